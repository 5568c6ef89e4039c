//! The `RetryInfo` of gRPC refusals, as tonic decodes it.

use std::time::Duration;

use axum::{Router, routing::post};
use lock_runtime::{
    ErrorClass, LockClient,
    web::{GrpcCode, retry_info},
};
use lock_tower::LockLayer;
use proptest::prelude::*;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::server::{Response, Server};

async fn serve(layer: LockLayer) -> Server {
    Server::start(Router::new().route("/shop.Orders/{id}", post(async || "paid").layer(layer)))
        .await
}

fn orders(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .no_wait()
}

fn status(response: &Response) -> Status {
    assert_eq!((response.status, response.body.as_str()), (200, ""));
    Status::from_header_map(&response.headers).expect("trailers only")
}

/// The delay after which the call may be retried, if the status has one.
fn delay(status: &Status) -> Option<Duration> {
    status
        .get_details_retry_info()
        .map(|info| info.retry_delay.expect("it has a delay"))
}

#[tokio::test]
async fn a_refusal_says_when_to_try_again() {
    let locks = LockClient::in_memory();
    let _guard = locks
        .exclusive("order:7")
        .lease(Duration::from_secs(5))
        .acquire()
        .await
        .unwrap();
    let waits = orders(&locks).wait(Duration::from_millis(20));
    let often = orders(&locks).retry_after(Duration::from_millis(250));
    let second = Duration::from_secs(1);
    for (layer, expected) in [
        (orders(&locks), second),
        (waits, second),
        (often, second / 4),
    ] {
        let response = serve(layer).await.grpc("/shop.Orders/7", &[]).await;
        let status = status(&response);
        assert_eq!(
            (status.code(), delay(&status)),
            (Code::Aborted, Some(expected))
        );
        let header = response.header("grpc-status-details-bin").unwrap();
        assert!(!header.contains('='), "without padding: {header}");
        assert_eq!(
            status.details(),
            theirs(status.code(), status.message(), expected)
        );
    }
    // The delay is at most the remaining lease of the holder.
    let seldom = serve(orders(&locks).retry_after(Duration::from_secs(60))).await;
    let after = delay(&status(&seldom.grpc("/shop.Orders/7", &[]).await)).unwrap();
    assert!(after > second && after <= second * 5, "{after:?}");
}

#[tokio::test]
async fn a_full_line_may_be_tried_again() {
    let full = LockClient::builder()
        .max_waiters_in_all(0)
        .build_in_memory()
        .unwrap();
    let server = serve(orders(&full).wait(Duration::from_secs(10))).await;
    let status = status(&server.grpc("/shop.Orders/7", &[]).await);
    assert_eq!(
        (status.code(), delay(&status)),
        (Code::ResourceExhausted, Some(Duration::from_secs(1)))
    );
}

#[tokio::test]
async fn a_call_that_has_ended_gets_no_retry_info() {
    let locks = LockClient::in_memory();
    let _guard = locks.exclusive("order:7").acquire().await.unwrap();
    let server = serve(orders(&locks).wait(Duration::from_secs(60))).await;
    let late = status(
        &server
            .grpc("/shop.Orders/7", &[("grpc-timeout", "50m")])
            .await,
    );
    assert_eq!(
        (late.code(), late.details()),
        (Code::DeadlineExceeded, [].as_slice())
    );

    // After a loss of the lock, effects of the call may exist.
    let revoked = locks.clone();
    let handler = post(async move || {
        revoked.revoke("order:8").await.unwrap();
        std::future::pending::<()>().await
    });
    let server =
        Server::start(Router::new().route("/shop.Orders/{id}", handler.layer(orders(&locks))))
            .await;
    let lost = status(&server.grpc("/shop.Orders/8", &[]).await);
    assert_eq!(
        (lost.code(), lost.details()),
        (Code::Aborted, [].as_slice())
    );

    locks.shutdown().await;
    let ended = status(&server.grpc("/shop.Orders/8", &[]).await);
    assert_eq!(
        (ended.code(), ended.details()),
        (Code::Unavailable, [].as_slice())
    );
}

fn details(code: GrpcCode, message: &str, after: Duration) -> Vec<u8> {
    let details = retry_info(code, message, after);
    assert_eq!(
        details,
        theirs(Code::from_i32(code.into()), message, after),
        "{code:?} {message:?} {after:?}"
    );
    details
}

/// The same details, encoded by `tonic_types`.
fn theirs(code: Code, message: &str, after: Duration) -> Vec<u8> {
    Status::with_error_details(code, message, ErrorDetails::with_retry_info(Some(after)))
        .details()
        .to_vec()
}

#[test]
fn the_longest_delay_is_what_the_format_can_say() {
    let longest = tonic_types::RetryInfo::MAX_RETRY_DELAY;
    let nanosecond = Duration::from_nanos(1);
    for (after, told) in [
        (Duration::ZERO, Duration::ZERO),
        (nanosecond, nanosecond),
        (longest - nanosecond, longest - nanosecond),
        (longest, longest),
        (longest + nanosecond, longest),
        (Duration::MAX, longest),
    ] {
        let details = details(GrpcCode::Aborted, "m", after);
        assert_eq!(
            delay(&Status::with_details(Code::Aborted, "m", details.into())),
            Some(told)
        );
    }
}

proptest! {
    #[test]
    fn any_delay_is_read_as_it_was_written(
        bits in 0u32..70,
        seconds: u64,
        nanos in prop_oneof![Just(0u32), 0u32..1_000_000_000],
        message in prop_oneof![Just(String::new()), ".{0,300}"],
        row in prop::sample::select(vec![
            ErrorClass::Busy, ErrorClass::Overloaded, ErrorClass::Unavailable, ErrorClass::Lost, ErrorClass::BadRequest, ErrorClass::Internal,
        ]),
    ) {
        // Delays of all magnitudes: nearly all numbers of 64 bits are very long delays.
        let after = Duration::new(seconds.checked_shr(bits).unwrap_or(0), nanos);
        let code = row.grpc_code();
        let status = Status::with_details(Code::from_i32(code.into()), &message, details(code, &message, after).into());
        let told = after.min(tonic_types::RetryInfo::MAX_RETRY_DELAY);
        prop_assert_eq!(delay(&status), Some(told));
    }
}
