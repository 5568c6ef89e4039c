//! Outages: clients that start while the store is away, requests that are refused at once, and the
//! return of the store.

mod breaker;
mod database;
mod forgotten;
mod lazy;
mod log;
mod speed;

use std::time::Duration;

use lock_runtime::{LockClient, LockError};
use tokio::time::{Instant, sleep};

/// Probes and refusals are far faster, also on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// Acquires and releases a lock without waiting for it.
async fn once(locks: &LockClient, key: &str) -> Result<(), LockError> {
    let guard = locks.exclusive(key).no_wait().acquire().await?;
    let _ = guard.release().await;
    Ok(())
}

/// The time until a request that does not wait succeeds.
async fn until_served(locks: &LockClient, key: &str) -> Duration {
    let begun = Instant::now();
    while let Err(error) = once(locks, key).await {
        assert!(begun.elapsed() < SOON * 2, "{error:#}");
        sleep(Duration::from_millis(2)).await;
    }
    begun.elapsed()
}

/// The error of the first request that is refused within a few milliseconds, several times in a
/// row.
async fn until_refused_at_once(locks: &LockClient, key: &str) -> LockError {
    let deadline = Instant::now() + SOON * 2;
    let mut in_a_row = 0;
    loop {
        assert!(Instant::now() < deadline, "requests hang");
        let begun = Instant::now();
        let result = once(locks, key).await;
        let is_fast = begun.elapsed() < Duration::from_millis(20);
        match result {
            Err(error) if is_fast && in_a_row >= 3 => return error,
            Err(_) if is_fast => in_a_row += 1,
            _ => in_a_row = 0,
        }
        sleep(Duration::from_millis(2)).await;
    }
}
