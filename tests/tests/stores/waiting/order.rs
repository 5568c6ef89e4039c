//! First come, first served, also among processes. To the store, each client is a process.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockRequest, Mode};
use lock_tests::{
    Captured,
    place::{begun, eventually, in_time, on_every_store},
};
use tokio::{
    sync::{Barrier, mpsc},
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{LONG, Place, TOLD, driven, in_line, nothing_left, pass_through, passes};

on_every_store! {
    processes_are_served_in_the_order_they_came,
    a_request_that_takes_no_pass_stands_in_line_as_any_other,
    readers_come_in_together_after_a_writer,
    readers_that_keep_coming_do_not_starve_a_writer,
    ; with permits:
    permits_are_served_one_by_one,
}

async fn served_in_order(
    place: &Place,
    requests: &[&dyn Fn(&LockClient) -> LockRequest],
    modes: &[Mode],
) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let (served, mut order) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let mut leases = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        let client = place.client().await;
        leases.push(Duration::from_secs(10 + number as u64));
        let acquire = request(&client).lease(leases[number]).wait(LONG).acquire();
        let served = served.clone();
        tasks.spawn(async move {
            let guard = acquire.await.unwrap();
            served.send((number, guard.fence())).unwrap();
            guard.release().await.unwrap();
        });
        in_line(&locks, "a", number + 1).await;
    }
    // Longer than a waiter pauses between two polls.
    sleep(Duration::from_millis(1600)).await;
    let waiters = locks.inspect("a").await.unwrap().waiters;
    assert!(
        waiters.iter().map(|waiter| waiter.lease).eq(leases),
        "{waiters:?}"
    );
    assert!(
        waiters
            .iter()
            .map(|waiter| waiter.mode)
            .eq(modes.iter().copied()),
        "{waiters:?}"
    );
    assert!(
        waiters
            .iter()
            .all(|waiter| waiter.silent < Duration::from_millis(1500)),
        "{waiters:?}"
    );

    let mut last = guard.fence();
    guard.release().await.unwrap();
    tasks.join_all().await;
    for expected in 0..requests.len() {
        let (number, fence) = order.recv().await.unwrap();
        assert_eq!(number, expected);
        assert!(fence > last, "{fence} after {last}");
        last = fence;
    }
    nothing_left(place, &["a"]).await;
}

async fn processes_are_served_in_the_order_they_came(place: Place) {
    let write = |locks: &LockClient| locks.exclusive("a");
    let read = |locks: &LockClient| locks.shared("a");
    let modes = [
        Mode::Exclusive,
        Mode::Exclusive,
        Mode::Shared,
        Mode::Exclusive,
        Mode::Shared,
        Mode::Exclusive,
    ];
    served_in_order(
        &place,
        &[&write, &write, &read, &write, &read, &write],
        &modes,
    )
    .await;
}

async fn a_request_that_takes_no_pass_stands_in_line_as_any_other(place: Place) {
    let write = |locks: &LockClient| locks.exclusive("a");
    let strict = |locks: &LockClient| locks.exclusive("a").strict_order();
    let fixed = |locks: &LockClient| locks.exclusive("a").no_renew();
    served_in_order(
        &place,
        &[&strict, &write, &fixed, &strict, &strict, &write],
        &[Mode::Exclusive; 6],
    )
    .await;
}

async fn readers_come_in_together_after_a_writer(place: Place) {
    let locks = place.client().await;
    // One reader in each process, with a writer behind them; or two readers, of which the second
    // calls the store once the first holds the lock.
    for (in_each, a_writer_follows) in [(1, true), (2, false)] {
        let mut fastest = LONG;
        for attempt in 0..3 {
            let key = format!("{in_each} {attempt}");
            fastest =
                fastest.min(readers_come_in(&place, &locks, &key, in_each, a_writer_follows).await);
        }
        assert!(fastest < TOLD, "{fastest:?}");
    }
    nothing_left(&place, &[]).await;
}

/// Returns the time from a writer's release until the readers of four processes, `in_each` of them
/// in each, have held the lock together.
async fn readers_come_in(
    place: &Place,
    locks: &LockClient,
    key: &str,
    in_each: usize,
    a_writer_follows: bool,
) -> Duration {
    let guard = locks.exclusive(key).acquire().await.unwrap();
    let all_inside = Arc::new(Barrier::new(4 * in_each));
    let mut readers = JoinSet::new();
    for number in 1..=4 {
        let client = place.client().await;
        for _ in 0..in_each {
            let acquire = begun(client.shared(key).wait(LONG).acquire()).await;
            let all_inside = all_inside.clone();
            readers.spawn(async move {
                let guard = acquire.await.unwrap();
                all_inside.wait().await;
                guard.release().await.unwrap();
            });
        }
        in_line(locks, key, number).await;
    }
    let mut writers = JoinSet::new();
    if a_writer_follows {
        let client = place.client().await;
        writers.spawn(client.exclusive(key).wait(LONG).acquire());
        in_line(locks, key, 5).await;
    }
    let released = Instant::now();
    guard.release().await.unwrap();
    readers.join_all().await;
    let waited = released.elapsed();
    for guard in writers.join_all().await {
        guard.unwrap().release().await.unwrap();
    }
    waited
}

async fn readers_that_keep_coming_do_not_starve_a_writer(place: Place) {
    let mut readers = JoinSet::new();
    for number in 0..4 {
        let client = place.client().await;
        readers.spawn(async move {
            sleep(Duration::from_millis(15 * number)).await;
            loop {
                let guard = client.shared("a").wait(LONG).acquire().await.unwrap();
                sleep(Duration::from_millis(60)).await;
                guard.release().await.unwrap();
            }
        });
    }
    let locks = place.client().await;
    sleep(Duration::from_millis(100)).await;
    for _ in 0..5 {
        // Some reader always holds the lock, and readers that come later queue behind the writer.
        let asked = Instant::now();
        locks
            .exclusive("a")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        assert!(
            asked.elapsed() < Duration::from_secs(2),
            "{:?}",
            asked.elapsed()
        );
    }
    readers.shutdown().await;
    nothing_left(&place, &["a"]).await;
}

async fn permits_are_served_one_by_one(place: Place) {
    let two = 2.try_into().unwrap();
    let locks = place.client().await;
    let inside = async |places: usize| {
        let found = locks.inspect("a").permits().await.unwrap();
        assert!(found.holders.len() <= 2, "{found:?}");
        (found.holders.len(), found.waiters.len()) == (2, places)
    };
    let mut guards = Vec::new();
    for _ in 0..2 {
        guards.push(locks.permits("a", two).acquire().await.unwrap());
    }
    let (served, mut order) = mpsc::unbounded_channel();
    for number in 0..4 {
        let client = place.client().await;
        let served = served.clone();
        tokio::spawn(async move {
            let guard = client.permits("a", two).wait(LONG).acquire().await.unwrap();
            served.send((number, guard)).unwrap();
        });
        eventually("it has a queue entry", async || inside(number + 1).await).await;
    }
    for expected in 0..4 {
        guards.remove(0).release().await.unwrap();
        let (number, guard) = order.recv().await.unwrap();
        assert_eq!(number, expected);
        guards.push(guard);
        assert!(inside(3 - expected).await);
        assert!(order.try_recv().is_err(), "only one permit was released");
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
    if let Place::Redis { .. } = place {
        nothing_left(&place, &[]).await;
    }
}

/// Two processes that always have waiters are served alternately, as strict order excludes local
/// hand-offs.
#[tokio::test]
async fn in_strict_order_processes_take_turns() {
    const TURNS: usize = 8;
    for place in [Place::memory(), Place::redis().await] {
        in_time(async {
            let locks = place.client().await;
            let guard = locks.exclusive("a").acquire().await.unwrap();
            let (served, mut order) = mpsc::unbounded_channel();
            let mut tasks = JoinSet::new();
            for process in 0..2 {
                let client = place.client().await;
                for _ in 0..TURNS {
                    let acquire =
                        begun(client.exclusive("a").strict_order().wait(LONG).acquire()).await;
                    let served = served.clone();
                    tasks.spawn(
                        async move { served.send((process, acquire.await.unwrap())).unwrap() },
                    );
                }
                in_line(&locks, "a", process + 1).await;
            }
            guard.release().await.unwrap();
            for turn in 0..2 * TURNS {
                let (process, guard) = order.recv().await.unwrap();
                assert_eq!(process, turn % 2, "turn {turn}");
                // The next waiter of its process has a queue entry, too.
                in_line(&locks, "a", (2 * TURNS - 1 - turn).min(2)).await;
                guard.release().await.unwrap();
            }
            tasks.join_all().await;
            nothing_left(&place, &["a"]).await;
        })
        .await;
    }
}

/// Each holder releases the lock at once, within the 50 ms for local hand-offs.
#[tokio::test]
async fn in_strict_order_nothing_is_passed_on() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let place = Place::redis().await;
        let locks = place.client().await;
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let mut waiting = Vec::new();
        for process in 1..=2 {
            let client = place.client().await;
            for _ in 0..20 {
                waiting
                    .push(begun(client.exclusive("a").strict_order().wait(LONG).acquire()).await);
            }
            driven(&mut waiting, in_line(&locks, "a", process)).await;
        }
        guard.release().await.unwrap();
        join_all(waiting.into_iter().map(pass_through)).await;
        assert_eq!(passes(&traces), 0);
        nothing_left(&place, &["a"]).await;
    })
    .await;
}
