//! How late a waiter of another process is granted a lock that has become free, by the way in which
//! it became free, counted from the instant at which the store regards the lock as free. A killed
//! process is played by its store, which acquires and is never heard of again.

use std::{sync::Arc, time::Duration};

use lock_runtime::{
    LockClient, LockGuard, LockKey, LockRequest, Mode,
    store::{AcquireReply, Hold, Instant, KeyRequest, Store as _, Token, redis::RedisStore},
};
use lock_tests::redis_server::RedisServer;
use tokio::time::sleep;

use crate::{
    contest::Contest,
    report::Row,
    turns::{Watch, together},
};

/// Locks that are in use at the same time.
const LOCKS: usize = 16;
/// Less than the pause between two polls of a waiter.
const SHORT: Duration = Duration::from_millis(120);
const WAIT: Duration = Duration::from_secs(30);
/// The waiter stands in the wait queue by then.
const QUEUED: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug)]
enum Way {
    Release,
    Reservation,
    ReservationOfReader,
    Lease,
    LeaseOfReader,
}

const WAYS: [(&str, Way); 5] = [
    ("a release", Way::Release),
    ("min_hold is over", Way::Reservation),
    ("a reader's min_hold is over", Way::ReservationOfReader),
    ("a dead writer's lease ends", Way::Lease),
    ("a dead reader's lease ends", Way::LeaseOfReader),
];

#[derive(Clone)]
struct Processes {
    here: LockClient,
    there: LockClient,
    dead: Arc<RedisStore>,
}

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = async || {
        LockClient::connect(&server.url())
            .await
            .expect("our own server answers")
    };
    let dead = RedisStore::connect(&server.url(), "lock")
        .await
        .expect("our own server answers");
    let processes = Processes {
        here: client().await,
        there: client().await,
        dead: Arc::new(dead),
    };
    let mut contest = Contest::new("freed", LOCKS, slice);
    for (name, way) in WAYS {
        let processes = processes.clone();
        contest = contest.subject(name, move |round, slice| {
            let lock = |number| (processes.clone(), format!("{way:?}:{round}:{number}"));
            let locks: Vec<_> = (0..LOCKS).map(lock).collect();
            together(slice, locks, move |(processes, key), watch| {
                repeat(processes, key, way, watch)
            })
        });
    }
    let mut rows = contest.run().await;
    // How often a lock becomes free is the scenario's own choice.
    for row in &mut rows {
        (row.ops_per_s, row.served_min, row.served_max) = (None, None, None);
    }
    processes.here.shutdown().await;
    processes.there.shutdown().await;
    rows
}

async fn repeat(processes: Processes, key: String, way: Way, watch: Watch) -> u64 {
    let mut turns = 0;
    while watch.is_running() {
        watch.record(processes.turn(&key, way).await, 1);
        turns += 1;
    }
    turns
}

impl Processes {
    /// How late the waiter is.
    async fn turn(&self, key: &str, way: Way) -> Duration {
        let (guards, free) = self.hold(key, way).await;
        let acquire = self.there.exclusive(key).wait(WAIT).acquire();
        let waiting = tokio::spawn(async move {
            let guard = acquire.await.expect("it is granted at some time");
            (Instant::now(), guard)
        });
        sleep(QUEUED).await;
        let free = free.unwrap_or_else(Instant::now);
        for guard in guards {
            release(guard).await;
        }
        let (granted, guard) = waiting.await.expect("no panic");
        release(guard).await;
        granted.saturating_duration_since(free)
    }

    /// The guards to release, and when the lock is free then, if not at once.
    async fn hold(&self, key: &str, way: Way) -> (Vec<LockGuard>, Option<Instant>) {
        let over = Instant::now() + SHORT;
        match way {
            Way::Release => (vec![acquired(self.here.exclusive(key)).await], None),
            Way::Reservation => (
                vec![acquired(self.here.exclusive(key).min_hold(SHORT)).await],
                Some(over),
            ),
            Way::ReservationOfReader => {
                let first = acquired(self.here.shared(key).min_hold(SHORT)).await;
                let second = acquired(self.here.shared(key)).await;
                release(first).await;
                (vec![second], Some(over))
            }
            Way::Lease => (Vec::new(), Some(self.die(key, Mode::Exclusive).await)),
            Way::LeaseOfReader => {
                let living = acquired(self.here.shared(key)).await;
                (vec![living], Some(self.die(key, Mode::Shared).await))
            }
        }
    }

    /// A process holds the lock and is killed.
    async fn die(&self, key: &str, mode: Mode) -> Instant {
        let hold = Hold::new(
            LockKey::new(key).expect("a short name is valid"),
            mode,
            Token::random(),
        );
        let reply = self
            .dead
            .acquire(&KeyRequest::new(hold, SHORT, Instant::now() + WAIT))
            .await;
        assert!(matches!(reply, Ok(AcquireReply::Granted(_))), "{reply:?}");
        Instant::now() + SHORT
    }
}

async fn acquired(request: LockRequest) -> LockGuard {
    request
        .wait(WAIT)
        .acquire()
        .await
        .expect("it is granted at some time")
}

async fn release(guard: LockGuard) {
    guard.release().await.expect("it is held");
}
