//! Readers share a lock, writers do not, and a writer can become a reader without a gap.

use std::{sync::Arc, time::Duration};

use lock_runtime::{LockErrorKind, Mode};
use lock_tests::{
    FencedResource,
    place::{LONG, Place, all_free, begun, eventually, on_every_store},
};
use tokio::task::{JoinSet, yield_now};

on_every_store! {
    readers_overlap_and_keep_writers_out,
    readers_and_writers_never_meet,
    a_waiting_writer_is_not_starved_by_later_readers,
    readers_that_wait_behind_a_writer_get_in_together,
    a_downgraded_writer_lets_readers_in_and_no_writer,
    no_writer_gets_in_while_one_downgrades,
    a_downgraded_lock_is_renewed,
    what_cannot_be_downgraded_is_released,
}

async fn readers_overlap_and_keep_writers_out(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let mut readers = Vec::new();
    for client in [&locks, &others, &locks] {
        readers.push(
            client
                .shared("a")
                .try_acquire()
                .await
                .unwrap()
                .expect("readers share"),
        );
        assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
        assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
    }
    for reader in readers {
        assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
        reader.release().await.unwrap();
    }
    let writer = others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("the last reader has left");
    assert!(locks.shared("a").try_acquire().await.unwrap().is_none());
    writer.release().await.unwrap();
}

async fn readers_and_writers_never_meet(place: Place) {
    let clients = [place.client().await, place.client().await];
    let resource = Arc::new(FencedResource::new());
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let (locks, resource) = (clients[task % 2].clone(), resource.clone());
        tasks.spawn(async move {
            for _ in 0..3 {
                if task < 4 {
                    let guard = locks.exclusive("a").wait(LONG).acquire().await.unwrap();
                    resource.increment(guard.fence()).await.unwrap();
                    guard.release().await.unwrap();
                } else {
                    let guard = locks.shared("a").wait(LONG).acquire().await.unwrap();
                    let inside = resource.enter_reader();
                    yield_now().await;
                    drop(inside);
                    guard.release().await.unwrap();
                }
            }
        });
    }
    tasks.join_all().await;
    let report = resource.report();
    assert!(report.is_clean() && report.value == 12, "{report}");
}

async fn a_waiting_writer_is_not_starved_by_later_readers(place: Place) {
    let locks = place.client().await;
    let mut reader = locks.shared("a").acquire().await.unwrap();
    let mut writer = begun(locks.exclusive("a").wait(LONG).acquire()).await;
    // Readers come without end, each before the one ahead of it leaves.
    for _ in 0..20 {
        let mut next = begun(locks.shared("a").wait(LONG).acquire()).await;
        reader.release().await.unwrap();
        tokio::select! {
            biased;
            guard = &mut writer => {
                guard.unwrap().release().await.unwrap();
                next.await.unwrap().release().await.unwrap();
                return;
            }
            guard = &mut next => reader = guard.unwrap(),
        }
    }
    panic!("twenty readers overtook the writer");
}

async fn readers_that_wait_behind_a_writer_get_in_together(place: Place) {
    let locks = place.client().await;
    let writer = locks.exclusive("a").acquire().await.unwrap();
    let mut readers = JoinSet::new();
    for _ in 0..10 {
        readers.spawn(begun(locks.shared("a").wait(LONG).acquire()).await);
    }
    writer.release().await.unwrap();
    let guards: Vec<_> = readers
        .join_all()
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(locks.inspect("a").await.unwrap().holders.len(), 10);
    drop(guards);
    locks
        .exclusive("a")
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn a_downgraded_writer_lets_readers_in_and_no_writer(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let writer = locks.exclusive("a").acquire().await.unwrap();
    let before = writer.fence();
    let reader = writer.downgrade().await.unwrap();
    assert!(reader.fence() > before, "a reader is a grant of its own");
    assert!(!reader.is_lost() && !reader.validity().is_zero());
    for client in [&locks, &others] {
        assert!(client.exclusive("a").try_acquire().await.unwrap().is_none());
        client
            .shared("a")
            .try_acquire()
            .await
            .unwrap()
            .expect("readers join")
            .release()
            .await
            .unwrap();
    }
    reader.verify().await.unwrap();
    reader.release().await.unwrap();
    let writer = others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("all have left");
    writer.release().await.unwrap();
}

async fn no_writer_gets_in_while_one_downgrades(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for _ in 0..10 {
        let writer = locks.exclusive("a").acquire().await.unwrap();
        let fence = writer.fence();
        let mut waiting = Vec::new();
        for client in [&locks, &others, &locks] {
            waiting.push(begun(client.exclusive("a").wait(LONG).acquire()).await);
        }
        let mut writers: JoinSet<_> = waiting.into_iter().collect();
        let reader = writer.downgrade().await.unwrap();
        // Had a writer been between the two, it would hold a token between theirs, and the lock.
        assert!(reader.fence() > fence);
        reader.verify().await.unwrap();
        assert_eq!(
            others.inspect("a").await.unwrap().holders[0].mode,
            Mode::Shared
        );
        assert!(
            writers.try_join_next().is_none(),
            "a writer got in beside a reader"
        );
        reader.release().await.unwrap();
        while let Some(writer) = writers.join_next().await {
            let writer = writer.unwrap().unwrap();
            assert!(writer.fence() > fence);
            writer.release().await.unwrap();
        }
    }
}

async fn a_downgraded_lock_is_renewed(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let lease = Duration::from_secs(1);
    let reader = locks
        .exclusive("a")
        .lease(lease)
        .acquire()
        .await
        .unwrap()
        .downgrade()
        .await
        .unwrap();
    tokio::time::sleep(lease * 2).await;
    reader.verify().await.unwrap();
    assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
    reader.release().await.unwrap();
}

async fn what_cannot_be_downgraded_is_released(place: Place) {
    let locks = place.client().await;
    let reader = locks.shared("a").name("look").acquire().await.unwrap();
    let view = reader.held();
    let error = reader.downgrade().await.unwrap_err();
    assert_eq!(
        (error.kind(), error.name()),
        (LockErrorKind::ModeMismatch, Some("look"))
    );
    // The errors of a view, and of a lock that was released, have the name as well.
    eventually("the lock is released", async || view.validity().is_zero()).await;
    let error = view.verify().await.unwrap_err();
    assert_eq!(
        (error.kind(), error.name()),
        (LockErrorKind::Released, Some("look"))
    );
    assert!(!view.is_lost());
    if place.has_permits() {
        let permit = locks
            .permits("a", 2.try_into().unwrap())
            .acquire()
            .await
            .unwrap();
        assert_eq!(
            permit.downgrade().await.unwrap_err().kind(),
            LockErrorKind::ModeMismatch
        );
        let is_free = || async {
            locks
                .inspect("a")
                .permits()
                .await
                .unwrap()
                .holders
                .is_empty()
        };
        eventually("the permit is free", is_free).await;
    }
    let both = locks.all(["a", "b"]).acquire().await.unwrap();
    assert_eq!(
        both.downgrade().await.unwrap_err().kind(),
        LockErrorKind::ModeMismatch
    );
    all_free(&locks, &["a", "b"]).await;

    let writer = locks.exclusive("a").acquire().await.unwrap();
    let again = writer.scope(locks.reentrant("a").acquire()).await.unwrap();
    let error = again.downgrade().await.unwrap_err();
    assert_eq!(
        error.kind(),
        LockErrorKind::ModeMismatch,
        "the outer guard still writes"
    );
    writer.verify().await.unwrap();
    writer.release().await.unwrap();
    all_free(&locks, &["a"]).await;
}
