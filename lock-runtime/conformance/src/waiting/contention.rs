//! Exclusion under contention: many calls at the same time, without the queues and pauses of a
//! client.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use lock_runtime::{
    LockKey, Mode,
    store::{self, AcquireReply, Hold, PollReply, Store},
    time::Instant,
};
use tokio::{
    task::{JoinSet, yield_now},
    time::sleep,
};

use crate::subject::lock;
use crate::{
    storm::{Grant, History},
    subject::{Subject, TWO_PERMITS, beside, fresh_key, in_time, promise},
};

/// The number of connections, and of the tasks that use each of them.
const CONNECTIONS: usize = 3;
const TASKS: usize = 4;
const LENGTH: Duration = Duration::from_millis(1500);
/// The pause between two polls of a waiter.
const LOOK: Duration = Duration::from_millis(1);

/// Checks exclusion and fencing tokens among tasks that call the store at the same time, over
/// several connections: exclusive locks, readers and permits of one name, with and without a place
/// in the wait queue.
///
/// # Panics
/// If the store breaks these promises.
pub async fn contenders_exclude_each_other(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let mut contest = Vec::new();
    for _ in 0..CONNECTIONS {
        contest.push(Arc::new(Subject::of(make).await));
    }
    in_time(async {
        let queues = contest[0].queues().await;
        let modes = contest[0].modes();
        let arena = Arc::new(Arena::new(fresh_key()));
        let mut tasks = JoinSet::new();
        for (number, subject) in contest.iter().cycle().take(CONNECTIONS * TASKS).enumerate() {
            // Half of them are writers.
            let mode = if number % 2 == 0 {
                Mode::Exclusive
            } else {
                modes[number / 2 % modes.len()]
            };
            let contender = Contender {
                subject: subject.clone(),
                arena: arena.clone(),
                mode,
                queued: queues && number % 4 == 1,
            };
            tasks.spawn(contender.work());
        }
        tasks.join_all().await;
        arena.judge();
        for mode in modes {
            let hold = beside(&arena.key, mode);
            contest[0]
                .assert_unused("nothing is left after the last release", &hold)
                .await;
        }
    })
    .await;
}

/// One name, and the tasks that hold its locks.
struct Arena {
    key: LockKey,
    until: Instant,
    writers: AtomicUsize,
    readers: AtomicUsize,
    permits: AtomicUsize,
    /// A task was inside for longer than its lease may last.
    stalled: AtomicBool,
    overlaps: Mutex<Vec<String>>,
    /// The fencing tokens of the lock, and those of its permits.
    histories: [Mutex<History>; 2],
}

impl Arena {
    fn new(key: LockKey) -> Self {
        Self {
            key,
            until: Instant::now() + LENGTH,
            writers: AtomicUsize::new(0),
            readers: AtomicUsize::new(0),
            permits: AtomicUsize::new(0),
            stalled: AtomicBool::new(false),
            overlaps: Mutex::default(),
            histories: Default::default(),
        }
    }

    /// Counts a holder, and notes with which others it is inside.
    async fn visit(&self, mode: Mode) {
        let count = match mode {
            Mode::Exclusive => &self.writers,
            Mode::Shared => &self.readers,
            _ => &self.permits,
        };
        let alike = count.fetch_add(1, SeqCst);
        let overlaps = match mode {
            Mode::Exclusive => alike > 0 || self.readers.load(SeqCst) > 0,
            Mode::Shared => self.writers.load(SeqCst) > 0,
            Mode::Permits(most) => alike >= most.get() as usize,
            mode => panic!("no request is of the mode {mode:?}"),
        };
        if overlaps {
            let [writers, readers] = [&self.writers, &self.readers].map(|count| count.load(SeqCst));
            lock(&self.overlaps).push(format!(
                "{mode:?} beside {alike} of its mode, with {writers} writers and {readers} readers"
            ));
        }
        for _ in 0..3 {
            yield_now().await;
        }
        count.fetch_sub(1, SeqCst);
    }

    fn judge(&self) {
        if self.stalled.load(SeqCst) {
            println!("not checked: exclusion under contention: a task did not run for a second");
        } else {
            let overlaps = lock(&self.overlaps);
            promise!(
                "no holder relies on a lock that another one holds",
                overlaps.is_empty(),
                "{} overlaps, the first: {}",
                overlaps.len(),
                overlaps[0]
            );
        }
        for history in &self.histories {
            let history = lock(history);
            let violations = history.violations();
            promise!(
                "fencing tokens of a key are unique and increase",
                violations.is_empty(),
                "{}: {violations:?}",
                violations[0]
            );
        }
    }
}

/// A task that acquires and releases a lock.
struct Contender {
    subject: Arc<Subject>,
    arena: Arc<Arena>,
    mode: Mode,
    queued: bool,
}

impl Contender {
    async fn work(self) {
        while Instant::now() < self.arena.until {
            let hold = beside(&self.arena.key, self.mode);
            let asked_at = std::time::Instant::now();
            if let Some(token) = self.acquired(&hold).await {
                let history = &self.arena.histories[usize::from(self.mode == TWO_PERMITS)];
                lock(history).add(Grant {
                    asked_at,
                    granted_at: std::time::Instant::now(),
                    token,
                });
                let entered = Instant::now();
                self.arena.visit(self.mode).await;
                if entered.elapsed() > store::Grant::HANDOFF_LEASE / 3 {
                    self.arena.stalled.store(true, SeqCst);
                }
                self.subject.release(&hold).await;
            }
            yield_now().await;
        }
    }

    /// Returns the number of the fencing token.
    async fn acquired(&self, hold: &Hold) -> Option<u64> {
        let subject = &self.subject;
        let lease = subject.lease();
        let reply = if self.queued {
            subject.queue_for(hold, lease).await
        } else {
            subject.acquire(hold, lease).await
        };
        match reply {
            AcquireReply::Granted(grant) => return Some(grant.fence.number()),
            AcquireReply::Queued { .. } => {}
            _ => return None,
        }
        loop {
            match subject.poll(hold).await {
                PollReply::Granted(grant) => return Some(grant.fence.number()),
                PollReply::Queued { .. } if Instant::now() > self.arena.until => {
                    subject.abandon(hold).await;
                    return None;
                }
                PollReply::Queued { .. } => sleep(LOOK).await,
                _ => return None,
            }
        }
    }
}
