//! Users, limits, and places that are no ensemble: one clear message each.

use lock_runtime::{LockClient, LockError, LockErrorKind};
use lock_tests::{ZooKeeperEnsemble, chain, shared_server, shared_zookeeper, unique};

use super::client_of;
use crate::etcd::once;

async fn refused(url: &str, namespace: &str) -> LockError {
    let builder = LockClient::builder().namespace(namespace);
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
async fn a_user_has_its_nodes_for_itself() {
    let ensemble = shared_zookeeper().await;
    let namespace = unique("ns");
    let locks = LockClient::builder().namespace(&namespace);
    let url = ensemble.url_as("app", "secret");
    let locks = locks.connect(&url).await.unwrap();
    once(&locks, "k").await.unwrap();
    for url in [
        ensemble.url_as("app", "secretive"),
        ensemble.url_as("other", "secret"),
        ensemble.url(),
    ] {
        let error = refused(&url, &namespace).await;
        assert_says(&error, LockErrorKind::Forbidden, &["no right", "cdrwa"]);
    }
    once(&locks, "k").await.unwrap();
}

/// The path of the URL is created.
#[tokio::test]
async fn the_path_of_a_url_is_that_of_the_namespace() {
    let ensemble = shared_zookeeper().await;
    let (root, namespace) = (unique("root"), unique("ns"));
    let connect = async |path: &str| {
        let locks = LockClient::builder().namespace(&namespace);
        let url = format!("{}{path}", ensemble.url());
        locks.connect(&url).await.unwrap()
    };
    let below = connect(&format!("/{root}/locks/")).await;
    let held = below.exclusive("k").acquire().await.unwrap();
    let other = connect("").await;
    once(&other, "k").await.unwrap();
    let same = connect(&format!("/{root}/locks")).await;
    let error = once(&same, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Contended, "{error}");
    held.release().await.unwrap();
}

/// No right to create it is necessary.
#[tokio::test]
async fn a_path_that_exists_may_be_in_a_closed_node() {
    let ensemble = shared_zookeeper().await;
    let closed = format!("/{}", unique("closed"));
    let path = format!("{closed}/locks");
    ensemble.cli(&["create", &closed]).await;
    ensemble.cli(&["create", &path]).await;
    ensemble.cli(&["setAcl", &closed, "world:anyone:r"]).await;
    let url = format!("{}{path}", ensemble.url());
    let locks = LockClient::connect(&url).await.unwrap();
    once(&locks, "k").await.unwrap();
}

#[tokio::test]
async fn a_place_that_is_no_ensemble_is_named() {
    let redis = shared_server().await.port();
    for (port, words) in [(redis, "127.0.0.1"), (1, "refused")] {
        let error = refused(&format!("zookeeper://127.0.0.1:{port}"), "app").await;
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &[words, &port.to_string()],
        );
    }
    // The other servers serve.
    let hosts = shared_zookeeper().await.hosts();
    let url = format!("zookeeper://127.0.0.1:1,127.0.0.1:{redis},{hosts}");
    for _ in 0..3 {
        let locks = LockClient::builder().namespace(unique("ns"));
        let locks = locks.connect(&url).await.unwrap();
        once(&locks, "k").await.unwrap();
    }
}

#[tokio::test]
async fn one_connection_too_many_is_explained() {
    let ensemble = ZooKeeperEnsemble::builder().setting("maxClientCnxns=1");
    let ensemble = ensemble.start().await;
    let locks = client_of(&ensemble, "app").await;
    let error = refused(&ensemble.url(), "app").await;
    assert_says(&error, LockErrorKind::Unavailable, &["maxClientCnxns"]);
    once(&locks, "k").await.unwrap();
}

/// Nodes of the namespace `a/r` would be those of `a`.
#[tokio::test]
async fn a_namespace_is_no_part_of_another_one() {
    let url = shared_zookeeper().await.url();
    assert_says(
        &refused(&url, "a/r").await,
        LockErrorKind::InvalidSpec,
        &["no name of a node"],
    );
}

#[tokio::test]
async fn nodes_of_others_are_left_untouched() {
    let ensemble = shared_zookeeper().await;
    let namespace = unique("ns");
    let locks = client_of(ensemble, &namespace).await;
    once(&locks, "k").await.unwrap();
    let node = |name: &str| format!("/{namespace}/{name}");
    ensemble.cli(&["set", &node("format"), "9"]).await;
    let error = refused(&ensemble.url(), &namespace).await;
    assert_says(
        &error,
        LockErrorKind::IncompatibleFormat,
        &["another format", &namespace],
    );
    let lazy = LockClient::builder().namespace(&namespace);
    let lazy = lazy.connect_lazy(&ensemble.url()).unwrap();
    let error = once(&lazy, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat);

    ensemble.cli(&["set", &node("c"), "colour"]).await;
    let error = once(&locks, "k").await.unwrap_err();
    assert_says(
        &error,
        LockErrorKind::ForeignKey,
        &[&node("c"), "untouched"],
    );
    ensemble.cli(&["delete", &node("c")]).await;
    crate::etcd::until_served(&locks, "k").await;
}
