//! Waiting processes that are killed or stopped: dead ones delay the others by 3 s at most, and a
//! stopped one detects by itself that its grant has ended.

use std::{sync::Arc, time::Duration};

use lock_runtime::{
    LockClient, LockKey, Mode,
    store::{Hold, Instant, KeyRequest, MemoryStore, Store as _, Token},
};
use lock_tests::{RedisFencedResource, Worker, place::in_time, shared_server, unique};
use tokio::time::sleep;

use super::{LONG, Place, in_line, nothing_left};

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// The longest lease of an unconfirmed grant from the wait queue, and the time without a poll after
/// which a queue entry is stale.
const SHORT: Duration = Duration::from_secs(3);

struct Fleet {
    place: Place,
    locks: LockClient,
    name: String,
    resource: RedisFencedResource,
    workers: Vec<Worker>,
}

impl Fleet {
    async fn new() -> Self {
        let (place, name) = (Place::redis().await, unique("resource"));
        let resource = RedisFencedResource::open(&shared_server().await.url(), &name).await;
        Self {
            locks: place.client().await,
            place,
            name,
            resource,
            workers: Vec::new(),
        }
    }

    async fn start(&self, task: &str, lease: Duration, how: &[&str]) -> Worker {
        let (url, lease) = (shared_server().await.url(), lease.as_millis().to_string());
        let arguments = [
            task,
            "--url",
            &url,
            "--namespace",
            self.place.namespace(),
            "--resource",
            &self.name,
        ];
        Worker::spawn(
            WORKER,
            &[&arguments, &["--lease-ms", &lease][..], how].concat(),
        )
    }

    /// Starts one more process that waits for "a".
    async fn waiter(&mut self, lease: Duration, how: &[&str]) {
        let places = self.locks.inspect("a").await.unwrap().waiters.len();
        let worker = self.start("wait", lease, how).await;
        self.workers.push(worker);
        in_line(&self.locks, "a", places + 1).await;
    }

    /// Waits until the worker has held and released the lock, and returns its fencing token.
    async fn served(worker: &mut Worker) -> u64 {
        let fence = worker.line().await.expect("a token").parse().unwrap();
        assert_eq!(
            worker.line().await.as_deref(),
            Some("written=true released")
        );
        fence
    }

    /// Ends the workers, and checks that there were `writes` increments and no overlaps, and that
    /// nothing is left.
    async fn end(mut self, writes: u64) {
        for worker in &mut self.workers {
            assert!(worker.finish().await.success());
        }
        let report = self.resource.report().await;
        assert!(report.is_clean() && report.value == writes, "{report}");
        nothing_left(&self.place, &["a"]).await;
    }
}

#[tokio::test]
async fn real_processes_are_served_in_the_order_they_came() {
    in_time(async {
        let mut fleet = Fleet::new().await;
        let guard = fleet.locks.exclusive("a").acquire().await.unwrap();
        for number in 0..5 {
            fleet
                .waiter(
                    LONG,
                    if number % 2 == 0 {
                        &[]
                    } else {
                        &["--strict-order"]
                    },
                )
                .await;
        }
        let mut last = guard.fence().number();
        guard.release().await.unwrap();
        for worker in &mut fleet.workers {
            let fence = Fleet::served(worker).await;
            assert!(fence > last, "{fence} after {last}");
            last = fence;
        }
        fleet.end(5).await;
    })
    .await;
}

#[tokio::test]
async fn the_dead_in_a_line_delay_the_living_by_three_seconds_in_all() {
    in_time(async {
        let mut fleet = Fleet::new().await;
        let guard = fleet.locks.exclusive("a").acquire().await.unwrap();
        for _ in 0..8 {
            fleet.waiter(LONG, &[]).await;
        }
        for dead in [6, 4, 2, 1, 0] {
            fleet.workers.remove(dead).kill().await;
        }
        let released = Instant::now();
        let mut last = guard.fence().number();
        guard.release().await.unwrap();
        for worker in &mut fleet.workers {
            let fence = Fleet::served(worker).await;
            assert!(fence > last, "{fence} after {last}");
            last = fence;
        }
        assert!(released.elapsed() < SHORT * 2, "{:?}", released.elapsed());
        fleet.end(3).await;
    })
    .await;
}

/// The first waiter is stopped, and then granted the lock.
async fn a_stopped_process_is_granted(lease: Duration) {
    let mut fleet = Fleet::new().await;
    let guard = fleet.locks.exclusive("a").acquire().await.unwrap();
    for _ in 0..2 {
        fleet.waiter(lease, &[]).await;
    }
    fleet.workers[0].stop();
    let released = Instant::now();
    guard.release().await.unwrap();
    let granted = fleet.locks.inspect("a").await.unwrap();
    assert_eq!(
        (granted.holders.len(), granted.waiters.len()),
        (1, 1),
        "{granted:?}"
    );
    let living = Fleet::served(&mut fleet.workers[1]).await;
    let back = released.elapsed();
    assert!(back < lease.min(SHORT) + Duration::from_secs(1), "{back:?}");

    // It resumes while another client holds the lock, with the push message about its own, expired
    // grant still unread.
    let guard = fleet.locks.exclusive("a").acquire().await.unwrap();
    fleet.workers[0].resume();
    in_line(&fleet.locks, "a", 1).await;
    fleet.resource.increment(guard.fence()).await.unwrap();
    guard.release().await.unwrap();
    let stopped = Fleet::served(&mut fleet.workers[0]).await;
    assert!(stopped > living);
    fleet.end(3).await;
}

#[tokio::test]
async fn a_grant_to_a_stopped_process_comes_back() {
    in_time(async {
        tokio::join!(
            a_stopped_process_is_granted(Duration::from_secs(1)),
            a_stopped_process_is_granted(LONG),
        );
    })
    .await;
}

#[tokio::test]
async fn the_end_of_a_dead_holders_lease_wakes_the_waiters() {
    in_time(async {
        let mut fleet = Fleet::new().await;
        let mut holder = fleet.start("hold", Duration::from_secs(1), &[]).await;
        let dead: u64 = holder.line().await.unwrap().parse().unwrap();
        for _ in 0..2 {
            fleet.waiter(LONG, &[]).await;
        }
        // The waiters poll more than once while the holder renews its lease.
        sleep(Duration::from_millis(1200)).await;
        holder.kill().await;
        let killed = Instant::now();
        let left = fleet.locks.inspect("a").await.unwrap().holders[0]
            .ttl
            .unwrap();
        assert!(left <= Duration::from_secs(1));
        let first = Fleet::served(&mut fleet.workers[0]).await;
        let late = killed.elapsed().saturating_sub(left);
        assert!(late < Duration::from_secs(1), "{late:?}");
        let second = Fleet::served(&mut fleet.workers[1]).await;
        assert!(dead < first && first < second);
        fleet.end(2).await;
    })
    .await;
}

/// The same to the millisecond: no release frees the lock, and the next poll is due when the lease
/// ends.
#[tokio::test(start_paused = true)]
async fn a_waiter_asks_when_the_holders_lease_ends() {
    in_time(async {
        let store = Arc::<MemoryStore>::default();
        let locks = LockClient::with_store(store.clone());
        for lease in [150, 1250, 2450].map(Duration::from_millis) {
            let dead = Hold::new(LockKey::new("a").unwrap(), Mode::Exclusive, Token::random());
            let deadline = Instant::now() + LONG;
            store
                .acquire(&KeyRequest::new(dead, lease, deadline))
                .await
                .unwrap();
            let begin = Instant::now();
            let guard = locks.exclusive("a").wait(LONG).acquire().await.unwrap();
            let late = begin
                .elapsed()
                .checked_sub(lease)
                .expect("not before the end of the lease");
            assert!(late < Duration::from_millis(10), "{late:?}");
            guard.release().await.unwrap();
        }
    })
    .await;
}
