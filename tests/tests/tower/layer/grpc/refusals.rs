//! Refusals of gRPC calls: always a status, never an error of the transport.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future;
use http::{HeaderMap, Response};
use http_body::Body as _;
use lock_examples::inventory::{Pieces, inventory_client::InventoryClient};
use lock_runtime::LockClient;
use lock_tower::LockLayer;
use tonic::{Code, Request, Status, body::Body};
use tonic_types::StatusExt;
use tower::ServiceBuilder;

use super::{
    freed,
    hall::{Served, hall, hall_with, pieces, reserve},
    items,
};
use lock_tests::place::in_time;

/// The default retry delay.
const A_WHILE: Duration = Duration::from_secs(1);

fn serve(lock: LockLayer) -> Served {
    Served::under(lock, hall().0)
}

/// Checks the code, message and retry delay of a status, and that it came from the server.
fn assert_refused(status: &Status, code: Code, message: &str, retry: Option<Duration>) {
    assert_eq!(
        (status.code(), status.message()),
        (code, message),
        "{status:?}"
    );
    assert_eq!(
        status
            .get_details_retry_info()
            .and_then(|info| info.retry_delay),
        retry,
        "{status:?}"
    );
    assert!(
        std::error::Error::source(status).is_none(),
        "{status:?} is of the transport"
    );
}

#[tokio::test]
async fn a_held_lock_is_aborted() {
    let locks = LockClient::in_memory();
    let _held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let waits = items(&locks)
        .wait(Duration::from_millis(20))
        .retry_after(A_WHILE * 2);
    for (lock, message, retry) in [
        (items(&locks).no_wait(), "The resource is in use.", A_WHILE),
        (
            waits,
            "The resource was in use for as long as the request could wait.",
            A_WHILE * 2,
        ),
    ] {
        let server = serve(lock);
        let status = server
            .client()
            .await
            .release(pieces("bolt"))
            .await
            .unwrap_err();
        assert_refused(&status, Code::Aborted, message, Some(retry));
    }
}

#[tokio::test]
async fn a_full_line_is_resource_exhausted() {
    let locks = LockClient::builder()
        .max_waiters(0)
        .build_in_memory()
        .unwrap();
    let server = serve(items(&locks));
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let (mut one, mut other) = (server.client().await, server.client().await);
    let (one, other) = (
        pin!(one.release(pieces("bolt"))),
        pin!(other.release(pieces("bolt"))),
    );
    let (refused, waiting) = future::select(one, other).await.factor_first();
    assert_refused(
        &refused.unwrap_err(),
        Code::ResourceExhausted,
        "Too many requests wait.",
        Some(A_WHILE),
    );
    held.release().await.unwrap();
    waiting.await.unwrap();
}

#[tokio::test]
async fn locks_out_of_reach_are_unavailable() {
    let locks = LockClient::in_memory();
    let server = serve(items(&locks));
    let mut client = server.client().await;
    client.release(pieces("bolt")).await.unwrap();
    locks.shutdown().await;
    let status = client.release(pieces("bolt")).await.unwrap_err();
    assert_refused(
        &status,
        Code::Unavailable,
        "The server is shutting down.",
        None,
    );
}

#[tokio::test]
async fn a_missing_part_of_the_key_is_an_invalid_argument() {
    let server = serve(items(&LockClient::in_memory()));
    let mut client = server.client().await;
    let status = client
        .release(Request::new(Pieces::default()))
        .await
        .unwrap_err();
    assert_refused(
        &status,
        Code::InvalidArgument,
        "The header \"x-item\" is missing.",
        None,
    );
    let mut twice = pieces("bolt");
    twice
        .metadata_mut()
        .append("x-item", "nut".parse().unwrap());
    let status = client.release(twice).await.unwrap_err();
    assert_refused(
        &status,
        Code::InvalidArgument,
        "The header \"x-item\" occurs more than once.",
        None,
    );
}

#[tokio::test]
async fn a_mistake_of_the_servers_is_internal() {
    let server = serve(items(&LockClient::in_memory()).lease(Duration::from_millis(1)));
    let status = server
        .client()
        .await
        .release(pieces("bolt"))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Internal, "{status:?}");
    assert!(
        !status.message().contains("bolt") && !status.message().contains("lease"),
        "{status:?}"
    );
}

#[tokio::test]
async fn a_lock_that_is_lost_ends_the_handler_with_aborted() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(items(&locks), service);
    let call = reserve(&server.client().await, "bolt");
    let mut entry = entries.reserve().await;
    locks.revoke("item:bolt").await.unwrap();
    in_time(entry.answer.closed()).await;
    let status = call.await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Aborted);
    assert!(
        status.message().contains("may have had effects") && !status.message().contains("bolt"),
        "{status:?}"
    );
    assert!(
        status.get_details_retry_info().is_none(),
        "a retry is suggested: {status:?}"
    );
    freed(&locks, "bolt").await;
}

#[tokio::test]
async fn what_a_handler_refuses_is_passed_on() {
    let locks = LockClient::in_memory();
    let server = Served::under(
        items(&locks),
        hall_with(|_| async { Err(Status::out_of_range("none left")) }).0,
    );
    let status = server
        .client()
        .await
        .release(pieces("bolt"))
        .await
        .unwrap_err();
    assert_refused(&status, Code::OutOfRange, "none left", None);
    freed(&locks, "bolt").await;
}

/// A single HEADERS frame ends the stream: `Trailers-Only` in the gRPC protocol.
#[tokio::test]
async fn a_refusal_is_trailers_only() {
    let locks = LockClient::in_memory();
    let _held = locks.exclusive("item:bolt").acquire().await.unwrap();
    let server = serve(items(&locks).no_wait());
    let seen = Arc::new(Mutex::new(None::<(HeaderMap, bool)>));
    let watched = {
        let seen = seen.clone();
        ServiceBuilder::new()
            .map_response(move |response: Response<Body>| {
                *seen.lock().unwrap() =
                    Some((response.headers().clone(), response.body().is_end_stream()));
                response
            })
            .service(server.channel().await)
    };
    InventoryClient::new(watched)
        .release(pieces("bolt"))
        .await
        .unwrap_err();
    let (headers, ended) = seen.lock().unwrap().take().unwrap();
    assert!(ended, "the headers end the stream");
    assert_eq!(headers["content-type"], "application/grpc");
    assert_eq!(
        (&headers["grpc-status"], &headers["grpc-message"]),
        (
            &"10".parse().unwrap(),
            &"The resource is in use.".parse().unwrap()
        )
    );
}
