//! The streams by which pages refresh themselves.

use std::{pin::Pin, sync::Arc, time::Duration};

use axum::body::Body;
use futures_util::poll;
use http::{Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use lock_runtime::{LockClient, store::MemoryStore};
use lock_tests::{FaultyStore, RedisServer, faulty_store::Operation, place::LONG, unique};
use lock_tower::inspector::{Inspector, InspectorBody};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{Instant, advance, sleep, timeout},
};
use tower::ServiceExt as _;

async fn stream(inspector: &Inspector) -> Response<InspectorBody> {
    let request = Request::get("/locks?format=events")
        .header("host", "localhost")
        .body(Body::empty());
    inspector.clone().oneshot(request.unwrap()).await.unwrap()
}

/// The next event of a stream. `None` at its end.
async fn event(body: &mut InspectorBody) -> Option<String> {
    let frame = body.frame().await?.unwrap();
    let event = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
    assert!(
        event.starts_with("data:") || event.starts_with("retry:") && event.ends_with("\n\n"),
        "{event}"
    );
    Some(event)
}

#[tokio::test(start_paused = true)]
async fn a_lock_appears_and_disappears() {
    let locks = LockClient::in_memory();
    let inspector = Inspector::new(locks.clone());
    let response = stream(&inspector).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut body = response.into_body();
    let since = Instant::now();
    assert!(event(&mut body).await.unwrap().contains("No lock is held"));
    let guard = locks.exclusive("order:42").acquire().await.unwrap();
    assert!(event(&mut body).await.unwrap().contains("order:42"));
    guard.release().await.unwrap();
    assert!(event(&mut body).await.unwrap().contains("No lock is held"));
    assert_eq!(since.elapsed().as_secs(), 3);
    while event(&mut body).await.is_some() {}
    assert_eq!(since.elapsed().as_secs(), 5, "a shutdown waits for streams");
    assert!(body.frame().await.is_none(), "and it stays ended");
}

#[tokio::test(start_paused = true)]
async fn the_number_of_streams_is_limited_and_a_stalled_reader_gives_way() {
    let inspector = Inspector::new(LockClient::in_memory()).max_streams(2);
    let (mut read, mut stalled) = (
        stream(&inspector).await.into_body(),
        stream(&inspector).await.into_body(),
    );
    let refused = stream(&inspector).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()["retry-after"], "10");

    event(&mut stalled).await.unwrap();
    event(&mut read).await.unwrap();
    // This one is being read: it waits for its next event.
    assert!(poll!(read.frame()).is_pending());
    advance(Duration::from_secs(31)).await;
    let mut next = stream(&inspector).await;
    assert_eq!(next.status(), StatusCode::OK);
    assert_eq!(
        stream(&inspector).await.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert!(event(&mut stalled).await.is_none(), "it has lost its place");
    assert!(event(next.body_mut()).await.is_some());
    drop(next);
    assert_eq!(stream(&inspector).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_stream_reads_from_the_store_only_while_it_is_read() {
    let server = RedisServer::builder().start().await;
    let namespace = unique("ns");
    let locks = LockClient::builder()
        .namespace(&namespace)
        .connect(&server.url())
        .await
        .unwrap();
    let inspector = Inspector::new(locks);
    let mut body = stream(&inspector).await.into_body();
    event(&mut body).await.unwrap();
    let scans = async || {
        let stats: String = server.query(&["INFO", "commandstats"]).await;
        let of_scan = stats.lines().find(|line| line.starts_with("cmdstat_scan:"));
        of_scan.map(str::to_owned)
    };
    let before = scans().await;
    assert!(before.is_some());
    sleep(Duration::from_millis(2500)).await;
    assert_eq!(scans().await, before);
    event(&mut body).await.unwrap();
    assert_ne!(scans().await, before);
}

/// A browser that is suspended leaves its connection open.
#[tokio::test]
async fn a_reader_that_stops_delays_no_other_page() {
    let locks = LockClient::in_memory();
    let mut guards = Vec::new();
    for number in 0..200 {
        let key = format!("{number:04}{}", "x".repeat(500));
        guards.push(locks.exclusive(key).acquire().await.unwrap());
    }
    let inspector = Inspector::new(locks).max_streams(3);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = axum::Router::new().nest_service("/locks", inspector.clone());
    let serving = tokio::spawn(async move { axum::serve(listener, app).await });
    let mut stopped = Vec::new();
    for _ in 0..2 {
        let mut connection = TcpStream::connect(address).await.unwrap();
        let request = b"GET /locks?format=events HTTP/1.1\r\nhost: localhost\r\n\r\n";
        connection.write_all(request).await.unwrap();
        let mut begin = [0; 15];
        connection.read_exact(&mut begin).await.unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200 OK");
        stopped.push(connection);
    }
    let mut body = stream(&inspector).await.into_body();
    for _ in 0..2 {
        let shown = timeout(LONG, event(&mut body)).await.unwrap().unwrap();
        assert!(shown.contains("1 to 100 of 200 names"));
    }
    drop(stopped);
    serving.abort();
}

#[tokio::test]
async fn an_event_is_bounded() {
    let locks = LockClient::in_memory();
    let mut guards = Vec::new();
    for number in 0..150 {
        let key = format!("{number:04}{}", "\u{202e}".repeat(169));
        guards.push(locks.exclusive(key).acquire().await.unwrap());
    }
    let body = stream(&Inspector::new(locks)).await.into_body();
    let mut body = Box::pin(body);
    assert!(!Pin::new(&mut body).is_end_stream());
    let event = event(&mut body).await.unwrap();
    assert!(event.len() < 512 << 10, "{} bytes", event.len());
}

/// Two pages of a slow store: each gets its events, although reading takes longer than a stream.
#[tokio::test(start_paused = true)]
async fn a_slow_store_delays_events_and_loses_none() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        if matches!(call.operation, Operation::Inspect(..)) {
            sleep(Duration::from_millis(300)).await;
        }
        call.execute().await
    });
    let locks = LockClient::with_store(store);
    let mut guards = Vec::new();
    for number in 0..500 {
        guards.push(
            locks
                .exclusive(format!("k{number}"))
                .acquire()
                .await
                .unwrap(),
        );
    }
    let inspector = Inspector::new(locks);
    let (mut one, mut other) = (
        stream(&inspector).await.into_body(),
        stream(&inspector).await.into_body(),
    );
    // The one that is not read does not keep its turn.
    assert!(poll!(other.frame()).is_pending());
    let since = Instant::now();
    for page in [&mut one, &mut other] {
        assert!(event(page).await.unwrap().contains("1 to 100 of 500 names"));
    }
    assert!(
        since.elapsed() > Duration::from_secs(5),
        "{:?}",
        since.elapsed()
    );
}
