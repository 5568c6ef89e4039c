//! Guarantees of the layer that hold over HTTP/1.1 and HTTP/2.

use std::{convert::Infallible, future::ready, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    http::header::CONTENT_LENGTH,
    middleware,
    response::Response,
    routing::post,
};
use futures_util::{StreamExt, stream};
use lock_runtime::{HeldLock, LockClient, LockGuard};
use lock_tests::{
    FencedResource,
    place::{LONG, all_free, begun},
};
use lock_tower::{HoldUntil, LockLayer};
use tokio::{sync::mpsc, task::JoinSet};

use super::{
    client::{Connected, Http, over_both_versions, problem},
    frames::{Frames, data, streaming},
};

over_both_versions!(
    requests_for_one_key_are_served_one_after_another,
    a_held_lock_is_a_conflict_that_may_be_tried_again,
    a_request_without_a_part_of_the_key_is_refused_with_its_name,
    the_lock_is_free_when_the_response_has_arrived,
    a_lost_lock_ends_the_handler_with_a_response,
    a_handler_that_panics_frees_the_lock,
    a_body_is_sent_under_the_lock_to_its_end,
    a_client_that_reads_slowly_keeps_the_lock,
    a_body_whose_lock_is_lost_is_an_error,
    a_body_of_a_known_length_whose_lock_is_lost_is_an_error,
);

fn orders(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .wait(LONG)
}

async fn at_once(locks: &LockClient) -> Option<LockGuard> {
    locks.exclusive("order:7").try_acquire().await.unwrap()
}

async fn requests_for_one_key_are_served_one_after_another(http: Http) {
    const REQUESTS: u64 = 40;
    let stock = Arc::new(FencedResource::new());
    let handler = {
        let stock = stock.clone();
        async move |lock: HeldLock| {
            stock
                .increment(lock.fence())
                .await
                .map_err(|stale| stale.to_string())
        }
    };
    let route = post(handler).layer(orders(&LockClient::in_memory()));
    let server = Arc::new(Connected::start(http, Router::new().route("/orders/{id}", route)).await);
    let mut requests = JoinSet::new();
    for _ in 0..REQUESTS {
        let server = server.clone();
        requests.spawn(async move { server.post("/orders/7").await.status() });
    }
    assert!(
        requests
            .join_all()
            .await
            .iter()
            .all(|status| *status == 200)
    );
    let report = stock.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.value, report.peak), (REQUESTS, 1));
}

async fn a_held_lock_is_a_conflict_that_may_be_tried_again(http: Http) {
    let locks = LockClient::in_memory();
    let route = post(async || "paid").layer(orders(&locks).no_wait());
    let server = Connected::start(http, Router::new().route("/orders/{id}", route)).await;
    let guard = at_once(&locks).await.unwrap();
    let response = server.post("/orders/7").await;
    assert_eq!(response.headers()["retry-after"], "1");
    assert_eq!(problem(response).await, (409, "contended".into()));
    guard.release().await.unwrap();
    assert_eq!(server.post("/orders/7").await.text().await.unwrap(), "paid");
}

async fn a_request_without_a_part_of_the_key_is_refused_with_its_name(http: Http) {
    let layer = LockLayer::new(LockClient::in_memory(), "pay:{header.idempotency-key}").unwrap();
    let route = post(async |lock: HeldLock| lock.key().to_string()).layer(layer);
    let server = Connected::start(http, Router::new().route("/pay", route)).await;
    assert_eq!(
        problem(server.post("/pay").await).await,
        (400, "missing_header".into())
    );
    let request = server.request("/pay").header("Idempotency-Key", "4:2");
    assert_eq!(
        request.send().await.unwrap().text().await.unwrap(),
        "pay:4%3A2"
    );
}

async fn the_lock_is_free_when_the_response_has_arrived(http: Http) {
    let locks = LockClient::in_memory();
    let route = post(async || "paid").layer(orders(&locks));
    let server = Connected::start(http, Router::new().route("/orders/{id}", route)).await;
    for _ in 0..100 {
        let response = server.post("/orders/7").await;
        assert_eq!(response.status(), 200);
        assert!(at_once(&locks).await.is_some());
    }
}

async fn a_lost_lock_ends_the_handler_with_a_response(http: Http) {
    let locks = LockClient::in_memory();
    let (entered, mut entries) = mpsc::unbounded_channel();
    let handler = async move |lock: HeldLock| -> String {
        entered.send(lock).unwrap();
        std::future::pending().await
    };
    let server = Connected::start(
        http,
        Router::new().route("/orders/{id}", post(handler).layer(orders(&locks))),
    )
    .await;
    let call = server.call("/orders/7");
    let lock: HeldLock = entries.recv().await.unwrap();
    locks.revoke("order:7").await.unwrap();
    let response = call.response().await.unwrap();
    assert!(lock.is_lost());
    assert!(!response.headers().contains_key("retry-after"));
    assert_eq!(problem(response).await, (500, "lost_revoked".into()));
}

async fn a_handler_that_panics_frees_the_lock(http: Http) {
    let locks = LockClient::in_memory();
    let handler = async |lock: HeldLock| assert!(lock.is_lost(), "as the test wants it");
    let server = Connected::start(
        http,
        Router::new().route("/orders/{id}", post(handler).layer(orders(&locks))),
    )
    .await;
    assert!(server.call("/orders/7").response().await.is_err());
    all_free(&locks, &["order:7"]).await;
}

/// A route whose response body consists of the frames that the test sends. `length` is the value
/// of the `Content-Length` header, if any.
fn streaming_under(
    locks: &LockClient,
    length: Option<u64>,
) -> (Router, mpsc::UnboundedReceiver<Frames>) {
    let (route, entries) = streaming();
    let say_length = middleware::map_response(move |mut response: Response| {
        response
            .headers_mut()
            .extend(length.map(|length| (CONTENT_LENGTH, length.into())));
        ready(response)
    });
    let layers = (orders(locks).hold_until(HoldUntil::Body), say_length);
    (
        Router::new().route("/orders/{id}", route.layer(layers)),
        entries,
    )
}

async fn a_body_is_sent_under_the_lock_to_its_end(http: Http) {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming_under(&locks, None);
    let server = Connected::start(http, app).await;
    for _ in 0..20 {
        let mut response = server.post("/orders/7").await;
        let frames = entered.recv().await.unwrap();
        for text in ["a", "b", "c"] {
            assert!(at_once(&locks).await.is_none(), "{text} is not sent yet");
            frames.send(data(text)).await.unwrap();
            assert_eq!(response.chunk().await.unwrap().unwrap(), text);
        }
        assert!(at_once(&locks).await.is_none(), "the end is not sent yet");
        drop(frames);
        assert!(response.bytes().await.unwrap().is_empty());
        assert!(
            at_once(&locks).await.is_some(),
            "the end is sent after the release"
        );
    }
}

async fn a_client_that_reads_slowly_keeps_the_lock(http: Http) {
    /// The body is larger than all buffers between the handler and the client.
    const CHUNKS: usize = 512;
    const CHUNK: Bytes = Bytes::from_static(&[7; 64 * 1024]);
    let locks = LockClient::in_memory();
    let layer = orders(&locks).hold_until(HoldUntil::Body);
    let handler =
        async || Body::from_stream(stream::repeat(Ok::<_, Infallible>(CHUNK)).take(CHUNKS));
    let server = Connected::start(
        http,
        Router::new().route("/orders/{id}", post(handler).layer(layer)),
    )
    .await;

    let mut response = server.post("/orders/7").await;
    let mut read = response.chunk().await.unwrap().unwrap().len();
    // A waiter is granted the lock as soon as it is free, but not while the unread rest of the body
    // is larger than all buffers.
    let mut waiting = begun(locks.exclusive("order:7").wait(LONG).acquire()).await;
    while read < CHUNKS * CHUNK.len() / 4 {
        read += response.chunk().await.unwrap().unwrap().len();
        assert!(futures_util::poll!(&mut waiting).is_pending());
    }
    let mut rest = response.bytes_stream();
    while let Some(chunk) = rest.next().await {
        read += chunk.unwrap().len();
    }
    assert_eq!(read, CHUNKS * CHUNK.len());
    waiting.await.unwrap().release().await.unwrap();
}

async fn a_body_whose_lock_is_lost_is_an_error(http: Http) {
    loss_in_the_body(http, None).await;
}

async fn a_body_of_a_known_length_whose_lock_is_lost_is_an_error(http: Http) {
    loss_in_the_body(http, Some(2)).await;
}

async fn loss_in_the_body(http: Http, length: Option<u64>) {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming_under(&locks, length);
    let server = Connected::start(http, app).await;
    for read_before in [false, true] {
        let mut response = server.post("/orders/7").await;
        assert_eq!(response.content_length(), length);
        let frames = entered.recv().await.unwrap();
        if read_before {
            frames.send(data("a")).await.unwrap();
            assert_eq!(response.chunk().await.unwrap().unwrap(), "a");
        }
        locks.revoke("order:7").await.unwrap();
        assert!(response.chunk().await.is_err());
        assert!(frames.is_closed(), "the inner body is dropped");
        all_free(&locks, &["order:7"]).await;
    }
}
