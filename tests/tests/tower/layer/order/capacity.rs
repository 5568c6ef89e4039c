//! `ConcurrencyLimit`, `LoadShed` and `Buffer`.

use std::sync::Arc;

use axum::{
    error_handling::HandleErrorLayer,
    routing::{MethodRouter, post},
};
use lock_runtime::{HeldLock, LockClient};
use lock_tests::{FencedResource, place::in_time};
use tokio::{
    sync::{Barrier, mpsc, oneshot},
    task::JoinSet,
};
use tower::{
    buffer::BufferLayer,
    limit::{ConcurrencyLimitLayer, GlobalConcurrencyLimitLayer},
    load_shed::LoadShedLayer,
};

use super::{app, is_free_at_once, orders, shed};
use crate::layer::{
    client::{Connected, Http},
    server::{Server, watched},
};

/// The status of a request for a free lock while others wait for one that is held.
async fn beside_a_hot_key(route: MethodRouter, locks: &LockClient) -> u16 {
    let (app, mut arrivals) = watched(app(route));
    let server = Server::start(app).await;
    let hot = locks.exclusive("order:1").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(server.send("POST", "/orders/1", &[]).await);
        arrivals.recv().await.unwrap();
    }
    let status = server.post("/orders/7").await.status;
    hot.release().await.unwrap();
    for sent in waiting {
        assert_eq!(sent.response().await.unwrap().status, 200);
    }
    status
}

#[tokio::test]
async fn a_limit_within_counts_none_that_wait_and_one_outside_does() {
    let locks = LockClient::in_memory();
    let limit = || (LoadShedLayer::new(), GlobalConcurrencyLimitLayer::new(2));
    let errors = || HandleErrorLayer::new(shed);
    let within = post(async || "served").layer((errors(), orders(&locks), limit()));
    assert_eq!(beside_a_hot_key(within, &locks).await, 200);
    let outside = post(async || "served").layer((errors(), limit(), orders(&locks)));
    assert_eq!(
        beside_a_hot_key(outside, &locks).await,
        507,
        "a hot key exhausts the limit"
    );
}

/// A handler that waits for the test. Each entry is a sender that ends one call.
fn slow() -> (MethodRouter, mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let (entered, entries) = mpsc::unbounded_channel();
    let handler = async move || {
        let (go_on, told) = oneshot::channel();
        entered.send(go_on).unwrap();
        let _ = told.await;
    };
    (post(handler), entries)
}

#[tokio::test]
async fn within_the_lock_load_is_shed_and_the_lock_freed() {
    let locks = LockClient::in_memory();
    let (route, mut entries) = slow();
    let limit = (LoadShedLayer::new(), GlobalConcurrencyLimitLayer::new(1));
    let server = Server::start(app(route.layer((
        HandleErrorLayer::new(shed),
        orders(&locks),
        limit,
    ))))
    .await;
    let first = server.send("POST", "/orders/1", &[]).await;
    let go_on = entries.recv().await.unwrap();
    let response = server.post("/orders/7").await;
    assert_eq!(
        (response.status, response.body.as_str()),
        (507, "service overloaded")
    );
    assert!(is_free_at_once(&locks).await);
    go_on.send(()).unwrap();
    assert_eq!(first.response().await.unwrap().status, 200);
}

/// `LoadShed` has no effect outside of the lock, and none inside if each layer is added by its own
/// `.layer`: axum makes each of these services always ready.
#[tokio::test]
async fn what_is_always_ready_is_never_shed() {
    let locks = LockClient::in_memory();
    let limit = GlobalConcurrencyLimitLayer::new(1);
    let outside = |route: MethodRouter| {
        route.layer((
            HandleErrorLayer::new(shed),
            LoadShedLayer::new(),
            orders(&locks),
            limit.clone(),
        ))
    };
    let one_by_one = |route: MethodRouter| {
        let limited: MethodRouter = route.layer(limit.clone());
        let shedding: MethodRouter =
            limited.layer((HandleErrorLayer::new(shed), LoadShedLayer::new()));
        shedding.layer(orders(&locks))
    };
    for layered in [
        &outside as &dyn Fn(MethodRouter) -> MethodRouter,
        &one_by_one,
    ] {
        let (route, mut entries) = slow();
        let (app, mut arrivals) = watched(app(layered(route)));
        let server = Server::start(app).await;
        let mut sent = Vec::new();
        for path in ["/orders/1", "/orders/7"] {
            sent.push(server.send("POST", path, &[]).await);
            arrivals.recv().await.unwrap();
        }
        for sent in sent {
            entries.recv().await.unwrap().send(()).unwrap();
            assert_eq!(sent.response().await.unwrap().status, 200);
        }
    }
}

/// The documentation asks for `GlobalConcurrencyLimit` on a route because axum applies the layers
/// of a route anew for each connection.
#[tokio::test]
async fn a_limit_that_is_not_global_is_one_for_each_connection() {
    in_time(async {
        let locks = LockClient::in_memory();
        let barrier = Arc::new(Barrier::new(2));
        let meet = post(async move || barrier.wait().await.is_leader().to_string());
        let server = Server::start(app(
            meet.layer((orders(&locks), ConcurrencyLimitLayer::new(1)))
        ))
        .await;
        let (one, other) = tokio::join!(server.post("/orders/1"), server.post("/orders/2"));
        assert_eq!((one.status, other.status), (200, 200));
    })
    .await;
}

#[tokio::test]
async fn layer_behind_or_before_a_buffer_serves_one_after_another() {
    const REQUESTS: u64 = 40;
    let locks = LockClient::in_memory();
    let buffer = || BufferLayer::new(1);
    let errors = || HandleErrorLayer::new(shed);
    let outside = |route: MethodRouter| route.layer((errors(), buffer(), orders(&locks)));
    let within = |route: MethodRouter| route.layer((errors(), orders(&locks), buffer()));
    for layered in [&outside as &dyn Fn(MethodRouter) -> MethodRouter, &within] {
        let stock = Arc::new(FencedResource::new());
        let handler = {
            let stock = stock.clone();
            async move |lock: HeldLock| {
                if lock.key().as_str() == "order:7" {
                    stock.increment(lock.fence()).await.unwrap();
                }
            }
        };
        // All requests share one connection, and so one buffer.
        let server = Arc::new(Connected::start(Http::Two, app(layered(post(handler)))).await);
        let mut requests = JoinSet::new();
        let held = locks.exclusive("order:7").acquire().await.unwrap();
        for _ in 0..REQUESTS {
            let server = server.clone();
            requests.spawn(async move { server.post("/orders/7").await.status() });
        }
        assert_eq!(
            server.post("/orders/8").await.status(),
            200,
            "waiters of another lock do not block it"
        );
        held.release().await.unwrap();
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
        assert!(is_free_at_once(&locks).await);
    }
}
