//! Bodies that are sent under the lock, and handlers that finish without their clients.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Request, Version, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::{StreamExt, stream};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use lock_runtime::{HeldLock, LockClient, LockError, LockKey, is_held};
use lock_tower::{DetachLayer, HoldUntil, LockLayer};
use tokio::sync::{mpsc, oneshot};
use tower::ServiceExt;

use super::server::{Server, watched};

const PROMPTLY: Duration = Duration::from_secs(10);

fn layer(locks: &LockClient, hold: HoldUntil) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .hold_until(hold)
}

async fn is_free(locks: &LockClient) -> bool {
    locks.inspect("order:7").await.unwrap().holders.is_empty()
}

/// Waits until the lock is free.
async fn freed(locks: &LockClient) {
    locks
        .exclusive("order:7")
        .wait(PROMPTLY)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

type Frames = mpsc::Sender<Frame<Bytes>>;

fn data(text: &'static str) -> Frame<Bytes> {
    Frame::data(Bytes::from_static(text.as_bytes()))
}

fn trailers() -> Frame<Bytes> {
    Frame::trailers(HeaderMap::from_iter([(
        axum::http::HeaderName::from_static("checksum"),
        7.into(),
    )]))
}

/// A route whose response body consists of the frames that the test sends, until the test drops
/// the sender. Each text is prefixed with 1 if the lock is held while the body is polled, or 0.
fn streaming(locks: &LockClient, hold: HoldUntil) -> (Router, mpsc::UnboundedReceiver<Frames>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let handler = async move |headers: HeaderMap| {
        let (frames, body) = mpsc::channel::<Frame<Bytes>>(8);
        sender.send(frames).unwrap();
        let body = stream::unfold(body, async |mut body| {
            let frame = body.recv().await?;
            let held = is_held(&LockKey::new("order:7").unwrap());
            let frame = frame.map_data(|text| {
                format!("{}{}", u8::from(held), String::from_utf8_lossy(&text)).into()
            });
            Some((Ok::<_, Infallible>(frame), body))
        });
        let mut response = Response::new(Body::new(StreamBody::new(body)));
        if let Some(content_type) = headers.get(CONTENT_TYPE) {
            response
                .headers_mut()
                .insert(CONTENT_TYPE, content_type.clone());
        }
        response
    };
    (
        Router::new().route("/shop.Orders/{id}", post(handler).layer(layer(locks, hold))),
        receiver,
    )
}

fn request() -> Request<Body> {
    Request::post("/shop.Orders/7").body(Body::empty()).unwrap()
}

async fn next(body: &mut Body) -> Option<Result<Frame<Bytes>, axum::Error>> {
    tokio::time::timeout(PROMPTLY, body.frame())
        .await
        .expect("the body goes on")
}

#[tokio::test]
async fn a_body_keeps_the_lock_until_its_last_frame_and_no_longer() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming(&locks, HoldUntil::Body);
    let mut body = app.oneshot(request()).await.unwrap().into_body();
    let frames = entered.recv().await.unwrap();
    assert!(!is_free(&locks).await, "the body has not been sent");
    frames.send(data("a")).await.unwrap();
    assert_eq!(
        next(&mut body).await.unwrap().unwrap().into_data().unwrap(),
        "1a"
    );
    assert!(!is_free(&locks).await);

    frames.send(data("b")).await.unwrap();
    frames.send(trailers()).await.unwrap();
    assert_eq!(
        next(&mut body).await.unwrap().unwrap().into_data().unwrap(),
        "1b"
    );
    assert!(!is_free(&locks).await, "the trailers are not sent yet");
    assert_eq!(
        next(&mut body)
            .await
            .unwrap()
            .unwrap()
            .into_trailers()
            .unwrap()["checksum"],
        "7"
    );
    assert!(
        is_free(&locks).await,
        "the release was awaited before the last frame"
    );
    assert!(next(&mut body).await.is_none());
}

#[tokio::test]
async fn a_body_without_trailers_keeps_the_lock_until_its_end() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming(&locks, HoldUntil::Body);
    let mut body = app.oneshot(request()).await.unwrap().into_body();
    drop(entered.recv().await.unwrap());
    assert!(!is_free(&locks).await);
    assert!(next(&mut body).await.is_none());
    assert!(is_free(&locks).await);
}

#[tokio::test]
async fn a_whole_body_is_sent_when_the_lock_is_free() {
    let locks = LockClient::in_memory();
    for text in ["paid", ""] {
        let route = post(async move || text).layer(layer(&locks, HoldUntil::Body));
        let response = Router::new()
            .route("/shop.Orders/{id}", route)
            .oneshot(request())
            .await
            .unwrap();
        let mut body = response.into_body();
        if !text.is_empty() {
            assert_eq!(
                next(&mut body).await.unwrap().unwrap().into_data().unwrap(),
                text
            );
        }
        assert!(
            is_free(&locks).await,
            "the server may not poll again after a known length"
        );
        drop(body);
    }
}

#[tokio::test]
async fn by_default_a_body_is_sent_without_the_lock() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming(&locks, HoldUntil::Response);
    let mut body = app.oneshot(request()).await.unwrap().into_body();
    let frames = entered.recv().await.unwrap();
    assert!(is_free(&locks).await);
    frames.send(data("a")).await.unwrap();
    assert_eq!(
        next(&mut body).await.unwrap().unwrap().into_data().unwrap(),
        "0a"
    );
}

#[tokio::test]
async fn a_body_that_is_dropped_gives_its_lock_back() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming(&locks, HoldUntil::Body);
    let server = Server::start(app).await;
    let sent = server.send("POST", "/shop.Orders/7", &[]).await;
    let frames = entered.recv().await.unwrap();
    frames.send(data("a")).await.unwrap();
    drop(sent);
    // The server notices the disconnect at the latest when it writes.
    while frames.send(data("b")).await.is_ok() {
        tokio::task::yield_now().await;
    }
    freed(&locks).await;
}

#[tokio::test]
async fn a_body_whose_lock_is_lost_does_not_end_as_if_it_were_whole() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming(&locks, HoldUntil::Body);

    let mut body = app.clone().oneshot(request()).await.unwrap().into_body();
    let frames = entered.recv().await.unwrap();
    locks.revoke("order:7").await.unwrap();
    let error = next(&mut body).await.unwrap().unwrap_err().into_inner();
    assert_eq!(
        error.downcast::<LockError>().unwrap().code(),
        "lost_revoked"
    );
    assert!(next(&mut body).await.is_none());
    assert!(frames.is_closed(), "the inner body is dropped");

    let server = Server::start(app).await;
    let sent = server.send("POST", "/shop.Orders/7", &[]).await;
    let frames = entered.recv().await.unwrap();
    frames.send(data("a")).await.unwrap();
    locks.revoke("order:7").await.unwrap();
    let response = sent.response().await.unwrap();
    assert_eq!(response.header("transfer-encoding"), Some("chunked"));
    assert!(
        !response.body.contains("\r\n0\r\n"),
        "{:?} has its last chunk",
        response.body
    );
}

#[tokio::test]
async fn a_grpc_stream_whose_lock_is_lost_ends_with_a_status() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = streaming(&locks, HoldUntil::Body);
    let mut body = app
        .clone()
        .oneshot(grpc(Version::HTTP_2))
        .await
        .unwrap()
        .into_body();
    let frames = entered.recv().await.unwrap();
    frames.send(data("a")).await.unwrap();
    assert!(next(&mut body).await.unwrap().unwrap().is_data());
    locks.revoke("order:7").await.unwrap();
    let trailers = next(&mut body)
        .await
        .unwrap()
        .unwrap()
        .into_trailers()
        .unwrap();
    assert_eq!(trailers["grpc-status"], "10");
    assert!(
        !trailers["grpc-message"].to_str().unwrap().contains("order"),
        "{trailers:?}"
    );
    assert!(next(&mut body).await.is_none());

    // HTTP/1.1 may not deliver the trailers, and without them the end would look clean.
    let mut body = app
        .oneshot(grpc(Version::HTTP_11))
        .await
        .unwrap()
        .into_body();
    let _frames = entered.recv().await.unwrap();
    locks.revoke("order:7").await.unwrap();
    assert!(next(&mut body).await.unwrap().is_err());
}

fn grpc(version: Version) -> Request<Body> {
    let mut request = request();
    *request.version_mut() = version;
    request
        .headers_mut()
        .insert(CONTENT_TYPE, "application/grpc+proto".parse().unwrap());
    request
}

#[tokio::test]
async fn a_request_that_only_claims_to_be_grpc_gets_no_clean_end() {
    let locks = LockClient::in_memory();
    let handler = async || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
    let app: Router = Router::new().route(
        "/shop.Orders/{id}",
        post(handler).layer(layer(&locks, HoldUntil::Body)),
    );
    let mut body = app
        .oneshot(grpc(Version::HTTP_2))
        .await
        .unwrap()
        .into_body();
    locks.revoke("order:7").await.unwrap();
    assert!(next(&mut body).await.unwrap().is_err());
}

#[tokio::test]
async fn a_loss_in_the_last_moment_is_no_clean_end() {
    let locks = LockClient::in_memory();
    let revoking = locks.clone();
    let handler = async move || {
        let locks = revoking.clone();
        // The lock is lost in the poll that ends the body.
        let body = stream::once(async move { locks.revoke("order:7").await.unwrap() });
        Body::from_stream(body.filter_map(async |_| None::<Result<Bytes, Infallible>>))
    };
    let app: Router = Router::new().route(
        "/shop.Orders/{id}",
        post(handler).layer(layer(&locks, HoldUntil::Body)),
    );
    let mut body = app.oneshot(request()).await.unwrap().into_body();
    let error = next(&mut body).await.unwrap().unwrap_err().into_inner();
    assert_eq!(
        error.downcast::<LockError>().unwrap().code(),
        "lost_revoked"
    );
    assert!(next(&mut body).await.is_none());
}

#[tokio::test]
async fn an_error_of_the_body_is_passed_on_and_frees_the_lock() {
    let locks = LockClient::in_memory();
    let handler = async || {
        Body::from_stream(stream::iter([Ok(Bytes::from_static(b"a")), Err("broken")]))
            .into_response()
    };
    let app: Router = Router::new().route(
        "/shop.Orders/{id}",
        post(handler).layer(layer(&locks, HoldUntil::Body)),
    );
    let mut body = app.oneshot(request()).await.unwrap().into_body();
    assert!(next(&mut body).await.unwrap().is_ok());
    assert!(
        next(&mut body)
            .await
            .unwrap()
            .unwrap_err()
            .to_string()
            .contains("broken")
    );
    assert!(next(&mut body).await.is_none());
    freed(&locks).await;
}

/// The lock of a request that has reached its handler, and a sender that ends the handler.
type Entry = (HeldLock, oneshot::Sender<()>);

/// A detached route with a handler that waits for the test. The first receiver gets each entry, the
/// second whether the lock was valid at the end of the handler.
fn slow(
    locks: &LockClient,
) -> (
    Router,
    mpsc::UnboundedReceiver<Entry>,
    mpsc::UnboundedReceiver<bool>,
) {
    let (entered, entries) = mpsc::unbounded_channel();
    let (ended, ends) = mpsc::unbounded_channel();
    let handler = async move |lock: HeldLock| {
        let (go_on, told) = oneshot::channel();
        entered.send((lock.clone(), go_on)).unwrap();
        told.await.unwrap();
        ended.send(!lock.validity().is_zero()).unwrap();
    };
    let route = post(handler).layer((
        DetachLayer::new(),
        layer(locks, HoldUntil::Response).wait(PROMPTLY),
    ));
    (
        Router::new().route("/shop.Orders/{id}", route),
        entries,
        ends,
    )
}

#[tokio::test]
async fn layer_detached_finishes_under_its_lock_without_its_caller() {
    let locks = LockClient::in_memory();
    let (app, mut entries, mut ends) = slow(&locks);
    let (app, mut arrivals) = watched(app);
    let server = Server::start(app).await;
    let sent = server.send("POST", "/shop.Orders/7", &[]).await;
    let (_, go_on) = entries.recv().await.unwrap();
    drop(sent);
    assert!(
        arrivals.recv().await.unwrap().await.is_err(),
        "the server drops the request"
    );
    assert!(!is_free(&locks).await);
    go_on.send(()).unwrap();
    assert!(ends.recv().await.unwrap(), "it held the lock to its end");
    freed(&locks).await;
}

#[tokio::test]
async fn a_detached_request_whose_future_is_dropped_is_finished() {
    let locks = LockClient::in_memory();
    let (app, mut entries, mut ends) = slow(&locks);
    let call = lock_tests::place::begun(app.oneshot(request())).await;
    let (_, go_on) = entries.recv().await.unwrap();
    drop(call);
    go_on.send(()).unwrap();
    assert!(ends.recv().await.unwrap());
    freed(&locks).await;
}

#[tokio::test]
async fn a_panic_of_a_detached_handler_is_the_callers() {
    let locks = LockClient::in_memory();
    let handler = async |lock: HeldLock| assert!(lock.is_lost(), "as the test wants it");
    let route = post(handler).layer((DetachLayer::new(), layer(&locks, HoldUntil::Response)));
    let app: Router = Router::new().route("/shop.Orders/{id}", route);
    let panic = tokio::spawn(app.oneshot(request()))
        .await
        .unwrap_err()
        .into_panic();
    assert!(
        panic
            .downcast::<&str>()
            .unwrap()
            .contains("as the test wants it")
    );
    freed(&locks).await;
}
