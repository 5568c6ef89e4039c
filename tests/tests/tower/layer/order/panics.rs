//! `CatchPanic`.

use axum::routing::{MethodRouter, post};
use lock_runtime::{HeldLock, LockClient};
use tower_http::catch_panic::CatchPanicLayer;

use super::{app, is_free_at_once, orders};
use crate::layer::server::Server;
use lock_tests::place::all_free;

fn panics() -> MethodRouter {
    post(async |lock: HeldLock| assert!(lock.is_lost(), "as the test wants it"))
}

#[tokio::test]
async fn a_panic_that_is_caught_outside_frees_the_lock() {
    let locks = LockClient::in_memory();
    let server = Server::start(app(panics().layer((CatchPanicLayer::new(), orders(&locks))))).await;
    assert_eq!(server.post("/orders/7").await.status, 500);
    all_free(&locks, &["order:7"]).await;
}

#[tokio::test]
async fn layer_awaits_its_release_after_a_panic_caught_within() {
    let locks = LockClient::in_memory();
    let server = Server::start(app(panics().layer((orders(&locks), CatchPanicLayer::new())))).await;
    assert_eq!(server.post("/orders/7").await.status, 500);
    assert!(is_free_at_once(&locks).await);
}
