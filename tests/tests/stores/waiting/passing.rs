//! Local hand-offs: the waiter that gets the lock, the time for which a process keeps it, and the
//! state of the previous guard.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockErrorKind, LockGuard, LockRequest, Loss, store::MemoryStore};
use lock_tests::{
    Captured, Proxy, RedisServer,
    place::{begun, eventually, in_time, no_key_left, on_every_store},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::sleep,
};

use super::{
    LONG, Place, SOON, driven, in_line, may_hand_back, nothing_left, pass_through, passes,
};

on_every_store! {
    a_pass_that_is_not_taken_goes_to_the_next,
    a_hand_off_that_no_waiter_takes_is_given_back,
    a_lock_is_passed_on_to_the_same_wish_only,
    who_has_passed_a_lock_on_has_released_it,
    a_grant_without_renewal_lasts_from_the_start,
}

/// A guard whose lock may be handed off locally within the next 50 ms.
async fn may_pass(locks: &LockClient, key: &str) -> LockGuard {
    let (guard, next) = may_hand_back(locks, key).await;
    // The grant to `next` reserves fencing tokens: as part of this release, or, if `next` calls the
    // store itself, because of the waiter behind it.
    let _behind = begun(locks.exclusive(key).wait(LONG).acquire()).await;
    guard.release().await.unwrap();
    next.await.unwrap()
}

#[tokio::test]
async fn two_hundred_waiters_of_one_process_cost_the_store_few_releases() {
    in_time(async {
        let server = RedisServer::start().await;
        let scripts = async || {
            let info: String = server.query(&["INFO", "commandstats"]).await;
            let calls = info
                .lines()
                .filter_map(|line| line.strip_prefix("cmdstat_eval")?.split_once(":calls="));
            calls
                .map(|(_, calls)| calls.split(',').next().unwrap().parse::<u64>().unwrap())
                .sum::<u64>()
        };
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let (served, mut order) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for number in 0..200 {
            let acquire = begun(locks.exclusive("a").wait(LONG).acquire()).await;
            let served = served.clone();
            tasks.spawn(async move {
                let guard = acquire.await.unwrap();
                served.send((number, guard.fence())).unwrap();
                guard.release().await.unwrap();
            });
        }
        let (before, mut last) = (scripts().await, guard.fence());
        guard.release().await.unwrap();
        tasks.join_all().await;
        let asked = scripts().await - before;
        assert!(asked < 100, "{asked} scripts for 200 turns");
        for expected in 0..200 {
            let (number, fence) = order.recv().await.unwrap();
            assert_eq!(number, expected);
            assert!(fence > last, "{fence} after {last}");
            last = fence;
        }
        no_key_left(&server, "lock").await;
    })
    .await;
}

async fn a_pass_that_is_not_taken_goes_to_the_next(place: Place) {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = place.client().await;
    let guard = may_pass(&locks, "a").await;
    let fence = guard.fence();
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    }
    guard.release().await.unwrap();
    // The lock was handed off to the first waiter, which has not been polled since.
    drop(waiting.remove(0));
    drop(waiting.remove(0));
    let fences = join_all(waiting.into_iter().map(pass_through)).await;
    assert!(
        fences[0] > fence.number() && fences[1] > fences[0],
        "{fences:?} after {fence}"
    );
    assert!(passes(&traces) > 0);
    nothing_left(&place, &["a"]).await;
}

async fn a_hand_off_that_no_waiter_takes_is_given_back(place: Place) {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let (locks, others) = (place.client().await, place.client().await);
    for key in ["a", "b"] {
        let other_waits = key == "b";
        let guard = may_pass(&locks, key).await;
        let mut other = Vec::new();
        if other_waits {
            other.push(begun(others.exclusive(key).wait(LONG).acquire()).await);
            driven(&mut other, in_line(&others, key, 1)).await;
        }
        let waiting = begun(locks.exclusive(key).wait(LONG).acquire()).await;
        guard.release().await.unwrap();
        drop(waiting);
        // Much shorter than the lease.
        let next = others.exclusive(key).wait(SOON).acquire();
        join_all(other.into_iter().map(pass_through)).await;
        pass_through(next).await;
    }
    assert!(passes(&traces) > 0);
    nothing_left(&place, &["a", "b"]).await;
}

/// The conditions of a local hand-off (rule 20).
async fn a_lock_is_passed_on_to_the_same_wish_only(place: Place) {
    type Ask = fn(&LockClient, &str) -> LockRequest;
    let wishes: [(Ask, bool); 6] = [
        (|locks, key| locks.exclusive(key), true),
        (|locks, key| locks.exclusive(key).max_hold(LONG * 2), true),
        (|locks, key| locks.exclusive(key).lease(LONG * 2), false),
        (|locks, key| locks.shared(key), false),
        (|locks, key| locks.exclusive(key).no_renew(), false),
        (|locks, key| locks.exclusive(key).strict_order(), false),
    ];
    let locks = place.client().await;
    for (number, (ask, same)) in wishes.iter().enumerate() {
        let mut passed = 0;
        // On a busy machine the 50 ms for local hand-offs may be over before the release.
        for attempt in 0..5 {
            let key = format!("{number} {attempt}");
            let guard = may_pass(&locks, &key).await;
            let fence = guard.fence();
            let waiting = begun(ask(&locks, &key).wait(LONG).acquire()).await;
            let traces = Captured::new();
            let collecting = traces.set_default();
            guard.release().await.unwrap();
            drop(collecting);
            passed += passes(&traces);
            let guard = waiting.await.unwrap();
            assert!(guard.fence() > fence);
            guard.verify().await.unwrap();
            // The store has the mode and the lease of the request.
            let asked = ask(&locks, &key);
            let has_its_terms = async || {
                let holder = locks.inspect(&key).await.unwrap().holders.remove(0);
                let read = format!("{asked:?}").contains("Shared");
                (holder.mode == lock_runtime::Mode::Shared) == read
                    && (number != 2 || holder.ttl.unwrap() > LONG)
            };
            eventually("it is held with the terms of the request", has_its_terms).await;
            guard.release().await.unwrap();
        }
        assert_eq!(
            passed > 0,
            *same,
            "request {number} was served by {passed} local hand-offs"
        );
    }
    nothing_left(&place, &[]).await;
}

async fn who_has_passed_a_lock_on_has_released_it(place: Place) {
    let locks = place.client().await;
    let guard = may_pass(&locks, "a").await;
    let held = guard.held();
    let (go_on, told) = oneshot::channel();
    let within = guard.scope({
        let locks = locks.clone();
        async move {
            told.await.unwrap();
            locks.reentrant("a").try_acquire().await.unwrap().is_none()
        }
    });
    let waiting = begun(locks.exclusive("a").wait(LONG).acquire()).await;
    guard.release().await.unwrap();
    let next = waiting.await.unwrap();

    assert_eq!(held.validity(), Duration::ZERO);
    assert_eq!(
        held.verify().await.unwrap_err().kind(),
        LockErrorKind::Released
    );
    assert!(next.fence() > held.fence());
    // A future that still runs in the frame of the previous guard does not own the lock.
    go_on.send(()).unwrap();
    assert!(within.await, "it entered the lock of another holder");
    assert!(next.validity() > Duration::ZERO);
    next.verify().await.unwrap();
    next.release().await.unwrap();
    nothing_left(&place, &["a"]).await;
}

/// A grant from the wait queue is for 3 s. Without renewal, the request confirms it before it
/// returns the guard.
async fn a_grant_without_renewal_lasts_from_the_start(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for mode in ["exclusive", "read"] {
        let guard = others.exclusive(mode).acquire().await.unwrap();
        let request = if mode == "read" {
            locks.shared(mode)
        } else {
            locks.exclusive(mode)
        };
        let waiting = tokio::spawn(request.no_renew().lease(LONG).wait(LONG).acquire());
        in_line(&others, mode, 1).await;
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        assert!(guard.validity() > LONG / 2, "{:?}", guard.validity());
        let holder = others.inspect(mode).await.unwrap().holders.remove(0);
        assert!(holder.ttl.unwrap() > LONG / 2, "{holder:?}");
        guard.release().await.unwrap();
    }
    nothing_left(&place, &["exclusive", "read"]).await;
}

#[tokio::test(start_paused = true)]
async fn max_hold_begins_anew_with_each_pass() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let locks = LockClient::in_memory();
        let limit = Duration::from_millis(300);
        let first = may_pass(&locks, "a").await;
        let mut waiting = Vec::new();
        for _ in 0..2 {
            waiting.push(begun(locks.exclusive("a").max_hold(limit).wait(LONG).acquire()).await);
        }
        first.release().await.unwrap();
        let second = waiting.remove(0).await.unwrap();
        sleep(Duration::from_millis(40)).await;
        second.release().await.unwrap();
        let third = waiting.remove(0).await.unwrap();
        assert_eq!(passes(&traces), 2);
        sleep(limit - Duration::from_millis(20)).await;
        assert!(!third.is_lost());
        third.verify().await.unwrap();
        sleep(Duration::from_millis(40)).await;
        assert_eq!(
            third.lost().await.kind(),
            LockErrorKind::Lost(Loss::MaxHold)
        );
        drop(third);
        assert!(locks.inspect("a").await.unwrap().holders.is_empty());
    })
    .await;
}

/// The next holder might not have the time for a renewal.
#[tokio::test(start_paused = true)]
async fn a_lock_whose_lease_is_nearly_over_is_not_passed_on() {
    in_time(async {
        for (held_for, passed) in [(200, 1), (700, 0)] {
            let traces = Captured::new();
            let _collecting = traces.set_default();
            let store = Arc::<MemoryStore>::default();
            let place = Place::Memory(store);
            let (locks, others) = (place.client().await, place.client().await);
            let request = || {
                locks
                    .exclusive("a")
                    .lease(Duration::from_secs(1))
                    .wait(LONG)
            };
            let guard = request().acquire().await.unwrap();
            let mut waiting = Vec::new();
            for _ in 0..3 {
                waiting.push(begun(request().acquire()).await);
            }
            guard.release().await.unwrap();
            let guard = waiting.remove(0).await.unwrap();
            // Once the 50 ms for local hand-offs are over, the next waiter calls the store. Another
            // waiter is behind it, so its grant reserves fencing tokens.
            driven(&mut waiting, in_line(&others, "a", 1)).await;
            // The validity of its grant counts from its latest request, and it makes none while it
            // is not polled.
            sleep(Duration::from_millis(held_for)).await;
            guard.release().await.unwrap();
            let second = waiting.remove(0).await.unwrap();
            let fence = second.fence();
            second.release().await.unwrap();
            assert_eq!(passes(&traces), passed, "after {held_for} ms");
            let third = waiting.remove(0).await.unwrap();
            assert!(third.fence() > fence);
            third.verify().await.unwrap();
            third.release().await.unwrap();
            nothing_left(&place, &["a"]).await;
        }
    })
    .await;
}

/// A store that has lost its data takes fencing tokens from its clock again. They are larger than
/// those that it had reserved before.
#[tokio::test]
async fn release_hands_off_no_reserved_fence_after_a_disconnect() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let locks = LockClient::connect(&proxy.url()).await.unwrap();
        let others = LockClient::connect(&server.url()).await.unwrap();
        let mut operator = server.connection().await.unwrap();
        others
            .exclusive("warm")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        // On a busy machine a round may take longer than the 50 ms for local hand-offs.
        for key in (0..20).map(|round| format!("k{round}")) {
            let guard = may_pass(&locks, &key).await;
            let waiting = tokio::spawn(begun(locks.exclusive(&key).wait(LONG).acquire()).await);
            proxy.cut();
            let _: () = redis::cmd("FLUSHALL")
                .query_async(&mut operator)
                .await
                .unwrap();
            let other = others.exclusive(&key).acquire().await.unwrap();
            // The release may fail, as the connection was cut.
            let _ = guard.release().await;
            let fence = other.fence();
            other.release().await.unwrap();
            let next = waiting.await.unwrap().unwrap();
            assert!(
                next.fence() > fence,
                "{} was granted after {fence}",
                next.fence()
            );
            next.release().await.unwrap();
        }
    })
    .await;
}
