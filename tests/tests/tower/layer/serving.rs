//! Requests under their lock: one at a time, and the lock is released however a request ends.

use std::{
    convert::Infallible,
    future::{self, Ready},
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request},
    response::Response,
    routing::{MethodRouter, post},
};
use lock_runtime::{HeldLock, LockClient, LockError, LockKey, is_held};
use lock_tests::FencedResource;
use lock_tower::{
    Http, KeyError, KeyExtractor, KeyTemplate, Keyed, Lock, LockLayer, ResponseFuture, Target,
};
use tokio::sync::{Barrier, mpsc, oneshot};
use tower::{Layer, Service, ServiceExt};

use super::server::Server;

/// Longer than any of these tests takes, and shorter than the default lease: a grant within this
/// time does not come from an expired lease.
const PROMPTLY: Duration = Duration::from_secs(10);

fn orders(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .wait(PROMPTLY)
}

#[tokio::test]
async fn requests_for_one_key_are_served_one_after_another() {
    const REQUESTS: u64 = 40;
    let locks = LockClient::in_memory();
    let stock = Arc::new(FencedResource::new());
    let handler = {
        let stock = stock.clone();
        async move |lock: HeldLock| {
            let mut stale = stock.increment(lock.fence()).await;
            tokio::task::yield_now().await;
            if stale.is_ok() {
                stale = stock.increment(lock.fence()).await;
            }
            stale.map_err(|stale| stale.to_string())
        }
    };
    let server =
        Server::start(Router::new().route("/orders/{id}", post(handler).layer(orders(&locks))))
            .await;

    let mut sent = Vec::new();
    for _ in 0..REQUESTS {
        sent.push(server.send("POST", "/orders/7", &[]).await);
    }
    for request in sent {
        assert_eq!(request.response().await.unwrap().status, 200);
    }

    let report = stock.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.value, report.peak), (2 * REQUESTS, 1));
}

#[tokio::test]
async fn requests_for_different_keys_are_served_at_the_same_time() {
    let locks = LockClient::in_memory();
    let server =
        Server::start(Router::new().route("/orders/{id}", meet(2).layer(orders(&locks)))).await;
    let (one, other) = tokio::join!(server.post("/orders/1"), server.post("/orders/2"));
    assert_eq!((one.status, other.status), (200, 200));
}

#[tokio::test]
async fn readers_and_holders_of_permits_are_served_at_the_same_time() {
    let locks = LockClient::in_memory();
    let permits = NonZeroU32::new(2).unwrap();
    let app = Router::new()
        .route("/read/{id}", meet(2).layer(orders(&locks).shared()))
        .route(
            "/permits/{id}",
            meet(2).layer(orders(&locks).permits(permits)),
        );
    let server = Server::start(app).await;
    for path in ["/read/1", "/permits/1"] {
        let (one, other) = tokio::join!(server.post(path), server.post(path));
        assert_eq!((one.status, other.status), (200, 200));
    }
}

/// A handler that returns once `many` requests are in it.
fn meet(many: usize) -> MethodRouter {
    let barrier = Arc::new(Barrier::new(many));
    post(async move || {
        barrier.wait().await;
    })
}

#[tokio::test]
async fn the_lock_is_free_when_the_response_is_there() {
    let locks = LockClient::in_memory();
    let app: Router =
        Router::new().route("/orders/{id}", post(async || "paid").layer(orders(&locks)));
    let server = Server::start(app.clone()).await;
    for _ in 0..200 {
        assert_eq!(server.post("/orders/7").await.status, 200);
        assert!(
            locks
                .exclusive("order:7")
                .try_acquire()
                .await
                .unwrap()
                .is_some()
        );

        // Without a socket, no other task runs between the response and the next attempt.
        let request = Request::post("/orders/7").body(Body::empty()).unwrap();
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), 200);
        assert!(
            locks
                .exclusive("order:7")
                .try_acquire()
                .await
                .unwrap()
                .is_some()
        );
    }
}

/// Closes its channel when it is dropped.
struct Dropped(#[expect(dead_code, reason = "its end is what counts")] oneshot::Sender<Infallible>);

/// A route with a handler that never returns. The receiver gets each entry: the lock, and a channel
/// that closes when the handler is dropped.
fn endless(
    locks: &LockClient,
) -> (
    Router,
    mpsc::Receiver<(HeldLock, oneshot::Receiver<Infallible>)>,
) {
    let (sender, receiver) = mpsc::channel(1);
    let handler = async move |lock: HeldLock| {
        let (ended, end) = oneshot::channel();
        let _dropped = Dropped(ended);
        sender.send((lock, end)).await.unwrap();
        future::pending::<()>().await;
    };
    (
        Router::new().route("/orders/{id}", post(handler).layer(orders(locks))),
        receiver,
    )
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_the_lock() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = endless(&locks);
    let server = Server::start(app).await;

    let sent = server.send("POST", "/orders/7", &[]).await;
    let (lock, end) = entered.recv().await.unwrap();
    assert!(
        locks
            .exclusive("order:7")
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    drop(sent);
    assert!(end.await.is_err());

    let next = locks
        .exclusive("order:7")
        .wait(PROMPTLY)
        .acquire()
        .await
        .unwrap();
    assert!(next.fence() > lock.fence());
    assert!(!lock.is_lost());
}

#[tokio::test]
async fn a_client_that_hangs_up_in_the_line_gives_up_its_place() {
    /// Adds an extension to the request, whose drop shows that the request was dropped.
    #[derive(Clone)]
    struct Watched(mpsc::Sender<oneshot::Receiver<Infallible>>);
    impl<B> KeyExtractor<axum::http::Request<B>> for Watched {
        fn target(&self, req: &mut axum::http::Request<B>) -> Result<Target, KeyError> {
            let (sender, receiver) = oneshot::channel();
            req.extensions_mut().insert(Arc::new(Dropped(sender)));
            self.0.try_send(receiver).unwrap();
            Ok(LockKey::new("order:7")?.into())
        }
    }

    let locks = LockClient::in_memory();
    let served = Arc::new(AtomicUsize::new(0));
    let (sender, mut watched) = mpsc::channel(1);
    let layer = LockLayer::with_key(locks.clone(), Watched(sender)).wait(PROMPTLY);
    let handler = {
        let served = served.clone();
        async move || {
            served.fetch_add(1, Ordering::Relaxed);
        }
    };
    let server = Server::start(Router::new().route("/", post(handler).layer(layer))).await;

    let held = locks.exclusive("order:7").acquire().await.unwrap();
    let sent = server.send("POST", "/", &[]).await;
    let end = watched.recv().await.unwrap();
    drop(sent);
    assert!(end.await.is_err());
    held.release().await.unwrap();
    assert!(
        locks
            .exclusive("order:7")
            .wait(PROMPTLY)
            .acquire()
            .await
            .is_ok()
    );
    assert_eq!(served.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_handler_that_panics_frees_the_lock() {
    let locks = LockClient::in_memory();
    let handler = async |lock: HeldLock| assert!(lock.is_lost(), "as the test wants it");
    let server =
        Server::start(Router::new().route("/orders/{id}", post(handler).layer(orders(&locks))))
            .await;
    assert!(
        server
            .send("POST", "/orders/7", &[])
            .await
            .response()
            .await
            .is_none()
    );
    assert!(
        locks
            .exclusive("order:7")
            .wait(PROMPTLY)
            .acquire()
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn a_lost_lock_ends_the_handler_with_a_response() {
    let locks = LockClient::in_memory();
    let (app, mut entered) = endless(&locks);
    let server = Server::start(app).await;

    let sent = server.send("POST", "/orders/7", &[]).await;
    let (lock, end) = entered.recv().await.unwrap();
    locks.revoke("order:7").await.unwrap();
    assert!(end.await.is_err());
    assert!(lock.is_lost());

    let response = sent.response().await.unwrap();
    assert_eq!(
        (response.status, response.problem().as_str()),
        (500, "lost_revoked")
    );
    assert_eq!(response.header("retry-after"), None);
}

#[tokio::test]
async fn a_handler_enters_the_lock_of_its_route_again() {
    let locks = LockClient::in_memory();
    let again = {
        let locks = locks.clone();
        async move |Path(id): Path<u32>, lock: HeldLock| -> Result<String, LockError> {
            assert!(is_held(lock.key()));
            let inner = locks
                .reentrant(format!("order:{id}"))
                .no_wait()
                .acquire()
                .await?;
            assert_eq!(inner.fence(), lock.fence());
            inner.release().await?;
            assert!(is_held(lock.key()));
            locks
                .exclusive(lock.key())
                .acquire()
                .await
                .map(|_| "not reached".into())
        }
    };
    let server =
        Server::start(Router::new().route("/orders/{id}", post(again).layer(orders(&locks)))).await;
    let response = server.post("/orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (500, "would_deadlock")
    );
    assert!(
        locks
            .exclusive("order:7")
            .try_acquire()
            .await
            .unwrap()
            .is_some()
    );
}

#[tokio::test]
async fn the_triplet_can_be_named_and_cloned() {
    fn future_of<S: Service<Req>, Req>(_: &ResponseFuture<S, Req, Http>) {}

    #[derive(Clone)]
    struct Ok200;
    impl Service<Request> for Ok200 {
        type Response = Response;
        type Error = Infallible;
        type Future = Ready<Result<Response, Infallible>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: Request) -> Self::Future {
            future::ready(Ok(Response::default()))
        }
    }

    let layer: LockLayer = LockLayer::new(LockClient::in_memory(), "{method}").unwrap();
    let mut service: Lock<Ok200, Keyed<KeyTemplate>, Http> = layer.layer(Ok200).clone();
    let future = service.call(Request::default());
    future_of(&future);
    assert_eq!(future.await.unwrap().status(), 200);
}
