//! What a review has found.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Request, StatusCode},
    response::Response,
    routing::{get, post},
};
use http_body_util::BodyExt;
use lock_runtime::{HeldLock, LockClient, web::Answer};
use lock_tower::{LockLayer, LockPolicies};
use tokio::sync::Notify;
use tower::ServiceExt;

async fn send(app: &Router, method: &str, path: &str) -> (StatusCode, String) {
    let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    let response: Result<Response, Infallible> = app.clone().oneshot(request).await;
    let response = response.unwrap();
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

/// The handler that the manual shows, `Path<u64>` under `"order:{id}"`, serves order 7 under as many locks as there are ways to
/// write a 7.
#[tokio::test]
async fn one_order_has_one_lock_however_its_number_is_written() {
    for path in ["/orders/07/pay", "/orders/+7/pay", "/orders/%37/pay"] {
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (entered, leave) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let pay = {
            let (inside, most, entered, leave) = (inside.clone(), most.clone(), entered.clone(), leave.clone());
            async move |Path(id): Path<u64>| {
                assert_eq!(id, 7);
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                entered.notify_one();
                leave.notified().await;
                inside.fetch_sub(1, Ordering::SeqCst);
            }
        };
        let layer = LockLayer::new(LockClient::in_memory(), "order:{id}").unwrap().no_wait();
        let app = Router::new().route("/orders/{id}/pay", post(pay).layer(layer));
        let first = tokio::spawn({
            let app = app.clone();
            async move { send(&app, "POST", "/orders/7/pay").await }
        });
        entered.notified().await;
        let second = tokio::spawn(async move { send(&app, "POST", path).await });
        tokio::select! {
            () = entered.notified() => leave.notify_one(),
            () = async { while !second.is_finished() { tokio::task::yield_now().await } } => {}
        }
        leave.notify_waiters();
        leave.notify_one();
        first.await.unwrap();
        assert_eq!(most.load(Ordering::SeqCst), 1, "{path}: two requests paid order 7 at the same time");
    }
}

/// lib.rs: "`Router::layer(lock)` covers these and the fallback, which passes without a lock: a 404 stays a 404."
#[tokio::test]
async fn a_404_stays_a_404_under_a_template_of_headers() {
    let layer = LockLayer::new(LockClient::in_memory(), "tenant:{header.x-tenant}").unwrap();
    let app = Router::new().route("/orders", post(async || "ordered")).layer(layer);
    assert_eq!(send(&app, "POST", "/nowhere").await.0, StatusCode::NOT_FOUND);
}

/// RFC 9457, 3.1.4: `title` is a string; consumers ignore what is of another type.
#[tokio::test]
async fn a_problem_has_a_title_whatever_its_status() {
    let locks = LockClient::in_memory();
    let layer = LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .no_wait()
        .status(Answer::Busy, StatusCode::from_u16(499).unwrap());
    let app = Router::new().route("/orders/{id}", get(async || "there").layer(layer));
    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    let (status, body) = send(&app, "GET", "/orders/7").await;
    assert_eq!(status, 499);
    let document: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert!(document["title"].is_string(), "{document}");
}

/// A setter of the layer says something, and it is not so.
#[tokio::test]
async fn what_a_layer_with_policies_is_told_is_not_ignored() {
    let locks = LockClient::in_memory();
    let policies = LockPolicies::from_toml_str("routes.\"/orders/{id}\" = { key = \"order:{id}\" }").unwrap();
    let layer = LockLayer::with_policies(locks.clone(), policies).status(Answer::Busy, StatusCode::LOCKED).no_wait();
    let app = Router::new().route("/orders/{id}", get(async |lock: HeldLock| lock.key().to_string())).layer(layer);
    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    let answer = tokio::time::timeout(Duration::from_secs(10), send(&app, "GET", "/orders/7")).await.unwrap();
    assert_eq!(answer.0, StatusCode::LOCKED);
}

/// A router behind another one's route answers 404 by itself.
#[tokio::test]
async fn a_404_of_a_router_behind_a_route_stays_a_404() {
    let layer = LockLayer::new(LockClient::in_memory(), "order:{id}").unwrap();
    let inner = Router::new().route("/api/orders/{id}", post(async || "paid")).layer(layer);
    let inner = tower::ServiceBuilder::new().map_request(|request: Request<Body>| request).service(inner);
    let app = Router::new().route_service("/api/{*rest}", inner);
    assert_eq!(send(&app, "POST", "/api/orders/7").await.0, StatusCode::OK);
    assert_eq!(send(&app, "POST", "/api/nowhere").await.0, StatusCode::NOT_FOUND);
}
