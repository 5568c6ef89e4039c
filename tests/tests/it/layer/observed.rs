//! Metrics of requests under their locks, labelled with the name of the policy, and their span.

use std::{collections::BTreeMap, convert::Infallible, num::NonZeroU32, time::Duration};

use axum::{Router, body::Body, response::Response, routing::post};
use futures_util::poll;
use http::Request;
use http_body_util::BodyExt;
use lock_runtime::{HeldLock, LockClient, LockKey, RevokeScope};
use lock_tests::{Captured, RedisServer};
use lock_tower::{HoldUntil, LockLayer, LockPolicies, PolicyLayer};
use metrics::LocalRecorderGuard;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tower::{Layer, ServiceExt};

const PROMPTLY: Duration = Duration::from_secs(10);

/// The metrics of this thread, the only one of a `#[tokio::test]`.
struct Counted {
    figures: Snapshotter,
    _recording: LocalRecorderGuard<'static>,
}

impl Counted {
    fn here() -> Self {
        let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
        Self {
            figures: recorder.snapshotter(),
            _recording: metrics::set_default_local_recorder(recorder),
        }
    }

    /// Returns the change of each metric since the last call, by name and labels. For a histogram,
    /// it is the number of new values.
    fn since_last(&self) -> BTreeMap<String, f64> {
        let figures = self
            .figures
            .snapshot()
            .into_vec()
            .into_iter()
            .map(|(key, _, _, value)| {
                let labels: Vec<_> = key
                    .key()
                    .labels()
                    .map(|label| format!("{}={}", label.key(), label.value()))
                    .collect();
                let value = match value {
                    DebugValue::Counter(count) => count as f64,
                    DebugValue::Gauge(value) => value.into_inner(),
                    DebugValue::Histogram(values) => {
                        assert!(
                            values
                                .iter()
                                .all(|value| (0.0..10.0).contains(&value.into_inner())),
                            "{values:?}"
                        );
                        values.len() as f64
                    }
                };
                (
                    format!("{}{{{}}}", key.key().name(), labels.join(",")),
                    value,
                )
            });
        figures.filter(|(_, value)| *value != 0.0).collect()
    }

    /// Returns the number of completed holds since the last call, by policy.
    fn held(&self) -> Vec<(String, f64)> {
        let figures = self.since_last().into_iter();
        figures
            .filter(|(name, _)| name.starts_with("lock_hold"))
            .collect()
    }

    fn expect(&self, expected: &[(&str, f64)]) {
        let expected: BTreeMap<_, _> = expected
            .iter()
            .map(|(name, value)| ((*name).to_owned(), *value))
            .collect();
        assert_eq!(self.since_last(), expected);
    }
}

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

const GRANTED: (&str, f64) = ("lock_acquire_seconds{policy=pay,outcome=granted}", 1.0);
const HELD: (&str, f64) = ("lock_hold_seconds{policy=pay}", 1.0);
const CONTENDED: (&str, f64) = ("lock_contended_total{policy=pay}", 1.0);

#[tokio::test]
async fn a_request_is_counted_from_its_wait_to_its_release() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let app = app(layer(&locks));
    assert_eq!(pay(&app).await.status(), 200);
    counted.expect(&[GRANTED, HELD]);

    let held = locks.exclusive("order:7").acquire().await.unwrap();
    let mut waiting = Box::pin(pay(&app));
    assert!(poll!(&mut waiting).is_pending());
    counted.expect(&[("lock_waiting{policy=pay}", 1.0)]);
    held.release().await.unwrap();
    assert_eq!(waiting.await.status(), 200);
    counted.expect(&[("lock_waiting{policy=pay}", -1.0), GRANTED, CONTENDED, HELD]);
}

#[tokio::test]
async fn a_refusal_is_counted_by_its_code() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let held = locks.exclusive("order:7").acquire().await.unwrap();
    assert_eq!(pay(&app(layer(&locks).no_wait())).await.status(), 409);
    counted.expect(&[
        ("lock_acquire_seconds{policy=pay,outcome=contended}", 1.0),
        CONTENDED,
    ]);
    assert_eq!(
        pay(&app(layer(&locks).wait(Duration::from_millis(1))))
            .await
            .status(),
        409
    );
    counted.expect(&[
        ("lock_acquire_seconds{policy=pay,outcome=wait_timeout}", 1.0),
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
    counted.expect(&[("lock_acquire_seconds{policy=pay,outcome=invalid_spec}", 1.0)]);
    let nowhere = Request::post("/nowhere").body(Body::empty()).unwrap();
    let Ok(response) = app(layer(&locks))
        .layer(layer(&locks))
        .oneshot(nowhere)
        .await;
    assert_eq!(response.status(), 404);
    counted.expect(&[]);
}

#[tokio::test]
async fn a_caller_who_hangs_up_waits_no_longer_and_holds_no_longer() {
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
    counted.expect(&[GRANTED]);
    drop(holding);
    counted.expect(&[HELD]);

    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    let app = app(layer(&locks));
    let mut waiting = Box::pin(pay(&app));
    assert!(poll!(&mut waiting).is_pending());
    drop(waiting);
    counted.expect(&[("lock_acquire_seconds{policy=pay,outcome=cancelled}", 1.0)]);
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
                    locks.revoke(lock.key(), RevokeScope::Leased).await.unwrap();
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
            GRANTED,
            HELD,
            ("lock_lost_total{policy=pay,loss=lost_revoked}", 1.0),
        ]);
    }
}

#[tokio::test]
async fn a_body_under_its_lock_is_held_until_its_end() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let response = pay(&app(layer(&locks).hold_until(HoldUntil::Body))).await;
    counted.expect(&[GRANTED]);
    response.into_body().collect().await.unwrap();
    counted.expect(&[HELD]);
    drop(pay(&app(layer(&locks).hold_until(HoldUntil::Body))).await);
    counted.expect(&[GRANTED, HELD]);
}

#[tokio::test]
async fn renewals_are_counted_at_the_end_of_a_hold() {
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
        figures["lock_renewals_total{policy=pay}"] >= 2.0,
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
    counted.expect(&[GRANTED, HELD]);
    redis.kill();
    assert_eq!(pay(&app).await.status(), 200);
    counted.expect(&[
        ("lock_acquire_seconds{policy=pay,outcome=unavailable}", 1.0),
        ("lock_unlocked_total{policy=pay}", 1.0),
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
    counted.expect(&[
        ("lock_acquire_seconds{policy=pay,outcome=granted}", 2.0),
        ("lock_hold_seconds{policy=pay}", 2.0),
        ("lock_acquire_seconds{policy=/x/{id},outcome=granted}", 1.0),
        ("lock_hold_seconds{policy=/x/{id}}", 1.0),
    ]);

    // A layer without a name is named after its template.
    let plain = LockLayer::new(locks, "order:{method}")
        .unwrap()
        .permits(NonZeroU32::MIN);
    let app = Router::new().fallback(async || "found").layer(plain);
    let Ok(_) = app.oneshot(order()).await;
    assert_eq!(
        counted.held(),
        [("lock_hold_seconds{policy=order:{method}}".to_owned(), 1.0)]
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
    for (content_type, path) in [
        ("application/grpc", "/shop.Orders/Pay"),
        ("application/grpc+proto", "/shop.Orders/Pay"),
        ("application/grpc", "/shop.Orders/Pay/7"),
        ("text/plain", "/shop.Orders/Pay"),
    ] {
        let request = Request::post(path).header("content-type", content_type);
        let Ok(_) = app
            .clone()
            .oneshot(request.body(Body::empty()).unwrap())
            .await;
    }
    assert_eq!(
        counted.held(),
        [
            ("lock_hold_seconds{policy=/shop.Orders/Pay}".to_owned(), 2.0),
            ("lock_hold_seconds{policy=/users/{id}}".to_owned(), 1.0),
            ("lock_hold_seconds{policy=/v1/orders/{id}}".to_owned(), 2.0),
            ("lock_hold_seconds{policy=unrouted}".to_owned(), 3.0),
        ]
    );
    let event = traces.wait_for(|event| event.message == "at work").await;
    assert_eq!(event.span_fields["policy"], "/v1/orders/{id}");
}

#[test]
fn an_exporter_is_told_what_the_figures_mean() {
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
        assert_eq!(event.spans, ["lock"]);
        let field = |name| event.span_fields[name].as_str();
        assert_eq!(
            (field("policy"), field("key"), field("outcome")),
            ("pay", "order:7", "granted")
        );
        assert!(field("fence").parse::<u64>().unwrap() > next.to_string().parse().unwrap());
        assert!(field("waited_ms").parse::<u64>().is_ok());
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
