//! One holder at a time, a larger fencing token each time.

use std::{sync::Arc, time::Duration};

use lock_runtime::LockErrorKind;
use lock_tests::{
    FencedResource,
    place::{Place, begun, on_every_store},
};
use tokio::task::JoinSet;

on_every_store! {
    tasks_of_two_clients_never_meet,
    a_held_lock_is_contended_for_a_request_without_wait,
    a_request_waits_as_long_as_it_said_and_not_longer,
    a_released_lock_is_free_at_once,
    a_dropped_guard_frees_the_lock,
    every_grant_has_a_larger_fencing_token,
    a_lock_released_elsewhere_is_found,
    a_lock_released_here_is_passed_on_at_once,
}

async fn tasks_of_two_clients_never_meet(place: Place) {
    let clients = [place.client().await, place.client().await];
    let resource = Arc::new(FencedResource::new());
    let mut tasks = JoinSet::new();
    for task in 0..20 {
        let (locks, resource) = (clients[task % 2].clone(), resource.clone());
        tasks.spawn(async move {
            for _ in 0..5 {
                let guard = locks
                    .exclusive("stock")
                    .wait(lock_tests::place::LONG)
                    .acquire()
                    .await
                    .unwrap();
                resource.increment(guard.fence()).await.unwrap();
                guard.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let report = resource.report();
    assert!(
        report.is_clean() && report.value == 100 && report.peak == 1,
        "{report}"
    );
}

async fn a_held_lock_is_contended_for_a_request_without_wait(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    for client in [&locks, &others] {
        assert!(client.exclusive("a").try_acquire().await.unwrap().is_none());
        let error = client.exclusive("a").no_wait().acquire().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Contended);
        assert_eq!(error.key().unwrap().as_str(), "a");
        let free_in = error.free_in().unwrap();
        assert!(
            free_in <= lock_runtime::LockSpec::DEFAULT_LEASE + place.unsure() && !free_in.is_zero(),
            "{free_in:?}"
        );
    }
    guard.release().await.unwrap();
}

async fn a_request_waits_as_long_as_it_said_and_not_longer(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let wait = Duration::from_millis(300);
    for client in [&locks, &others] {
        let start = tokio::time::Instant::now();
        let error = client
            .exclusive("a")
            .wait(wait)
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::WaitTimeout);
        assert!(start.elapsed() >= wait, "{:?}", start.elapsed());
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
    }
    guard.release().await.unwrap();
}

async fn a_released_lock_is_free_at_once(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for client in [&locks, &others, &locks] {
        let guard = client.exclusive("a").try_acquire().await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

async fn a_dropped_guard_frees_the_lock(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    drop(locks.exclusive("a").acquire().await.unwrap());
    others
        .exclusive("a")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn every_grant_has_a_larger_fencing_token(place: Place) {
    let clients = [place.client().await, place.client().await];
    let mut last = None;
    for round in 0..50 {
        let guard = clients[round % 2].exclusive("a").acquire().await.unwrap();
        assert!(
            last < Some(guard.fence()),
            "{last:?} then {}",
            guard.fence()
        );
        last = Some(guard.fence());
        guard.release().await.unwrap();
    }
}

async fn a_lock_released_elsewhere_is_found(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let waiting = begun(
        others
            .exclusive("a")
            .wait(lock_tests::place::LONG)
            .acquire(),
    )
    .await;
    guard.release().await.unwrap();
    let start = tokio::time::Instant::now();
    waiting.await.unwrap().release().await.unwrap();
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}

async fn a_lock_released_here_is_passed_on_at_once(place: Place) {
    let locks = place.client().await;
    let start = tokio::time::Instant::now();
    let mut guard = locks.exclusive("a").acquire().await.unwrap();
    for _ in 0..100 {
        let waiting = begun(locks.exclusive("a").acquire()).await;
        guard.release().await.unwrap();
        guard = waiting.await.unwrap();
    }
    guard.release().await.unwrap();
    // If the line slept until its next look, each turn would take half a second.
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
}
