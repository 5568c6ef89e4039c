//! Readers and writers of several processes, with different time-outs, on a resource that counts
//! overlaps.
//!
//! The crowds run for a few seconds, and twenty times as long with
//! `LOCK_TESTS_STORM=20 cargo test -p lock-tests --test stores crowds`.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockError, LockErrorKind, LockRequest};
use lock_tests::{
    FencedResource, Proxy, place::times_as_long, proxy::Direction::ToClient, shared_server,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{LONG, Place, SOON, nothing_left};

/// Longer than any request waits, so a lock that is never released fails the test.
const LEASE: Duration = LONG;

/// The errors that a broken connection may cause.
const BROKEN: [LockErrorKind; 2] = [LockErrorKind::Unavailable, LockErrorKind::ReleaseUnknown];

/// The number of completed turns of each kind.
type Turns = [u64; 6];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_of_several_processes_never_meet() {
    let place = Place::redis().await;
    let turns = crowd(four_clients(&place).await, Duration::from_secs(5), &[]).await;
    assert!(turns.iter().all(|turns| *turns > 0), "{turns:?}");
    nothing_left(&place, &["a", "b"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_never_meet_while_connections_break() {
    let server = shared_server().await;
    let proxy = Proxy::to(server).await;
    let place = Place::at(proxy.url());
    let clients = four_clients(&place).await;
    let faults = async {
        loop {
            match rand::random_range(0..4) {
                0 => proxy.cut(),
                1 => proxy.drop_messages(),
                2 => proxy.delay(ToClient, Duration::from_millis(rand::random_range(0..100))),
                _ => proxy.drop_next_reply(),
            }
            sleep(Duration::from_millis(rand::random_range(0..400))).await;
            proxy.let_through().await;
            sleep(Duration::from_millis(rand::random_range(0..200))).await;
        }
    };
    tokio::select! {
        turns = crowd(clients, Duration::from_secs(4), &BROKEN) => assert!(turns.iter().sum::<u64>() > 0, "{turns:?}"),
        () = faults => {}
    }
    proxy.let_through().await;
    nothing_left(&place, &["a", "b"]).await;
}

async fn four_clients(place: &Place) -> Vec<LockClient> {
    join_all((0..4).map(|_| place.client())).await
}

/// Runs six tasks per client for `length` (longer in a storm). No task hangs or gets an error other
/// than `refusals`, and holders that exclude each other do not overlap.
async fn crowd(
    clients: Vec<LockClient>,
    length: Duration,
    refusals: &'static [LockErrorKind],
) -> Turns {
    let resource = Arc::new(FencedResource::new());
    let until = Instant::now() + length * u32::try_from(times_as_long()).unwrap();
    let mut tasks = JoinSet::new();
    for locks in clients {
        for _ in 0..6 {
            tasks.spawn(work(locks.clone(), resource.clone(), until, refusals));
        }
    }
    let mut turns = Turns::default();
    while let Some(done) = timeout(until - Instant::now() + LONG, tasks.join_next())
        .await
        .expect("a task hangs")
    {
        turns
            .iter_mut()
            .zip(done.unwrap())
            .for_each(|(all, these)| *all += these);
    }
    let report = resource.report();
    assert!(report.is_clean(), "{report}");
    assert!(report.writes > 0 && report.peak > 1, "{report}");
    turns
}

async fn work(
    locks: LockClient,
    resource: Arc<FencedResource>,
    until: Instant,
    refusals: &'static [LockErrorKind],
) -> Turns {
    let mut turns = Turns::default();
    while Instant::now() < until {
        let kind = rand::random_range(0..turns.len());
        let patience = Duration::from_micros(rand::random_range(0..60_000));
        let patience = if rand::random_bool(0.3) {
            patience
        } else {
            LONG
        };
        match timeout(patience, turn(&locks, &resource, kind)).await {
            Ok(Ok(())) => turns[kind] += 1,
            Ok(Err(error)) => assert!(refusals.contains(&error.kind()), "{kind}: {error}"),
            Err(_) => assert!(patience < LONG, "a turn hangs"),
        }
    }
    turns
}

/// One turn of the given kind. It may be dropped at any await point.
async fn turn(locks: &LockClient, resource: &FencedResource, kind: usize) -> Result<(), LockError> {
    let stay = Duration::from_micros(rand::random_range(0..2000));
    let write = async |fence: u64| {
        resource.increment(fence).await.unwrap();
        sleep(stay).await;
    };
    let read = async || {
        let _inside = resource.enter_reader();
        sleep(stay).await;
    };
    let patient = |request: LockRequest| request.lease(LEASE).wait(SOON);
    match kind {
        0 => {
            let guard = patient(locks.exclusive("a")).acquire().await?;
            write(guard.fence().number()).await;
            guard.release().await
        }
        1 => {
            let guard = patient(locks.exclusive("a"))
                .strict_order()
                .acquire()
                .await?;
            write(guard.fence().number()).await;
            drop(guard);
            Ok(())
        }
        2 => patient(locks.shared("a")).run(async |_| read().await).await,
        3 => {
            let guard = patient(locks.exclusive("a")).acquire().await?;
            write(guard.fence().number()).await;
            let guard = guard.downgrade().await?;
            read().await;
            guard.release().await
        }
        4 => {
            let guard = patient(locks.all(["a", "b"])).no_renew().acquire().await?;
            let fence = guard
                .fences()
                .find(|(key, _)| key.as_str() == "a")
                .unwrap()
                .1;
            write(fence.number()).await;
            guard.release().await
        }
        _ => match locks
            .exclusive("a")
            .lease(LEASE)
            .wait(stay * 100)
            .acquire()
            .await
        {
            Ok(guard) => {
                write(guard.fence().number()).await;
                guard.release().await
            }
            Err(error) if error.kind() == LockErrorKind::WaitTimeout => Ok(()),
            Err(error) => Err(error),
        },
    }
}
