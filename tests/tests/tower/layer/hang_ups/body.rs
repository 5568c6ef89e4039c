//! While the body is sent under the lock.

use std::time::Duration;

use axum::http::{HeaderMap, header::ETAG};
use http_body::Frame;
use lock_tower::HoldUntil;
use tokio::time::timeout;

use super::Scene;
use crate::layer::{
    client::{Http, over_both_versions},
    frames::{body_of, data},
};

over_both_versions!(
    before_the_first_frame_the_lock_is_freed,
    in_the_middle_the_lock_is_freed,
    before_the_trailers_the_lock_is_freed,
    while_the_server_cannot_write_the_lock_is_freed,
);

/// A client that hangs up when it has read `read`.
async fn after_reading(http: Http, read: &[&'static str]) {
    let mut scene = Scene::of(http, HoldUntil::Body).await;
    let (call, _) = scene.call("/orders/7").await;
    let (frames, body) = body_of();
    scene.entered().await.answer(body);
    let (behind, _) = scene.call("/orders/7").await;
    let mut response = call.response().await.unwrap();
    for text in read {
        frames.send(data(*text)).await.unwrap();
        assert_eq!(response.chunk().await.unwrap().unwrap(), *text);
    }
    assert!(scene.is_held("order:7").await);
    drop(response);
    // Nothing is written: the server notices all the same.
    frames.closed().await;
    scene.ends_with(behind).await;
}

async fn before_the_first_frame_the_lock_is_freed(http: Http) {
    after_reading(http, &[]).await;
}

async fn in_the_middle_the_lock_is_freed(http: Http) {
    after_reading(http, &["a", "b"]).await;
}

async fn before_the_trailers_the_lock_is_freed(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Body).await;
    let (call, _) = scene.call("/orders/7").await;
    let (frames, body) = body_of();
    scene.entered().await.answer(body);
    let (behind, _) = scene.call("/orders/7").await;
    let mut response = call.response().await.unwrap();
    frames.send(data("all")).await.unwrap();
    assert_eq!(response.chunk().await.unwrap().unwrap(), "all");
    scene.stop_releases(true);
    frames
        .send(Frame::trailers(HeaderMap::from_iter([(ETAG, 7.into())])))
        .await
        .unwrap();
    // The trailers have been taken, and wait for the release.
    frames.closed().await;
    drop(response);
    scene.releases(2).await;
    scene.stop_releases(false);
    scene.ends_with(behind).await;
}

async fn while_the_server_cannot_write_the_lock_is_freed(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Body).await;
    let (call, _) = scene.call("/orders/7").await;
    let (frames, body) = body_of();
    scene.entered().await.answer(body);
    let (behind, _) = scene.call("/orders/7").await;
    let response = call.response().await.unwrap();
    // Until all buffers on the way are full.
    const CHUNK: &[u8] = &[7; 256 * 1024];
    const FULL: Duration = Duration::from_millis(200);
    while timeout(FULL, frames.send(data(CHUNK))).await.is_ok() {}
    assert!(scene.is_held("order:7").await);
    drop(response);
    frames.closed().await;
    scene.ends_with(behind).await;
}
