//! Storms over one server.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{RedisServer, place::Place};
use tokio::time::sleep;

use super::storm::Storm;

const LEASE: Duration = Duration::from_secs(1);
/// The time in addition to a lease within which service resumes after a fault.
const RECONNECT: Duration = Duration::from_secs(2);

/// Connects `count` clients to one server, in a namespace of their own.
pub(crate) async fn clients(server: &RedisServer, count: usize) -> Vec<LockClient> {
    let place = Place::at(server.url());
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(place.client().await);
    }
    clients
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_for_a_moment_keeps_holders_apart() {
    let server = RedisServer::start().await;
    let storm = Storm::of(clients(&server, 8).await)
        .lease(LEASE)
        .run(async |faults| {
            for _ in 0..2 {
                sleep(LEASE).await;
                faults.begin("the server stops for half a lease");
                server.stop();
                sleep(LEASE / 2).await;
                server.resume();
            }
        });
    let report = storm.await;
    report.assert_fenced();
    report.assert_service_within(LEASE + RECONNECT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgets_everything_is_fenced() {
    let server = RedisServer::start().await;
    let storm = Storm::of(clients(&server, 8).await)
        .lease(LEASE)
        .run(async |faults| {
            for _ in 0..2 {
                sleep(LEASE).await;
                faults.begin("the server is killed, and comes back empty");
                server.restart_empty().await;
                sleep(LEASE).await;
            }
        });
    let report = storm.await;
    // Holders may overlap here. The overlaps are counted.
    report.assert_fenced();
    report.assert_service_within(LEASE + RECONNECT);
}
