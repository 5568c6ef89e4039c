//! The worker processes of a storm, which are stopped, killed and replaced while their output is
//! collected.

use std::{
    collections::HashMap,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use lock_tests::{
    Worker,
    storm::{Event, Log, Nanos, Record, in_nanos, nanos},
};
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Duration, sleep},
};

use super::server::Server;

/// The pause between two checks of the server.
const LOOK: Duration = Duration::from_millis(10);

/// The number of the test's own process.
const THIS: usize = 0;
/// The number that stands for the only server of a storm.
const SERVER: usize = usize::MAX;
/// The number that stands for the task of [`Guarded`](super::guarded::Guarded).
pub(super) const GUARDED: usize = usize::MAX - 1;

/// The records of all processes, each with the number of its process.
#[derive(Clone, Debug, Default)]
pub(super) struct Records(Arc<Mutex<Vec<(usize, Record)>>>);

impl Records {
    /// The log for the tasks of this process.
    pub(super) fn log(&self) -> Log {
        let records = self.clone();
        Arc::new(move |record| records.add(THIS, record))
    }

    /// Records the times in which the only server did not reply: it was stopped, wrote its log to a
    /// slow disk, or the machine ran other processes.
    pub(super) async fn watch(&self, server: &Server) {
        loop {
            if let Some(mut connection) = server.connection().await {
                loop {
                    let since = nanos();
                    let has_replied = connection.replies().await;
                    let at = nanos();
                    if at - since >= in_nanos(LOOK) {
                        let event = Event::Stalled { since };
                        self.add(
                            SERVER,
                            Record {
                                at,
                                request: 0,
                                event,
                            },
                        );
                    }
                    if !has_replied {
                        break;
                    }
                    sleep(LOOK).await;
                }
            }
            sleep(LOOK).await;
        }
    }

    pub(super) fn add(&self, process: usize, record: Record) {
        self.0.lock().unwrap().push((process, record));
    }

    pub(super) fn take(&self) -> Vec<(usize, Record)> {
        mem::take(&mut self.0.lock().unwrap())
    }
}

/// The command that starts a worker.
pub(super) struct Place {
    /// The program.
    pub(super) path: String,
    /// Its arguments, without the seed.
    pub(super) arguments: Vec<String>,
}

/// All workers.
pub(super) struct Processes {
    places: Vec<Place>,
    seed: u64,
    records: Records,
    numbers: AtomicUsize,
    running: Mutex<Vec<Option<Running>>>,
    killed: Mutex<HashMap<usize, Nanos>>,
}

struct Running {
    orders: mpsc::UnboundedSender<Order>,
    /// The number of the worker and the time of its end, if it was killed.
    end: JoinHandle<Option<(usize, Nanos)>>,
}

enum Order {
    Stop,
    Resume,
    Kill,
    Finish,
}

impl Processes {
    /// Starts a worker at each place.
    pub(super) fn start_all(places: Vec<Place>, seed: u64, records: Records) -> Self {
        let running = Mutex::new(places.iter().map(|_| None).collect());
        let numbers = AtomicUsize::new(THIS + 1);
        let this = Self {
            places,
            seed,
            records,
            numbers,
            running,
            killed: Mutex::default(),
        };
        (0..this.len()).for_each(|index| this.start(index));
        this
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Starts a worker at a place that has none.
    pub(super) fn start(&self, index: usize) {
        let Place { path, arguments } = &self.places[index];
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let seed = self.seed.wrapping_add(number as u64).to_string();
        let arguments: Vec<_> = arguments
            .iter()
            .map(String::as_str)
            .chain(["--seed", &seed])
            .collect();
        let worker = Worker::spawn(path, &arguments);
        let (orders, received) = mpsc::unbounded_channel();
        let end = tokio::spawn(follow(worker, number, received, self.records.clone()));
        self.running.lock().unwrap()[index] = Some(Running { orders, end });
    }

    pub(super) fn stop(&self, index: usize) {
        self.order(index, Order::Stop);
    }

    pub(super) fn resume(&self, index: usize) {
        self.order(index, Order::Resume);
    }

    fn order(&self, index: usize, order: Order) {
        let running = self.running.lock().unwrap();
        let Some(worker) = &running[index] else {
            panic!("worker {index} runs")
        };
        worker
            .orders
            .send(order)
            .unwrap_or_else(|_| panic!("worker {index} has failed"));
    }

    /// Kills a worker, and returns when it has ended.
    pub(super) async fn kill(&self, index: usize) {
        self.order(index, Order::Kill);
        self.ended(index).await;
    }

    async fn ended(&self, index: usize) {
        let running = self.running.lock().unwrap()[index].take();
        let killed = running
            .expect("it was started")
            .end
            .await
            .expect("a worker has failed");
        self.killed.lock().unwrap().extend(killed);
    }

    /// Lets all workers finish their requests. Returns the numbers of those that were killed
    /// earlier, with the times.
    pub(super) async fn finish(self) -> HashMap<usize, Nanos> {
        (0..self.len()).for_each(|index| self.order(index, Order::Finish));
        for index in 0..self.len() {
            self.ended(index).await;
        }
        self.killed.into_inner().unwrap()
    }
}

/// Collects the output of a worker until it exits or is killed.
async fn follow(
    mut worker: Worker,
    number: usize,
    mut orders: mpsc::UnboundedReceiver<Order>,
    records: Records,
) -> Option<(usize, Nanos)> {
    let (mut ready, mut finishing) = (false, false);
    loop {
        tokio::select! {
            line = worker.line() => match line.as_deref() {
                None => panic!("worker {number} has failed"),
                Some("ready") => {
                    worker.say("go").await;
                    if finishing {
                        worker.say("end").await;
                    }
                    ready = true;
                }
                Some("done") => break,
                Some(record) => records.add(number, serde_json::from_str(record).expect("a record")),
            },
            Some(order) = orders.recv() => match order {
                Order::Stop => worker.stop(),
                Order::Resume => worker.resume(),
                Order::Finish => {
                    finishing = true;
                    if ready {
                        worker.say("end").await;
                    }
                }
                Order::Kill => {
                    let at = nanos();
                    worker.kill().await;
                    // The last line may be incomplete.
                    let rest = worker.lines().await;
                    rest.iter().filter_map(|line| serde_json::from_str(line).ok()).for_each(|record| records.add(number, record));
                    return Some((number, at));
                }
            },
        }
    }
    assert!(
        worker.finish().await.success(),
        "worker {number} has failed"
    );
    None
}
