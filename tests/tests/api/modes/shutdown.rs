//! A client that is shut down refuses requests, ends those that wait, and releases locks whose
//! guards were dropped.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
    time::Duration,
};

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{
    Proxy,
    place::{LONG, Place, begun, in_time, on_every_store},
    shared_server,
};
use tokio::time::{Instant, sleep};

on_every_store! {
    new_requests_and_waiting_ones_are_sent_home,
    what_was_dropped_is_given_back_before_shutdown_ends,
    guards_in_hand_stay_and_are_renewed,
}

async fn new_requests_and_waiting_ones_are_sent_home(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..5 {
        waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    }
    let start = Instant::now();
    locks.shutdown().await;
    for waiting in waiting {
        assert_eq!(
            waiting.await.unwrap_err().kind(),
            LockErrorKind::ShuttingDown
        );
    }
    for request in [
        locks.exclusive("b"),
        locks.exclusive("b").no_wait(),
        locks.all(["b", "c"]).no_wait(),
    ] {
        assert_eq!(
            request.acquire().await.unwrap_err().kind(),
            LockErrorKind::ShuttingDown
        );
    }
    assert_eq!(
        locks.exclusive("b").try_acquire().await.unwrap_err().kind(),
        LockErrorKind::ShuttingDown
    );
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
    guard.release().await.unwrap();
}

async fn what_was_dropped_is_given_back_before_shutdown_ends(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let keys: Vec<String> = (0..50).map(|number| format!("a{number}")).collect();
    for key in &keys {
        drop(locks.exclusive(key).acquire().await.unwrap());
    }
    // A request whose reply has not arrived.
    let mut asking = locks.exclusive("b").acquire();
    drop(poll_fn(|cx| Poll::Ready(Pin::new(&mut asking).poll(cx))).await);
    drop(asking);
    locks.shutdown().await;
    for key in keys.iter().map(String::as_str).chain(["b"]) {
        others
            .exclusive(key)
            .try_acquire()
            .await
            .unwrap()
            .expect("given back")
            .release()
            .await
            .unwrap();
    }
}

async fn guards_in_hand_stay_and_are_renewed(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let lease = Duration::from_secs(1);
    let guard = locks.exclusive("a").lease(lease).acquire().await.unwrap();
    locks.shutdown().await;
    sleep(lease * 2).await;
    guard.verify().await.unwrap();
    assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("released")
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn shutdown_ends_also_when_the_store_is_silent() {
    in_time(async {
        let proxy = Proxy::to(shared_server().await).await;
        let locks = Place::at(proxy.url()).client().await;
        let guard = locks.exclusive("a").acquire().await.unwrap();
        proxy.black_hole();
        drop(guard);
        let start = Instant::now();
        locks.shutdown().await;
        assert!(start.elapsed() < LONG / 3, "{:?}", start.elapsed());
    })
    .await;
}

/// A guard may be dropped outside of any runtime, after the one that made it has ended.
#[test]
fn a_guard_that_outlives_its_runtime_is_given_back_on_the_next() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let locks = LockClient::in_memory();
    let first = runtime();
    let guard = first.block_on(async { locks.exclusive("a").acquire().await.unwrap() });
    drop(first);
    drop(guard);
    runtime().block_on(in_time(async {
        let start = Instant::now();
        locks.shutdown().await;
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "no task gave it back"
        );
        assert!(locks.inspect("a").await.unwrap().holders.is_empty());
    }));
}

/// A guard stays held and renewed when the runtime that made it ends and another takes over.
#[test]
fn a_guard_that_outlives_its_runtime_is_renewed_on_the_next() {
    for threads in [false, true] {
        let runtime = || match threads {
            true => tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap(),
            false => tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap(),
        };
        let lease = Duration::from_secs(1);
        let locks = LockClient::in_memory();
        let first = runtime();
        let guard =
            first.block_on(async { locks.exclusive("a").lease(lease).acquire().await.unwrap() });
        drop(first);
        runtime().block_on(in_time(async {
            // Any lease starts the background task again.
            locks
                .exclusive("b")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
            sleep(lease * 2).await;
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }));
    }
}
