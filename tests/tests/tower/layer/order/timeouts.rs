//! The `Timeout` layers of tower and tower-http.

use std::{
    convert::Infallible,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::StatusCode,
    routing::{MethodRouter, post},
};
use lock_runtime::{HeldLock, LockClient, LockKey};
use lock_tower::{HoldUntil, LockLayer, ServiceError};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tower::{BoxError, Layer, ServiceExt, limit::GlobalConcurrencyLimitLayer, service_fn};
use tower_http::timeout::{ResponseBodyTimeoutLayer, TimeoutLayer};

use super::{app, is_free_at_once, orders};
use crate::layer::{
    client::{Connected, Http},
    frames::{data, streaming},
    server::{End, Server},
};
use lock_tests::place::{LONG, all_free};

const SOON: Duration = Duration::from_millis(50);

fn soon() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, SOON)
}

/// A handler that never returns. Each entry resolves when the handler is dropped.
fn endless() -> (MethodRouter, mpsc::UnboundedReceiver<End>) {
    let (entered, entries) = mpsc::unbounded_channel();
    let handler = async move |_: HeldLock| {
        let (_alive, end) = oneshot::channel();
        entered.send(end).unwrap();
        pending::<()>().await;
    };
    (post(handler), entries)
}

#[tokio::test]
async fn layer_within_a_timeout_gives_up_its_queue_entry() {
    let locks = LockClient::in_memory();
    let served = Arc::new(AtomicUsize::new(0));
    let count = served.clone();
    let route = post(async move || count.fetch_add(1, Ordering::Relaxed).to_string());
    let server = Server::start(app(route.layer((soon(), orders(&locks))))).await;
    let held = locks.exclusive("order:7").acquire().await.unwrap();
    assert_eq!(server.post("/orders/7").await.status, 408);
    held.release().await.unwrap();
    assert!(is_free_at_once(&locks).await);
    assert_eq!(served.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn outside_it_strikes_in_the_handler_and_the_lock_is_freed() {
    let locks = LockClient::in_memory();
    let (route, mut entries) = endless();
    let server = Server::start(app(route.layer((soon(), orders(&locks))))).await;
    assert_eq!(server.post("/orders/7").await.status, 408);
    assert!(
        entries.recv().await.unwrap().await.is_err(),
        "the handler is dropped"
    );
    all_free(&locks, &["order:7"]).await;
}

#[tokio::test]
async fn within_it_strikes_in_the_handler_and_the_release_is_awaited() {
    let locks = LockClient::in_memory();
    let (route, mut entries) = endless();
    let server = Server::start(app(route.layer((orders(&locks), soon())))).await;
    let held = locks.exclusive("order:7").acquire().await.unwrap();
    let sent = server.send("POST", "/orders/7", &[]).await;
    // The time-out does not include the wait for the lock.
    assert!(timeout(SOON * 4, entries.recv()).await.is_err());
    held.release().await.unwrap();
    let end = entries.recv().await.unwrap();
    assert_eq!(sent.response().await.unwrap().status, 408);
    assert!(end.await.is_err(), "the handler is dropped");
    assert!(is_free_at_once(&locks).await);
}

#[tokio::test]
async fn within_its_error_is_passed_on_when_the_lock_is_free() {
    let locks = LockClient::in_memory();
    let never = tower::timeout::TimeoutLayer::new(SOON)
        .layer(service_fn(|_: ()| pending::<Result<(), BoxError>>()));
    let service =
        LockLayer::plain(locks.clone(), |_: &()| LockKey::new("order:7").unwrap()).layer(never);
    let error = service.oneshot(()).await.unwrap_err();
    assert!(
        matches!(error, ServiceError::Inner(error) if error.is::<tower::timeout::error::Elapsed>())
    );
    assert!(is_free_at_once(&locks).await);
}

/// The status of a request while the inner capacity is in use, or `None` if there is no response
/// within [`LONG`]. Checks that the lock is free afterwards. Requires a paused clock.
async fn while_the_capacity_is_taken(
    route: MethodRouter,
    locks: &LockClient,
) -> Option<StatusCode> {
    let app: Router = Router::new().route("/orders/{id}", route);
    let request = Request::post("/orders/7").body(Body::empty()).unwrap();
    let response = timeout(LONG, app.oneshot(request))
        .await
        .ok()
        .map(|response| response.unwrap().status());
    all_free(locks, &["order:7"]).await;
    response
}

#[tokio::test(start_paused = true)]
async fn layer_bounds_its_wait_for_capacity_by_an_earlier_timeout() {
    let locks = LockClient::in_memory();
    let limit = GlobalConcurrencyLimitLayer::new(1);
    // This permit is kept until the end of the test.
    let taken = limit.layer(service_fn(async |()| Ok::<_, Infallible>(())));
    let _taken = taken.clone().ready_oneshot().await.unwrap();
    let served = || post(async || "served");
    let struck = Some(StatusCode::REQUEST_TIMEOUT);

    let outside = served().layer((soon(), orders(&locks), limit.clone()));
    assert_eq!(while_the_capacity_is_taken(outside, &locks).await, struck);
    // Inside, the timer starts after the wait for the capacity, unless each layer is added by its
    // own `.layer`.
    let within = served().layer((orders(&locks), soon(), limit.clone()));
    assert_eq!(while_the_capacity_is_taken(within, &locks).await, None);
    let limited: MethodRouter = served().layer(limit);
    let hurried: MethodRouter = limited.layer(soon());
    let one_by_one = hurried.layer(orders(&locks));
    assert_eq!(
        while_the_capacity_is_taken(one_by_one, &locks).await,
        struck
    );
}

#[tokio::test]
async fn layer_frees_the_lock_of_a_body_that_makes_no_progress() {
    let locks = LockClient::in_memory();
    let lock = orders(&locks).hold_until(HoldUntil::Body);
    let idle = || ResponseBodyTimeoutLayer::new(SOON);
    let outside = |route: MethodRouter| route.layer((idle(), lock.clone()));
    let within = |route: MethodRouter| route.layer((lock.clone(), idle()));
    for layered in [&outside as &dyn Fn(MethodRouter) -> MethodRouter, &within] {
        let (route, mut entries) = streaming();
        let server = Connected::start(Http::Two, app(layered(route))).await;
        let mut response = server.post("/orders/7").await;
        let frames = entries.recv().await.unwrap();
        frames.send(data("a")).await.unwrap();
        assert_eq!(response.chunk().await.unwrap().unwrap(), "a");
        assert!(response.chunk().await.is_err());
        frames.closed().await;
        all_free(&locks, &["order:7"]).await;
    }
}
