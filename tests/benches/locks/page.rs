//! A page of the inspector with 10,000 locks: the time to its first byte, and the memory of a page
//! that is open.

use std::time::{Duration, Instant};

use axum::{Router, body::Body, routing::get};
use futures_util::{future::join_all, poll};
use hdrhistogram::Histogram;
use http::Request;
use http_body_util::BodyExt as _;
use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;
use lock_tower::inspector::Inspector;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tower::ServiceExt as _;

use crate::{heap, report::Row};

const LOCKS: usize = 10_000;
const REQUESTS: usize = 100;
const PAGES: usize = 16;
const PAUSE: Duration = Duration::from_millis(20);

pub(crate) async fn measure() -> Vec<Row> {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await;
    let locks = locks.expect("our own server answers");
    let guards = join_all((0..LOCKS).map(|number| {
        let lock = locks.exclusive(format!("order:{number:05}"));
        async { lock.acquire().await.expect("it is free") }
    }));
    let guards = guards.await;
    let inspector = Inspector::new(locks.clone());
    let app = Router::new()
        .nest_service("/locks", inspector)
        .route("/empty", get(async || ""));
    let listener = TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("a bound listener").to_string();
    let serving = tokio::spawn(async move { axum::serve(listener, app).await });
    let mut rows = Vec::new();
    for (subject, path) in [
        ("first page", "/locks"),
        ("last page", "/locks?after=lock:order:09899"),
        ("one lock", "/locks?key=order:05000"),
        ("limit: an empty response", "/empty"),
    ] {
        let taken = first_bytes(&address, path).await;
        let micros = |quantile| Some(taken.value_at_quantile(quantile) as f64 / 1e3);
        rows.push(Row {
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            longest_us: micros(1.0),
            ..Row::new("page", subject, 1)
        });
    }
    serving.abort();
    drop(guards);
    locks.shutdown().await;
    let bytes = heap::growth(in_memory, open).await / PAGES as f64;
    rows.push(Row {
        bytes_per_waiter: Some(bytes),
        ..Row::new("page", "open pages", PAGES)
    });
    rows
}

/// Times requests up to the first byte of the response, each on a new connection.
async fn first_bytes(address: &str, path: &str) -> Histogram<u64> {
    let mut taken = Histogram::new(3).expect("three digits are allowed");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    for number in 0..REQUESTS + 5 {
        let mut connection = TcpStream::connect(address).await.expect("it listens");
        let before = Instant::now();
        let sent = connection.write_all(request.as_bytes()).await;
        sent.expect("the service reads");
        let mut response = vec![0; 15];
        let read = connection.read_exact(&mut response).await;
        let took = before.elapsed();
        read.expect("the service answers");
        assert_eq!(response, b"HTTP/1.1 200 OK");
        let read = connection.read_to_end(&mut response).await;
        read.expect("the rest of the response");
        if number >= 5 {
            let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            taken.record(nanos).expect("it grows as needed");
        }
        sleep(PAUSE).await;
    }
    taken
}

type Pages = Vec<lock_tower::inspector::InspectorBody>;

/// A service with locks in memory, whose first page has been shown.
async fn in_memory() -> (Inspector, Vec<lock_runtime::LockGuard>, Pages) {
    let locks = LockClient::in_memory();
    let guards = (0..LOCKS).map(|number| locks.exclusive(format!("order:{number:05}")).acquire());
    let guards = join_all(guards).await.into_iter();
    let guards = guards.map(|guard| guard.expect("it is free")).collect();
    let inspector = Inspector::new(locks).max_streams(PAGES + 1);
    let mut first = opened(&inspector).await;
    event(&mut first).await;
    (inspector, guards, Vec::with_capacity(PAGES))
}

/// Opens pages, and reads their first events. Afterwards each waits for its next one.
async fn open((inspector, _guards, pages): &mut (Inspector, Vec<lock_runtime::LockGuard>, Pages)) {
    for _ in 0..PAGES {
        pages.push(opened(inspector).await);
    }
    join_all(pages.iter_mut().map(event)).await;
    for page in pages {
        assert!(poll!(page.frame()).is_pending());
    }
}

async fn opened(inspector: &Inspector) -> lock_tower::inspector::InspectorBody {
    let request = Request::get("/?format=events").header("host", "localhost");
    let request = request.body(Body::empty());
    let request = request.expect("a valid request");
    let Ok(response) = inspector.clone().oneshot(request).await;
    assert_eq!(response.status(), 200);
    response.into_body()
}

async fn event(page: &mut lock_tower::inspector::InspectorBody) {
    let frame = page.frame().await.expect("an event");
    let event = frame.expect("no error").into_data().expect("data");
    assert!(event.len() > 10_000, "{} bytes", event.len());
}
