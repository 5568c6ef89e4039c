//! Facts about a hold, for metrics: the number of its renewals, and whether the request had to
//! wait.

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use lock_runtime::{LockClient, LockGuard, LockRequest, store::MemoryStore};
use lock_tests::{
    Captured, FaultyStore,
    faulty_store::Operation,
    place::{LONG, Place, begun, eventually, in_time, on_every_store},
};

use super::line::silent_store;

on_every_store! {
    renewals_are_counted_for_all_keys,
    what_is_not_renewed_has_no_renewals,
    a_lock_that_is_free_is_not_contended,
    a_lock_of_another_holder_is_contended,
    a_lock_that_is_passed_on_is_contended,
    one_key_of_several_is_enough,
    a_lock_that_is_entered_again_is_not_contended,
    a_downgraded_lock_is_as_contended_as_before;
    with permits:
    permits_are_contended_when_all_are_taken,
}

/// Long enough to be kept on a busy machine.
const LEASE: Duration = Duration::from_secs(1);

async fn renewals_are_counted_for_all_keys(place: Place) {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = place.client().await;
    let (one, two) = (
        locks.exclusive("c").lease(LEASE),
        locks.all(["a", "b"]).lease(LEASE),
    );
    let (one, two) = (one.acquire().await.unwrap(), two.acquire().await.unwrap());
    assert_eq!((one.renewals(), two.renewals()), (0, 0));
    // These are not renewals.
    one.verify().await.unwrap();
    two.extend(LEASE).await.unwrap();
    eventually("each is renewed twice", async || {
        one.renewals() >= 2 && two.renewals() >= 4
    })
    .await;
    let told = |keys: &[&str]| {
        let renewed = traces
            .events()
            .into_iter()
            .filter(|event| event.message == "renewed");
        renewed
            .filter(|event| keys.contains(&event.field("key").unwrap()))
            .count() as u64
    };
    assert_eq!(
        (one.renewals(), two.renewals()),
        (told(&["c"]), told(&["a", "b"]))
    );
    let view = two.held();
    two.release().await.unwrap();
    assert!(
        view.renewals() >= 4,
        "the count stays when the lock is gone"
    );
    one.release().await.unwrap();
    let again = locks.exclusive("c").acquire().await.unwrap();
    assert_eq!(again.renewals(), 0);
    again.release().await.unwrap();
}

async fn what_is_not_renewed_has_no_renewals(place: Place) {
    let locks = place.client().await;
    let guard = locks
        .exclusive("a")
        .lease(LEASE)
        .no_renew()
        .acquire()
        .await
        .unwrap();
    guard.lost().await;
    assert_eq!(guard.renewals(), 0);
}

/// Acquires and releases, and returns whether the lock was contended.
async fn contended(request: LockRequest) -> bool {
    let guard = request.wait(LONG).acquire().await.unwrap();
    was_contended(guard).await
}

async fn was_contended(guard: LockGuard) -> bool {
    assert_eq!(guard.held().was_contended(), guard.was_contended());
    let contended = guard.was_contended();
    guard.release().await.unwrap();
    contended
}

async fn a_lock_that_is_free_is_not_contended(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for _ in 0..3 {
        for request in [
            locks.exclusive("a"),
            locks.shared("a"),
            locks.all(["a", "b"]),
        ] {
            assert!(!contended(request.clone()).await, "{request:?}");
            assert!(!was_contended(request.no_wait().acquire().await.unwrap()).await);
        }
    }
    // Readers do not block each other.
    let reader = others.shared("a").acquire().await.unwrap();
    let another = locks.shared("a").acquire().await.unwrap();
    assert!(!contended(locks.shared("a")).await);
    assert!(!was_contended(another).await);
    reader.release().await.unwrap();
}

async fn a_lock_of_another_holder_is_contended(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for (held, wanted) in [
        (others.exclusive("a"), locks.exclusive("a")),
        (others.exclusive("a"), locks.shared("a")),
        (others.shared("a"), locks.exclusive("a")),
        (locks.exclusive("a"), locks.shared("a")),
        (locks.shared("a"), locks.exclusive("a")),
    ] {
        let guard = held.acquire().await.unwrap();
        let waiting = tokio::spawn(contended(wanted.clone()));
        eventually("it stands in line", async || {
            !locks.inspect("a").await.unwrap().waiters.is_empty()
        })
        .await;
        guard.release().await.unwrap();
        assert!(waiting.await.unwrap(), "{wanted:?}");
    }
    // The next request is not contended again.
    assert!(!contended(locks.exclusive("a")).await);
}

async fn a_lock_that_is_passed_on_is_contended(place: Place) {
    let locks = place.client().await;
    for request in [locks.exclusive("a"), locks.exclusive("a").strict_order()] {
        let guard = request.clone().acquire().await.unwrap();
        let head = begun(contended(request.clone())).await;
        let behind = begun(contended(request.clone())).await;
        eventually("it stands in line", async || {
            !locks.inspect("a").await.unwrap().waiters.is_empty()
        })
        .await;
        guard.release().await.unwrap();
        let (head, behind) = tokio::join!(head, behind);
        assert!(head && behind, "{request:?}");
    }
    assert!(!contended(locks.exclusive("a")).await);
}

async fn one_key_of_several_is_enough(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for held in ["a", "b", "c"] {
        let guard = others.exclusive(held).acquire().await.unwrap();
        let waiting = tokio::spawn(contended(locks.all(["a", "b", "c"])));
        eventually("it stands in line", async || {
            !locks.inspect(held).await.unwrap().waiters.is_empty()
        })
        .await;
        guard.release().await.unwrap();
        assert!(waiting.await.unwrap(), "{held}");
    }
}

async fn a_lock_that_is_entered_again_is_not_contended(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = others.exclusive("a").acquire().await.unwrap();
    let waiting = tokio::spawn(locks.reentrant("a").wait(LONG).acquire());
    eventually("it stands in line", async || {
        !locks.inspect("a").await.unwrap().waiters.is_empty()
    })
    .await;
    guard.release().await.unwrap();
    let outer = waiting.await.unwrap().unwrap();
    outer
        .scope(async { assert!(!contended(locks.reentrant("a")).await) })
        .await;
    assert!(was_contended(outer).await);
}

async fn a_downgraded_lock_is_as_contended_as_before(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let free = locks
        .exclusive("a")
        .acquire()
        .await
        .unwrap()
        .downgrade()
        .await
        .unwrap();
    assert!(!was_contended(free).await);
    let guard = others.exclusive("a").acquire().await.unwrap();
    let waiting = tokio::spawn(locks.exclusive("a").wait(LONG).acquire());
    eventually("it stands in line", async || {
        !locks.inspect("a").await.unwrap().waiters.is_empty()
    })
    .await;
    guard.release().await.unwrap();
    assert!(was_contended(waiting.await.unwrap().unwrap().downgrade().await.unwrap()).await);
}

async fn permits_are_contended_when_all_are_taken(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let request = |locks: &LockClient| locks.permits("a", 2.try_into().unwrap()).wait(LONG);
    let first = request(&others).acquire().await.unwrap();
    assert!(!contended(request(&locks)).await);
    let second = request(&others).acquire().await.unwrap();
    let waiting = tokio::spawn(contended(request(&locks)));
    eventually("it stands in line", async || {
        !locks
            .inspect("a")
            .permits()
            .await
            .unwrap()
            .waiters
            .is_empty()
    })
    .await;
    first.release().await.unwrap();
    assert!(waiting.await.unwrap());
    second.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_free_only_after_the_first_answer_is_contended() {
    in_time(async {
        // Released after the next acquire request, and before its reply arrives.
        let held_first = Arc::new(Mutex::<Option<LockGuard>>::default());
        let released = held_first.clone();
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), move |call| {
            let acquires = matches!(call.operation, Operation::Acquire(_));
            let guard = acquires.then(|| released.lock().unwrap().take()).flatten();
            async move {
                let outcome = call.execute().await;
                if let Some(guard) = guard {
                    guard.release().await.unwrap();
                }
                outcome
            }
        });
        let (locks, others) = (
            LockClient::with_store(store.clone()),
            LockClient::with_store(store),
        );
        let permit = |locks: &LockClient| locks.permits("a", 1.try_into().unwrap());
        for (held, wanted) in [
            (others.exclusive("a"), locks.exclusive("a")),
            (others.exclusive("a"), locks.shared("a")),
            (permit(&others), permit(&locks)),
        ] {
            let guard = held.acquire().await.unwrap();
            *held_first.lock().unwrap() = Some(guard);
            assert!(contended(wanted.clone()).await, "{wanted:?}");
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_silent_at_first_makes_no_lock_contended() {
    in_time(async {
        let (store, silent) = silent_store();
        let locks = LockClient::with_store(store);
        for request in [
            locks.exclusive("a"),
            locks.shared("a"),
            locks.all(["a", "b"]),
        ] {
            silent.store(true, Ordering::Relaxed);
            let waiting = begun(contended(request.clone())).await;
            silent.store(false, Ordering::Relaxed);
            assert!(!waiting.await, "{request:?}");
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_came_behind_another_was_contended() {
    in_time(async {
        let (store, silent) = silent_store();
        let locks = LockClient::with_store(store);
        silent.store(true, Ordering::Relaxed);
        let head = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let behind = begun(contended(locks.exclusive("a"))).await;
        silent.store(false, Ordering::Relaxed);
        drop(head);
        // No reply of the store has shown that the lock was held.
        assert!(behind.await);
    })
    .await;
}
