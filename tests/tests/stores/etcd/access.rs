//! Users, rights, TLS, and places that are no cluster: one clear message each.

use lock_runtime::{EtcdOptions, LockClient, LockError, LockErrorKind, health::Verdict};
use lock_tests::{EtcdCluster, chain, shared_etcd, shared_server, unique};
use tokio::time::{Duration, Instant, sleep};

use super::once;

const LEASE: Duration = Duration::from_secs(3);

async fn refused(url: &str) -> LockError {
    refused_with(url, EtcdOptions::new()).await
}

async fn refused_with(url: &str, options: EtcdOptions) -> LockError {
    let builder = LockClient::builder().namespace("app").etcd(options);
    builder.connect(url).await.unwrap_err()
}

fn assert_says(error: &LockError, kind: LockErrorKind, words: &[&str]) {
    let text = chain(error);
    assert_eq!(error.kind(), kind, "{text}");
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    assert!(!text.contains("secret"), "{text}");
}

#[tokio::test]
async fn users_have_a_password_and_rights_to_a_prefix() {
    use LockErrorKind::{Forbidden, InvalidUrl, Unauthenticated};
    let cluster = EtcdCluster::start().await;
    let error = refused(&cluster.url_as("app", "secret")).await;
    assert_says(
        &error,
        InvalidUrl,
        &["authentication is not enabled", "leave the user out"],
    );

    cluster.require_users("rootsecret").await;
    cluster.user("app", "secret", "app/").await;
    cluster.user("other", "secret", "else/").await;
    let error = refused(&cluster.url()).await;
    assert_says(
        &error,
        Unauthenticated,
        &["write the user and the password into the URL"],
    );
    let error = refused(&cluster.url_as("app", "secretive")).await;
    assert_says(&error, Unauthenticated, &["invalid user ID or password"]);
    let error = refused(&cluster.url_as("stranger", "secret")).await;
    assert_says(&error, Unauthenticated, &["invalid user ID or password"]);
    let error = refused(&cluster.url_as("other", "secret")).await;
    assert_says(
        &error,
        Forbidden,
        &["permission denied", "readwrite", "prefix"],
    );

    let locks = LockClient::builder().namespace("app");
    let locks = locks
        .connect(&cluster.url_as("app", "secret"))
        .await
        .unwrap();
    once(&locks, "k").await.unwrap();
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
    // A member forgets the tokens that it has given out when it starts again.
    cluster.restart(0).await;
    super::until_served(&locks, "k").await;
    // A change of rights makes them invalid as well.
    cluster.user("third", "secret", "third/").await;
    once(&locks, "k").await.unwrap();
    cluster
        .ctl(&["role", "revoke-permission", "app", "--prefix=true", "app/"])
        .await;
    let error = once(&locks, "k").await.unwrap_err();
    assert_says(&error, Forbidden, &["permission denied"]);
}

/// A signed token ends at its time, however often it is used, and is valid at each member.
#[tokio::test]
async fn a_client_logs_in_again_when_its_signed_token_ends() {
    let cluster = EtcdCluster::builder().members(3).signed_tokens(2);
    let cluster = cluster.start().await;
    cluster.require_users("rootsecret").await;
    cluster.user("app", "secret", "app/").await;
    let locks = LockClient::builder().namespace("app");
    let url = cluster.url_as("app", "secret");
    let locks = locks.connect(&url).await.unwrap();
    let held = locks.exclusive("held").lease(LEASE).acquire();
    let held = held.await.unwrap();
    let began = Instant::now();
    while began.elapsed() < LEASE * 2 {
        // A login takes the server longer than a call may on a busy machine, so the request waits.
        drop(locks.exclusive("k").acquire().await.unwrap());
        sleep(LEASE / 10).await;
    }
    held.verify().await.unwrap();
}

#[tokio::test]
async fn tls_verifies_the_members_and_their_clients() {
    let cluster = EtcdCluster::builder().tls().start().await;
    let (ca, identity) = cluster.certificates();
    let trusting = EtcdOptions::new().root_certificate(ca);
    let known = trusting
        .clone()
        .client_certificate(&*identity.certificate, &*identity.key);
    let locks = LockClient::builder().etcd(known.clone());
    let locks = locks.connect(&cluster.url()).await.unwrap();
    once(&locks, "k").await.unwrap();

    let error = refused_with(&cluster.url(), EtcdOptions::new()).await;
    assert_says(&error, LockErrorKind::Unavailable, &["UnknownIssuer"]);
    let error = refused_with(&cluster.url(), trusting).await;
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &["certificate of the client"],
    );
    let plain = cluster.url().replace("etcds:", "etcd:");
    let error = refused(&plain).await;
    assert_says(&error, LockErrorKind::Unavailable, &[&cluster.hosts()]);
    let secure = shared_etcd().await.url().replace("etcd:", "etcds:");
    let error = refused_with(&secure, known).await;
    assert_says(&error, LockErrorKind::Unavailable, &["etcd at"]);
    let pem = EtcdOptions::new().root_certificate("no certificate");
    let error = refused_with(&cluster.url(), pem).await;
    assert_says(&error, LockErrorKind::InvalidUrl, &["the root certificate"]);
}

#[tokio::test]
async fn a_place_that_is_no_cluster_is_named() {
    let redis = shared_server().await.port();
    let error = refused(&format!("etcd://127.0.0.1:{redis}")).await;
    assert_says(&error, LockErrorKind::Unavailable, &[&redis.to_string()]);
    let error = refused("etcd://127.0.0.1:1").await;
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &["127.0.0.1:1", "refused"],
    );
    // The other members serve.
    let url = format!(
        "etcd://127.0.0.1:1,127.0.0.1:{redis},{}",
        shared_etcd().await.hosts()
    );
    for _ in 0..3 {
        let locks = LockClient::builder().namespace(unique("ns"));
        let locks = locks.connect(&url).await.unwrap();
        once(&locks, "k").await.unwrap();
    }
}

/// Keys of the namespace `a/r` would be those of `a`.
#[tokio::test]
async fn a_namespace_is_no_part_of_another_one() {
    let builder = LockClient::builder().namespace("a/r");
    let refused = builder.connect(&shared_etcd().await.url()).await;
    assert_says(&refused.unwrap_err(), LockErrorKind::InvalidSpec, &["'/'"]);
}

#[tokio::test]
async fn keys_of_others_are_left_untouched() {
    let etcd = shared_etcd().await;
    let namespace = unique("ns");
    let connect = async || {
        let builder = LockClient::builder().namespace(&namespace);
        builder.connect(&etcd.url()).await
    };
    etcd.ctl(&["put", &format!("{namespace}/format"), "9"])
        .await;
    let error = connect().await.unwrap_err();
    assert_says(
        &error,
        LockErrorKind::IncompatibleFormat,
        &["another format", &namespace],
    );
    let lazy = LockClient::builder().namespace(&namespace);
    let lazy = lazy.connect_lazy(&etcd.url()).unwrap();
    let error = once(&lazy, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat);
    etcd.ctl(&["del", &format!("{namespace}/format")]).await;

    etcd.ctl(&["put", &format!("{namespace}/c"), "colour"])
        .await;
    let locks = connect().await.unwrap();
    let error = once(&locks, "k").await.unwrap_err();
    assert_says(
        &error,
        LockErrorKind::ForeignKey,
        &[&format!("{namespace}/c"), "untouched"],
    );
    etcd.ctl(&["del", &format!("{namespace}/c")]).await;
    once(&locks, "k").await.unwrap();

    let list = etcd
        .ctl(&["get", "--prefix", "--keys-only", &format!("{namespace}/r/")])
        .await;
    let record = list.lines().find(|line| line.contains("k")).unwrap();
    etcd.ctl(&["put", record, "red"]).await;
    let error = once(&locks, "k").await.unwrap_err();
    assert_says(&error, LockErrorKind::ForeignKey, &[record]);
    let kept = etcd.ctl(&["get", "--print-value-only", record]).await;
    assert_eq!(kept.trim(), "red");
}
