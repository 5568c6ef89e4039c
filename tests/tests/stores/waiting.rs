//! Waiting for a lock that is held: the order in which waiters are served, their delay, and the
//! cost of waiters that give up, die or miss a push message (rules 15 to 20 of docs/PROTOCOL.md).

mod crowds;
mod fairness;
mod freed;
mod given_up;
mod inherited;
mod order;
mod outage;
mod passing;
mod processes;
pub(crate) mod pushes;
mod stranded;

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    time::Duration,
};

use lock_runtime::{LockClient, LockGuard, future::AcquireFuture};
use lock_tests::{
    Captured,
    place::{LONG, Place, begun, eventually, no_key_left},
    shared_cluster, shared_server,
    traces::Event,
};

/// Much shorter than a lease of 30 s, and long enough for a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// Shorter than the regular pause between two polls, which is at least 750 ms.
const TOLD: Duration = Duration::from_millis(600);

/// Waits until the store's wait queue of `key` has this number of entries.
async fn in_line(locks: &LockClient, key: &str, places: usize) {
    let what = format!("{places} entries are in the wait queue of {key}");
    eventually(&what, async || {
        locks.inspect(key).await.unwrap().waiters.len() == places
    })
    .await;
}

/// Polls the waiters until `until` is done. None of them may be served before.
async fn driven<F, T>(waiting: &mut [F], until: impl Future<Output = T>) -> T
where
    F: Future<Output: fmt::Debug> + Unpin,
{
    let mut until = pin!(until);
    poll_fn(|cx| {
        for future in &mut *waiting {
            let polled = Pin::new(future).poll(cx);
            assert!(polled.is_pending(), "it should still wait: {polled:?}");
        }
        until.as_mut().poll(cx)
    })
    .await
}

/// The number of local hand-offs.
fn passes(traces: &Captured) -> usize {
    let is_pass = |event: &&Event| event.message == "handed off in this process";
    traces.events().iter().filter(is_pass).count()
}

/// Acquires and releases the lock, and returns its fencing token.
async fn pass_through(acquire: impl Future<Output = <AcquireFuture as Future>::Output>) -> u64 {
    let guard = acquire.await.unwrap();
    let fence = guard.fence().number();
    guard.release().await.unwrap();
    fence
}

/// A guard whose lock cannot be handed off locally, and a waiter of the same process. A release
/// within 50 ms requests the lock again for that waiter in the same step.
async fn may_hand_back(locks: &LockClient, key: &str) -> (LockGuard, Pin<Box<AcquireFuture>>) {
    let request = || locks.exclusive(key).wait(LONG);
    let guard = request().acquire().await.unwrap();
    // No waiter is behind `first` when it calls the store, so its grant reserves no fencing
    // tokens.
    let (first, second) = (
        begun(request().acquire()).await,
        begun(request().acquire()).await,
    );
    guard.release().await.unwrap();
    (first.await.unwrap(), second)
}

/// Waits until the keys have no holders and no queue entries. On Redis, only fencing tokens may
/// remain in the namespace.
async fn nothing_left(place: &Place, keys: &[&str]) {
    let locks = place.client().await;
    for key in keys {
        let is_free = async || {
            let found = locks.inspect(*key).await.unwrap();
            found.holders.is_empty() && found.waiters.is_empty()
        };
        eventually(
            &format!("{key} is free and its wait queue is empty"),
            is_free,
        )
        .await;
    }
    if let Place::Redis { url, namespace } = place {
        if url.contains("+cluster") {
            for node in shared_cluster().await.masters().await {
                no_key_left(node, namespace).await;
            }
        } else {
            no_key_left(shared_server().await, namespace).await;
        }
    }
}
