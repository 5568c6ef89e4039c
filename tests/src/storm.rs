//! One process of a storm over all modes: tasks that request locks in all ways, and records of
//! their events, which the test judges. Unlike the other fixtures it uses the locks under test; it
//! does not judge them.
//!
//! The same code works in the test's process and in workers (`lock-worker storm`), also in workers
//! of another build.

mod record;
mod task;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lock_runtime::LockClient;
use rand::{SeedableRng as _, rngs::StdRng};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep_until},
};

pub use self::record::{Ask, Event, Kind, Record, nanos};
use self::task::Task;

/// The locks of a storm. Requests for several keys use the last two, so that the waiters of the
/// first one wait for it alone.
pub const KEYS: [&str; 3] = ["a", "b", "c"];
/// Number of permits of a key.
pub const PERMITS: u32 = 2;

/// Interval between checks of the clock of a process.
const TICK: Duration = Duration::from_millis(10);

/// Receiver of the records.
pub type Log = Arc<dyn Fn(Record) + Send + Sync>;

/// Settings for the tasks of a process.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of tasks.
    pub tasks: usize,
    /// The lease of every request that renews it.
    pub lease: Duration,
    /// Whether they request permits too.
    pub permits: bool,
    /// Seed of their choices.
    pub seed: u64,
}

/// The running tasks of a process.
#[derive(Debug)]
pub struct Working {
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
    clock: JoinHandle<()>,
}

impl Plan {
    /// Starts the tasks; `clients` are assigned to them in turn.
    pub fn start(&self, clients: &[LockClient], log: &Log) -> Working {
        let (over, requests) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let mut tasks = JoinSet::new();
        for (number, locks) in (0..self.tasks).zip(clients.iter().cycle()) {
            let random =
                StdRng::seed_from_u64(self.seed.wrapping_mul(1000).wrapping_add(number as u64));
            let (over, requests) = (over.clone(), requests.clone());
            let task = Task::new(locks.clone(), self.clone(), random, log.clone(), requests);
            tasks.spawn(task.work(over));
        }
        Working {
            over,
            tasks,
            clock: tokio::spawn(watch_the_clock(log.clone())),
        }
    }
}

impl Working {
    /// Lets every task complete its turn, and waits for all tasks.
    ///
    /// # Panics
    /// When a task gets an error that no failing store explains, or a guard that contradicts
    /// itself.
    pub async fn finish(self) {
        self.over.store(true, Ordering::Relaxed);
        self.tasks.join_all().await;
        self.clock.abort();
    }
}

/// Records the times when the process did not run, because it was stopped or the machine was busy.
async fn watch_the_clock(log: Log) {
    loop {
        let due = Instant::now() + TICK;
        sleep_until(due).await;
        let late = due.elapsed();
        if late >= TICK {
            let at = nanos();
            let since = at - u64::try_from(late.as_nanos()).unwrap_or(at);
            log(Record {
                at,
                request: 0,
                event: Event::Stalled { since },
            });
        }
    }
}
