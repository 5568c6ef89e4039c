//! Waiting for a lock that others hold: in which order they are served, how soon, and what it costs when one of them gives up,
//! dies, or is not told (FAILURES 5, 7; PROTOCOL 15 to 20).

mod crowds;
mod fairness;
mod freed;
mod given_up;
mod inherited;
mod order;
mod outage;
mod passing;
mod processes;
mod pushes;
mod stranded;

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    time::Duration,
};

use lock_runtime::{AcquireFuture, LockClient, LockGuard};
use lock_tests::{Captured, shared_cluster, shared_server, traces::Event};

use crate::place::{LONG, Place, begun, eventually, no_key_left};

/// Much less than a lease of 30 s, much more than a busy machine needs.
const SOON: Duration = Duration::from_secs(10);

/// A poll's pause is 750 ms at least: what is served sooner was told.
const TOLD: Duration = Duration::from_millis(600);

/// Waits until so many places are taken in the store's line.
async fn in_line(locks: &LockClient, key: &str, places: usize) {
    let what = format!("{places} places are taken in the line of {key}");
    eventually(&what, async || {
        locks.inspect(key).await.unwrap().waiters.len() == places
    })
    .await;
}

/// Lets those who wait go on until `until` is done. None of them is done before.
async fn driven<F, T>(waiting: &mut [F], until: impl Future<Output = T>) -> T
where
    F: Future<Output: fmt::Debug> + Unpin,
{
    let mut until = pin!(until);
    poll_fn(|cx| {
        for future in &mut *waiting {
            let polled = Pin::new(future).poll(cx);
            assert!(polled.is_pending(), "it was to wait: {polled:?}");
        }
        until.as_mut().poll(cx)
    })
    .await
}

/// How often a lock was passed on without the store.
fn passes(traces: &Captured) -> usize {
    let is_pass = |event: &&Event| event.message == "handed off in this process";
    traces.events().iter().filter(is_pass).count()
}

/// Takes and gives back the lock, and says which fencing token it had.
async fn pass_through(acquire: impl Future<Output = <AcquireFuture as Future>::Output>) -> u64 {
    let guard = acquire.await.unwrap();
    let fence = guard.fence().number();
    guard.release().await.unwrap();
    fence
}

/// A guard that cannot be passed on, and is handed back for the one who waits here if it is released within 50 ms.
async fn may_hand_back(locks: &LockClient, key: &str) -> (LockGuard, Pin<Box<AcquireFuture>>) {
    let request = || locks.exclusive(key).wait(LONG);
    let guard = request().acquire().await.unwrap();
    // When it asks the store nobody waits behind it, so it gets no fencing token to spare.
    let (first, second) = (
        begun(request().acquire()).await,
        begun(request().acquire()).await,
    );
    guard.release().await.unwrap();
    (first.await.unwrap(), second)
}

/// Nobody holds any of the keys or stands in their lines, nor will in a moment. On Redis nothing at all is left but the fences.
async fn nothing_left(place: &Place, keys: &[&str]) {
    let locks = place.client().await;
    for key in keys {
        let is_free = async || {
            let found = locks.inspect(*key).await.unwrap();
            found.holders.is_empty() && found.waiters.is_empty()
        };
        eventually(
            &format!("{key} is free and nobody stands in its line"),
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
