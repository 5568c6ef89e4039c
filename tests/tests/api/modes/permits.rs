//! At most n holders, and n of them. Each number counts all holders.

use std::{num::NonZeroU32, sync::Arc};

use lock_runtime::{LockClient, LockGuard, LockRequest, Mode};
use lock_tests::{
    FencedResource,
    place::{LONG, Place, begun, eventually, on_every_store},
};
use tokio::task::JoinSet;

on_every_store! {
    ; with permits:
    never_more_than_n_hold_and_all_n_do,
    a_permit_given_back_goes_to_the_next,
    each_number_counts_all_holders,
    permits_of_two_numbers_are_granted_in_order,
    two_numbers_are_served_side_by_side,
    permits_and_locks_of_one_name_are_strangers,
}

fn three() -> NonZeroU32 {
    NonZeroU32::new(3).unwrap()
}

fn of(locks: &LockClient, number: u32) -> LockRequest {
    locks
        .permits("a", NonZeroU32::new(number).unwrap())
        .wait(LONG)
}

async fn tried(locks: &LockClient, number: u32) -> Option<LockGuard> {
    of(locks, number).try_acquire().await.unwrap()
}

async fn never_more_than_n_hold_and_all_n_do(place: Place) {
    let clients = [place.client().await, place.client().await];
    let resource = Arc::new(FencedResource::with_room(three()));
    let mut tasks = JoinSet::new();
    for task in 0..20 {
        let (locks, resource) = (clients[task % 2].clone(), resource.clone());
        tasks.spawn(async move {
            for _ in 0..3 {
                let guard = locks
                    .permits("a", three())
                    .wait(LONG)
                    .acquire()
                    .await
                    .unwrap();
                let inside = resource.enter(1u64).unwrap();
                while resource.report().peak < 3 {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                drop(inside);
                guard.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let report = resource.report();
    assert!(report.overlaps == 0 && report.peak == 3, "{report}");
}

async fn a_permit_given_back_goes_to_the_next(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let mut guards = Vec::new();
    for client in [&locks, &others, &locks] {
        guards.push(
            client
                .permits("a", three())
                .try_acquire()
                .await
                .unwrap()
                .expect("one of three"),
        );
    }
    assert!(
        others
            .permits("a", three())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    assert_eq!(locks.inspect("a").permits().await.unwrap().holders.len(), 3);
    let waiting = begun(locks.permits("a", three()).wait(LONG).acquire()).await;
    guards.pop().unwrap().release().await.unwrap();
    guards.push(waiting.await.unwrap());
    assert!(
        others
            .permits("a", three())
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    for guard in guards {
        guard.release().await.unwrap();
    }
    assert!(
        locks
            .inspect("a")
            .permits()
            .await
            .unwrap()
            .holders
            .is_empty()
    );
}

async fn each_number_counts_all_holders(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let first = tried(&locks, 2).await.expect("free");
    assert!(tried(&others, 1).await.is_none(), "one is held");
    let second = tried(&others, 3).await.expect("one of three is held");
    assert!(tried(&locks, 2).await.is_none(), "two are held");
    let third = tried(&locks, 3).await.expect("two of three are held");
    assert!(tried(&others, 3).await.is_none(), "three are held");
    assert_eq!(locks.inspect("a").permits().await.unwrap().holders.len(), 3);
    for guard in [first, second, third] {
        guard.extend(LONG).await.unwrap();
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
    }
    assert!(
        locks
            .inspect("a")
            .permits()
            .await
            .unwrap()
            .holders
            .is_empty()
    );
    let alone = tried(&others, 1).await.expect("free");
    alone.release().await.unwrap();
}

/// A request that comes later does not pass one with a smaller number.
async fn permits_of_two_numbers_are_granted_in_order(place: Place) {
    let [locks, two, three] = [
        place.client().await,
        place.client().await,
        place.client().await,
    ];
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(tried(&locks, 3).await.expect("three"));
    }
    let waits = async |count: usize| {
        eventually("they wait", async || {
            locks.inspect("a").permits().await.unwrap().waiters.len() == count
        })
        .await;
    };
    let smaller = tokio::spawn(of(&two, 2).acquire());
    waits(1).await;
    let larger = tokio::spawn(of(&three, 3).acquire());
    waits(2).await;
    held.pop().unwrap().release().await.unwrap();
    // Two of three are held.
    assert!(tried(&locks, 3).await.is_none(), "the smaller number waits");
    assert!(!smaller.is_finished() && !larger.is_finished());
    held.pop().unwrap().release().await.unwrap();
    let smaller = smaller.await.unwrap().unwrap();
    let larger = larger.await.unwrap().unwrap();
    for guard in [smaller, larger, held.pop().unwrap()] {
        guard.release().await.unwrap();
    }
}

/// Two versions of a program run during a deployment.
async fn two_numbers_are_served_side_by_side(place: Place) {
    let resource = Arc::new(FencedResource::with_room(three()));
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (locks, resource) = (place.client().await, resource.clone());
        tasks.spawn(async move {
            for _ in 0..20 {
                let guard = of(&locks, 2 + task % 2).acquire().await.unwrap();
                let inside = resource.enter(1u64).unwrap();
                tokio::task::yield_now().await;
                drop(inside);
                guard.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let report = resource.report();
    assert!(report.overlaps == 0, "{report}");
    let locks = place.client().await;
    let found = locks.inspect("a").permits().await.unwrap();
    assert!(
        found.holders.is_empty() && found.waiters.is_empty(),
        "{found:?}"
    );
}

async fn permits_and_locks_of_one_name_are_strangers(place: Place) {
    let locks = place.client().await;
    let permit = locks.permits("a", NonZeroU32::MIN).acquire().await.unwrap();
    let writer = locks
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("another object");
    assert_eq!(
        locks.inspect("a").await.unwrap().holders[0].mode,
        Mode::Exclusive
    );
    assert_eq!(
        locks.inspect("a").permits().await.unwrap().holders[0].mode,
        Mode::Permits(NonZeroU32::MIN)
    );
    writer.release().await.unwrap();
    permit.release().await.unwrap();
}
