//! The layer calls a service only on the clone that it polled ready, however a request ends.

use std::{
    collections::VecDeque,
    fmt,
    future::{self, Ready},
    mem::take,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{Request, Response, request},
};
use http_body_util::BodyExt;
use lock_runtime::{HeldLock, LockClient, LockErrorKind, LockKey};
use lock_tests::{
    RedisServer,
    place::{LONG, begun, eventually},
};
use lock_tower::{HoldUntil, LockLayer, ServiceError, Target};
use tower::{Layer, Service, ServiceExt};

use super::frames::{Frames, body_of, data};

/// A service that must be polled ready before each call, and is pending at the first poll.
#[derive(Debug)]
struct Probe {
    polls: usize,
    /// The next results of `poll_ready`, shared by all clones. Ready when it is empty.
    says: Arc<Mutex<VecDeque<Says>>>,
}

#[derive(Debug)]
enum Says {
    Failed,
    /// Pending once. The waker is stored here.
    NotYet(Arc<Mutex<Option<Waker>>>),
}

impl Probe {
    fn new() -> Self {
        Self {
            polls: 0,
            says: Arc::default(),
        }
    }

    fn says(&self, says: Says) {
        self.says.lock().unwrap().push_back(says);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        self.polls += 1;
        if self.polls == 1 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        match self.says.lock().unwrap().pop_front() {
            None => Poll::Ready(Ok(())),
            Some(Says::Failed) => Poll::Ready(Err("not ready".into())),
            Some(Says::NotYet(waker)) => {
                *waker.lock().unwrap() = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn called(&mut self) {
        assert!(take(&mut self.polls) > 1, "called before it was ready");
    }
}

impl Clone for Probe {
    /// Returns a clone that is not ready, even if `self` is.
    fn clone(&self) -> Self {
        Self {
            polls: 0,
            says: self.says.clone(),
        }
    }
}

impl Service<u32> for Probe {
    type Response = u32;
    type Error = String;
    type Future = Ready<Result<u32, String>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        self.poll(cx)
    }

    fn call(&mut self, req: u32) -> Self::Future {
        self.called();
        future::ready(if req == 13 {
            Err("inner".into())
        } else {
            Ok(req)
        })
    }
}

/// Responds with the body in the extensions, or else with the key of its lock.
impl Service<Request<()>> for Probe {
    type Response = Response<Body>;
    type Error = String;
    type Future = Ready<Result<Response<Body>, String>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        self.poll(cx)
    }

    fn call(&mut self, mut req: Request<()>) -> Self::Future {
        self.called();
        let lock = req.extensions().get::<HeldLock>();
        let name = lock.map_or("none".into(), |lock| lock.key().to_string());
        let body = req
            .extensions_mut()
            .remove::<Answer>()
            .and_then(|answer| answer.lock().unwrap().take());
        future::ready(Ok(Response::new(body.unwrap_or(name.into()))))
    }
}

type Answer = Arc<Mutex<Option<Body>>>;

#[tokio::test]
async fn a_service_is_called_only_when_it_was_polled_ready() {
    let locks = LockClient::in_memory();
    let key = |req: &u32| {
        if *req == 0 {
            Ok(Target::Skip)
        } else {
            LockKey::new("one").map(Target::Lock)
        }
    };
    let mut service = LockLayer::plain(locks.clone(), key)
        .no_wait()
        .layer(Probe::new());
    for req in [0, 1, 2, 0, 3] {
        assert_eq!(service.ready().await.unwrap().call(req).await.unwrap(), req);
    }
    assert!(matches!(service.call(13).await, Err(ServiceError::Inner(error)) if error == "inner"));
    let _held = locks.exclusive("one").acquire().await.unwrap();
    assert!(
        matches!(service.call(1).await, Err(ServiceError::Lock(error)) if error.code() == "contended")
    );
}

fn layer(
    locks: &LockClient,
) -> LockLayer<impl Fn(&Request<()>) -> Result<Target, lock_tower::KeyError> + Clone> {
    LockLayer::with_key(locks.clone(), |req: &Request<()>| match req.uri().path() {
        "/skip" => Ok(Target::Skip),
        path => Ok(LockKey::new(path)?.into()),
    })
    .wait(LONG)
}

fn request(path: &str) -> Request<()> {
    request::Builder::new().uri(path).body(()).unwrap()
}

/// A request whose response body consists of the frames.
fn streamed(path: &str) -> (Request<()>, Frames) {
    let (frames, body) = body_of();
    let mut request = request(path);
    request
        .extensions_mut()
        .insert::<Answer>(Arc::new(Mutex::new(Some(body))));
    (request, frames)
}

async fn text(response: Response<impl HttpBody<Data = Bytes, Error: fmt::Debug>>) -> String {
    String::from_utf8(
        response
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes()
            .into(),
    )
    .unwrap()
}

async fn is_free_at_once(locks: &LockClient) -> bool {
    locks.exclusive("/7").try_acquire().await.unwrap().is_some()
}

#[tokio::test]
async fn one_service_serves_several_requests_at_a_time() {
    let locks = LockClient::in_memory();
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let mut service = layer(&locks).hold_until(hold).layer(Probe::new());
        // All calls are made before any is polled; three of them need the same lock.
        let mut calls = Vec::new();
        for path in ["/7", "/skip", "/8", "/7", "/skip", "/7"] {
            calls.push(service.ready().await.unwrap().call(request(path)));
        }
        let texts = calls
            .into_iter()
            .map(async |call| text(call.await.unwrap()).await);
        let texts = futures_util::future::join_all(texts).await;
        assert_eq!(texts, ["/7", "none", "/8", "/7", "none", "/7"]);
        assert!(is_free_at_once(&locks).await);
    }
}

#[tokio::test]
async fn a_body_under_its_lock_keeps_no_service_from_others() {
    let locks = LockClient::in_memory();
    let mut service = layer(&locks)
        .hold_until(HoldUntil::Body)
        .layer(Probe::new());
    let (first, frames) = streamed("/7");
    let mut body = service
        .ready()
        .await
        .unwrap()
        .call(first)
        .await
        .unwrap()
        .into_body();
    let second = begun(service.ready().await.unwrap().call(request("/7"))).await;
    assert_eq!(
        text(
            service
                .ready()
                .await
                .unwrap()
                .call(request("/8"))
                .await
                .unwrap()
        )
        .await,
        "/8"
    );
    assert_eq!(
        text(
            service
                .ready()
                .await
                .unwrap()
                .call(request("/skip"))
                .await
                .unwrap()
        )
        .await,
        "none"
    );
    frames.send(data("a")).await.unwrap();
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "a"
    );
    assert!(!is_free_at_once(&locks).await);
    drop(frames);
    assert!(body.frame().await.is_none());
    assert_eq!(text(second.await.unwrap()).await, "/7");
}

#[tokio::test]
async fn layer_frees_the_lock_if_the_service_is_never_ready() {
    let locks = LockClient::in_memory();
    let probe = Probe::new();
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let mut service = layer(&locks).hold_until(hold).layer(probe.clone());
        for path in ["/7", "/skip"] {
            probe.says(Says::Failed);
            let error = service
                .ready()
                .await
                .unwrap()
                .call(request(path))
                .await
                .unwrap_err();
            assert_eq!(
                error, "not ready",
                "unchanged, so that the error of axum stays `Infallible`"
            );
            assert!(is_free_at_once(&locks).await, "the release was awaited");
        }
        assert_eq!(
            text(
                service
                    .ready()
                    .await
                    .unwrap()
                    .call(request("/7"))
                    .await
                    .unwrap()
            )
            .await,
            "/7"
        );
    }

    let mut plain =
        LockLayer::plain(locks.clone(), |_: &u32| LockKey::new("/7").unwrap()).layer(probe.clone());
    probe.says(Says::Failed);
    let error = plain.ready().await.unwrap().call(1).await.unwrap_err();
    assert!(matches!(error, ServiceError::Inner(error) if error == "not ready"));
    assert!(is_free_at_once(&locks).await);
}

#[tokio::test]
async fn a_lock_that_is_lost_before_the_service_is_ready_is_an_error() {
    let locks = LockClient::in_memory();
    let probe = Probe::new();
    let waker = Arc::default();
    probe.says(Says::NotYet(Arc::clone(&waker)));
    let mut service = layer(&locks).layer(probe);
    let call = tokio::spawn(service.ready().await.unwrap().call(request("/7")));
    eventually("it is polled", async || waker.lock().unwrap().is_some()).await;
    locks.revoke("/7").await.unwrap();
    let response = call.await.unwrap().unwrap();
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("lost_revoked"));
}

#[tokio::test]
async fn layer_without_its_store_calls_only_a_ready_service() {
    let redis = RedisServer::start().await;
    let locks = LockClient::connect(&redis.url()).await.unwrap();
    let wait = Duration::from_millis(100);
    let closed = layer(&locks).lease(Duration::from_secs(1)).wait(wait);
    let probe = Probe::new();
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let mut service = closed
            .clone()
            .hold_until(hold)
            .fail_open()
            .layer(probe.clone());
        assert_eq!(
            text(
                service
                    .ready()
                    .await
                    .unwrap()
                    .call(request("/7"))
                    .await
                    .unwrap()
            )
            .await,
            "/7"
        );
    }
    redis.kill();
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let mut service = closed
            .clone()
            .hold_until(hold)
            .fail_open()
            .layer(probe.clone());
        let (one, frames) = streamed("/7");
        let calls = [one, request("/7")].map(|request| service.call(request));
        drop(frames);
        let [one, other] = futures_util::future::join_all(calls)
            .await
            .try_into()
            .unwrap();
        assert_eq!(
            (
                text(one.unwrap()).await.as_str(),
                text(other.unwrap()).await.as_str()
            ),
            ("", "none")
        );
        probe.says(Says::Failed);
        assert_eq!(service.call(request("/7")).await.unwrap_err(), "not ready");
    }
    let refused = closed.layer(probe).oneshot(request("/7")).await.unwrap();
    assert_eq!(refused.status(), 503);
    let error = locks
        .exclusive("/7")
        .wait(wait)
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
}
