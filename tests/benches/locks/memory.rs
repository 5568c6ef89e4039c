//! Acquire and release in this process. In `memory` every task has its own key, in `memory-one-key`
//! all tasks use the same one. The limit is a map of mutexes, looked up by the key each time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lock_runtime::LockClient;
use tokio::sync::OwnedMutexGuard;

use crate::{
    contest::{Contest, LIMIT, Round},
    report::Row,
    subject::{Ours, Subject},
    turns::{Turn, repeat, together},
};

/// Number of turns that are timed together.
const BATCH: u32 = 1_000;
const TASKS: usize = 64;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let mut rows = compare("memory", 1, slice, |task| format!("bench:{task}")).await;
    rows.extend(compare("memory", TASKS, slice, |task| format!("bench:{task}")).await);
    rows.extend(compare("memory-one-key", TASKS, slice, |_| "bench".to_owned()).await);
    rows
}

async fn compare(
    scenario: &'static str,
    tasks: usize,
    slice: Duration,
    key: fn(usize) -> String,
) -> Vec<Row> {
    let locks = LockClient::in_memory();
    let mutexes = Arc::<Mutexes>::default();
    let contest = Contest::new(scenario, tasks, slice)
        .subject("lock-runtime", |_, slice| {
            each(slice, (0..tasks).map(|task| Ours::new(&locks, key(task))))
        })
        .subject(LIMIT, |_, slice| {
            each(
                slice,
                (0..tasks).map(|task| Keyed {
                    mutexes: mutexes.clone(),
                    key: key(task),
                }),
            )
        });
    let rows = contest.run().await;
    locks.shutdown().await;
    rows
}

// Spawns a task also for a single subject, as a service does: the main future of a multi-threaded
// runtime is on another thread.
fn each<S: Subject>(
    slice: Duration,
    subjects: impl Iterator<Item = S>,
) -> impl Future<Output = Round> {
    together(slice, subjects.map(Turn), |turn, watch| {
        repeat(turn, BATCH, watch)
    })
}

type Mutexes = Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>;

/// The code that a user would write without a library.
struct Keyed {
    mutexes: Arc<Mutexes>,
    key: String,
}

impl Keyed {
    fn mutex(&self) -> Arc<tokio::sync::Mutex<()>> {
        let mut mutexes = self.mutexes.lock().unwrap_or_else(PoisonError::into_inner);
        match mutexes.get(&self.key) {
            Some(mutex) => mutex.clone(),
            None => mutexes.entry(self.key.clone()).or_default().clone(),
        }
    }
}

impl Subject for Keyed {
    type Guard = OwnedMutexGuard<()>;

    async fn acquire(&self) -> OwnedMutexGuard<()> {
        self.mutex().lock_owned().await
    }

    async fn release(&self, guard: OwnedMutexGuard<()>) {
        drop(guard);
    }
}
