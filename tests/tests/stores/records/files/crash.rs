//! Processes that are killed, at any point of a swap.

use std::{fs, time::Duration};

use lock_runtime::LockClient;
use lock_tests::{Worker, place::in_time};
use tokio::time::sleep;

use super::Place;

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// A process that acquires groups of three locks, each group in one swap.
struct Hoarder {
    worker: Worker,
    name: &'static str,
    /// The number of the group with which it began last.
    group: u32,
}

impl Hoarder {
    fn start(place: &Place, name: &'static str) -> Self {
        let directory = place.0.path().to_str().unwrap();
        Self {
            worker: Worker::spawn(WORKER, &["hoard", directory, name]),
            name,
            group: 0,
        }
    }

    async fn reach(&mut self, group: u32) {
        while self.group < group {
            self.group = self.worker.line().await.unwrap().parse().unwrap();
        }
    }

    /// Kills it at some point of a swap.
    async fn kill(&mut self) {
        let micros = rand::random_range(0..5000);
        sleep(Duration::from_micros(micros)).await;
        self.worker.kill().await;
        while let Some(group) = self.worker.line().await {
            self.group = group.parse().unwrap();
        }
    }

    /// Checks that it had all locks of each group, and all or none of the last one.
    async fn check(&self, locks: &LockClient) {
        for group in 0..=self.group {
            let mut held = 0;
            for key in ["a", "b", "c"] {
                let key = format!("{}:{group}:{key}", self.name);
                held += locks.inspect(key).await.unwrap().holders.len();
            }
            let last = group == self.group;
            assert!(held == 3 || (last && held == 0), "{held} of group {group}");
        }
    }
}

#[tokio::test]
async fn a_process_killed_in_a_swap_leaves_no_half_of_it() {
    for _ in 0..10 {
        let place = Place::new();
        let mut killed = Hoarder::start(&place, "killed");
        let mut other = Hoarder::start(&place, "other");
        in_time(killed.reach(3)).await;
        killed.kill().await;
        let further = other.group + 3;
        in_time(other.reach(further)).await;
        other.kill().await;
        let locks = place.client();
        killed.check(&locks).await;
        other.check(&locks).await;
    }
}

#[tokio::test]
async fn a_torn_write_has_no_effect() {
    let place = Place::new();
    let locks = place.client();
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let text = fs::read_to_string(place.file()).unwrap();
    for length in [0, 1, text.len() / 2, text.len() - 1] {
        let torn = place.0.path().join("records.new");
        place.alone(|| fs::write(torn, &text[..length]).unwrap());
        guard.verify().await.unwrap();
        let next = place.client().exclusive("b").acquire().await.unwrap();
        next.release().await.unwrap();
    }
    guard.release().await.unwrap();
}
