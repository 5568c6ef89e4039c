//! Work that is done once for a key, beside the plain lock and a bare `GET`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    routing::post,
};
use lock_runtime::{LockClient, LockGuard, OnceEntry, OnceGuard};
use lock_tests::redis_server::RedisServer;
use lock_tower::OnceLayer;
use redis::aio::MultiplexedConnection;
use tokio::time::sleep;
use tower::ServiceExt as _;

use crate::{
    contest::{Contest, LIMIT},
    raw::{self, Raw},
    report::Row,
    subject::{LEASE, Subject},
};

const TASKS: [usize; 2] = [1, 64];
const RESULT: &[u8] = b"receipt 7";
const KEEP: Duration = Duration::from_secs(60);
/// The time of a handler.
const WORK: Duration = Duration::from_millis(10);

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let raw = Raw::connect(&raw::client(&server.url())).await;
    let locks = LockClient::connect(&server.url())
        .await
        .expect("our own server answers");
    let mut rows = Vec::new();
    for tasks in TASKS {
        let first = Contest::new("once, first", tasks, slice)
            .servers([&server])
            .each(LIMIT, |task| Fresh::new(&locks, "plain", task))
            .each("once", |task| First(Fresh::new(&locks, "once", task)));
        rows.extend(first.run().await);
        for task in 0..tasks {
            let once = locks.once(format!("done:{task}"));
            let Ok(OnceEntry::Vacant(guard)) = once.begin().await else {
                panic!("the key is new");
            };
            guard.complete(RESULT).await.expect("it is held");
        }
        let replays = Contest::new("once, replay", tasks, slice)
            .servers([&server])
            .each(LIMIT, |task| Get {
                connection: raw.connection.clone(),
                key: format!("lock:done:{task}"),
            })
            .each("once", |task| Replay {
                locks: locks.clone(),
                key: format!("done:{task}"),
            });
        rows.extend(replays.run().await);
        for task in 0..tasks {
            let forgotten = locks.once(format!("done:{task}")).forget().await;
            forgotten.expect("our own server answers");
        }
    }
    let route = Contest::new("once, route", 1, slice)
        .servers([&server])
        .each(LIMIT, |_| Route::new(&locks, 1))
        .each("100 equal", |_| Route::new(&locks, 100));
    rows.extend(route.run().await);
    locks.shutdown().await;
    rows
}

/// A plain lock, of another key each time.
struct Fresh {
    locks: LockClient,
    key: String,
    number: AtomicU64,
}

impl Fresh {
    fn new(locks: &LockClient, kind: &str, task: usize) -> Self {
        Self {
            locks: locks.clone(),
            // Those of the rounds differ.
            key: format!("{kind}:{task}:{:x}", rand::random::<u64>()),
            number: AtomicU64::new(0),
        }
    }

    fn next(&self) -> String {
        format!(
            "{}:{}",
            self.key,
            self.number.fetch_add(1, Ordering::Relaxed)
        )
    }
}

impl Subject for Fresh {
    type Guard = LockGuard;

    async fn acquire(&self) -> LockGuard {
        let request = self.locks.exclusive(self.next()).lease(LEASE);
        request.acquire().await.expect("it is free")
    }

    async fn release(&self, guard: LockGuard) {
        guard.release().await.expect("it is held");
    }
}

/// The first run for a key.
struct First(Fresh);

impl Subject for First {
    type Guard = OnceGuard;

    async fn acquire(&self) -> OnceGuard {
        let once = self.0.locks.once(self.0.next()).lease(LEASE).keep(KEEP);
        match once.begin().await.expect("it is free") {
            OnceEntry::Vacant(guard) => guard,
            OnceEntry::Done(_) => panic!("the key is new"),
        }
    }

    async fn release(&self, guard: OnceGuard) {
        guard.complete(RESULT).await.expect("it is held");
    }
}

struct Replay {
    locks: LockClient,
    key: String,
}

impl Subject for Replay {
    type Guard = ();

    async fn acquire(&self) {
        let begun = self.locks.once(&*self.key).begin().await;
        assert!(matches!(begun, Ok(OnceEntry::Done(_))), "{begun:?}");
    }

    async fn release(&self, (): ()) {}
}

/// A route whose handler takes [`WORK`], with requests that are equal and come at once.
struct Route {
    app: Router,
    handled: Arc<AtomicU64>,
    requests: usize,
    number: AtomicU64,
}

impl Route {
    fn new(locks: &LockClient, requests: usize) -> Self {
        let handled = Arc::new(AtomicU64::new(0));
        let handler = {
            let handled = handled.clone();
            async move || {
                handled.fetch_add(1, Ordering::Relaxed);
                sleep(WORK).await;
                "receipt 7"
            }
        };
        let layer = OnceLayer::new(locks.clone(), "route:{header.idempotency-key}");
        let layer = layer.expect("a request can fill it");
        Self {
            app: Router::new().route("/payments", post(handler).layer(layer)),
            handled,
            requests,
            number: AtomicU64::new(rand::random::<u64>() / 2),
        }
    }
}

impl Subject for Route {
    type Guard = ();

    async fn acquire(&self) {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let before = self.handled.load(Ordering::Relaxed);
        let request = |_| {
            let request = Request::post("/payments").header("idempotency-key", number);
            let request = request.body(Body::from("5 EUR")).expect("it is valid");
            tokio::spawn(self.app.clone().oneshot(request))
        };
        for response in (0..self.requests).map(request).collect::<Vec<_>>() {
            let response = response.await.expect("no handler panics");
            let Ok(response) = response;
            assert_eq!(response.status(), StatusCode::OK);
        }
        assert_eq!(self.handled.load(Ordering::Relaxed), before + 1);
    }

    async fn release(&self, (): ()) {}
}

struct Get {
    connection: MultiplexedConnection,
    key: String,
}

impl Subject for Get {
    type Guard = ();

    async fn acquire(&self) {
        let mut connection = self.connection.clone();
        let value: redis::RedisResult<Option<Vec<u8>>> = redis::cmd("GET")
            .arg(&self.key)
            .query_async(&mut connection)
            .await;
        assert!(
            value.is_ok_and(|value| value.is_some()),
            "no value at {}",
            self.key
        );
    }

    async fn release(&self, (): ()) {}
}
