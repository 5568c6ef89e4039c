//! Responses to requests that are refused.

use std::{pin::pin, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, Response, StatusCode, Version, request},
    response::IntoResponse,
    routing::post,
};
use futures_util::future;
use lock_runtime::{ErrorClass, HeldLock, LockClient};
use lock_tests::{Captured, RedisServer, traces::Event};
use lock_tower::{LockLayer, Refusal, key};
use tower::{Layer, ServiceExt};
use tracing::Level;

use super::server::Server;

const GRPC: (&str, &str) = ("content-type", "application/grpc+proto");

fn orders(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .no_wait()
}

async fn serve(layer: LockLayer) -> Server {
    let paid = post(async || "paid").layer(layer);
    let app = Router::new().route("/orders/{id}", paid.clone());
    Server::start(app.route("/shop.Orders/{id}", paid)).await
}

#[tokio::test]
async fn a_held_lock_is_a_conflict_that_may_be_tried_again() {
    let locks = LockClient::in_memory();
    let guard = locks.exclusive("order:secret-7").acquire().await.unwrap();
    let waits = orders(&locks).wait(Duration::from_millis(20));
    for (layer, code) in [(orders(&locks), "contended"), (waits, "wait_timeout")] {
        let server = serve(layer).await;
        let response = server.post("/orders/secret-7").await;
        assert_eq!((response.status, response.problem().as_str()), (409, code));
        assert_eq!(response.header("retry-after"), Some("1"));
        for secret in ["secret-7", &guard.fence().to_string()] {
            assert!(!response.body.contains(secret), "{}", response.body);
        }
    }
}

#[tokio::test]
async fn retry_after_is_no_longer_than_the_lease_of_the_holder() {
    let locks = LockClient::in_memory();
    let _guard = locks
        .exclusive("order:7")
        .lease(Duration::from_secs(5))
        .acquire()
        .await
        .unwrap();
    let server = serve(orders(&locks).retry_after(Duration::from_secs(60))).await;
    let after: u64 = server
        .post("/orders/7")
        .await
        .header("retry-after")
        .unwrap()
        .parse()
        .unwrap();
    assert!((1..=5).contains(&after), "{after}");
}

#[tokio::test]
async fn a_server_that_is_full_or_ends_is_unavailable() {
    let locks = LockClient::builder()
        .max_waiters(0)
        .build_in_memory()
        .unwrap();
    let server = serve(orders(&locks).wait(Duration::from_secs(10))).await;
    let guard = locks.exclusive("order:7").acquire().await.unwrap();
    let (first, second) = (
        pin!(server.post("/orders/7")),
        pin!(server.post("/orders/7")),
    );
    let (response, waiting) = future::select(first, second).await.factor_first();
    assert_eq!(
        (response.status, response.problem().as_str()),
        (503, "overloaded")
    );
    assert_eq!(response.header("retry-after"), Some("1"));
    guard.release().await.unwrap();
    assert_eq!(waiting.await.status, 200);

    locks.shutdown().await;
    let response = server.post("/orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (503, "shutting_down")
    );
    assert_eq!(response.header("retry-after"), None);
}

#[tokio::test]
async fn a_missing_header_is_named() {
    let layer = LockLayer::new(LockClient::in_memory(), "pay:{header.idempotency-key}").unwrap();
    let server = serve(layer).await;
    let response = server.post("/orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "missing_header")
    );
    assert!(
        response.body.contains("idempotency-key"),
        "{}",
        response.body
    );
    let response = server
        .post_with(
            "/orders/7",
            &[("idempotency-key", "1"), ("Idempotency-Key", "2")],
        )
        .await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "repeated_header")
    );
    assert_eq!(
        server
            .post_with("/orders/7", &[("Idempotency-Key", "1")])
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn a_value_that_cannot_be_in_a_key_is_the_callers_mistake() {
    let server = serve(orders(&LockClient::in_memory())).await;
    let response = server.post(&format!("/orders/{}", "x".repeat(600))).await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "invalid_key")
    );
    let response = server.post("/orders/%FF").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "bad_request")
    );
}

#[tokio::test]
async fn a_404_stays_a_404() {
    let locks = LockClient::in_memory();
    let inner = Router::new()
        .route("/{id}", post(async || "paid"))
        .layer(orders(&locks));
    let app = Router::new()
        .route("/orders/{id}", post(async || "paid"))
        .nest("/nested", inner)
        .layer(orders(&locks));
    let server = Server::start(app).await;
    assert_eq!(server.post("/orders/7").await.status, 200);
    assert_eq!(server.post("/nowhere").await.status, 404);
    assert_eq!(server.post("/nested/a/b").await.status, 404);
    assert_eq!(
        server
            .send("GET", "/orders/7", &[])
            .await
            .response()
            .await
            .unwrap()
            .status,
        405
    );
}

#[tokio::test]
async fn a_placeholder_that_the_route_does_not_have_is_our_mistake() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let layer = LockLayer::new(LockClient::in_memory(), "order:{order_id}").unwrap();
    let server = serve(layer).await;
    let response = server.post("/orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (500, "misconfigured")
    );
    assert!(!response.body.contains("order_id"), "{}", response.body);
    let event = traces.wait_for(|event| event.level == Level::ERROR).await;
    let error = event.field("error").unwrap();
    let message = "the key template has {order_id}, and the route \"/orders/{id}\" has no such parameter: it has {id}";
    assert_eq!(error, message);
}

#[tokio::test]
async fn invalid_options_of_a_layer_are_an_error_event_before_any_request() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let app = || Router::<()>::new().route("/orders/{id}", post(async || "paid"));
    let is_error = |event: &Event| event.level == Level::ERROR;
    drop(app().layer(orders(&locks)));
    assert!(!traces.events().iter().any(is_error));
    drop(app().layer(orders(&locks).lease(Duration::ZERO)));
    let event = traces.wait_for(is_error).await;
    assert_eq!(event.field("policy"), Some("order:{id}"));
    let message = "a lease of 0s is out of range; give 100 ms to 24 h";
    assert_eq!(event.field("error"), Some(message));
}

#[tokio::test]
async fn layer_around_a_finished_router_serves_nothing_unlocked() {
    let app: Router = Router::new().route("/orders/{id}", post(async || "paid"));
    let app = orders(&LockClient::in_memory()).layer(app);
    let request = axum::extract::Request::post("/orders/7")
        .body(axum::body::Body::empty())
        .unwrap();
    let response = app.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 500);
}

#[tokio::test]
async fn a_grpc_caller_gets_a_status_in_the_headers() {
    let locks = LockClient::in_memory();
    let _guard = locks.exclusive("order:7").acquire().await.unwrap();
    let server = serve(orders(&locks)).await;
    let response = server.grpc("/shop.Orders/7", &[]).await;
    assert_eq!((response.status, response.body.as_str()), (200, ""));
    assert_eq!(response.header("content-type"), Some("application/grpc"));
    assert_eq!(response.header("grpc-status"), Some("10"));
    assert_eq!(
        response.header("grpc-message"),
        Some("The resource is in use.")
    );
}

/// A caller chooses its headers, and must not choose the protocol by them: a refusal with the
/// status 200 is not counted as one.
#[tokio::test]
async fn a_refusal_is_that_of_grpc_on_a_route_of_grpc_only() {
    let locks = LockClient::in_memory();
    let _guard = locks.exclusive("a").acquire().await.unwrap();
    let layer = || {
        let key = key::global("a").unwrap();
        LockLayer::with_key(locks.clone(), key).no_wait()
    };
    let pay = || post(async || "paid").layer(layer());
    let routed = Router::new()
        .route("/orders/{id}", pay())
        .route("/{tenant}/pay", pay())
        .route("/orders/pay", pay())
        .route("/Users/{id}", pay())
        .route("/v1.0/pay", pay())
        .route("/files/{*rest}", pay())
        .route("/shop.Orders/{*rest}", pay())
        .route("/Greeter/{*rest}", pay())
        .nest("/grpc", Router::new().route("/shop.Orders/{*rest}", pay()));
    let around = Router::new().fallback_service(layer().layer(Router::new()));
    let headers = |request: request::Builder| {
        let request = request.header(GRPC.0, GRPC.1).header("te", "trailers");
        request.body(Body::empty()).unwrap()
    };
    for (app, path, is_grpc) in [
        (&routed, "/orders/7", false),
        (&routed, "/shop.Tenant/pay", false),
        (&routed, "/orders/pay", false),
        (&routed, "/Users/me", false),
        (&routed, "/v1.0/pay", false),
        (&routed, "/files/shop.Orders/Pay", false),
        (&routed, "/shop.Orders/Pay", true),
        (&routed, "/Greeter/Greet", true),
        (&routed, "/grpc/shop.Orders/Pay", true),
        (&around, "/shop.Orders/Pay", true),
        (&around, "/Greeter/Greet", true),
        (&around, "/orders/pay", false),
        (&around, "/Users/7", false),
        (&around, "/api/shop.Orders/Pay", false),
        (&around, "/", false),
    ] {
        let request = headers(Request::post(path).version(Version::HTTP_2));
        let response = app.clone().oneshot(request).await.unwrap();
        let status = if is_grpc { 200 } else { 409 };
        assert_eq!(response.status(), status, "{path}");
        assert_eq!(response.headers().contains_key("grpc-status"), is_grpc);
        for request in [
            Request::post(path),
            Request::put(path).version(Version::HTTP_2),
        ] {
            let response = around.clone().oneshot(headers(request)).await.unwrap();
            assert_eq!(response.status(), 409, "{path}");
        }
    }
}

#[tokio::test]
async fn a_grpc_caller_waits_no_longer_than_its_own_deadline() {
    let locks = LockClient::in_memory();
    let _guard = locks.exclusive("order:7").acquire().await.unwrap();
    let server = serve(orders(&locks).wait(Duration::from_secs(60))).await;
    let deadline = ("grpc-timeout", "50m");
    let response = server.grpc("/shop.Orders/7", &[deadline]).await;
    assert_eq!(
        response.header("grpc-status"),
        Some("4"),
        "DEADLINE_EXCEEDED: {response:?}"
    );

    // A longer deadline has no effect, and neither has `grpc-timeout` without gRPC.
    let server = serve(orders(&locks).wait(Duration::from_millis(20))).await;
    let response = server
        .grpc("/shop.Orders/7", &[("grpc-timeout", "1M")])
        .await;
    assert_eq!(response.header("grpc-status"), Some("10"));
    let response = server
        .post_with("/orders/7", &[("grpc-timeout", "0n")])
        .await;
    assert_eq!(response.problem(), "wait_timeout");
}

#[tokio::test(start_paused = true)]
async fn a_grpc_caller_is_answered_before_its_deadline() {
    let locks = LockClient::in_memory();
    let _guard = locks.exclusive("order:7").acquire().await.unwrap();
    let app = Router::new().route(
        "/shop.Orders/{id}",
        post(async || "paid").layer(orders(&locks).wait(Duration::from_secs(60))),
    );
    for (text, deadline) in [
        ("1S", Duration::from_secs(1)),
        ("10m", Duration::from_millis(10)),
    ] {
        let request = Request::post("/shop.Orders/7")
            .version(Version::HTTP_2)
            .header(GRPC.0, GRPC.1)
            .header("grpc-timeout", text);
        let answer = app.clone().oneshot(request.body(Body::empty()).unwrap());
        let response = tokio::time::timeout(deadline, answer)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(response.headers()["grpc-status"], "4");
    }
}

#[tokio::test]
async fn a_store_out_of_reach_refuses_unless_the_layer_fails_open() {
    let redis = RedisServer::start().await;
    let locks = LockClient::connect(&redis.url()).await.unwrap();
    let handler = post(async |lock: Option<HeldLock>| {
        if lock.is_some() {
            "locked"
        } else {
            "not locked"
        }
    });
    let layer = orders(&locks)
        .lease(Duration::from_secs(1))
        .wait(Duration::from_millis(100));
    let outer = LockLayer::new(LockClient::in_memory(), "tenant:{id}").unwrap();
    let app = Router::new()
        .route("/orders/{id}", handler.clone().layer(layer.clone()))
        .route(
            "/shop.Open/{id}",
            handler.clone().layer(layer.clone().fail_open()),
        )
        .route("/both/{id}", handler.layer((outer, layer.fail_open())));
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let server = Server::start(app).await;
    assert_eq!(server.post("/shop.Open/1").await.body, "locked");
    let guard = locks.exclusive("order:2").acquire().await.unwrap();
    assert_eq!(
        server.post("/shop.Open/2").await.problem(),
        "wait_timeout",
        "a held lock is not an outage"
    );
    drop(guard);

    // A slow store is not an outage, however short the deadline of the caller.
    let held = locks.exclusive("order:4").acquire().await.unwrap();
    redis.command(&["CLIENT", "PAUSE", "200", "ALL"]).await;
    let response = server.grpc("/shop.Open/4", &[("grpc-timeout", "1n")]).await;
    assert_eq!(
        (response.body.as_str(), response.header("grpc-status")),
        ("", Some("4"))
    );
    held.release().await.unwrap();

    redis.kill();
    let response = server.post("/orders/3").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (503, "unavailable")
    );
    for _ in 0..2 {
        assert_eq!(server.post("/shop.Open/3").await.body, "not locked");
    }
    // The handler does not see the lock of an outer layer instead.
    assert_eq!(server.post("/both/3").await.body, "not locked");
    let (mut events, mut refused) = (traces.events(), traces.events());
    events.retain(|event| event.message == "served without its lock");
    // The first of three; the others follow as one line.
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].field("left_out"), None);
    refused.retain(|event| event.message == "request refused");
    events.extend(refused.pop());
    // The events have the cause: a refused connection or a time-out.
    for event in events {
        let error = event.field("error").unwrap();
        let causes = [": no connection", ": no answer"];
        assert!(causes.iter().any(|cause| error.contains(cause)), "{error}");
    }
}

#[tokio::test]
async fn a_problem_has_a_title_whatever_its_status() {
    // A `title` is a string (RFC 9457, 3.1.3); consumers ignore any other value (3.1).
    let locks = LockClient::in_memory();
    let layer = orders(&locks).status(ErrorClass::Busy, StatusCode::from_u16(499).unwrap());
    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    let response = serve(layer).await.post("/orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (499, "contended")
    );
}

#[tokio::test]
async fn refusals_can_be_said_in_other_words() {
    let locks = LockClient::in_memory();
    let _guard = locks.exclusive("order:7").acquire().await.unwrap();
    let layer = orders(&locks).on_reject(|refusal: &Refusal<'_>| {
        Response::builder()
            .status(423)
            .body(Bytes::from(format!("{}!", refusal.code())))
            .unwrap()
    });
    let server =
        Server::start(Router::new().route("/orders/{id}", post(async || "paid").layer(layer)))
            .await;
    let response = server.post("/orders/7").await;
    assert_eq!(
        (response.status, response.body.as_str()),
        (423, "contended!")
    );
}

#[tokio::test]
async fn a_handler_without_a_layer_has_no_lock() {
    let app = Router::new()
        .route("/must", post(async |lock: HeldLock| lock.key().to_string()))
        .route(
            "/may",
            post(async |lock: Option<HeldLock>| lock.is_none().to_string().into_response()),
        );
    let server = Server::start(app).await;
    let response = server.post("/must").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (500, "not_locked")
    );
    assert_eq!(server.post("/may").await.body, "true");
}
