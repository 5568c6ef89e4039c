//! A lock that is retained by its client after its release, for the next use there.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockErrorKind, LockRequest};
use tokio::time::{Instant, sleep};

use lock_tests::place::{LONG, Place, all_free, on_every_store};

on_every_store! {
    retained_lock_is_used_again_without_the_store,
    retained_lock_is_released_for_a_waiter_of_another_client,
    retained_lock_is_released_for_a_request_that_does_not_wait,
    retained_lock_is_released_for_a_reader_and_for_several_keys,
    retained_lock_gives_way_to_every_request_of_its_client,
    retained_lock_is_free_when_its_time_is_over,
    retained_lock_is_released_with_its_client,
    lock_that_is_released_after_its_client_is_not_retained,
    retained_lock_that_is_revoked_is_not_used_again,
    contended_lock_is_not_retained,
    many_retained_locks_are_released_by_a_shutdown,
}

/// Longer than each test.
const RETAINED: Duration = Duration::from_secs(60);

/// Returns a request that retains the lock, and `None` where that is refused.
async fn retaining(locks: &LockClient, key: &str, place: &Place) -> Option<LockRequest> {
    let request = locks.exclusive(key).retain(RETAINED);
    if matches!(place, Place::Majority(_)) {
        let refused = request.acquire().await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::InvalidSpec);
        assert!(
            refused.to_string().contains("leave `retain` out"),
            "{refused}"
        );
        return None;
    }
    Some(request)
}

/// Uses a lock for a moment. Returns its fencing token.
async fn used(request: &LockRequest) -> u64 {
    let guard = request.clone().wait(LONG).acquire().await.unwrap();
    let fence = guard.fence().number();
    guard.release().await.unwrap();
    fence
}

/// Returns whether a request that does not wait gets the lock within a few attempts: each may be
/// late on a busy machine.
async fn is_had_at_once(request: &LockRequest) -> bool {
    for _ in 0..10 {
        if let Some(guard) = request.clone().try_acquire().await.unwrap() {
            guard.release().await.unwrap();
            return true;
        }
    }
    false
}

async fn retained_lock_is_used_again_without_the_store(place: Place) {
    let locks = place.client().await;
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    let first = used(&request).await;
    for number in 1..20 {
        // A token that the store issues follows its clock.
        sleep(Duration::from_millis(2)).await;
        assert_eq!(used(&request).await, first + number);
    }
    let held = locks.inspect("a").await.unwrap().holders;
    assert_eq!(held.len(), 1, "the store knows of no release");
    locks.shutdown().await;
}

async fn retained_lock_is_released_for_a_waiter_of_another_client(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    let first = used(&request).await;
    let since = Instant::now();
    let guard = others.exclusive("a").wait(LONG).acquire().await.unwrap();
    assert!(guard.fence().number() > first);
    // Before the message could be repeated by a poll, on a machine that is not busy.
    assert!(since.elapsed() < RETAINED / 4, "{:?}", since.elapsed());
    guard.release().await.unwrap();
    all_free(&others, &["a"]).await;
}

async fn retained_lock_is_released_for_a_request_that_does_not_wait(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    used(&request).await;
    assert!(is_had_at_once(&others.exclusive("a")).await);
    // A holder at work refuses it.
    let guard = request.acquire().await.unwrap();
    let refused = others.exclusive("a").no_wait().acquire().await;
    assert_eq!(refused.unwrap_err().kind(), LockErrorKind::Contended);
    guard.release().await.unwrap();
    locks.shutdown().await;
}

async fn retained_lock_is_released_for_a_reader_and_for_several_keys(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    used(&request).await;
    assert!(is_had_at_once(&others.shared("a")).await);
    let request = locks.exclusive("b").retain(RETAINED);
    used(&request).await;
    assert!(is_had_at_once(&others.all(["b", "c"])).await);
    locks.shutdown().await;
}

async fn retained_lock_gives_way_to_every_request_of_its_client(place: Place) {
    let locks = place.client().await;
    if retaining(&locks, "a", &place).await.is_none() {
        return;
    }
    for (number, other) in [
        locks.shared("0"),
        locks.exclusive("1").lease(Duration::from_secs(7)),
        locks.exclusive("2").strict_order(),
        locks.all(["3", "x"]),
    ]
    .into_iter()
    .enumerate()
    {
        let request = locks.exclusive(number.to_string()).retain(RETAINED);
        used(&request).await;
        assert!(is_had_at_once(&other).await, "{number}");
        used(&request).await;
        used(&other).await;
    }
    locks.shutdown().await;
    all_free(&place.client().await, &["0", "1", "2", "3", "x"]).await;
}

async fn retained_lock_is_free_when_its_time_is_over(place: Place) {
    let locks = place.client().await;
    if retaining(&locks, "a", &place).await.is_none() {
        return;
    }
    let brief = Duration::from_millis(200);
    let since = Instant::now();
    used(&locks.exclusive("a").retain(brief)).await;
    all_free(&locks, &["a"]).await;
    assert!(since.elapsed() >= brief, "{:?}", since.elapsed());
    // At least a third of the lease is left when it ends.
    let since = Instant::now();
    used(
        &locks
            .exclusive("a")
            .lease(Duration::from_secs(2))
            .retain(RETAINED),
    )
    .await;
    all_free(&locks, &["a"]).await;
    assert!(
        since.elapsed() >= Duration::from_secs(1),
        "{:?}",
        since.elapsed()
    );
}

async fn retained_lock_is_released_with_its_client(place: Place) {
    let others = place.client().await;
    for is_shut_down in [true, false] {
        let locks = place.client().await;
        let Some(request) = retaining(&locks, "a", &place).await else {
            return;
        };
        used(&request).await;
        drop(request);
        if is_shut_down {
            locks.shutdown().await;
            let guard = others.exclusive("a").no_wait().acquire().await.unwrap();
            guard.release().await.unwrap();
        } else {
            drop(locks);
            all_free(&others, &["a"]).await;
        }
    }
}

async fn lock_that_is_released_after_its_client_is_not_retained(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    let guard = request.acquire().await.unwrap();
    drop(locks);
    guard.release().await.unwrap();
    let held = others.inspect("a").await.unwrap().holders;
    assert!(held.is_empty(), "{held:?}");
}

async fn retained_lock_that_is_revoked_is_not_used_again(place: Place) {
    let (locks, operator) = (place.client().await, place.client().await);
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    let first = used(&request).await;
    operator.revoke("a").await.unwrap();
    let other = used(&operator.exclusive("a")).await;
    // Until the message arrives, which may meet a holder.
    let since = Instant::now();
    loop {
        let guard = request.clone().wait(LONG).acquire().await.unwrap();
        let fence = guard.fence().number();
        if guard.release().await.is_ok() && fence > other {
            break;
        }
        assert!(since.elapsed() < LONG);
        sleep(Duration::from_millis(10)).await;
    }
    assert!(other > first);
    locks.shutdown().await;
}

async fn contended_lock_is_not_retained(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let Some(request) = retaining(&locks, "a", &place).await else {
        return;
    };
    used(&request).await;
    used(&others.exclusive("a")).await;
    used(&request).await;
    let held = locks.inspect("a").await.unwrap().holders;
    assert!(held.is_empty(), "{held:?}");
    all_free(&others, &["a"]).await;
    locks.shutdown().await;
}

async fn many_retained_locks_are_released_by_a_shutdown(place: Place) {
    const LOCKS: usize = 100;
    let (locks, others) = (place.client().await, place.client().await);
    if retaining(&locks, "a", &place).await.is_none() {
        return;
    }
    let name = |number: usize| format!("k{number}");
    let uses = (0..LOCKS).map(async |number| {
        used(&locks.exclusive(name(number)).retain(RETAINED)).await;
    });
    join_all(uses).await;
    let others = &others;
    let is_held = |number| async move {
        let holders = others.inspect(name(number)).await.unwrap().holders;
        !holders.is_empty()
    };
    let held = join_all((0..LOCKS).map(&is_held)).await;
    assert!(
        held.iter().filter(|held| **held).count() > LOCKS / 2,
        "they are retained"
    );
    locks.shutdown().await;
    let held = join_all((0..LOCKS).map(&is_held)).await;
    assert_eq!(held.iter().filter(|held| **held).count(), 0);
}
