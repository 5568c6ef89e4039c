//! Releases that servers of a majority do not execute or answer, and `min_hold`.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use lock_runtime::{
    LockClient, LockSpec,
    store::{MemoryStore, QuorumMember, QuorumStore, Store, StoreError, StoreErrorKind},
};
use lock_tests::{
    FaultyStore,
    faulty_store::{Call, Operation, Outcome},
    place::{LONG, Place},
};
use tokio::time::Instant;

const MIN_HOLD: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_secs(60);
/// From the end of a reservation until a waiter has the lock.
const SOON: Duration = Duration::from_secs(2);

/// Three stores in this process, whose operations a test handles.
pub(super) struct Three(pub(super) [Arc<FaultyStore>; 3]);

impl Three {
    /// The `hook` receives the number of the server with each call.
    pub(super) fn new(
        hook: impl Fn(usize, Call) -> BoxFuture<'static, Outcome> + Clone + Send + Sync + 'static,
    ) -> Self {
        Self([0, 1, 2].map(|number| {
            let hook = hook.clone();
            FaultyStore::new(Arc::new(MemoryStore::new()), move |call| hook(number, call))
        }))
    }

    pub(super) fn store(&self) -> Arc<dyn Store> {
        let members = self.0.iter().enumerate();
        let members = members
            .map(|(number, store)| (number.to_string(), store.clone() as Arc<dyn QuorumMember>));
        Arc::new(QuorumStore::new(members, LockSpec::MAX_LEASE).expect("three are an odd number"))
    }

    pub(super) fn client(&self) -> LockClient {
        LockClient::with_store(self.store())
    }
}

pub(super) fn cut() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "cut")
}

/// The time from the grant of a lock, which is released at once, to the next grant.
async fn kept_for(locks: &LockClient, others: &LockClient) -> Duration {
    let request = locks.exclusive("a").lease(LEASE).min_hold(MIN_HOLD);
    let guard = request.acquire().await.expect("it is free");
    let granted = Instant::now();
    let _ = guard.release().await;
    let next = others.exclusive("a").wait(LEASE * 2).acquire().await;
    drop(next.expect("it is free in time"));
    granted.elapsed()
}

#[tokio::test(start_paused = true)]
async fn min_hold_outlives_lost_releases() {
    for lost in 0..=3 {
        for executes in [false, true] {
            let three = Three::new(move |server, call| {
                Box::pin(async move {
                    let is_release = matches!(call.operation, Operation::Release(_));
                    if !is_release || server >= lost || call.nth > 0 {
                        return call.execute().await;
                    }
                    if executes {
                        call.execute().await?;
                    }
                    Err(cut())
                })
            });
            let kept = kept_for(&three.client(), &three.client()).await;
            assert!(
                (MIN_HOLD..MIN_HOLD + SOON).contains(&kept),
                "{lost} releases are lost, executed: {executes}: {kept:?}"
            );
        }
    }
}

/// A `min_hold` counts from the grant, however late the release arrives.
#[tokio::test(start_paused = true)]
async fn an_outage_does_not_lengthen_min_hold() {
    let start = Instant::now();
    let fails = move |call: Call| async move {
        let ends = matches!(
            call.operation,
            Operation::Release(_) | Operation::Abandon(_)
        );
        if ends && start.elapsed() < MIN_HOLD * 3 / 4 {
            return Err(cut());
        }
        call.execute().await
    };
    let three = Three::new(move |_, call| Box::pin(fails(call)));
    let one = FaultyStore::new(Arc::new(MemoryStore::new()), fails);
    let one = || LockClient::with_store(one.clone());
    let (of_three, of_one) = tokio::join!(
        async { kept_for(&three.client(), &three.client()).await },
        async { kept_for(&one(), &one()).await }
    );
    for kept in [of_three, of_one] {
        assert!((MIN_HOLD..MIN_HOLD + SOON).contains(&kept), "{kept:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn min_hold_is_kept_among_many_waiters() {
    let place = Place::majority();
    lock_conformance::min_hold_outlives_lost_releases(&async || place.store().await).await;
}

/// A request for several keys that fails reserves none of those that it had acquired.
#[tokio::test(start_paused = true)]
async fn a_request_for_several_keys_that_fails_reserves_nothing() {
    for place in [Place::memory(), Place::majority()] {
        let (locks, others) = (place.client().await, place.client().await);
        let held = others.exclusive("b").acquire().await.unwrap();
        for wait in [None, Some(Duration::from_secs(1))] {
            let several = locks.all(["a", "b"]).min_hold(MIN_HOLD);
            let several = match wait {
                Some(wait) => several.wait(wait),
                None => several.no_wait(),
            };
            several.acquire().await.unwrap_err();
            let start = Instant::now();
            let free = others.exclusive("a").wait(LONG).acquire().await.unwrap();
            assert!(start.elapsed() < SOON, "{wait:?}: {:?}", start.elapsed());
            free.release().await.unwrap();
        }
        held.release().await.unwrap();
        // All of them are kept from the grant of the last one on.
        let guard = locks.all(["a", "b"]).min_hold(MIN_HOLD).acquire().await;
        let granted = Instant::now();
        guard.unwrap().release().await.unwrap();
        for key in ["a", "b"] {
            let next = others.exclusive(key).wait(LEASE).acquire().await;
            drop(next.unwrap());
            assert!(
                granted.elapsed() >= MIN_HOLD,
                "{key}: {:?}",
                granted.elapsed()
            );
        }
    }
}
