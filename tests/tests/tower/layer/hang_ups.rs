//! Clients that disconnect at every stage of a request. Afterwards the lock is free, the next
//! request is served, and nothing remains: no holder, no waiter, no used capacity of the inner
//! service.

mod body;
mod detached;
mod stages;
mod unread;

use std::sync::Arc;

use axum::{Router, body::Body, routing::post};
use lock_runtime::{HeldLock, LockClient, store::MemoryStore};
use lock_tests::{
    FaultyStore,
    faulty_store::Operation,
    place::{LONG, begun, eventually},
};
use lock_tower::{DetachLayer, HoldUntil, LockLayer};
use tokio::sync::{mpsc, oneshot, watch};
use tower::{limit::GlobalConcurrencyLimitLayer, util::option_layer};

use super::{
    client::{Call, Connected, Http},
    server::{End, watched},
};

/// The limit of waiters for one key. A leaked waiter would occupy a place of another one.
const WAITERS: usize = 2;

/// A request that has reached its handler.
struct Entry {
    lock: HeldLock,
    /// Sends the body of the response.
    answer: oneshot::Sender<Body>,
    /// Resolves when the handler is dropped.
    end: End,
}

impl Entry {
    #[track_caller]
    fn answer(self, body: impl Into<Body>) {
        assert!(
            self.answer.send(body.into()).is_ok(),
            "the handler has been dropped"
        );
    }
}

/// A route with an inner capacity of one request. The test controls its handlers.
struct Scene {
    store: Arc<FaultyStore>,
    /// While `true`, releases are delayed.
    releases_stopped: watch::Sender<bool>,
    locks: LockClient,
    server: Connected,
    arrivals: mpsc::UnboundedReceiver<End>,
    entries: mpsc::UnboundedReceiver<Entry>,
}

impl Scene {
    async fn of(http: Http, hold: HoldUntil) -> Self {
        Self::with(http, hold, None).await
    }

    /// Like [`Scene::of`], with a [`DetachLayer`] outside of the lock.
    async fn detached(http: Http, hold: HoldUntil) -> Self {
        Self::with(http, hold, Some(DetachLayer::new())).await
    }

    async fn with(http: Http, hold: HoldUntil, detach: Option<DetachLayer>) -> Self {
        let (releases_stopped, stopped) = watch::channel(false);
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), move |call| {
            let mut stopped = stopped.clone();
            async move {
                if matches!(call.operation, Operation::Release(_)) {
                    // An error means that the test is over.
                    let _ = stopped.wait_for(|stopped| !stopped).await;
                }
                call.execute().await
            }
        });
        let locks = LockClient::builder()
            .max_waiters(WAITERS)
            .build_with_store(store.clone())
            .unwrap();
        let (entered, entries) = mpsc::unbounded_channel();
        let handler = async move |lock: HeldLock| {
            let (answer, told) = oneshot::channel();
            let (_alive, end) = oneshot::channel();
            entered.send(Entry { lock, answer, end }).unwrap();
            told.await.unwrap()
        };
        let lock = LockLayer::new(locks.clone(), "order:{id}")
            .unwrap()
            .wait(LONG)
            .hold_until(hold);
        let route = post(handler).layer((
            option_layer(detach),
            lock,
            GlobalConcurrencyLimitLayer::new(1),
        ));
        let (app, arrivals) = watched(Router::new().route("/orders/{id}", route));
        let server = Connected::start(http, app).await;
        Self {
            store,
            releases_stopped,
            locks,
            server,
            arrivals,
            entries,
        }
    }

    /// Sends a request and waits until it has begun, with the end of its future in the server.
    async fn call(&mut self, path: &str) -> (Call, End) {
        let call = self.server.call(path);
        (call, self.arrivals.recv().await.unwrap())
    }

    /// Waits for the next request that reaches its handler.
    async fn entered(&mut self) -> Entry {
        self.entries.recv().await.unwrap()
    }

    async fn is_held(&self, key: &str) -> bool {
        !self.locks.inspect(key).await.unwrap().holders.is_empty()
    }

    fn stop_releases(&self, stopped: bool) {
        self.releases_stopped.send_replace(stopped);
    }

    /// Waits until `count` releases have been sent to the store.
    async fn releases(&self, count: usize) {
        let is_release = |operation: &Operation| matches!(operation, Operation::Release(_));
        self.store.wait_for(count, is_release).await;
    }

    /// Serves the request that was behind, and checks that nothing remains of either request.
    async fn ends_with(mut self, behind: Call) {
        self.serve_next(behind).await;
        self.ends().await;
    }

    async fn serve_next(&mut self, call: Call) {
        let entry = self.entered().await;
        assert!(!entry.lock.is_lost());
        entry.answer("served");
        let response = call.response().await.unwrap();
        assert_eq!(
            (
                response.status().as_u16(),
                response.text().await.unwrap().as_str()
            ),
            (200, "served")
        );
    }

    async fn ends(mut self) {
        assert!(
            self.entries.try_recv().is_err(),
            "no other request is served"
        );
        eventually("no holder and no waiter is left", || async {
            let left = self.locks.inspect("order:7").await.unwrap();
            left.holders.is_empty() && left.waiters.is_empty()
        })
        .await;
        let guard = self
            .locks
            .exclusive("order:7")
            .no_wait()
            .acquire()
            .await
            .unwrap();
        let waiting =
            [(); WAITERS].map(|()| begun(self.locks.exclusive("order:7").wait(LONG).acquire()));
        let waiting = futures_util::future::join_all(waiting).await;
        drop(waiting);
        guard.release().await.unwrap();
        for path in ["/orders/7", "/orders/8"] {
            let (call, _) = self.call(path).await;
            self.serve_next(call).await;
        }
    }
}

/// Waits until the server has dropped the request or the handler.
async fn dropped(end: End) {
    assert!(end.await.is_err());
}
