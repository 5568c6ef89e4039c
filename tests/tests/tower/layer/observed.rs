//! Metrics of requests under their locks, labelled with the name of the policy, and their span.

use std::{convert::Infallible, num::NonZeroU32, time::Duration};

use axum::{Router, body::Body, response::Response, routing::post};
use futures_util::poll;
use http::{Request, Version};
use http_body_util::BodyExt;
use lock_runtime::{HeldLock, LockClient, LockKey};
use lock_tests::{Captured, RedisServer};
use lock_tower::{HoldUntil, LockLayer, LockPolicies, PolicyLayer};
use metrics_util::debugging::DebuggingRecorder;
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tower::{Layer, ServiceExt};

use crate::observed::Counted;

const PROMPTLY: Duration = Duration::from_secs(10);

fn layer(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .name("pay")
        .wait(PROMPTLY)
}

fn app(layer: LockLayer) -> Router {
    Router::new().route("/orders/{id}", post(async || "paid").layer(layer))
}

async fn pay(app: &Router) -> Response {
    let Ok(response) = app.clone().oneshot(order()).await;
    response
}

fn order() -> Request<Body> {
    Request::post("/orders/7").body(Body::empty()).unwrap()
}

const ASKED: (&str, f64) = ("lock_wait_seconds{name=pay,mode=exclusive}", 1.0);
const GRANTED: (&str, f64) = (
    "lock_acquisitions_total{name=pay,mode=exclusive,outcome=granted}",
    1.0,
);
const HELD: (&str, f64) = ("lock_hold_seconds{name=pay,mode=exclusive}", 1.0);
const CONTENDED: (&str, f64) = ("lock_contended_total{name=pay,mode=exclusive}", 1.0);
const HANDED: (&str, f64) = (
    "lock_handoffs_total{name=pay,mode=exclusive,scope=remote}",
    1.0,
);
const MORE_HELD: (&str, f64) = ("lock_held{name=pay,mode=exclusive}", 1.0);
const LESS_HELD: (&str, f64) = ("lock_held{name=pay,mode=exclusive}", -1.0);

#[tokio::test]
async fn a_request_is_counted_from_its_wait_to_its_release() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let app = app(layer(&locks));
    assert_eq!(pay(&app).await.status(), 200);
    counted.expect(&[ASKED, GRANTED, HELD]);

    let held = locks.exclusive("order:7").acquire().await.unwrap();
    let mut waiting = Box::pin(pay(&app));
    assert!(poll!(&mut waiting).is_pending());
    counted.expect(&[("lock_waiting{name=pay,mode=exclusive}", 1.0)]);
    held.release().await.unwrap();
    assert_eq!(waiting.await.status(), 200);
    counted.expect(&[
        ("lock_waiting{name=pay,mode=exclusive}", -1.0),
        ASKED,
        GRANTED,
        CONTENDED,
        HANDED,
        HELD,
    ]);
}

#[tokio::test]
async fn a_refusal_is_counted_by_its_code() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let held = locks.exclusive("order:7").acquire().await.unwrap();
    assert_eq!(pay(&app(layer(&locks).no_wait())).await.status(), 409);
    counted.expect(&[
        ASKED,
        (
            "lock_acquisitions_total{name=pay,mode=exclusive,outcome=contended}",
            1.0,
        ),
        CONTENDED,
    ]);
    assert_eq!(
        pay(&app(layer(&locks).wait(Duration::from_millis(1))))
            .await
            .status(),
        409
    );
    counted.expect(&[
        ASKED,
        (
            "lock_acquisitions_total{name=pay,mode=exclusive,outcome=wait_timeout}",
            1.0,
        ),
        CONTENDED,
    ]);
    held.release().await.unwrap();

    // An invalid request never waits. A request without a route acquires nothing.
    assert_eq!(
        pay(&app(layer(&locks).lease(Duration::ZERO)))
            .await
            .status(),
        500
    );
    counted.expect(&[(
        "lock_acquisitions_total{name=pay,mode=exclusive,outcome=invalid_spec}",
        1.0,
    )]);
    let nowhere = Request::post("/nowhere").body(Body::empty()).unwrap();
    let Ok(response) = app(layer(&locks))
        .layer(layer(&locks))
        .oneshot(nowhere)
        .await;
    assert_eq!(response.status(), 404);
    counted.expect(&[]);
}

#[tokio::test]
async fn a_request_whose_connection_ends_neither_waits_nor_holds() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let entered = Notify::new();
    let service = tower::service_fn(async |_: Request<Body>| {
        entered.notify_one();
        std::future::pending::<Result<Response, Infallible>>().await
    });
    let mut holding = Box::pin(
        LockLayer::with_key(locks.clone(), lock_tower::key::global("order:7").unwrap())
            .name("pay")
            .layer(service)
            .oneshot(order()),
    );
    tokio::select! {
        _ = &mut holding => unreachable!("it never ends"),
        () = entered.notified() => {}
    }
    counted.expect(&[ASKED, GRANTED, MORE_HELD]);
    drop(holding);
    counted.expect(&[HELD, LESS_HELD]);

    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    let app = app(layer(&locks));
    let mut waiting = Box::pin(pay(&app));
    assert!(poll!(&mut waiting).is_pending());
    drop(waiting);
    counted.expect(&[
        ASKED,
        (
            "lock_acquisitions_total{name=pay,mode=exclusive,outcome=cancelled}",
            1.0,
        ),
    ]);
}

#[tokio::test]
async fn a_loss_is_counted_with_its_reason() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let body = {
            let locks = locks.clone();
            async move |lock: HeldLock| {
                let revoked = async move {
                    locks.revoke(lock.key()).await.unwrap();
                    std::future::pending::<Result<String, Infallible>>().await
                };
                if hold == HoldUntil::Response {
                    revoked.await.unwrap();
                    return Body::empty();
                }
                Body::from_stream(futures_util::stream::once(revoked))
            }
        };
        let app = Router::new().route(
            "/orders/{id}",
            post(body).layer(layer(&locks).hold_until(hold)),
        );
        let response = pay(&app).await;
        assert_eq!(
            response.into_body().collect().await.is_err(),
            hold == HoldUntil::Body
        );
        counted.expect(&[
            ASKED,
            GRANTED,
            HELD,
            ("lock_lost_total{name=pay,mode=exclusive,loss=revoked}", 1.0),
        ]);
    }
}

#[tokio::test]
async fn a_body_under_its_lock_is_held_until_its_end() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let response = pay(&app(layer(&locks).hold_until(HoldUntil::Body))).await;
    counted.expect(&[ASKED, GRANTED, MORE_HELD]);
    response.into_body().collect().await.unwrap();
    counted.expect(&[HELD, LESS_HELD]);
    drop(pay(&app(layer(&locks).hold_until(HoldUntil::Body))).await);
    counted.expect(&[ASKED, GRANTED, HELD]);
}

#[tokio::test]
async fn renewals_are_counted() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let handler = async |lock: HeldLock| {
        while lock.renewals() < 2 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let layer = layer(&locks).lease(Duration::from_millis(100));
    let app = Router::new().route("/orders/{id}", post(handler).layer(layer));
    assert_eq!(timeout(PROMPTLY, pay(&app)).await.unwrap().status(), 200);
    let figures = counted.since_last();
    assert!(
        figures["lock_renewals_total{name=pay,mode=exclusive}"] >= 2.0,
        "{figures:?}"
    );
}

#[tokio::test]
async fn a_request_that_is_served_without_its_lock_is_counted() {
    let counted = Counted::here();
    let redis = RedisServer::start().await;
    let locks = LockClient::connect(&redis.url()).await.unwrap();
    let app = app(layer(&locks)
        .wait(Duration::from_millis(50))
        .lease(Duration::from_secs(1))
        .fail_open());
    assert_eq!(pay(&app).await.status(), 200);
    counted.expect(&[ASKED, GRANTED, HELD]);
    redis.kill();
    assert_eq!(pay(&app).await.status(), 200);
    counted.expect(&[
        ASKED,
        (
            "lock_acquisitions_total{name=pay,mode=exclusive,outcome=unavailable}",
            1.0,
        ),
        ("lock_unlocked_total{name=pay}", 1.0),
    ]);
}

#[tokio::test]
async fn policies_are_counted_by_their_names_and_never_by_key() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let policies = LockPolicies::from_toml_str(
        "[routes]\n\"POST /orders/{id}\" = { name = \"pay\", key = \"order:{id}\" }\n\"/x/{id}\" = { key = \"x:{id}\" }",
    );
    let layer = PolicyLayer::new(locks.clone(), policies.unwrap());
    let app: Router = Router::new().fallback(async || "found").layer(layer);
    for path in ["/orders/1", "/orders/2", "/x/3", "/y"] {
        let Ok(response) = app
            .clone()
            .oneshot(Request::post(path).body(Body::empty()).unwrap())
            .await;
        assert_eq!(response.status(), 200);
    }
    counted.expect_all(&[
        (
            "lock_acquisitions_total{name=/x/{id},mode=exclusive,outcome=granted}",
            1.0,
        ),
        ("lock_wait_seconds{name=/x/{id},mode=exclusive}", 1.0),
        ("lock_hold_seconds{name=/x/{id},mode=exclusive}", 1.0),
        (GRANTED.0, 2.0),
        (ASKED.0, 2.0),
        (HELD.0, 2.0),
    ]);

    // A layer without a name is named after its template.
    let plain = LockLayer::new(locks, "order:{method}")
        .unwrap()
        .permits(NonZeroU32::MIN);
    let app = Router::new().fallback(async || "found").layer(plain);
    let Ok(_) = app.oneshot(order()).await;
    assert_eq!(
        counted.held(),
        [(
            "lock_hold_seconds{name=order:{method},mode=permits}".to_owned(),
            1.0
        )]
    );
}

#[tokio::test]
async fn layer_without_a_name_is_named_after_the_route() {
    let counted = Counted::here();
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let by_closure = |request: &Request<Body>| LockKey::new(request.uri().path());
    let lock = LockLayer::with_key(LockClient::in_memory(), by_closure);
    let handler = async || tracing::info!("at work");
    let orders = Router::new().route("/orders/{id}", post(handler));
    let app = Router::new()
        .nest("/v1", orders)
        .route("/users/{id}", post(async || "done"))
        .fallback(async || "nothing")
        .layer(lock);
    for path in ["/v1/orders/1", "/v1/orders/2", "/users/1", "/nowhere"] {
        let request = Request::post(path).body(Body::empty()).unwrap();
        let Ok(response) = app.clone().oneshot(request).await;
        assert_eq!(response.status(), 200);
    }
    // A caller chooses the path, so it is a name only where it is that of a call over gRPC.
    let long = format!("/shop.Orders/{}", "Pay".repeat(100));
    for (version, content_type, path) in [
        (Version::HTTP_2, "application/grpc", "/shop.Orders/Pay"),
        (
            Version::HTTP_2,
            "application/grpc+proto",
            "/shop.Orders/Pay",
        ),
        (Version::HTTP_2, "application/grpc", "/shop.Orders/Pay/7"),
        (Version::HTTP_2, "text/plain", "/shop.Orders/Pay"),
        (Version::HTTP_11, "application/grpc", "/shop.Orders/Refund"),
        (Version::HTTP_2, "application/grpc", &long),
    ] {
        let request = Request::post(path).version(version);
        let request = request.header("content-type", content_type);
        let Ok(_) = app
            .clone()
            .oneshot(request.body(Body::empty()).unwrap())
            .await;
    }
    assert_eq!(
        counted.held(),
        [
            (
                "lock_hold_seconds{name=/shop.Orders/Pay,mode=exclusive}".to_owned(),
                2.0
            ),
            (
                "lock_hold_seconds{name=/users/{id},mode=exclusive}".to_owned(),
                1.0
            ),
            (
                "lock_hold_seconds{name=/v1/orders/{id},mode=exclusive}".to_owned(),
                2.0
            ),
            (
                "lock_hold_seconds{name=unrouted,mode=exclusive}".to_owned(),
                5.0
            ),
        ]
    );
    let event = traces.wait_for(|event| event.message == "at work").await;
    assert_eq!(event.span_fields["lock.name"], "/v1/orders/{id}");
}

#[test]
fn an_exporter_gets_descriptions_and_units() {
    let recorder = DebuggingRecorder::new();
    metrics::with_local_recorder(&recorder, || {
        lock_tower::metrics::describe();
        metrics::counter!("lock_lost_total").increment(1);
        metrics::histogram!("lock_hold_seconds").record(1);
    });
    for (_, unit, text, _) in recorder.snapshotter().snapshot().into_vec() {
        assert!(unit.is_some() && text.is_some_and(|text| !text.is_empty()));
    }
}

#[tokio::test]
async fn a_handler_runs_in_a_span_that_says_under_which_lock() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let handler = async || {
        tracing::info!("at work");
        let line = async {
            tracing::info!("writing");
            Ok::<_, Infallible>("line")
        };
        Body::from_stream(futures_util::stream::once(line))
    };
    let app = Router::new().route(
        "/orders/{id}",
        post(handler).layer(layer(&locks).hold_until(HoldUntil::Body)),
    );
    let held = locks.exclusive("order:7").acquire().await.unwrap();
    let mut waiting = Box::pin(pay(&app));
    assert!(poll!(&mut waiting).is_pending());
    let next = held.fence();
    held.release().await.unwrap();
    waiting.await.into_body().collect().await.unwrap();

    for message in ["at work", "writing"] {
        let event = traces.wait_for(|event| event.message == message).await;
        assert_eq!(event.spans.first().unwrap(), "lock");
        let field = |name| event.span_fields[name].as_str();
        assert_eq!(
            (field("lock.name"), field("lock.key"), field("outcome")),
            ("pay", "order:7", "granted")
        );
        assert!(field("lock.fence").parse::<u64>().unwrap() > next.to_string().parse().unwrap());
        assert!(field("lock.waited_ms").parse::<u64>().is_ok());
    }

    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    let refused = pay(&self::app(layer(&locks).no_wait())).await;
    assert_eq!(refused.status(), 409);
    let event = traces
        .wait_for(|event| event.message == "request refused")
        .await;
    assert_eq!(
        (
            event.spans.as_slice(),
            event.span_fields["outcome"].as_str()
        ),
        (&["lock".to_owned()][..], "contended")
    );
}

#[tokio::test]
async fn a_span_ends_where_the_request_does() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let entered = std::sync::Arc::new(Notify::new());
    let handler = {
        let entered = entered.clone();
        async move || entered.notify_one()
    };
    let app = Router::new().route("/orders/{id}", post(handler).layer(layer(&locks)));
    let response = pay(&app).await;
    entered.notified().await;
    tracing::info!("afterwards");
    drop(response);
    let event = traces.wait_for(|event| event.message == "afterwards").await;
    assert!(event.spans.is_empty());
}
