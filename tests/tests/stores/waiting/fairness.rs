//! No request starves behind faster ones, behind the many of another process, or behind ones with
//! longer time-outs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lock_runtime::{LockClient, store::MemoryStore};
use lock_tests::{
    FaultyStore,
    place::{begun, on_every_store},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{LONG, Place, in_line, nothing_left};

on_every_store! {
    the_impatient_inherit_their_place_until_it_is_their_turn,
    a_process_with_many_waiters_leaves_another_its_turn,
    acquire_admits_the_readers_of_a_process_together,
}

/// The time-out of each request is shorter than the wait in the queue, but the next request of the
/// process inherits the queue entry (rule 17).
async fn the_impatient_inherit_their_place_until_it_is_their_turn(place: Place) {
    let mut busy = JoinSet::new();
    for _ in 0..10 {
        let client = place.client().await;
        busy.spawn(async move {
            loop {
                let guard = client.exclusive("a").wait(LONG).acquire().await.unwrap();
                sleep(Duration::from_millis(300)).await;
                guard.release().await.unwrap();
            }
        });
    }
    let locks = place.client().await;
    in_line(&locks, "a", 9).await;
    let mut tries = JoinSet::new();
    let mut served = false;
    for _ in 0..8 {
        let acquire = locks.exclusive("a").wait(Duration::from_secs(2)).acquire();
        tries.spawn(async move {
            match acquire.await {
                Ok(guard) => guard.release().await.is_ok(),
                Err(_) => false,
            }
        });
        // Shorter than the time-out of the request in front.
        sleep(Duration::from_secs(1)).await;
        while let Some(done) = tries.try_join_next() {
            served |= done.unwrap();
        }
        if served {
            break;
        }
    }
    assert!(served, "its queue entry never came to the front");
    tries.shutdown().await;
    busy.shutdown().await;
    nothing_left(&place, &["a"]).await;
}

/// Between two writers, all waiting readers of a process are admitted, and not only one of them.
async fn acquire_admits_the_readers_of_a_process_together(place: Place) {
    const READERS: usize = 50;
    let (readers, writers) = (place.client().await, place.client().await);
    let guard = writers.exclusive("a").acquire().await.unwrap();
    let turns = Arc::new(AtomicUsize::new(0));
    let mut writing = JoinSet::new();
    for _ in 0..2 {
        let (writers, turns) = (writers.clone(), turns.clone());
        writing.spawn(async move {
            loop {
                let guard = writers
                    .exclusive("a")
                    .strict_order()
                    .wait(LONG)
                    .acquire()
                    .await
                    .unwrap();
                turns.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(5)).await;
                guard.release().await.unwrap();
            }
        });
    }
    let mut reading = JoinSet::new();
    for _ in 0..READERS {
        let acquire = begun(readers.shared("a").wait(LONG).acquire()).await;
        reading.spawn(async move {
            let guard = acquire.await.unwrap();
            sleep(Duration::from_millis(200)).await;
            guard.release().await.unwrap();
        });
    }
    in_line(&readers, "a", 2).await;
    guard.release().await.unwrap();
    reading.join_all().await;
    // If readers were admitted one at a time, there would be as many writers between them.
    let turns = turns.load(Ordering::Relaxed);
    assert!(
        turns < READERS / 4,
        "{turns} writers came between {READERS} readers"
    );
    writing.shutdown().await;
    nothing_left(&place, &["a"]).await;
}

/// The readers of a process come faster than the round trip to the store, and overlap. Those that
/// come after the first of their group has been admitted belong to the next group.
#[tokio::test(start_paused = true)]
async fn readers_that_keep_coming_do_not_starve_a_writer_of_another_process() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        sleep(Duration::from_millis(5)).await;
        let outcome = call.execute().await;
        sleep(Duration::from_millis(5)).await;
        outcome
    });
    let readers = LockClient::with_store(store.clone());
    let reading = tokio::spawn(async move {
        let mut all = JoinSet::new();
        loop {
            let reader = readers.shared("a").wait(LONG).acquire();
            all.spawn(async move {
                let guard = reader.await.unwrap();
                sleep(Duration::from_millis(100)).await;
                guard.release().await.unwrap();
            });
            sleep(Duration::from_millis(9)).await;
        }
    });
    sleep(Duration::from_millis(200)).await;
    let writers = LockClient::with_store(store);
    for _ in 0..3 {
        let writer = writers
            .exclusive("a")
            .wait(Duration::from_secs(3))
            .acquire();
        writer.await.unwrap().release().await.unwrap();
    }
    assert!(!reading.is_finished(), "a reader was refused");
    reading.abort();
}

/// A process hands off a lock locally for 50 ms, and then it is the turn of another process.
async fn a_process_with_many_waiters_leaves_another_its_turn(place: Place) {
    const MANY: usize = 300;
    let (crowded, locks) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..MANY {
        let acquire = begun(crowded.exclusive("a").wait(LONG).acquire()).await;
        tasks.spawn(async move {
            let guard = acquire.await.unwrap();
            sleep(Duration::from_millis(10)).await;
            guard.release().await.unwrap();
        });
    }
    in_line(&locks, "a", 1).await;
    guard.release().await.unwrap();
    for _ in 0..5 {
        sleep(Duration::from_millis(20)).await;
        let asked = Instant::now();
        let guard = locks.exclusive("a").wait(LONG).acquire().await.unwrap();
        let waited = asked.elapsed();
        assert!(waited < Duration::from_millis(400), "{waited:?}");
        guard.release().await.unwrap();
    }
    let mut served = 0;
    while tasks.try_join_next().is_some() {
        served += 1;
    }
    assert!(
        0 < served && served < MANY * 3 / 4,
        "{served} were served before the other process"
    );
    drop(tasks);
    nothing_left(&place, &["a"]).await;
}
