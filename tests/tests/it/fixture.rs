//! The fixtures do what the other tests believe they do.

mod cluster;
mod fenced;
mod processes;
mod proxy;
mod redis_server;
mod sentinel;
mod traces;

/// The worker binary of this package.
const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// A server that listened on all addresses would also do so on this one.
async fn assert_only_on_its_address(port: u16) {
    let error = tokio::net::TcpStream::connect(("127.0.0.2", port)).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "port {port}");
}
