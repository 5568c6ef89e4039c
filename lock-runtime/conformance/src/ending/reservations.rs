//! The time for which a lock is kept after an early release (`min_hold`).

use std::{
    iter,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lock_runtime::{
    LockClient, LockGuard,
    store::{Listener, Store},
    time::Instant,
};
use tokio::task::JoinSet;

use crate::{
    intercepted::{Fate, Intercepted},
    subject::{LONG, Subject, in_time, promise, unique},
};

const KEPT: &str = "a lock is kept for its min_hold, whatever release calls are lost";
const MIN_HOLD: Duration = Duration::from_millis(100);
/// The requests of each client.
const REQUESTS: usize = 3;

/// Checks that a lock that is released early is granted to no other request before its `min_hold`
/// has passed, although each release is lost once: before its execution or after it. The requests
/// are several of each of two clients. The guards are released, dropped, or their release is.
///
/// # Panics
/// If the store breaks this promise.
pub async fn min_hold_outlives_lost_releases(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let stores = [make().await, make().await];
    in_time(async {
        for lost in [Fate::Answered, Fate::Unsent, Fate::Unanswered] {
            kept_in_turn(&stores, lost).await;
        }
    })
    .await;
}

/// Every second release gets no reply, the first one included.
fn losing(store: &Arc<dyn Store>, lost: Fate) -> LockClient {
    let calls = AtomicUsize::new(0);
    let decide = move |_: &_| match calls.fetch_add(1, Ordering::Relaxed) % 2 {
        0 => lost,
        _ => Fate::Answered,
    };
    let pass = Arc::new(|event: &_, listener: &Arc<dyn Listener>| {
        listener.on_event(event);
    });
    Subject::over(Intercepted::losing(store.clone(), pass, Arc::new(decide))).client()
}

async fn kept_in_turn(stores: &[Arc<dyn Store>; 2], lost: Fate) {
    let clients = stores.each_ref().map(|store| losing(store, lost));
    let key = unique();
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for number in 0..REQUESTS {
        for locks in &clients {
            let request = locks.exclusive(&key).min_hold(MIN_HOLD).wait(LONG);
            tasks.spawn(async move {
                let guard = request.acquire().await.expect("the lock is free in time");
                let granted = Instant::now();
                ends(guard, number).await;
                granted
            });
        }
    }
    let mut granted = tasks.join_all().await;
    granted.sort();
    // No grant is before the end of the `min_hold` of the one before it.
    let earliest = iter::successors(Some(start), |earliest| Some(*earliest + MIN_HOLD));
    for (number, (granted, earliest)) in granted.into_iter().zip(earliest).enumerate() {
        promise!(
            KEPT,
            granted >= earliest,
            "{lost:?}: grant {number} came {:?} too early",
            earliest - granted
        );
    }
}

/// Ends a guard, in a way that depends on the number.
async fn ends(guard: LockGuard, number: usize) {
    match number % 3 {
        // Its error is that of the lost reply.
        0 => drop(guard.release().await),
        1 => drop(guard),
        _ => {
            let _ = tokio::time::timeout(Duration::ZERO, guard.release()).await;
        }
    }
}
