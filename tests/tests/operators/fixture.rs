//! Tests of the fixtures that the other tests rely on.

mod cluster;
mod fenced;
mod postgres;
mod processes;
mod proxy;
mod redis_server;
mod sentinel;
mod traces;

use lock_tests::RedisServer;

/// The worker binary of this package.
const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// Sets a key on a primary and waits until `replicas` replicas have it, as a failover loses writes
/// without a copy.
async fn set_with_copies(primary: &RedisServer, key: &str, value: &str, replicas: usize) {
    let mut connection = primary.connection().await.unwrap();
    redis::cmd("SET")
        .arg(key)
        .arg(value)
        .exec_async(&mut connection)
        .await
        .unwrap();
    let copies: usize = redis::cmd("WAIT")
        .arg(replicas)
        .arg(5000)
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(copies >= replicas, "{copies} of {replicas}");
}

/// Checks that the port is closed on another address: a server on all addresses would accept this
/// connection.
async fn assert_only_on_its_address(port: u16) {
    let error = tokio::net::TcpStream::connect(("127.0.0.2", port))
        .await
        .unwrap_err();
    assert_eq!(
        error.kind(),
        std::io::ErrorKind::ConnectionRefused,
        "port {port}"
    );
}
