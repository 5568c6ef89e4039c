//! A storm: tasks of several processes that request locks in all modes and options, the records of
//! their events, and the conditions that the records must meet.
//!
//! | module | content |
//! |---|---|
//! | `task` | the tasks |
//! | `record` | the events that a task records |
//! | `chronicle` | all records of a storm, and its overlaps, gaps and late answers |
//! | `history` | the fencing tokens of a key |
//! | `report` | the results, and the assertions about them |

mod chronicle;
mod history;
mod record;
mod report;
mod task;

use std::{
    collections::HashMap,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lock_runtime::{
    LockClient,
    time::{Instant, sleep_until},
};
use rand::{SeedableRng as _, rngs::StdRng};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use self::task::Task;
pub use self::{
    chronicle::{
        Chronicle, Fault, Gap, HANDOVER, Nanos, Operation, RECOVERY, TokenViolations, in_nanos,
    },
    history::{Grant, History, Violation},
    record::{Ask, Event, Kind, Record},
    report::Report,
};
use super::subject::LONG;
use crate::subject::lock;

/// The locks of a storm. Requests for several keys use the last two, so that the waiters of the
/// first one wait for it alone.
pub const KEYS: [&str; 3] = ["a", "b", "c"];
/// Number of permits of a key.
pub const PERMITS: u32 = 2;

/// Interval between checks of the clock of a process.
const TICK: Duration = Duration::from_millis(10);

/// Receiver of the records.
pub type Log = Arc<dyn Fn(Record) + Send + Sync>;

/// A clock in nanoseconds, the same for all processes of a storm.
pub type Clock = fn() -> Nanos;

/// Settings for the tasks of a process.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The clock of the records.
    pub clock: Clock,
    /// Number of tasks.
    pub tasks: usize,
    /// The lease of every request that renews it.
    pub lease: Duration,
    /// The lease of the others.
    pub brief_lease: Duration,
    /// Whether they request permits too.
    pub permits: bool,
    /// Whether some requests retain the lock.
    pub retains: bool,
    /// Whether they request several keys at once without waiting.
    pub several_at_once: bool,
    /// The beginning of all names.
    pub prefix: String,
    /// Seed of their choices.
    pub seed: u64,
}

impl Plan {
    /// A plan for a store without limits.
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            tasks: 6,
            lease: Duration::from_secs(1),
            brief_lease: Duration::from_millis(150),
            permits: true,
            retains: false,
            several_at_once: true,
            prefix: String::new(),
            seed: 0,
        }
    }
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
        // Before the tasks: the process may be stopped as soon as they have begun.
        let clock = watch_the_clock(Instant::now(), self.clock, log.clone());
        let clock = tokio::spawn(clock);
        let mut tasks = JoinSet::new();
        for (number, locks) in (0..self.tasks).zip(clients.iter().cycle()) {
            let random =
                StdRng::seed_from_u64(self.seed.wrapping_mul(1000).wrapping_add(number as u64));
            let (over, requests) = (over.clone(), requests.clone());
            let task = Task::new(locks.clone(), self.clone(), random, log.clone(), requests);
            tasks.spawn(task.work(over));
        }
        Working { over, tasks, clock }
    }
}

impl Plan {
    /// Runs a storm with clients of this process only, and without faults.
    ///
    /// # Panics
    /// When a task hangs, or for the reasons of [`Working::finish`].
    pub async fn run(
        &self,
        clients: &[LockClient],
        length: Duration,
        handover: Duration,
    ) -> Report {
        let records = Arc::new(Mutex::new(Vec::new()));
        let log: Log = {
            let records = records.clone();
            Arc::new(move |record: Record| lock(&records).push((0, record)))
        };
        let begin = Instant::now();
        let working = self.start(clients, &log);
        sleep(length).await;
        let finished = timeout(LONG, working.finish()).await;
        finished.expect("no task of the storm hangs");
        let records = mem::take(&mut *lock(&records));
        let chronicle = Chronicle::new(records, HashMap::new(), Vec::new(), self.lease);
        let chronicle = chronicle.handover(handover);
        Report::new("one process".into(), &chronicle, begin.elapsed(), self.seed)
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
async fn watch_the_clock(mut now: Instant, clock: Clock, log: Log) {
    loop {
        let due = now + TICK;
        sleep_until(due).await;
        let late = due.elapsed();
        if late >= TICK {
            let at = clock();
            let since = at.saturating_sub(in_nanos(late));
            log(Record {
                at,
                request: 0,
                event: Event::Stalled { since },
            });
        }
        now = Instant::now();
    }
}
