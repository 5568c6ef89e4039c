//! `rediss://`: the trusted authorities, the requirements, and the errors if only one end speaks
//! TLS.

use std::{path::Path, sync::Arc};

use lock_runtime::{LockClient, LockError, LockErrorKind, RedisOptions, store::redis::RedisStore};
use lock_tests::{
    RedisServer, Worker,
    access::{file_of, rules},
};
use tokio::time::timeout;

use super::{CONNECT, Duration, assert_says, within};

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// Connects a client that trusts the authority of the server.
async fn connect(url: &str, ca: &str) -> Result<LockClient, LockError> {
    // This fails only if another test was faster.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = LockClient::builder().redis(RedisOptions::new().root_certificate(ca));
    within(CONNECT, builder.connect(url)).await
}

/// The output of a process that connects, acquires and releases. Its system trusts the authorities
/// in `trusted` only.
pub(crate) async fn of_a_process(trusted: Option<&Path>, options: &[&str]) -> String {
    let trusted = trusted.map(|file| format!("SSL_CERT_FILE={}", file.display()));
    let mut args = vec!["-u", "SSL_CERT_FILE", "-u", "SSL_CERT_DIR"];
    args.extend(trusted.as_deref());
    args.extend([WORKER, "connect"]);
    args.extend(options);
    let mut worker = Worker::spawn("env", &args);
    let said = within(CONNECT, worker.line())
        .await
        .expect("it says how it went");
    assert!(worker.finish().await.success());
    said
}

#[tokio::test]
async fn a_client_with_an_authority_of_its_own_locks_over_tls() {
    let rules = format!("{} +select", rules(&RedisStore::acl_line("lock")).join(" "));
    let server = RedisServer::builder()
        .tls()
        .user("ann", "hunter2", &rules)
        .start()
        .await;
    let url = format!("{}/3", server.tls_url_as("ann", "hunter2"));
    let locks = connect(&url, server.ca_pem()).await.unwrap();
    let guard = locks
        .exclusive("k")
        .lease(Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    let held = guard.held();
    timeout(Duration::from_millis(1500), held.lost())
        .await
        .expect_err("it is renewed beyond its lease");
    let clients: String = server.query(&["CLIENT", "LIST"]).await;
    let ours = clients
        .lines()
        .find(|line| line.contains(" user=ann "))
        .expect("the one connection of the client");
    assert!(
        ours.contains(&format!(" laddr=127.0.0.1:{} ", server.tls_port())),
        "{ours}"
    );
    guard.release().await.unwrap();
    let denied: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
    assert!(
        denied.is_empty(),
        "no command of the user was ever denied: {denied:?}"
    );
}

#[tokio::test]
async fn connect_with_takes_the_options_of_a_store() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = RedisServer::builder().tls().start().await;
    let connect = async |authority: &str| {
        let options = RedisOptions::new().root_certificate(authority);
        within(
            CONNECT,
            RedisStore::connect_with(&server.tls_url(), "lock", options),
        )
        .await
    };
    let locks = LockClient::with_store(Arc::new(connect(server.ca_pem()).await.unwrap()));
    let guard = locks.exclusive("k").acquire().await.unwrap();
    guard.release().await.unwrap();
    let error = connect("hunter2").await.unwrap_err();
    assert_says(&error, LockErrorKind::InvalidSpec, &["root_certificate"]);
}

#[tokio::test]
async fn a_lost_connection_is_made_again_over_tls() {
    let server = RedisServer::builder().tls().start().await;
    let locks = connect(&server.tls_url(), server.ca_pem()).await.unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_url_trusts_what_the_system_trusts() {
    let (server, stranger) = (
        RedisServer::builder().tls().start().await,
        RedisServer::builder().tls().start().await,
    );
    let trusted = file_of(server.ca_pem());
    let url = server.tls_url();
    assert_eq!(
        of_a_process(Some(trusted.path()), &[&url]).await,
        "released"
    );
    let others = file_of(stranger.ca_pem());
    for trusted in [None, Some(others.path())] {
        let said = of_a_process(trusted, &[&url]).await;
        assert!(
            said.starts_with("unavailable ") && said.contains("certificate"),
            "{said}"
        );
        assert!(said.contains("SSL_CERT_FILE"), "{said}");
    }
}

#[tokio::test]
async fn a_certificate_for_another_host_is_refused() {
    let server = RedisServer::builder()
        .tls_for(&["elsewhere.example"])
        .start()
        .await;
    let error = connect(&server.tls_url(), server.ca_pem())
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &["certificate", "elsewhere.example"],
    );
}

#[tokio::test]
async fn a_certificate_that_no_chain_can_verify_is_pinned() {
    let builder = || RedisServer::builder().tls_self_signed();
    let (server, stranger) = (builder().start().await, builder().start().await);
    let locks = connect(&server.tls_url(), server.ca_pem()).await.unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    let error = connect(&server.tls_url(), stranger.ca_pem())
        .await
        .unwrap_err();
    assert_says(&error, LockErrorKind::Unavailable, &["certificate"]);
}

#[tokio::test]
async fn tls_to_a_plain_port_and_plain_to_a_tls_port_are_named_in_the_error() {
    let server = RedisServer::builder().tls().start().await;
    let error = connect(&format!("rediss://{}", server.addr()), server.ca_pem())
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &[&server.addr().to_string(), "speak TLS", "redis://"],
    );

    let address = format!("127.0.0.1:{}", server.tls_port());
    let error = within(CONNECT, LockClient::connect(&format!("redis://{address}")))
        .await
        .unwrap_err();
    // The server closes the connection, and its last reply may arrive before that or not.
    let kind = if error.kind() == LockErrorKind::WrongServer {
        error.kind()
    } else {
        LockErrorKind::Unavailable
    };
    assert_says(&error, kind, &[&address, "requires TLS (rediss://)"]);
}

#[tokio::test]
async fn a_process_without_a_crypto_provider_gets_the_remedy() {
    let server = RedisServer::builder().tls().start().await;
    let trusted = file_of(server.ca_pem());
    let said = of_a_process(Some(trusted.path()), &["--no-provider", &server.tls_url()]).await;
    assert!(
        said.starts_with("unavailable ") && said.contains("install_default()"),
        "{said}"
    );
    assert_eq!(
        of_a_process(None, &["--no-provider", &server.url()]).await,
        "released",
        "without TLS it needs none"
    );
}
