//! Rule 15 after the death of a holder: every waiter acquires the lock once the lease has expired.

use std::time::Duration;

use lock_runtime::{LockClient, LockRequest, Mode, store::Store};
use lock_tests::shared_server;
use tokio::time::{Instant, timeout};

use super::{AcquireReply, HOUR, LONG, TWO_PERMITS, acquire, beside, both, fresh_hold, granted};

const LEASE: Duration = Duration::from_millis(400);

fn request(locks: &LockClient, key: &lock_runtime::LockKey, mode: Mode) -> LockRequest {
    match mode {
        Mode::Shared => locks.shared(key),
        Mode::Permits(permits) => locks.permits(key, permits),
        _ => locks.exclusive(key),
    }
}

// Rule 15.
#[tokio::test]
async fn who_waits_gets_the_lock_right_after_a_dead_holders_lease() {
    let mut waiters = tokio::task::JoinSet::new();
    for store in both().await {
        for (dead, waiting) in [
            (Mode::Exclusive, Mode::Exclusive),
            (Mode::Exclusive, Mode::Shared),
            (Mode::Shared, Mode::Exclusive),
            (TWO_PERMITS, TWO_PERMITS),
        ] {
            let locks = LockClient::with_store(store.clone());
            let store = store.clone();
            waiters.spawn(async move {
                let hold = fresh_hold(dead);
                let since = Instant::now();
                granted(&*store, &hold, LEASE).await;
                if dead == TWO_PERMITS {
                    // A live holder of the other permit.
                    granted(&*store, &beside(&hold.key, dead), HOUR).await;
                }
                let guard = timeout(
                    LONG,
                    request(&locks, &hold.key, waiting).wait(LONG).acquire(),
                )
                .await;
                let waited = since.elapsed();
                let guard = guard
                    .unwrap()
                    .unwrap_or_else(|error| panic!("{dead:?} {waiting:?}: {error}"));
                assert!(
                    waited >= LEASE.mul_f32(0.9),
                    "{dead:?} {waiting:?}: {waited:?}"
                );
                assert!(waited < LONG / 4, "{dead:?} {waiting:?}: {waited:?}");
                guard.release().await.unwrap();
            });
        }
    }
    waiters.join_all().await;
}

// Rule 15: many requests wait in the local queues of two clients, and all are served.
#[tokio::test]
async fn all_waiters_behind_a_dead_holder_get_their_turn() {
    let url = shared_server().await.url();
    let fleet = [
        LockClient::connect(&url).await.unwrap(),
        LockClient::connect(&url).await.unwrap(),
    ];
    let hold = fresh_hold(Mode::Exclusive);
    let store = super::redis_on(shared_server().await).await;
    granted(&*store, &hold, LEASE).await;
    let mut waiters = tokio::task::JoinSet::new();
    for number in 0..30 {
        let mode = if number % 3 == 0 {
            Mode::Shared
        } else {
            Mode::Exclusive
        };
        let request = request(&fleet[number % 2], &hold.key, mode).wait(LONG);
        waiters.spawn(async move { request.acquire().await.unwrap().release().await.unwrap() });
    }
    timeout(LONG, waiters.join_all()).await.unwrap();
}

// Rule 15, and failure 13 seen in other libraries.
#[tokio::test]
async fn a_crashed_reader_does_not_outlive_the_living() {
    for store in both().await {
        let dead = fresh_hold(Mode::Shared);
        let alive = beside(&dead.key, Mode::Shared);
        granted(&*store, &dead, Duration::from_millis(100)).await;
        granted(&*store, &alive, HOUR).await;
        let writer = beside(&dead.key, Mode::Exclusive);
        until_one_is_left(&*store, &dead).await;
        assert!(
            matches!(
                acquire(&*store, &writer, HOUR).await,
                AcquireReply::Busy { .. }
            ),
            "one is alive: {store:?}"
        );
        store
            .release(&lock_runtime::store::Release::new(alive))
            .await
            .unwrap();
        granted(&*store, &writer, HOUR).await;
    }
}

async fn until_one_is_left(store: &dyn Store, hold: &super::Hold) {
    super::eventually("the dead one falls out", async || {
        super::inspect(store, hold).await.holders.len() == 1
    })
    .await;
}
