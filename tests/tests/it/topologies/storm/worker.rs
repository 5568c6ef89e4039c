//! One of many that want a lock: asks, enters what the lock protects, writes, gives the lock back, and begins again.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lock_runtime::{LockClient, LockError, LockErrorKind, LockGuard};
use lock_tests::{FencedResource, fenced};
use tokio::time::sleep;

use super::history::{Grant, History};

/// Most stay inside for so long at most.
const SHORT_STAY: Duration = Duration::from_millis(2);
/// Some stay for so long, to be inside while a server fails.
const LONG_STAY: Duration = Duration::from_millis(150);
/// Between two attempts on a server that refuses at once.
const PAUSE: Duration = Duration::from_millis(10);

/// A key, what it protects, and all grants of it.
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
    /// Works until the storm is over, and returns the errors after which it tried again.
    pub(super) async fn work(self) -> Vec<LockErrorKind> {
        let mut errors = Vec::new();
        while !self.over.load(Ordering::Relaxed) {
            let key = &self.keys[rand::random_range(0..self.keys.len())];
            let outcome = if self.readers && rand::random_bool(0.3) {
                self.read(key).await
            } else {
                self.write(key).await
            };
            if let Err(error) = outcome {
                use LockErrorKind::{Lost, ReadOnly, ReleaseUnknown, Unavailable, WaitTimeout};
                let expected = matches!(
                    error.kind(),
                    Unavailable | WaitTimeout | Lost(_) | ReleaseUnknown | ReadOnly
                );
                assert!(expected, "no failing server explains this: {error:?}");
                errors.push(error.kind());
                sleep(PAUSE).await;
            }
        }
        errors
    }

    async fn write(&self, key: &Key) -> Result<(), LockError> {
        let asked_at = Instant::now();
        let request = if self.readers {
            self.locks.write(&*key.name)
        } else {
            self.locks.exclusive(&*key.name)
        };
        let guard = request.lease(self.lease).wait(self.lease).acquire().await?;
        let token = guard.fence().number();
        key.granted(Grant {
            asked_at,
            granted_at: Instant::now(),
            token,
        });
        // It does not look whether it still holds the lock: keeping it out then is what the token is for.
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
            .read(&*key.name)
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

/// In both ways.
async fn give_back(guard: LockGuard) -> Result<(), LockError> {
    if rand::random_bool(0.2) {
        drop(guard);
        return Ok(());
    }
    guard.release().await
}
