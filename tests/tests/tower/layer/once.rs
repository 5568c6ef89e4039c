//! Requests that are served once for each key, and whose response is repeated.

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
    body::{Body, Bytes},
    http::{HeaderMap, Request, Response, StatusCode},
    response::IntoResponse as _,
    routing::post,
};
use futures_util::{StreamExt as _, stream};
use http_body_util::BodyExt as _;
use lock_runtime::{HeldLock, LockClient, LockSpec, OnceEntry};
use lock_tests::{RedisServer, place::in_time};
use lock_tower::{LockPolicies, OnceLayer, PolicyLayer};
use serde_json::Value;
use tokio::{task::JoinSet, time::sleep};
use tower::ServiceExt as _;

const TEMPLATE: &str = "pay:{header.x-user}:{header.idempotency-key}";

/// What a test sees of a response.
#[derive(Debug)]
struct Seen {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Seen {
    fn is_replay(&self) -> bool {
        self.headers.contains_key("idempotent-replayed")
    }

    fn code(&self) -> String {
        let problem: Value = serde_json::from_slice(&self.body).unwrap();
        problem["code"].as_str().unwrap().to_owned()
    }
}

/// Requests to one route.
#[derive(Clone)]
struct App {
    router: Router,
    runs: Arc<AtomicUsize>,
}

impl App {
    /// A route whose handler responds with the status that the request names.
    fn new(layer: OnceLayer) -> Self {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let handler = async move |held: HeldLock, headers: HeaderMap, body: Bytes| {
            let run = counted.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(20)).await;
            assert!(!held.is_lost());
            let status = headers.get("x-status").map(|it| it.to_str().unwrap());
            let status: StatusCode = status.unwrap_or("201").parse().unwrap();
            let headers = [
                ("location", format!("/payments/{run}")),
                ("x-trace", run.to_string()),
            ];
            (status, headers, [b"paid: ", &body[..]].concat()).into_response()
        };
        let router = Router::new().route("/payments", post(handler).layer(layer));
        Self { router, runs }
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::Relaxed)
    }

    async fn send(&self, request: Request<Body>) -> Seen {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        Seen {
            status: parts.status,
            headers: parts.headers,
            body: body.collect().await.unwrap().to_bytes(),
        }
    }

    async fn pay(&self, user: &str, key: &str, body: &str) -> Seen {
        self.send(payment(user, key, body)).await
    }
}

fn payment(user: &str, key: &str, body: &str) -> Request<Body> {
    let request = Request::post("/payments").header("x-user", user);
    let request = request.header("idempotency-key", key);
    request.body(Body::from(body.to_owned())).unwrap()
}

fn layer(locks: &LockClient) -> OnceLayer {
    OnceLayer::new(locks.clone(), TEMPLATE).unwrap()
}

async fn apps() -> (RedisServer, [App; 2], LockClient) {
    let server = RedisServer::start().await;
    let [one, other] = [
        LockClient::connect(&server.url()).await.unwrap(),
        LockClient::connect(&server.url()).await.unwrap(),
    ];
    let apps = [&one, &other].map(|locks| App::new(layer(locks)));
    (server, apps, one)
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_requests_at_once_get_the_response_of_one() {
    let (_server, apps, _locks) = apps().await;
    let mut requests = JoinSet::new();
    for number in 0..100 {
        let app = apps[number % 2].clone();
        requests.spawn(async move { app.pay("7", "a", "5 EUR").await });
    }
    let seen = in_time(requests.join_all()).await;
    assert_eq!(apps[0].runs() + apps[1].runs(), 1);
    assert_eq!(seen.iter().filter(|it| !it.is_replay()).count(), 1);
    for seen in &seen {
        assert_eq!(seen.status, 201, "{seen:?}");
        assert_eq!(seen.body, "paid: 5 EUR");
        assert_eq!(seen.headers["location"], "/payments/0");
        // Only some headers are kept.
        assert_eq!(seen.headers.contains_key("x-trace"), !seen.is_replay());
    }
    // Another user, and another key.
    for (user, key) in [("8", "a"), ("7", "b")] {
        let seen = apps[0].pay(user, key, "5 EUR").await;
        assert!(!seen.is_replay(), "{seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_request_under_the_key_is_refused() {
    let (_server, [app, other], _locks) = apps().await;
    app.pay("7", "a", "5 EUR").await;
    for request in [payment("7", "a", "6 EUR"), {
        let mut request = payment("7", "a", "5 EUR");
        *request.uri_mut() = "/payments?twice".parse().unwrap();
        request
    }] {
        let seen = other.send(request).await;
        assert_eq!(seen.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(seen.code(), "key_reused");
    }
    let request = Request::post("/payments").header("x-user", "7");
    let seen = app.send(request.body(Body::empty()).unwrap()).await;
    assert_eq!(seen.status, StatusCode::BAD_REQUEST);
    assert_eq!(seen.code(), "missing_header");
    assert_eq!((app.runs(), other.runs()), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_that_say_try_again_are_not_kept() {
    let (_server, [app, _], _locks) = apps().await;
    for (key, status) in ["408", "409", "425", "429", "500", "503"]
        .into_iter()
        .enumerate()
    {
        for _ in 0..2 {
            let mut request = payment("7", &key.to_string(), "5 EUR");
            request
                .headers_mut()
                .insert("x-status", status.parse().unwrap());
            let seen = app.send(request).await;
            assert_eq!(seen.status.as_str(), status);
            assert!(!seen.is_replay());
        }
        let seen = app.pay("7", &key.to_string(), "5 EUR").await;
        assert!(seen.status == 201 && !seen.is_replay(), "{seen:?}");
        assert_eq!(app.runs(), 3 * (key + 1));
    }
    let request = || {
        let mut request = payment("7", "declined", "5 EUR");
        request
            .headers_mut()
            .insert("x-status", "402".parse().unwrap());
        app.send(request)
    };
    assert!(!request().await.is_replay());
    let seen = request().await;
    assert!(seen.is_replay() && seen.status == 402, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_too_long_are_refused_or_not_kept() {
    let (_server, _apps, locks) = apps().await;
    let app = App::new(layer(&locks).max_request(8).max_response(10));
    let seen = app.pay("7", "long", "123456789").await;
    assert_eq!(seen.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!((seen.code(), app.runs()), ("body_too_large".into(), 0));
    // "paid: " and this.
    let seen = app.pay("7", "a", "12345").await;
    assert_eq!(
        (seen.status.as_u16(), &seen.body[..]),
        (201, &b"paid: 12345"[..])
    );
    let seen = app.pay("7", "a", "12345").await;
    assert_eq!(seen.status, StatusCode::CONFLICT);
    assert_eq!((seen.code(), app.runs()), ("response_not_kept".into(), 1));
    let fits = app.pay("7", "b", "1234").await;
    let again = app.pay("7", "b", "1234").await;
    assert!(again.is_replay() && again.body == fits.body);
}

/// Without it the work would be done again.
#[tokio::test]
async fn a_response_with_long_headers_is_done_and_not_repeated() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let handler = async move || {
        counted.fetch_add(1, Ordering::Relaxed);
        [("location", "x".repeat(90_000))]
    };
    let router = Router::new().route("/payments", post(handler));
    let router = router.layer(layer(&LockClient::in_memory()));
    let app = App { router, runs };
    assert_eq!(app.pay("7", "a", "").await.status, StatusCode::OK);
    let seen = app.pay("7", "a", "").await;
    assert_eq!((seen.status.as_u16(), app.runs()), (409, 1), "{seen:?}");
    assert_eq!(seen.code(), "response_not_kept");
}

/// A connection gives each part of a body a share of a whole buffer.
#[tokio::test]
async fn a_body_of_small_parts_keeps_no_buffers() {
    struct Buffer(Arc<AtomicUsize>);
    impl AsRef<[u8]> for Buffer {
        fn as_ref(&self) -> &[u8] {
            &[b'x'; 8192]
        }
    }
    impl Drop for Buffer {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let kept = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (parts, highest) = (kept.clone(), most.clone());
    let parts = stream::iter(0..1000).map(move |_| {
        let now = parts.fetch_add(1, Ordering::Relaxed) + 1;
        highest.fetch_max(now, Ordering::Relaxed);
        Ok::<_, Infallible>(Bytes::from_owner(Buffer(parts.clone())).split_to(1))
    });
    let app = App::new(layer(&LockClient::in_memory()));
    let mut request = payment("7", "a", "");
    *request.body_mut() = Body::from_stream(parts);
    let seen = app.send(request).await;
    assert_eq!(seen.body.len(), "paid: ".len() + 1000);
    let most = most.load(Ordering::Relaxed);
    assert!(most <= 3, "{most} buffers at a time");
}

/// A stream that panics when it is polled after its end.
#[tokio::test]
async fn a_body_that_has_ended_is_not_polled_again() {
    let handler = async || {
        let parts = stream::unfold(0, async |number| {
            (number < 3).then(|| (Ok::<_, Infallible>(Bytes::from_static(b"x")), number + 1))
        });
        Body::from_stream(parts)
    };
    let router = Router::new().route("/payments", post(handler));
    let router = router.layer(layer(&LockClient::in_memory()));
    let runs = Arc::default();
    let app = App { router, runs };
    for is_replay in [false, true] {
        let seen = app.pay("7", "a", "").await;
        assert_eq!((&seen.body[..], seen.is_replay()), (&b"xxx"[..], is_replay));
    }
}

/// Two layers that disagree about the key of a request.
#[tokio::test]
async fn a_route_that_is_served_once_under_another_key_is_refused() {
    let policies = r#"
        [routes."POST /payments"]
        key = "pay:{header.x-user}:{header.idempotency-key}"
        once = "1h"
    "#;
    let policies = LockPolicies::from_toml_str(policies).unwrap();
    let locks = LockClient::in_memory();
    let router = Router::new().route("/payments", post(async || "paid"));
    let inner = router.layer(PolicyLayer::new(locks.clone(), policies));
    for (key, status) in [(TEMPLATE, 200), ("other:{header.idempotency-key}", 500)] {
        let outer = OnceLayer::new(locks.clone(), key).unwrap();
        let router = inner.clone().layer(outer);
        let runs = Arc::default();
        let seen = App { router, runs }.pay("7", "a", "").await;
        assert_eq!(seen.status.as_u16(), status, "{seen:?}");
    }
}

#[tokio::test]
async fn routes_of_a_policy_file_are_served_once() {
    let policies = r#"
        [routes."POST /payments"]
        name = "pay"
        key = "pay:{header.x-user}:{header.idempotency-key}"
        once = { keep = "1h", result = "11B", request = "1KiB" }

        [routes."POST /orders"]
        key = "order:{header.x-user}"
    "#;
    let policies = LockPolicies::from_toml_str(policies).unwrap();
    let locks = LockClient::in_memory();
    let app = App::new(layer(&locks));
    let handler = async |_held: HeldLock, body: Bytes| body;
    let routes = || {
        Router::new()
            .route("/payments", post(handler))
            .route("/orders", post(handler))
    };
    let inner = routes().layer(PolicyLayer::new(locks.clone(), policies.clone()));
    let once = OnceLayer::with_policies(locks, policies);
    let with_both = App {
        router: inner.clone().layer(once),
        runs: app.runs.clone(),
    };
    let seen = with_both.pay("7", "a", "5 EUR").await;
    assert_eq!(
        (seen.status.as_u16(), seen.is_replay()),
        (200, false),
        "{seen:?}"
    );
    let seen = with_both.pay("7", "a", "5 EUR").await;
    assert!(seen.is_replay() && &seen.body[..] == b"5 EUR", "{seen:?}");
    let seen = with_both.pay("7", "a", "6 EUR").await;
    assert_eq!(
        (seen.status.as_u16(), seen.code()),
        (422, "key_reused".into())
    );
    let seen = with_both.pay("7", "b", &"x".repeat(1025)).await;
    assert_eq!(seen.status, StatusCode::PAYLOAD_TOO_LARGE);
    for status in [200, 409] {
        let seen = with_both.pay("7", "c", "longer than eleven").await;
        assert_eq!(seen.status.as_u16(), status, "{seen:?}");
    }
    // Another route has its lock, and nothing is kept.
    for _ in 0..2 {
        let mut request = payment("7", "a", "x");
        *request.uri_mut() = "/orders".parse().unwrap();
        let seen = with_both.send(request).await;
        assert_eq!(
            (seen.status.as_u16(), seen.is_replay()),
            (200, false),
            "{seen:?}"
        );
    }
    // Without the layer, no request runs twice.
    let alone = App {
        router: inner,
        runs: app.runs.clone(),
    };
    let seen = alone.pay("7", "d", "5 EUR").await;
    assert_eq!(
        (seen.status.as_u16(), seen.code()),
        (500, "misconfigured".into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_does_not_wait_is_refused_while_another_runs() {
    let (_server, _apps, locks) = apps().await;
    let app = App::new(layer(&locks).spec(LockSpec::exclusive().no_wait()));
    let OnceEntry::Vacant(guard) = locks.once("pay:7:a").begin().await.unwrap() else {
        panic!("it is free");
    };
    let seen = app.pay("7", "a", "5 EUR").await;
    assert_eq!(seen.status, StatusCode::CONFLICT);
    assert_eq!((seen.code(), app.runs()), ("running".into(), 0));
    assert!(seen.headers.contains_key("retry-after"));
    guard.release().await.unwrap();
    assert_eq!(app.pay("7", "a", "5 EUR").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_has_lost_its_lock_stores_nothing() {
    let (_server, [app, _], locks) = apps().await;
    let revoked = locks.clone();
    let handler = post(async move || {
        revoked.revoke("pay:7:a").await.unwrap();
        std::future::pending::<()>().await;
    });
    let hangs = Router::new().route("/payments", handler.layer(layer(&locks)));
    let response = hangs.oneshot(payment("7", "a", "5 EUR"));
    let response = in_time(response).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let seen = app.pay("7", "a", "5 EUR").await;
    assert!(seen.status == 201 && !seen.is_replay(), "{seen:?}");
}

/// Each frame of a response arrives, also those after the part that is read first.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_passed_on_whole() {
    let locks = LockClient::in_memory();
    let body = || {
        let chunks = (0..20_u8).map(|number| Ok::<_, Infallible>(Bytes::from(vec![number; 10])));
        Body::from_stream(stream::iter(chunks))
    };
    let handler = post(async move || Response::new(body()));
    let app = Router::new().route("/payments", handler.layer(layer(&locks).max_response(55)));
    let response = app.oneshot(payment("7", "a", "5 EUR")).await.unwrap();
    let sent = response.into_body().collect().await.unwrap().to_bytes();
    let expected: Vec<u8> = (0..20).flat_map(|number| [number; 10]).collect();
    assert_eq!(sent, expected);
    // A body that fails is not stored.
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let handler = post(move || {
        let broken = || Err(std::io::Error::other("broken"));
        let frames = [Ok(Bytes::from_static(b"x")), broken()].into_iter();
        let is_first = counted.fetch_add(1, Ordering::Relaxed) == 0;
        std::future::ready(Response::new(match is_first {
            true => Body::from_stream(stream::iter(frames)),
            false => Body::empty(),
        }))
    });
    let app = Router::new().route("/payments", handler.layer(layer(&locks)));
    let response = app
        .clone()
        .oneshot(payment("7", "b", "5 EUR"))
        .await
        .unwrap();
    response.into_body().collect().await.unwrap_err();
    let response = app.oneshot(payment("7", "b", "5 EUR")).await.unwrap();
    assert!(!response.headers().contains_key("idempotent-replayed"));
    assert_eq!(runs.load(Ordering::Relaxed), 2);
}

/// A client that has given up sends its request again.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_client_disconnects_runs_to_its_end() {
    let (_server, [app, other], _locks) = apps().await;
    let request = app.router.clone().oneshot(payment("7", "a", "5 EUR"));
    let gone = tokio::time::timeout(Duration::from_millis(10), request).await;
    gone.unwrap_err();
    let seen = other.pay("7", "a", "5 EUR").await;
    assert!(seen.is_replay() && seen.body == "paid: 5 EUR", "{seen:?}");
    assert_eq!((app.runs(), other.runs()), (1, 0));
}

/// No headers let a request see the response to another user, or to another key.
#[tokio::test]
async fn responses_to_headers_made_to_do_harm_stay_apart() {
    let app = App::new(layer(&LockClient::in_memory()));
    let long = "k".repeat(400);
    let pairs: &[[&[u8]; 2]] = &[
        [b"7", b"a:b"],
        [b"7:a", b"b"],
        [b"7%3Aa", b"b"],
        [b"7%3aa", b"b"],
        [b"7{a}", b"b"],
        [b"{7", b"a}:b"],
        [b"7/a", b"b"],
        [b"7 ", b"a"],
        [b"7\ta", b"b"],
        [b"7", b"a,b"],
        [b"7,a", b"b"],
        [b"*", b"*"],
        ["jób".as_bytes(), b"b"],
        [b"7", long.as_bytes()],
        [b"7", &long.as_bytes()[1..]],
    ];
    let request = |[user, key]: &[&[u8]; 2]| {
        let request = Request::post("/payments").header("x-user", *user);
        let request = request.header("idempotency-key", *key);
        request.body(Body::from("5 EUR")).unwrap()
    };
    // Spaces at the end of a value are no part of it: the wire removes them.
    let mut runs = 0;
    for pair in pairs {
        let seen = app.send(request(pair)).await;
        runs += 1;
        let shown = pair.map(|it| it.escape_ascii().to_string());
        assert!(
            seen.status == 201 && !seen.is_replay(),
            "{shown:?}: {seen:?}"
        );
        assert_eq!(app.runs(), runs, "{shown:?}");
    }
    for (run, pair) in pairs.iter().enumerate() {
        let seen = app.send(request(pair)).await;
        assert!(seen.is_replay(), "{seen:?}");
        assert_eq!(seen.headers["location"], format!("/payments/{run}"));
    }
    // Those that are no text, too long, missing, or several are refused, and nothing runs.
    let longest = "k".repeat(2_000);
    for pair in [
        [&b"7"[..], b"a\xff"],
        [b"7", longest.as_bytes()],
        [b"", b"a"],
        [b"7", b""],
    ] {
        let seen = app.send(request(&pair)).await;
        assert!(seen.status.is_client_error(), "{pair:?}: {seen:?}");
    }
    let mut twice = request(&[b"7", b"a"]);
    twice.headers_mut().append("x-user", "8".parse().unwrap());
    let seen = app.send(twice).await;
    assert!(seen.status.is_client_error(), "{seen:?}");
    assert_eq!(app.runs(), runs);
}

/// The key has a result of another version, or of another program.
#[tokio::test]
async fn a_result_that_is_no_response_is_an_error() {
    let locks = LockClient::in_memory();
    let app = App::new(layer(&locks));
    for (key, result) in [
        ("a", &b"receipt 7"[..]),
        ("b", b""),
        ("c", b"{\"status\":201}"),
    ] {
        let once = locks.once(format!("pay:7:{key}"));
        let ran = once
            .run_bytes(async |_| Ok::<_, Infallible>(result.to_vec()))
            .await;
        assert!(!ran.unwrap().unwrap().is_replay);
        let seen = app.pay("7", key, "5 EUR").await;
        assert!(
            seen.status.is_server_error() && !seen.is_replay(),
            "{seen:?}"
        );
    }
    assert_eq!(app.runs(), 0);
}

/// A nested router removes its prefix from the path.
#[tokio::test(flavor = "multi_thread")]
async fn requests_of_two_tenants_differ() {
    let locks = LockClient::in_memory();
    let app = App::new(layer(&locks));
    let app = App {
        router: Router::new().nest("/tenants/{tenant}", app.router),
        ..app
    };
    let pay = async |tenant: u32| {
        let mut request = payment("7", "a", "5 EUR");
        *request.uri_mut() = format!("/tenants/{tenant}/payments").parse().unwrap();
        app.send(request).await
    };
    assert_eq!(pay(1).await.status, 201);
    assert!(pay(1).await.is_replay());
    assert_eq!(pay(2).await.code(), "key_reused");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_value_of_a_header_is_kept() {
    let locks = LockClient::in_memory();
    let handler = post(async || {
        let links = [("link", "<a>"), ("link", "<b>")];
        (axum::response::AppendHeaders(links), "paid")
    });
    let layer = layer(&locks).headers(["link".parse().unwrap()]);
    let app = Router::new().route("/payments", handler.layer(layer));
    for _ in 0..2 {
        let response = app
            .clone()
            .oneshot(payment("7", "a", "5 EUR"))
            .await
            .unwrap();
        let links: Vec<_> = response.headers().get_all("link").iter().collect();
        assert_eq!(links, ["<a>", "<b>"]);
    }
}
