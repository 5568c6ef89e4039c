//! Reloads of policies while requests are served.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use futures_util::future::join_all;
use lock_runtime::{HeldLock, LockClient};
use lock_tower::{LockPolicies, PolicyLayer};
use tokio::{sync::Semaphore, time::timeout};

use crate::layer::server::Server;

/// Longer than any of these tests takes, and shorter than the default lease.
const PROMPTLY: Duration = Duration::from_secs(10);

async fn named(lock: Option<HeldLock>) -> String {
    lock.map_or("none".into(), |lock| lock.key().to_string())
}

#[tokio::test]
async fn policy_file_reload_leaves_requests_under_their_policy() {
    let locks = LockClient::in_memory();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("locks.toml");
    let write = |says: &str| {
        std::fs::write(&file, format!("routes.'/orders/{{id}}' = {{ {says} }}")).unwrap()
    };
    write("key = 'order:{id}', wait = '1h', hold_until = 'response'");
    let policies = LockPolicies::from_file(&file).unwrap();
    let (entered, leave) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let handler = {
        let (entered, leave) = (entered.clone(), leave.clone());
        async move |lock: Option<HeldLock>| {
            entered.add_permits(1);
            leave.acquire().await.unwrap().forget();
            named(lock).await
        }
    };
    let app = Router::new().route("/orders/{id}", post(handler));
    let server = Server::start(app.layer(PolicyLayer::new(locks.clone(), policies.clone()))).await;
    let enters = async || entered.acquire().await.unwrap().forget();

    let holds = server.send("POST", "/orders/7", &[]).await;
    enters().await;
    let waits = server.send("POST", "/orders/7", &[]).await;
    // Requests on different connections arrive in any order. A full wait queue shows that the
    // second one has arrived.
    let stands = async {
        let probe = || {
            locks
                .exclusive("order:7")
                .max_waiters(0)
                .wait(Duration::from_millis(1))
        };
        while !matches!(probe().acquire().await, Err(error) if error.code() == "overloaded") {}
    };
    timeout(PROMPTLY, stands).await.expect("the request waits");

    write("key = 'order:{id}', no_wait = true, status = { busy = 423 }");
    policies.reload().unwrap();
    let response = timeout(PROMPTLY, server.post("/orders/7"))
        .await
        .expect("refused at once");
    assert_eq!(
        (response.status, response.problem().as_str()),
        (423, "contended")
    );
    write("skip = true");
    policies.reload().unwrap();
    let skipped = server.send("POST", "/orders/7", &[]).await;
    timeout(PROMPTLY, enters())
        .await
        .expect("served without the lock");
    leave.add_permits(3);
    assert_eq!(skipped.response().await.unwrap().body, "none");
    assert_eq!(holds.response().await.unwrap().body, "order:7");
    assert_eq!(waits.response().await.unwrap().body, "order:7");
}

#[tokio::test]
async fn no_request_that_comes_after_a_reload_is_served_as_before() {
    let locks = LockClient::in_memory();
    let text = |number| format!("routes.'/orders/{{id}}' = {{ key = 'v{number}:{{id}}' }}");
    let policies = LockPolicies::from_toml_str(&text(0)).unwrap();
    let app = Router::new().route("/orders/{id}", post(named));
    let server = Server::start(app.layer(PolicyLayer::new(locks, policies.clone()))).await;
    for number in 1..200 {
        policies.replace(&text(number)).unwrap();
        assert_eq!(server.post("/orders/7").await.body, format!("v{number}:7"));
        assert!(policies.replace("routes = 1").is_err());
        assert_eq!(server.post("/orders/7").await.body, format!("v{number}:7"));
    }
}

/// Another thread reloads during a storm: each request is served, under its lock, and no two run at
/// the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_storm_with_reloads_in_it_loses_none() {
    const REQUESTS: usize = 400;
    let text = |number: usize| {
        let extra = [
            "hold_until = 'body'",
            "mode = 'exclusive'",
            "max_waiters = 1000",
            "lease = '20s'",
        ][number % 4];
        format!(
            "routes.'/orders/{{id}}' = {{ name = 'v{number}', key = 'order:{{id}}', wait = '1h', {extra} }}"
        )
    };
    let policies = LockPolicies::from_toml_str(&text(0)).unwrap();
    let inside = Arc::new(AtomicUsize::new(0));
    let handler = {
        let inside = inside.clone();
        async move |lock: Option<HeldLock>| {
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at once");
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            named(lock).await
        }
    };
    let app = Router::new().route("/orders/{id}", post(handler));
    let locks = LockClient::in_memory();
    let server = Server::start(app.layer(PolicyLayer::new(locks, policies.clone()))).await;
    let over = Arc::new(AtomicBool::new(false));
    let reloads = std::thread::spawn({
        let over = over.clone();
        move || {
            let mut number = 0;
            while !over.load(Ordering::Relaxed) {
                number += 1;
                policies.replace(&text(number)).unwrap();
            }
            number
        }
    });
    for _ in 0..REQUESTS / 40 {
        for response in join_all((0..40).map(|_| server.post("/orders/7"))).await {
            assert_eq!((response.status, response.body.as_str()), (200, "order:7"));
        }
    }
    over.store(true, Ordering::Relaxed);
    assert!(reloads.join().unwrap() > 10);
}
