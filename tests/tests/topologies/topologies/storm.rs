//! Many workers on a few keys while servers fail, and the outcome: whether fencing tokens went
//! back, whether an update was lost, how often holders overlapped, and for how long no lock was
//! granted.
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
//! A storm takes five seconds, or longer if its faults do.
//! `LOCK_TESTS_STORM=20 cargo test -p lock-tests --test topologies topologies::` makes it twenty
//! times as long, with twenty times the faults.

mod fault;
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
use lock_tests::{
    Delays,
    place::{LONG, times_as_long},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

pub(crate) use self::report::Report;
use self::{
    fault::{Fault, Out},
    worker::{Key, Worker},
};

/// The minimum length of a round of faults.
const ROUND: Duration = Duration::from_secs(5);
/// The longest time for which a storm goes on after its faults, until each key is granted once
/// more. A test that asserts a shorter gap finds its whole length in the report.
const PATIENCE: Duration = Duration::from_secs(10);

/// The plan of a storm.
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
    /// A storm with four tasks per client on three keys, with a lease of a second. To the store,
    /// each client is a process of its own.
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

    /// Sets the number of tasks per client.
    pub(crate) fn tasks(self, tasks: usize) -> Self {
        Self { tasks, ..self }
    }

    pub(crate) fn keys(self, keys: usize) -> Self {
        self.named((0..keys).map(|number| format!("key-{number}")))
    }

    /// Sets the names of the keys, for tests that depend on them.
    pub(crate) fn named(self, keys: impl IntoIterator<Item = String>) -> Self {
        Self {
            keys: keys.into_iter().collect(),
            ..self
        }
    }

    pub(crate) fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// Sets the minimum length of a round, which is five seconds by default.
    pub(crate) fn round(self, round: Duration) -> Self {
        Self { round, ..self }
    }

    /// Makes 30 % of the requests those of readers, and the others those of writers of the same
    /// lock.
    pub(crate) fn with_readers(self) -> Self {
        Self {
            readers: true,
            ..self
        }
    }

    /// Runs the workers while `faults` runs, prints the report and returns it.
    ///
    /// # Panics
    /// When a worker gets an error that no failing server explains.
    pub(crate) async fn run(self, faults: impl AsyncFn(&Faults)) -> Report {
        let keys: Arc<[Key]> = self.keys.into_iter().map(Key::new).collect();
        let over = Arc::new(AtomicBool::new(false));
        let (begin, delays) = (Instant::now(), Delays::of_tasks());
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
                Ok(_) => unreachable!("a worker runs until the storm is over"),
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
        let report = Report::new(
            begin..end,
            log.begun.into_inner().unwrap(),
            &keys,
            errors,
            &delays,
        );
        println!("{report}");
        report
    }
}

/// Waits until each key is granted once more, so that the last gap is measured to its end.
async fn granted_once_more(keys: &[Key]) {
    let now = Instant::now();
    while keys.iter().any(|key| !key.granted_since(now)) && now.elapsed() < PATIENCE {
        sleep(Duration::from_millis(5)).await;
    }
}

/// The log in which a fault script records its faults, as the report measures gaps from their
/// start.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    begun: Mutex<Vec<Fault>>,
}

impl Faults {
    /// Records a fault that begins now. It ends when the next one begins.
    pub(crate) fn begin(&self, name: &str) {
        self.add(name, Out::None);
    }

    /// Records a fault through which no server can serve. No service is promised until the next
    /// fault begins.
    pub(crate) fn outage(&self, name: &str) {
        self.add(name, Out::All);
    }

    /// Records a fault after which service is promised for all keys but these, until the next fault
    /// begins.
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
