//! A layer with path parameters where no route of axum has matched: a 404 stays a 404, and anything
//! else is reported, once.

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    response::Redirect,
    routing::{get, post},
};
use lock_runtime::{HeldLock, LockClient};
use lock_tests::Captured;
use lock_tower::LockLayer;
use tower::ServiceExt as _;
use tracing::Level;

async fn status(app: &Router, path: &str) -> StatusCode {
    let request = Request::post(path).body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap().status()
}

/// The names in the reports so far.
fn reported(traces: &Captured) -> Vec<String> {
    let events = traces.events().into_iter();
    let reports = events.filter(|event| event.message.starts_with("served without its lock"));
    reports
        .map(|event| {
            assert_eq!(event.level, Level::ERROR);
            event.fields["name"].clone()
        })
        .collect()
}

#[tokio::test]
async fn a_service_that_is_served_without_its_lock_is_reported_once() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let handler = async |lock: Option<HeldLock>| {
        if lock.is_some() {
            StatusCode::OK
        } else {
            StatusCode::ACCEPTED
        }
    };
    let inner = || Router::new().route("/orders/{number}", post(handler));
    let layer = |template| LockLayer::new(locks.clone(), template).unwrap();

    let around = Router::new()
        .nest_service("/around", inner())
        .layer(layer("around:{number:int}"));
    assert_eq!(status(&around, "/around/orders").await, 404);
    assert_eq!(status(&around, "/nowhere").await, 404);
    assert_eq!(reported(&traces), [""; 0], "a 404 stays a 404");
    for _ in 0..3 {
        assert_eq!(status(&around, "/around/orders/7").await, 202);
    }
    assert_eq!(reported(&traces), ["around:{number:int}"]);

    // On the route itself it locks.
    let inside = Router::new().nest_service("/inside", inner().layer(layer("inside:{number}")));
    assert_eq!(status(&inside, "/inside/orders/7").await, 200);
    assert_eq!(status(&inside, "/inside/nowhere").await, 404);
    let only_get = Router::new().route("/get/{id}", get(handler));
    let refused = Router::new().nest_service("/s", only_get);
    let refused = refused.layer(layer("refused:{number}"));
    assert_eq!(status(&refused, "/s/get/7").await, 405);
    assert_eq!(reported(&traces).len(), 1);

    // Another layer has a report of its own.
    let fallback = Router::new()
        .fallback(async || Redirect::to("/"))
        .layer(layer("fallback:{number}"));
    assert_eq!(status(&fallback, "/a").await, 303);
    assert_eq!(reported(&traces).len(), 2);
}
