//! Many workers on a few keys while servers fail, and what came of it: whether tokens ever went back, whether an update was
//! lost, how often two met, and how long nobody got a lock.
//!
//! ```ignore
//! let storm = Storm::of(clients).lease(LEASE).run(async |faults| {
//!     sleep(Duration::from_secs(1)).await;
//!     faults.begin("the server stops for half a lease");
//!     server.stop();
//!     sleep(LEASE / 2).await;
//!     server.resume();
//! });
//! let report = storm.await;
//! report.assert_fenced();
//! report.assert_service_within(LEASE + Duration::from_secs(2));
//! ```
//!
//! A storm lasts five seconds, or as long as its faults. `LOCK_TESTS_STORM=20 cargo test -p lock-tests --test it topologies`
//! makes it twenty times as long, with twenty times the faults.

pub(super) mod history;
mod noticed;
mod report;
mod worker;

use std::{
    panic::resume_unwind,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lock_runtime::LockClient;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

pub(crate) use self::report::Report;
use self::{
    history::{Fault, Out},
    worker::{Key, Worker},
};
use crate::{exclusion::times_as_long, place::LONG};

/// How long one round of faults is, if they do not take longer.
const ROUND: Duration = Duration::from_secs(5);
/// How long after the faults each key may take to be granted once more. Whoever asserts less sees in the report how long it
/// took.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is to be done, and by whom.
#[derive(Debug)]
pub(crate) struct Storm {
    clients: Vec<LockClient>,
    tasks: usize,
    keys: Vec<String>,
    lease: Duration,
    round: Duration,
    readers: bool,
}

impl Storm {
    /// Each client is a process of its own to the store: four tasks work with each, on three keys, with a lease of a second.
    pub(crate) fn of(clients: Vec<LockClient>) -> Self {
        let storm = Self {
            clients,
            tasks: 4,
            keys: Vec::new(),
            lease: Duration::from_secs(1),
            round: ROUND,
            readers: false,
        };
        storm.keys(3)
    }

    /// So many tasks with each client.
    pub(crate) fn tasks(self, tasks: usize) -> Self {
        Self { tasks, ..self }
    }

    pub(crate) fn keys(self, keys: usize) -> Self {
        self.named((0..keys).map(|number| format!("key-{number}")))
    }

    /// Keys with these names, where it matters which.
    pub(crate) fn named(self, keys: impl IntoIterator<Item = String>) -> Self {
        Self {
            keys: keys.into_iter().collect(),
            ..self
        }
    }

    pub(crate) fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// How long it lasts at least, where five seconds are not right.
    pub(crate) fn round(self, round: Duration) -> Self {
        Self { round, ..self }
    }

    /// One in three comes to read, and the others are writers of the same lock.
    pub(crate) fn with_readers(self) -> Self {
        Self {
            readers: true,
            ..self
        }
    }

    /// Lets all work while `faults` runs, prints what was seen and returns it.
    ///
    /// # Panics
    /// When a worker gets an error that no failing server explains.
    pub(crate) async fn run(self, faults: impl AsyncFn(&Faults)) -> Report {
        let keys: Arc<[Key]> = self.keys.into_iter().map(Key::new).collect();
        let over = Arc::new(AtomicBool::new(false));
        let begin = Instant::now();
        let mut workers = JoinSet::new();
        for client in self
            .clients
            .iter()
            .flat_map(|client| vec![client; self.tasks])
        {
            let (locks, keys, over) = (client.clone(), keys.clone(), over.clone());
            workers.spawn(
                Worker {
                    locks,
                    keys,
                    over,
                    lease: self.lease,
                    readers: self.readers,
                }
                .work(),
            );
        }

        let log = Faults::default();
        let script = async {
            for _ in 0..times_as_long() {
                tokio::join!(faults(&log), sleep(self.round));
            }
            granted_once_more(&keys).await;
        };
        tokio::select! {
            () = script => {}
            Some(ended) = workers.join_next() => match ended {
                Ok(_) => unreachable!("it works until it is told that the storm is over"),
                Err(failed) => resume_unwind(failed.into_panic()),
            }
        }
        let end = Instant::now();
        over.store(true, Ordering::Relaxed);
        let errors = timeout(LONG, workers.join_all())
            .await
            .expect("a worker hangs")
            .into_iter()
            .flatten();
        let report = Report::new(begin..end, log.begun.into_inner().unwrap(), &keys, errors);
        println!("{report}");
        report
    }
}

/// The last gap has to be seen to its end, or it would be too short.
async fn granted_once_more(keys: &[Key]) {
    let now = Instant::now();
    while keys.iter().any(|key| !key.granted_since(now)) && now.elapsed() < PATIENCE {
        sleep(Duration::from_millis(5)).await;
    }
}

/// Where a fault script says what it does, for the report to measure from there.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    begun: Mutex<Vec<Fault>>,
}

impl Faults {
    /// A fault begins now; it ends when the next begins.
    pub(crate) fn begin(&self, name: &str) {
        self.add(name, Out::None);
    }

    /// The same for one that nobody can serve through: until the next begins, no service is promised.
    pub(crate) fn outage(&self, name: &str) {
        self.add(name, Out::All);
    }

    /// No service of these keys is promised until the next begins, and of the others there is.
    pub(crate) fn outage_of(&self, keys: &[String], name: &str) {
        self.add(name, Out::Some(keys.to_owned()));
    }

    fn add(&self, name: &str, out: Out) {
        self.begun.lock().unwrap().push(Fault {
            name: name.to_owned(),
            at: Instant::now(),
            out,
        });
    }
}
