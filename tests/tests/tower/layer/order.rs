//! The lock outside and inside of other layers, in the documented orders.

mod bodies;
mod capacity;
mod panics;
mod timeouts;

use axum::{Router, http::StatusCode, routing::MethodRouter};
use lock_runtime::LockClient;
use lock_tower::LockLayer;
use tower::BoxError;

use lock_tests::place::LONG;

fn orders(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .wait(LONG)
}

fn app(route: MethodRouter) -> Router {
    Router::new().route("/orders/{id}", route)
}

/// Turns an error of another layer into a response.
async fn shed(error: BoxError) -> (StatusCode, String) {
    (StatusCode::INSUFFICIENT_STORAGE, error.to_string())
}

async fn is_free_at_once(locks: &LockClient) -> bool {
    locks
        .exclusive("order:7")
        .try_acquire()
        .await
        .unwrap()
        .is_some()
}
