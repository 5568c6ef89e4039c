//! A process of a storm over all modes: tasks that ask for locks in every way there is, and a record of what each of them
//! saw, which the test judges. Unlike the other fixtures it uses the locks under test; it decides nothing about them.
//!
//! The same code works in the test's process and in workers (`lock-worker storm`), also in workers of another build.

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

/// The locks of a storm. Requests for several keys take the last two, so that the first one's waiters wait for it alone.
pub const KEYS: [&str; 3] = ["a", "b", "c"];
/// How many may hold the permits of a key.
pub const PERMITS: u32 = 2;

/// Between two looks at the clock of a process.
const TICK: Duration = Duration::from_millis(10);

/// Where records go.
pub type Log = Arc<dyn Fn(Record) + Send + Sync>;

/// What the tasks of a process do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many work at once.
    pub tasks: usize,
    /// The lease of every request that renews it.
    pub lease: Duration,
    /// Whether they ask for permits too.
    pub permits: bool,
    /// Where their choices come from.
    pub seed: u64,
}

/// The tasks of a process at work.
#[derive(Debug)]
pub struct Working {
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
    clock: JoinHandle<()>,
}

impl Plan {
    /// Starts the tasks, each with one of `clients`, which they share in turn.
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
    /// Lets every task end what it has begun, and waits for that.
    ///
    /// # Panics
    /// When a task has got an error that no failing store explains, or a guard that contradicts itself.
    pub async fn finish(self) {
        self.over.store(true, Ordering::Relaxed);
        self.tasks.join_all().await;
        self.clock.abort();
    }
}

/// Records when the process did not run, as it was stopped or the machine did other things.
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
