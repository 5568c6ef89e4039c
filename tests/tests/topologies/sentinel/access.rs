//! Nodes and Sentinels with users and passwords of their own, and with TLS.

use lock_runtime::{LockClient, LockErrorKind, RedisOptions, store::redis::RedisStore};
use lock_tests::{
    RedisServer, SentinelSet, chain,
    place::{LONG, eventually, in_time},
};

use super::{Duration, assert_says, builder, copied, url_with};

/// The rights that a user needs on a Sentinel.
const SENTINEL_RULES: &str =
    "+sentinel|master +sentinel|get-master-addr-by-name +subscribe &+switch-master";

/// The rules of the documented line, for `ACL SETUSER`.
fn rules(more: &str) -> String {
    let line = RedisStore::acl_line("lock");
    let rules: Vec<_> = line.split(' ').skip(5).collect();
    format!("{} {more}", rules.join(" "))
}

#[tokio::test]
async fn nodes_and_sentinels_have_users_of_their_own() {
    in_time(async {
        let set = SentinelSet::builder()
            .password("s3cret")
            .user("app", "p@ss/word", &rules("+select +wait"))
            .sentinel_password("watch")
            .sentinel_user("app", "look", SENTINEL_RULES)
            .start()
            .await;
        let app = "app:p%40ss%2Fword@";
        let connect = async |before: &str, behind: &str| {
            LockClient::connect(&url_with(set.sentinels(), before, behind)).await
        };
        let url = "/3?sentinel_user=app&sentinel_password=look&min_replicas=1";
        let locks = connect(app, url).await.unwrap();
        locks
            .exclusive("k")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        copied(&set).await;
        let new = set.failover().await;
        locks
            .exclusive("k")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        for server in set.sentinels().iter().chain([new]) {
            let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
            assert!(
                log.is_empty(),
                "no command of the user was ever denied: {log:?}"
            );
        }

        // The default users, with a password only.
        connect(":s3cret@", "?sentinel_password=watch")
            .await
            .unwrap();

        for (before, behind, words) in [
            (app, "", ["sentinel_user and sentinel_password", "26379"]),
            (
                app,
                "?sentinel_password=hunter2",
                ["sentinel_user and sentinel_password", "\"locks\""],
            ),
            (
                "",
                "?sentinel_password=watch",
                ["redis://user:password@host:6379", "\"locks\""],
            ),
            (
                "app:hunter2@",
                "?sentinel_password=watch",
                ["redis://user:password@host:6379", "\"locks\""],
            ),
        ] {
            let error = connect(before, behind).await.unwrap_err();
            let address = set.sentinels()[0].addr().to_string();
            let words = words.map(|word| {
                if word == "26379" {
                    address.as_str()
                } else {
                    word
                }
            });
            assert_says(&error, LockErrorKind::Unauthenticated, &words);
            assert!(!chain(&error).contains("hunter2"), "{error}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_user_without_rights_to_ask_or_wait_gets_the_rule_to_add() {
    in_time(async {
        let set = SentinelSet::builder()
            .user("app", "hunter2", &rules(""))
            .sentinel_user("app", "hunter3", "+ping")
            .start()
            .await;
        let connect = async |behind: &str| {
            LockClient::connect(&url_with(set.sentinels(), "app:hunter2@", behind)).await
        };
        let error = connect("?sentinel_user=app&sentinel_password=hunter3")
            .await
            .unwrap_err();
        let words = [
            "ACL SETUSER",
            "+sentinel|master",
            "+sentinel|get-master-addr-by-name",
        ];
        assert_says(&error, LockErrorKind::Forbidden, &words);
        let error = connect("?min_replicas=1").await.unwrap_err();
        let line = format!("{} +wait", RedisStore::acl_line("lock"));
        assert_says(&error, LockErrorKind::Forbidden, &[&line]);
        connect("").await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_set_with_tls_is_reached_with_its_authority() {
    in_time(async {
        // This fails only if another test was faster.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let set = SentinelSet::builder()
            .tls()
            .password("s3cret")
            .start()
            .await;
        let hosts: Vec<_> = set
            .sentinels()
            .iter()
            .map(|sentinel| format!("127.0.0.1:{}", sentinel.tls_port()))
            .collect();
        let url = format!(
            "rediss+sentinel://:s3cret@{}/{}",
            hosts.join(","),
            SentinelSet::SERVICE
        );
        let locks = LockClient::builder()
            .redis(RedisOptions::new().root_certificate(set.ca_pem()))
            .connect(&url)
            .await
            .unwrap();
        let guard = locks.exclusive("k").acquire().await.unwrap();
        copied(&set).await;
        set.failover().await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &[&hosts[1], "certificate", "root_certificate"],
        );
        // TLS to the nodes, and none to the Sentinels, which name the TLS ports of the nodes.
        let url = set.url_with(":s3cret@", "?sentinel_tls=false");
        let url = url.replacen("redis+", "rediss+", 1);
        let trusting =
            LockClient::builder().redis(RedisOptions::new().root_certificate(set.ca_pem()));
        let locks = trusting.connect(&url).await.unwrap();
        locks
            .exclusive("k")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

/// TLS to the nodes and to the Sentinels, before and after a failover.
#[tokio::test]
async fn users_of_the_documented_lines_reach_a_set_over_tls() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let set =
            SentinelSet::builder()
                .tls()
                .password("s3cret")
                .user("app", "hunter2", &rules("+wait"));
        let set = set
            .sentinel_password("watch")
            .sentinel_user("app", "look", SENTINEL_RULES)
            .start()
            .await;
        let trusting = RedisOptions::new().root_certificate(set.ca_pem());
        let replicated = trusting
            .clone()
            .min_replicas(1.try_into().unwrap(), Duration::from_millis(200));
        let ports = set
            .sentinels()
            .iter()
            .map(|it| format!("127.0.0.1:{}", it.tls_port()));
        let url = format!(
            "rediss+sentinel://app:hunter2@{}/{}?sentinel_user=app&sentinel_password=look",
            ports.collect::<Vec<_>>().join(","),
            SentinelSet::SERVICE
        );
        let connect = async |options| {
            let builder = LockClient::builder().redis(options);
            builder.connect(&url).await.unwrap()
        };
        let (locks, others) = (connect(replicated).await, connect(trusting).await);
        let guard = locks.exclusive("k").wait(LONG).acquire().await.unwrap();
        let waiting = tokio::spawn(others.exclusive("k").wait(LONG).acquire());
        eventually("it waits", async || {
            !locks.inspect("k").await.unwrap().waiters.is_empty()
        })
        .await;
        copied(&set).await;
        let new = set.failover().await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        for server in set.sentinels().iter().chain([new]) {
            let clients: String = server.query(&["CLIENT", "LIST"]).await;
            let ours: Vec<_> = clients
                .lines()
                .filter(|line| line.contains(" user=app "))
                .collect();
            let port = format!(" laddr=127.0.0.1:{} ", server.tls_port());
            assert!(
                !ours.is_empty() && ours.iter().all(|line| line.contains(&port)),
                "{clients}"
            );
            let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
            assert!(
                log.is_empty(),
                "no command of the user was ever denied: {log:?}"
            );
        }
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &["certificate", "root_certificate"],
        );
        assert!(!chain(&error).contains("hunter2"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_server_that_asks_for_a_certificate_gets_the_builders() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = RedisServer::builder()
        .tls()
        .arg("--tls-auth-clients", "yes")
        .start()
        .await;
    let own = server.client_identity();
    let options = RedisOptions::new().root_certificate(server.ca_pem());
    let trusting = builder("lock").redis(options.clone());
    let builder = builder("lock")
        .redis(options.client_certificate(own.certificate.as_str(), own.key.as_str()));
    assert!(!format!("{builder:?}").contains("BEGIN"), "{builder:?}");
    let locks = builder.clone().connect(&server.tls_url()).await.unwrap();
    locks
        .exclusive("k")
        .wait(Duration::from_secs(5))
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let error = trusting.connect(&server.tls_url()).await.unwrap_err();
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &["certificate", "client_certificate"],
    );
    // A plain URL does not use the certificates.
    builder.connect(&server.url()).await.unwrap();
}

#[tokio::test]
async fn connect_refuses_invalid_certificates_before_it_connects() {
    let options = RedisOptions::new;
    for options in [
        options().root_certificate("hunter2"),
        options().client_certificate("hunter2", "hunter2"),
        options()
            .root_certificate("-----BEGIN CERTIFICATE-----\nhunter2\n-----END CERTIFICATE-----\n"),
    ] {
        let builder = builder("lock").redis(options);
        let error = builder.connect("rediss://127.0.0.1:1").await.unwrap_err();
        assert_says(&error, LockErrorKind::InvalidSpec, &["certificate"]);
        assert!(!chain(&error).contains("hunter2"), "{error}");
    }
}
