//! Waiters are served despite the shutdown of a client, the end of a runtime or a release whose
//! future is forgotten.

use std::{
    future::Future as _,
    sync::Arc,
    task::{Context, Waker},
    thread,
    time::Duration,
};

use lock_runtime::LockClient;
use lock_tests::{
    Captured, RedisServer,
    place::{LONG, Place, in_time, on_every_store},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::sleep,
};

use super::in_line;

/// Shorter than [`LEASE`], so a waiter that gets the lock only at the end of that lease times out.
const PATIENCE: Duration = Duration::from_secs(6);
const LEASE: Duration = Duration::from_secs(60);
/// Longer than a request and its reply take without a fault.
const MOMENT: Duration = Duration::from_millis(30);

on_every_store! { a_client_that_is_shut_down_leaves_no_place_in_line }

async fn a_client_that_is_shut_down_leaves_no_place_in_line(place: Place) {
    let (one, two) = (place.client().await, place.client().await);
    let guard = one.exclusive("a").acquire().await.unwrap();
    let waiting = tokio::spawn(two.exclusive("a").wait(LONG).acquire());
    in_line(&one, "a", 1).await;
    two.shutdown().await;
    assert!(
        one.inspect("a").await.unwrap().waiters.is_empty(),
        "the next release would go to a client that was shut down"
    );
    waiting.await.unwrap().unwrap_err();
    guard.release().await.unwrap();
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

#[test]
fn acquire_continues_after_the_previous_runtime_has_ended() {
    let (first, second) = (runtime(), runtime());
    let server = Arc::new(second.block_on(RedisServer::start()));
    let locks = second.block_on(LockClient::connect(&server.url())).unwrap();
    // Starts the background task of the client on the first runtime.
    first.block_on(async {
        locks
            .exclusive("elsewhere")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap()
    });
    // The second request waits behind the first when that one is granted the lock, so the release
    // requests the lock again for it.
    server.stop();
    let request = || locks.exclusive("a").lease(LEASE).wait(PATIENCE);
    let (acquire, stops) = (request().acquire(), server.clone());
    let leaving = first.spawn(async move {
        let guard = acquire.await.unwrap();
        stops.stop();
        drop(guard);
    });
    thread::sleep(MOMENT);
    let waiting = second.spawn(request().acquire());
    thread::sleep(MOMENT);
    server.resume();
    second.block_on(leaving).unwrap();
    drop(first);
    server.resume();
    let guard = second
        .block_on(waiting)
        .unwrap()
        .expect("no other client uses the key");
    second.block_on(guard.release()).unwrap();
}

#[tokio::test]
async fn who_waits_goes_on_when_a_release_is_forgotten() {
    in_time(async {
        let server = Arc::new(RedisServer::start().await);
        let locks = LockClient::connect(&server.url()).await.unwrap();
        server.stop();
        // The forgotten release is never sent: the lock becomes free at the end of its lease.
        let request = || {
            locks
                .exclusive("a")
                .lease(Duration::from_secs(1))
                .wait(PATIENCE)
        };
        let (acquire, stops) = (request().acquire(), server.clone());
        let leaving = tokio::spawn(async move {
            let guard = acquire.await.unwrap();
            stops.stop();
            let mut release = Box::pin(guard.release());
            assert!(
                release
                    .as_mut()
                    .poll(&mut Context::from_waker(Waker::noop()))
                    .is_pending()
            );
            std::mem::forget(release);
        });
        sleep(MOMENT).await;
        let waiting = tokio::spawn(request().acquire());
        sleep(MOMENT).await;
        server.resume();
        leaving.await.unwrap();
        server.resume();
        waiting
            .await
            .unwrap()
            .expect("no other client uses the key")
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn acquire_all_requests_its_second_key_with_a_new_deadline() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let locks = LockClient::in_memory();
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let both = tokio::spawn(locks.all(["a", "b"]).wait(LONG).acquire());
        // Longer than the deadline of a single request.
        sleep(Duration::from_secs(3)).await;
        guard.release().await.unwrap();
        both.await.unwrap().unwrap().release().await.unwrap();
        let late = traces
            .events()
            .iter()
            .filter(|event| event.message == "waiting for the store")
            .count();
        assert_eq!(late, 0, "a request was late when it was sent");
    })
    .await;
}
