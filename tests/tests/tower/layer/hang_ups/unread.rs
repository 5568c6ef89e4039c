//! Disconnects while a large request body has not been read.

use std::convert::Infallible;

use axum::body::Bytes;
use futures_util::stream;
use lock_tower::HoldUntil;
use tokio::sync::oneshot::error::TryRecvError;

use super::{Scene, dropped};
use crate::layer::client::{Http, over_both_versions};

over_both_versions!(a_small_body_hides_no_hang_up);

/// An endless body, larger than all buffers.
fn endless() -> reqwest::Body {
    reqwest::Body::wrap_stream(stream::repeat(Ok::<_, Infallible>(Bytes::from_static(
        &[7; 64 * 1024],
    ))))
}

async fn a_small_body_hides_no_hang_up(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Response).await;
    let call = scene
        .server
        .call_with(scene.server.request("/orders/7").body("small"));
    let end = scene.arrivals.recv().await.unwrap();
    let entry = scene.entered().await;
    call.hang_up().await;
    dropped(end).await;
    dropped(entry.end).await;
    scene.ends().await;
}

#[tokio::test]
async fn over_http2_a_large_one_hides_none_either() {
    let mut scene = Scene::of(Http::Two, HoldUntil::Response).await;
    let call = scene
        .server
        .call_with(scene.server.request("/orders/7").body(endless()));
    let end = scene.arrivals.recv().await.unwrap();
    let entry = scene.entered().await;
    call.hang_up().await;
    dropped(end).await;
    dropped(entry.end).await;
    scene.ends().await;
}

/// As documented: hyper does not read from the connection, and so does not notice its end.
#[tokio::test]
async fn layer_over_http1_misses_a_hang_up_behind_an_unread_body() {
    let mut scene = Scene::of(Http::One, HoldUntil::Response).await;
    let call = scene
        .server
        .call_with(scene.server.request("/orders/7").body(endless()));
    let end = scene.arrivals.recv().await.unwrap();
    let mut entry = scene.entered().await;
    call.hang_up().await;

    // A later disconnect has been noticed, so this one would have been noticed by now.
    let (later, later_end) = scene.call("/orders/8").await;
    later.hang_up().await;
    dropped(later_end).await;
    assert_eq!(entry.end.try_recv(), Err(TryRecvError::Empty));
    assert!(!entry.lock.is_lost() && scene.is_held("order:7").await);

    entry.answer("unsent");
    dropped(end).await;
    scene.ends().await;
}
