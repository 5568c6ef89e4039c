//! Callers that do not send their request, or do not read the response: other clients get the lock
//! after `max_hold`, which is a minute where nothing is said about it.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, StatusCode},
    routing::post,
};
use futures_util::stream;
use lock_runtime::{LockClient, LockErrorKind, LockSpec, OnLost};
use lock_tests::{
    Captured,
    place::{eventually, in_time},
};
use lock_tower::{HoldUntil, LockLayer, LockPolicies, Policy, PolicyLayer};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{Instant, pause, sleep},
};
use tower::ServiceExt as _;

const SECOND: Duration = Duration::from_secs(1);

fn layer(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id:int}").unwrap()
}

fn policies(locks: &LockClient, fields: &str) -> PolicyLayer<LockPolicies> {
    let file = format!("[routes.'POST /orders/{{id}}']\nkey = 'order:{{id:int}}'\n{fields}");
    PolicyLayer::new(locks.clone(), LockPolicies::from_toml_str(&file).unwrap())
}

/// Reads its whole request, and responds with a body without an end.
async fn handler(_request: Bytes) -> Body {
    let chunk = Ok::<_, Infallible>(Bytes::from_static(&[7; 64 * 1024]));
    Body::from_stream(stream::repeat_with(move || chunk.clone()))
}

/// A connection with which a request was sent, and the server.
struct Caller {
    _connection: TcpStream,
    server: JoinHandle<()>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Sends the text to a server of the app, reads nothing, and waits until the lock is held.
async fn calls(locks: &LockClient, app: Router, request: &str) -> Caller {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut connection = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    connection.write_all(request.as_bytes()).await.unwrap();
    eventually("the lock is held", || async {
        !locks.inspect("order:7").await.unwrap().holders.is_empty()
    })
    .await;
    pause();
    Caller {
        _connection: connection,
        server,
    }
}

/// Checks that another client does not get the lock before `max_hold`, and then gets it.
async fn is_held_for(locks: &LockClient, max_hold: Duration) {
    sleep(max_hold - SECOND).await;
    let early = locks.exclusive("order:7").no_wait().acquire().await;
    assert_eq!(early.unwrap_err().kind(), LockErrorKind::Contended);
    let since = Instant::now();
    let next = locks.exclusive("order:7").wait(max_hold * 2).acquire();
    next.await.unwrap().release().await.unwrap();
    assert!(since.elapsed() <= 2 * SECOND, "{:?}", since.elapsed());
}

const HEAD: &str = "POST /orders/7 HTTP/1.1\r\nhost: test\r\ncontent-length: 1000000\r\n\r\n";
const WHOLE: &str = "POST /orders/7 HTTP/1.1\r\nhost: test\r\ncontent-length: 0\r\n\r\n";

/// A test with a layer, and one with a policy file, that say nothing about `max_hold`.
macro_rules! by_layer_and_file {
    ($($layer:ident, $file:ident: $request:expr, $hold_until:expr, $field:expr;)*) => {$(
        #[tokio::test]
        async fn $layer() {
            in_time(async {
                let locks = LockClient::in_memory();
                let layer = layer(&locks).hold_until($hold_until);
                let app = Router::new().route("/orders/{id}", post(handler).layer(layer));
                let _caller = calls(&locks, app, $request).await;
                is_held_for(&locks, Policy::DEFAULT_MAX_HOLD).await;
            })
            .await;
        }

        #[tokio::test]
        async fn $file() {
            in_time(async {
                let locks = LockClient::in_memory();
                let app = Router::new().route("/orders/{id}", post(handler));
                let app = app.layer(policies(&locks, $field));
                let _caller = calls(&locks, app, $request).await;
                is_held_for(&locks, Policy::DEFAULT_MAX_HOLD).await;
            })
            .await;
        }
    )*};
}

by_layer_and_file! {
    a_head_without_its_body_holds_the_lock_of_a_layer_for_a_minute,
    a_head_without_its_body_holds_the_lock_of_a_file_for_a_minute:
        HEAD, HoldUntil::Response, "";
    a_caller_that_never_reads_holds_the_lock_of_a_layer_for_a_minute,
    a_caller_that_never_reads_holds_the_lock_of_a_file_for_a_minute:
        WHOLE, HoldUntil::Body, "hold_until = 'body'";
}

/// A service that runs on after the loss does not keep the lock either.
#[tokio::test]
async fn a_caller_does_not_hold_the_lock_longer_where_a_loss_is_ignored() {
    for on_lost in [OnLost::Error, OnLost::Ignore] {
        let locks = LockClient::in_memory();
        let layer = layer(&locks).hold_until(HoldUntil::Body).on_lost(on_lost);
        let app = Router::new().route("/orders/{id}", post(handler).layer(layer));
        let _caller = calls(&locks, app, WHOLE).await;
        is_held_for(&locks, Policy::DEFAULT_MAX_HOLD).await;
        tokio::time::resume();
    }
}

fn order() -> Request<Body> {
    Request::post("/orders/7").body(Body::empty()).unwrap()
}

/// A request whose handler never responds.
fn hangs(locks: &LockClient, layer: LockLayer) -> JoinHandle<StatusCode> {
    let handler = post(std::future::pending::<()>).layer(layer);
    let app = Router::new().route("/orders/{id}", handler);
    assert_eq!(locks.defaults(), &LockSpec::exclusive());
    tokio::spawn(async move { app.oneshot(order()).await.unwrap().status() })
}

#[tokio::test(start_paused = true)]
async fn the_longest_of_a_minute_the_lease_and_min_hold_is_the_default() {
    type Set = fn(LockLayer) -> LockLayer;
    let minute = 60 * SECOND;
    let sets: [(Set, Duration); 6] = [
        (|layer| layer, minute),
        (|layer| layer.lease(90 * SECOND), 90 * SECOND),
        (|layer| layer.lease(90 * SECOND).no_renew(), 90 * SECOND),
        (|layer| layer.min_hold(120 * SECOND), 120 * SECOND),
        (
            |layer| layer.lease(90 * SECOND).max_hold(5 * SECOND),
            5 * SECOND,
        ),
        (|layer| layer.max_hold(3 * 60 * SECOND), 3 * minute),
    ];
    for (set, expected) in sets {
        let locks = LockClient::in_memory();
        let hanging = hangs(&locks, set(layer(&locks)));
        sleep(SECOND).await;
        is_held_for(&locks, expected - SECOND).await;
        assert_eq!(hanging.await.unwrap(), 500);
    }
}

#[tokio::test(start_paused = true)]
async fn max_hold_is_removed_by_name_and_that_of_the_client_comes_before_the_minute() {
    let locks = LockClient::in_memory();
    let hanging = hangs(&locks, layer(&locks).no_max_hold());
    sleep(3600 * SECOND).await;
    let held = locks.exclusive("order:7").no_wait().acquire().await;
    assert_eq!(held.unwrap_err().kind(), LockErrorKind::Contended);
    hanging.abort();

    let five = LockSpec::exclusive().max_hold(5 * SECOND);
    let locks = LockClient::builder().defaults(five).build_in_memory();
    let locks = locks.unwrap();
    let app = Router::new().route("/orders/{id}", post(std::future::pending::<()>));
    for fields in ["", "no_max_hold = true"] {
        let app = app.clone().layer(policies(&locks, fields));
        let hanging = tokio::spawn(async move { app.oneshot(order()).await.unwrap().status() });
        sleep(10 * SECOND).await;
        assert_eq!(hanging.is_finished(), fields.is_empty(), "{fields}");
        hanging.abort();
        let _ = hanging.await;
    }
}

#[tokio::test]
async fn a_body_without_max_hold_is_a_mistake_in_code_and_file() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let endless = layer(&locks).hold_until(HoldUntil::Body).no_max_hold();
    let app = Router::new().route("/orders/{id}", post(async || "sent").layer(endless));
    let event = traces.events().into_iter().find(|event| {
        event
            .message
            .contains("the options of the lock are invalid")
    });
    let error = event.expect("an event at start-up").fields["error"].clone();
    assert!(error.contains("needs a max_hold"), "{error}");
    assert_eq!(app.oneshot(order()).await.unwrap().status(), 500);

    let policy = Policy::new("report").hold_until(HoldUntil::Body);
    let policy = policy.with_spec(LockSpec::exclusive().no_max_hold());
    let policy = std::sync::Arc::new(policy);
    let select = move |_: &Request<Body>| (policy.clone(), lock_runtime::LockKey::new("report"));
    let layer = PolicyLayer::new(locks, select);
    let app = Router::new().route("/orders/{id}", post(async || "sent"));
    let response = app.layer(layer).oneshot(order()).await.unwrap();
    assert_eq!(response.status(), 500);

    for file in [
        "[routes.'/a']\nkey = '{header.x}'\nhold_until = 'body'\nno_max_hold = true",
        "[defaults]\nno_max_hold = true\n[routes.'/a']\nkey = '{header.x}'\nhold_until = 'body'",
        "[groups.g]\nhold_until = 'body'\n[routes.'/a']\nkey = '{header.x}'\ngroup = 'g'\nno_max_hold = true",
    ] {
        let error = LockPolicies::from_toml_str(file).unwrap_err();
        assert_eq!(error.all().len(), 1, "{error}");
        assert!(error.to_string().contains("needs a max_hold"), "{error}");
    }
    for file in [
        "[defaults]\nno_max_hold = true\n[routes.'/a']\nkey = '{header.x}'\nhold_until = 'body'\nmax_hold = '1h'",
        "[defaults]\nhold_until = 'body'\n[routes.'/a']\nkey = '{header.x}'\nhold_until = 'response'\nno_max_hold = true",
    ] {
        LockPolicies::from_toml_str(file).unwrap();
    }
}
