//! A worker of a storm: acquires a lock, enters the protected resource, writes, releases the lock,
//! and starts again.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lock_runtime::{LockClient, LockError, LockErrorKind, LockGuard};
use lock_tests::{
    FencedResource, fenced,
    storm::{Grant, History},
};
use tokio::time::sleep;

/// The upper limit of most stays inside the resource.
const SHORT_STAY: Duration = Duration::from_millis(2);
/// The length of a few stays, so that a holder is inside while a server fails.
const LONG_STAY: Duration = Duration::from_millis(150);
/// The pause after an error, as a server may refuse requests at once.
const PAUSE: Duration = Duration::from_millis(10);

/// A key, the resource that it protects, and its grants.
#[derive(Debug)]
pub(super) struct Key {
    name: String,
    resource: FencedResource,
    history: Mutex<History>,
}

impl Key {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            resource: FencedResource::new(),
            history: Mutex::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn history(&self) -> History {
        self.history.lock().unwrap().clone()
    }

    pub(super) fn resource(&self) -> fenced::Report {
        self.resource.report()
    }

    pub(super) fn granted(&self, grant: Grant) {
        self.history.lock().unwrap().add(grant);
    }

    pub(super) fn granted_since(&self, time: Instant) -> bool {
        self.history
            .lock()
            .unwrap()
            .last()
            .is_some_and(|last| last > time)
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) locks: LockClient,
    pub(super) keys: Arc<[Key]>,
    pub(super) over: Arc<AtomicBool>,
    pub(super) lease: Duration,
    pub(super) readers: bool,
}

impl Worker {
    /// Works until the storm is over. Returns the errors, each of which was followed by a new
    /// attempt.
    pub(super) async fn work(self) -> Vec<LockError> {
        let mut errors = Vec::new();
        while !self.over.load(Ordering::Relaxed) {
            let key = &self.keys[rand::random_range(0..self.keys.len())];
            let outcome = if self.readers && rand::random_bool(0.3) {
                self.read(key).await
            } else {
                self.write(key).await
            };
            if let Err(error) = outcome {
                use LockErrorKind::{
                    Blocked, Lost, ReadOnly, ReleaseUnknown, Unavailable, WaitTimeout,
                };
                let expected = match error.kind() {
                    Unavailable | WaitTimeout | Lost(_) | ReleaseUnknown | ReadOnly => true,
                    // Of PostgreSQL, by a process that is stopped within a transaction.
                    Blocked => true,
                    _ => false,
                };
                assert!(expected, "no failing server explains this: {error:?}");
                errors.push(error);
                sleep(PAUSE).await;
            }
        }
        errors
    }

    async fn write(&self, key: &Key) -> Result<(), LockError> {
        let asked_at = Instant::now();
        let request = self.locks.exclusive(&*key.name);
        let guard = request.lease(self.lease).wait(self.lease).acquire().await?;
        let token = guard.fence().number();
        key.granted(Grant {
            asked_at,
            granted_at: Instant::now(),
            token,
        });
        // The worker does not check that it still holds the lock: the fencing token has to keep it
        // out.
        if let Ok(inside) = key.resource.enter(token) {
            let value = key.resource.read();
            sleep(stay()).await;
            let _ = key.resource.write(token, value + 1);
            drop(inside);
        }
        give_back(guard).await
    }

    async fn read(&self, key: &Key) -> Result<(), LockError> {
        let asked_at = Instant::now();
        let guard = self
            .locks
            .shared(&*key.name)
            .lease(self.lease)
            .wait(self.lease)
            .acquire()
            .await?;
        key.granted(Grant {
            asked_at,
            granted_at: Instant::now(),
            token: guard.fence().number(),
        });
        let inside = key.resource.enter_reader();
        sleep(stay()).await;
        drop(inside);
        give_back(guard).await
    }
}

fn stay() -> Duration {
    if rand::random_bool(0.02) {
        LONG_STAY
    } else {
        SHORT_STAY.mul_f64(rand::random())
    }
}

/// Releases the lock or drops the guard.
async fn give_back(guard: LockGuard) -> Result<(), LockError> {
    if rand::random_bool(0.2) {
        drop(guard);
        return Ok(());
    }
    guard.release().await
}
