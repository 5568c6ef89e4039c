//! Layers that wrap the body, with the lock held until it is sent: `Trace` and `Compression`.

use axum::routing::MethodRouter;
use lock_runtime::LockClient;
use lock_tower::HoldUntil;
use tower_http::{compression::CompressionLayer, trace::TraceLayer};

use super::{app, is_free_at_once, orders};
use crate::layer::{
    client::{Connected, Http},
    frames::{data, streaming},
};
use lock_tests::place::all_free;

type Layered<'a> = &'a dyn Fn(MethodRouter) -> MethodRouter;

/// The lock is held until the last frame, and a loss is an error, wherever the other layer is.
async fn is_seen_through(http: Http, locks: &LockClient, layered: Layered<'_>) {
    let (route, mut entries) = streaming();
    let server = Connected::start(http, app(layered(route))).await;
    let ask = || {
        server
            .request("/orders/7")
            .header("accept-encoding", "gzip")
            .send()
    };

    let response = ask().await.unwrap();
    let frames = entries.recv().await.unwrap();
    frames.send(data("some text ".repeat(100))).await.unwrap();
    // It is taken when the next one fits in.
    frames
        .send(data("and some more ".repeat(100)))
        .await
        .unwrap();
    assert!(!is_free_at_once(locks).await, "the end is still to come");
    drop(frames);
    assert!(!response.bytes().await.unwrap().is_empty());
    assert!(
        is_free_at_once(locks).await,
        "the end goes out when the lock is free"
    );

    let response = ask().await.unwrap();
    let frames = entries.recv().await.unwrap();
    frames.send(data("some text ".repeat(100))).await.unwrap();
    locks.revoke("order:7").await.unwrap();
    assert!(response.bytes().await.is_err(), "no clean end");
    frames.closed().await;

    let response = ask().await.unwrap();
    let frames = entries.recv().await.unwrap();
    drop(response);
    frames.closed().await;
    all_free(locks, &["order:7"]).await;
}

#[tokio::test]
async fn a_trace_outside_or_within_changes_nothing() {
    let locks = LockClient::in_memory();
    let lock = || orders(&locks).hold_until(HoldUntil::Body);
    let outside = |route: MethodRouter| route.layer((TraceLayer::new_for_http(), lock()));
    let within = |route: MethodRouter| route.layer((lock(), TraceLayer::new_for_http()));
    let both = |route: MethodRouter| {
        route.layer((
            TraceLayer::new_for_http(),
            lock(),
            TraceLayer::new_for_http(),
        ))
    };
    for layered in [&outside as Layered<'_>, &within, &both] {
        for http in [Http::One, Http::Two] {
            is_seen_through(http, &locks, layered).await;
        }
    }
}

#[tokio::test]
async fn a_compressed_body_is_sent_under_the_lock() {
    let locks = LockClient::in_memory();
    let layered = |route: MethodRouter| {
        let lock = orders(&locks).hold_until(HoldUntil::Body);
        route.layer((CompressionLayer::new(), lock))
    };
    for http in [Http::One, Http::Two] {
        is_seen_through(http, &locks, &layered).await;
    }
    let (route, mut entries) = streaming();
    let server = Connected::start(Http::One, app(layered(route))).await;
    let response = server
        .request("/orders/7")
        .header("accept-encoding", "gzip")
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["content-encoding"], "gzip");
    drop(entries.recv().await.unwrap());
    assert!(
        response.bytes().await.unwrap().starts_with(&[0x1f, 0x8b]),
        "it is gzip"
    );
}
