//! The removal of records that are no longer needed.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use super::pool::Pool;

const INTERVAL: Duration = Duration::from_secs(60 * 60);
const PAUSE: Duration = Duration::from_millis(100);

/// One client at a time removes records, and only those that no other transaction has locked.
const REMOVE: &str = "delete from lock_runtime.record where ctid = any (array( \
        select ctid from lock_runtime.record where needed_until < lock_runtime.micros() \
        limit 1000 for update skip locked)) \
    and pg_try_advisory_xact_lock(hashtext('lock_runtime.upkeep')) returning 1";

/// Removes records from time to time, as long as the pool is in use.
pub(super) fn start(pool: &Arc<Pool>) {
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        // Clients that start together do not remove together.
        let mut pause = INTERVAL.mul_f64(rand::random());
        loop {
            sleep(pause).await;
            let Some(pool) = pool.upgrade() else {
                return;
            };
            pause = match pool.query(REMOVE, &[]).await {
                Ok(removed) if !removed.is_empty() => PAUSE,
                _ => INTERVAL,
            };
        }
    });
}
