//! Locks that their client retains for the next use. `without` is the same client without
//! retention.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockGuard};
use lock_tests::redis_server::RedisServer;

use crate::{
    contest::{Contest, Round},
    heap, raw,
    report::Row,
    subject::{LEASE, Ours, Rslock, Subject, connect},
    turns::{Watch, contend, together},
};

const WITHOUT: &str = "without";
const RETAINED: Duration = Duration::from_secs(1);
/// The number of locks that are idle at the same time.
const LOCKS: usize = 10_000;
/// The retention of locks that are used once each.
const BRIEFLY: Duration = Duration::from_millis(50);

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let manager = Rslock::manager(&raw::client(&server.url()));
    let clients = connect(&server.url(), 2).await;
    let [locks, others] = &clients[..] else {
        unreachable!("two clients")
    };
    let mut rows = Vec::new();
    for tasks in [1, 64] {
        let again = Contest::new("retained", tasks, slice)
            .servers([&server])
            .each("lock-runtime", |task| {
                Ours::new(locks, format!("bench:{task}")).retain(RETAINED)
            })
            .each(WITHOUT, |task| Ours::new(locks, format!("without:{task}")))
            .each("rslock", |task| {
                Rslock::new(&manager, format!("rslock:{task}"))
            });
        rows.extend(again.run().await);
        let once = Contest::new("once each", tasks, slice)
            .servers([&server])
            .each("lock-runtime", |task| {
                Fresh::new(locks, task, Some(BRIEFLY))
            })
            .each(WITHOUT, |task| Fresh::new(locks, task, None));
        rows.extend(once.run().await);
    }
    let taken_over = Contest::new("taken over", 1, slice)
        .subject("lock-runtime", |_, slice| {
            taken_over(slice, [locks, others], true)
        })
        .subject(WITHOUT, |_, slice| {
            taken_over(slice, [locks, others], false)
        });
    rows.extend(taken_over.run().await);
    let alternate = Contest::new("alternate", 2, slice)
        .servers([&server])
        .subject("lock-runtime", |round, slice| {
            let subject = move |locks| Ours::new(locks, format!("turns:{round}")).retain(RETAINED);
            together(slice, clients.iter().map(subject), contend)
        })
        .subject(WITHOUT, |round, slice| {
            let subject = move |locks| Ours::new(locks, format!("plain:{round}"));
            together(slice, clients.iter().map(subject), contend)
        });
    rows.extend(alternate.run().await);
    join_all(clients.iter().map(LockClient::shutdown)).await;
    rows.push(Row {
        bytes_per_lease: Some(bytes_per_lock().await),
        ..Row::new("idle", "lock-runtime", LOCKS)
    });
    rows
}

/// Heap use of a lock that is retained.
async fn bytes_per_lock() -> f64 {
    eprintln!("idle, bytes per lock");
    let prepare = async || {
        let server = RedisServer::start().await;
        let locks = connect(&server.url(), 1).await.remove(0);
        (server, locks)
    };
    let grow = async |(_, locks): &mut (RedisServer, LockClient)| {
        for number in 0..LOCKS {
            let lock = Ours::new(locks, format!("idle:{number}")).retain(LEASE);
            lock.release(lock.acquire().await).await;
        }
    };
    heap::growth(prepare, grow).await / LOCKS as f64
}

/// Locks that are used once each.
struct Fresh {
    locks: LockClient,
    task: usize,
    retain: Option<Duration>,
    next: AtomicU64,
}

impl Fresh {
    fn new(locks: &LockClient, task: usize, retain: Option<Duration>) -> Self {
        Self {
            locks: locks.clone(),
            task,
            retain,
            next: AtomicU64::new(0),
        }
    }
}

impl Subject for Fresh {
    type Guard = LockGuard;

    async fn acquire(&self) -> LockGuard {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Many more than are retained at a time.
        let key = format!("fresh:{}:{}", self.task, number % 100_000);
        let ours = Ours::new(&self.locks, key);
        let ours = match self.retain {
            Some(retain) => ours.retain(retain),
            None => ours,
        };
        ours.acquire().await
    }

    async fn release(&self, guard: LockGuard) {
        guard.release().await.expect("it is held");
    }
}

/// Times the first acquire of a lock by another client than the one that has used it, and retains
/// it or not.
fn taken_over(
    slice: Duration,
    [locks, others]: [&LockClient; 2],
    is_retained: bool,
) -> impl Future<Output = Round> {
    let clients = [(locks.clone(), others.clone())];
    together(
        slice,
        clients,
        move |(locks, others), watch: Watch| async move {
            let mut turns = 0;
            while watch.is_running() {
                let key = format!("over:{is_retained}:{turns}");
                let first = Ours::new(&locks, key.clone());
                let first = if is_retained {
                    first.retain(RETAINED)
                } else {
                    first
                };
                first.release(first.acquire().await).await;
                let other = Ours::new(&others, key);
                let since = Instant::now();
                let guard = other.acquire().await;
                watch.record(since.elapsed(), 1);
                other.release(guard).await;
                turns += 1;
            }
            turns
        },
    )
}
