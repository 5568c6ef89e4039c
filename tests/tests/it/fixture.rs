//! The fixtures do what the other tests believe they do.

mod cluster;
mod fenced;
mod processes;
mod proxy;
mod redis_server;
mod sentinel;
mod traces;

use lock_tests::RedisServer;

/// The worker binary of this package.
const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// Sets a key on a primary and waits until so many replicas have it: what they do not have is lost in a failover.
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

/// A server that listened on all addresses would also do so on this one.
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
