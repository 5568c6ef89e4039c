//! First come, first served within a process, and no request overtakes the waiters.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lock_runtime::{LockClient, store::MemoryStore};
use lock_tests::{
    Captured, FaultyStore,
    faulty_store::Operation,
    place::{LONG, Place, begun, eventually, in_time, on_every_store},
};
use tokio::{sync::mpsc, task::JoinSet};

on_every_store! {
    acquire_serves_a_hundred_waiters_in_order,
    acquire_given_up_leaves_the_queue_to_the_next,
    try_acquire_does_not_overtake_waiters,
}

async fn acquire_serves_a_hundred_waiters_in_order(place: Place) {
    let locks = place.client().await;
    let first = locks.exclusive("a").acquire().await.unwrap();
    let (served, mut order) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for number in 0..100 {
        let waiting = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let served = served.clone();
        tasks.spawn(async move {
            let guard = waiting.await.unwrap();
            served.send(number).unwrap();
            guard.release().await.unwrap();
        });
    }
    first.release().await.unwrap();
    for expected in 0..100 {
        assert_eq!(order.recv().await, Some(expected));
    }
    tasks.join_all().await;
}

async fn acquire_given_up_leaves_the_queue_to_the_next(place: Place) {
    let locks = place.client().await;
    let first = locks.exclusive("a").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..10 {
        waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    }
    let last = waiting.pop().unwrap();
    // The head, some in the middle, and each next head.
    for index in [0, 4, 2] {
        drop(waiting.remove(index));
        tokio::task::yield_now().await;
    }
    first.release().await.unwrap();
    drop(waiting);
    last.await.unwrap().release().await.unwrap();
}

async fn try_acquire_does_not_overtake_waiters(place: Place) {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let (locks, others) = (place.client().await, place.client().await);
    let guard = others.exclusive("a").acquire().await.unwrap();
    let waiting = tokio::spawn(locks.exclusive("a").wait(LONG).acquire());
    traces
        .wait_for(|event| event.message == "waiting for its holder")
        .await;
    guard.release().await.unwrap();
    // The store would grant it now, and the waiter polls only now and then.
    assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
    assert!(locks.all(["a", "b"]).try_acquire().await.unwrap().is_none());
    waiting.await.unwrap().unwrap().release().await.unwrap();
    locks
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("no waiter is left")
        .release()
        .await
        .unwrap();
}

/// Rules 17 and 1 of docs/PROTOCOL.md: the next waiter takes over the token of the waiter before
/// it, unless a request with that token is still without a reply.
#[tokio::test(start_paused = true)]
async fn acquire_inherits_a_queue_entry_and_no_token_in_doubt() {
    in_time(async {
        let (store, silent) = silent_store();
        let (locks, others) = (
            LockClient::with_store(store.clone()),
            LockClient::with_store(store.clone()),
        );
        let guard = others.exclusive("a").acquire().await.unwrap();
        let held = store.requests().len();

        let head = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let next = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let queued = store.requests().len();
        assert_eq!(queued, held + 1, "only the head sends a request");
        drop(head);
        let next = tokio::spawn(next);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(
            store.requests().len(),
            queued,
            "the entry was inherited, and is kept by polls"
        );
        assert_eq!(locks.inspect("a").await.unwrap().waiters.len(), 1);
        next.abort();
        eventually("the last waiter gives up the entry", async || {
            locks.inspect("a").await.unwrap().waiters.is_empty()
        })
        .await;

        // The head is dropped while the store has its request.
        silent.store(true, Ordering::Relaxed);
        let head = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let next = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        drop(head);
        silent.store(false, Ordering::Relaxed);
        let in_doubt = &store.requests()[queued..];
        assert_eq!(in_doubt.len(), 1);
        let next = tokio::spawn(next);
        guard.release().await.unwrap();
        let guard = next.await.unwrap().unwrap();
        let later = &store.requests()[queued + 1..];
        let token = in_doubt[0].hold.token;
        assert!(
            !later.is_empty() && later.iter().all(|request| request.hold.token != token),
            "a token in doubt was used"
        );
        guard.release().await.unwrap();
    })
    .await;
}

/// A store in this process. The acquire requests that it receives while the flag is set are lost.
pub(super) fn silent_store() -> (Arc<FaultyStore>, Arc<AtomicBool>) {
    let silent = Arc::new(AtomicBool::new(false));
    let flag = silent.clone();
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), move |call| {
        let silent = flag.load(Ordering::Relaxed);
        async move {
            if silent && matches!(call.operation, Operation::Acquire(_)) {
                pending::<()>().await;
            }
            call.execute().await
        }
    });
    (store, silent)
}
