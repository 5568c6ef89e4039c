//! The layer among other layers, including those that tonic applies to every service.

use std::time::Duration;

use lock_runtime::LockClient;
use tonic::{Code, body::Body, transport::Server};
use tower::{limit::ConcurrencyLimitLayer, util::MapRequestLayer};

use super::{
    freed,
    hall::{Served, hall, pieces, reserve},
    is_free, items,
};
use lock_tests::place::{eventually, in_time};

const SHORTLY: Duration = Duration::from_millis(200);

async fn line_is(locks: &LockClient, item: &str, waiting: usize) {
    let is_so = || async {
        locks
            .inspect(format!("item:{item}"))
            .await
            .unwrap()
            .waiters
            .len()
            == waiting
    };
    eventually(&format!("{waiting} wait"), is_so).await;
}

/// A call that ends by tonic's own time-out has the status CANCELLED.
#[tokio::test]
async fn tonics_time_out_outside_ends_the_wait_for_the_lock() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Server::builder()
        .timeout(SHORTLY)
        .layer(items(&locks))
        .add_service(service);
    let server = Served::by(|incoming| server.serve_with_incoming(incoming));
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let status = server
        .client()
        .await
        .reserve(pieces("bolt"))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Cancelled, "{status:?}");
    line_is(&locks, "bolt", 0).await;
    held.release().await.unwrap();
    freed(&locks, "bolt").await;
    assert!(entries.entered().is_none());
}

#[tokio::test]
async fn tonics_time_out_outside_ends_the_handler_and_frees_its_lock() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Server::builder()
        .timeout(SHORTLY)
        .layer(items(&locks))
        .add_service(service);
    let server = Served::by(|incoming| server.serve_with_incoming(incoming));
    let mut client = server.client().await;
    let mut entry = loop {
        let status = client.reserve(pieces("bolt")).await.unwrap_err();
        assert_eq!(status.code(), Code::Cancelled, "{status:?}");
        // On a slow machine, the time-out may elapse before the handler is entered.
        if let Some(entry) = entries.entered() {
            break entry;
        }
    };
    in_time(entry.answer.closed()).await;
    freed(&locks, "bolt").await;
    assert!(!entry.held.unwrap().is_lost());
}

/// tonic's server and its client watch the deadline as well. If one of them ends the call first,
/// the status is CANCELLED instead of the DEADLINE_EXCEEDED of the layer.
#[tokio::test]
async fn a_caller_waits_no_longer_than_its_own_deadline() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(items(&locks), service);
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let mut hurried = pieces("bolt");
    hurried.set_timeout(SHORTLY);
    let status = server.client().await.reserve(hurried).await.unwrap_err();
    assert!(
        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{status:?}"
    );
    line_is(&locks, "bolt", 0).await;
    held.release().await.unwrap();
    freed(&locks, "bolt").await;
    assert!(entries.entered().is_none());
}

/// Uses a deadline that only the lock layer sees.
#[tokio::test]
async fn a_wait_that_the_callers_deadline_ends_is_deadline_exceeded() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let hurry = MapRequestLayer::new(|mut request: http::Request<Body>| {
        request
            .headers_mut()
            .insert("grpc-timeout", "50m".parse().unwrap());
        request
    });
    let server = Server::builder()
        .layer(hurry)
        .layer(items(&locks))
        .add_service(service);
    let server = Served::by(|incoming| server.serve_with_incoming(incoming));
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let client = server.client().await;
    let status = reserve(&client, "bolt").await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(!status.message().contains("bolt"), "{status:?}");
    line_is(&locks, "bolt", 0).await;
    held.release().await.unwrap();

    // The deadline bounds the wait, and not the handler.
    let call = reserve(&client, "bolt");
    let entry = entries.reserve().await;
    tokio::time::sleep(Duration::from_millis(60)).await;
    entry.answer.send(Ok(())).unwrap();
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn layer_waits_without_taking_capacity_of_an_inner_limit() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Server::builder()
        .layer(items(&locks))
        .layer(ConcurrencyLimitLayer::new(1))
        .add_service(service);
    let server = Served::by(|incoming| server.serve_with_incoming(incoming));
    let client = server.client().await;
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let waiting = reserve(&client, "bolt");
    line_is(&locks, "bolt", 1).await;
    let served = reserve(&client, "nut");
    entries.reserve().await.answer.send(Ok(())).unwrap();
    served.await.unwrap().unwrap();

    held.release().await.unwrap();
    entries.reserve().await.answer.send(Ok(())).unwrap();
    waiting.await.unwrap().unwrap();
}

/// tonic's own limit is outside: it counts waiting calls as well, but only of its connection.
#[tokio::test]
async fn tonics_limit_of_a_connection_leaves_the_others_alone() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Server::builder()
        .concurrency_limit_per_connection(1)
        .layer(items(&locks))
        .add_service(service);
    let server = Served::by(|incoming| server.serve_with_incoming(incoming));
    let (client, other) = (server.client().await, server.client().await);
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let waiting = reserve(&client, "bolt");
    line_is(&locks, "bolt", 1).await;
    let behind = reserve(&client, "nut");
    let served = reserve(&other, "nut");
    entries.reserve().await.answer.send(Ok(())).unwrap();
    served.await.unwrap().unwrap();

    held.release().await.unwrap();
    for _ in 0..2 {
        entries.reserve().await.answer.send(Ok(())).unwrap();
    }
    waiting.await.unwrap().unwrap();
    behind.await.unwrap().unwrap();
    assert!(is_free(&locks, "bolt").await && is_free(&locks, "nut").await);
}
