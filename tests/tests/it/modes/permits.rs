//! At most n holders, and n of them.

use std::{num::NonZeroU32, sync::Arc};

use lock_runtime::{LockErrorKind, Mode};
use lock_tests::FencedResource;
use tokio::task::JoinSet;

use crate::place::{LONG, Place, begun, on_every_store};

on_every_store! {
    ; with permits:
    never_more_than_n_hold_and_all_n_do,
    a_permit_given_back_goes_to_the_next,
    another_number_is_refused_while_one_is_held,
    permits_and_locks_of_one_name_are_strangers,
}

fn three() -> NonZeroU32 {
    NonZeroU32::new(3).unwrap()
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
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
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
    assert_eq!(locks.inspect_permits("a").await.unwrap().holders.len(), 3);
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
    assert!(locks.inspect_permits("a").await.unwrap().holders.is_empty());
}

async fn another_number_is_refused_while_one_is_held(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.permits("a", three()).acquire().await.unwrap();
    for client in [&locks, &others] {
        let error = client
            .permits("a", NonZeroU32::MIN)
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::ModeMismatch);
        assert_eq!(error.key().unwrap().as_str(), "a");
    }
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    others
        .permits("a", NonZeroU32::MIN)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn permits_and_locks_of_one_name_are_strangers(place: Place) {
    let locks = place.client().await;
    let permit = locks.permits("a", NonZeroU32::MIN).acquire().await.unwrap();
    let writer = locks
        .write("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("another object");
    assert_eq!(
        locks.inspect("a").await.unwrap().holders[0].mode,
        Mode::Exclusive
    );
    assert_eq!(
        locks.inspect_permits("a").await.unwrap().holders[0].mode,
        Mode::Permits(NonZeroU32::MIN)
    );
    writer.release().await.unwrap();
    permit.release().await.unwrap();
}
