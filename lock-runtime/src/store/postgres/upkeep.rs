//! The removal of records that are no longer needed.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};
use tokio_postgres::types::Type;

use super::{connection::pool::Pool, failure::Failure};

const INTERVAL: Duration = Duration::from_secs(60 * 60);
/// For processes that do not live longer.
const SOON: Duration = Duration::from_secs(60);
/// The pause between two pages.
const PAUSE: Duration = Duration::from_millis(100);

/// The time without a removal after which a client that ends makes one: there is none that lives
/// for longer.
const MISSED: Duration = Duration::from_secs(3 * 60 * 60);
/// The time that such a client takes for it.
const BRIEFLY: Duration = Duration::from_secs(1);

/// Returns a row if no client has removed records for these microseconds. The name is that of no
/// lock, as it has no namespace.
const CLAIM: &str = "insert into lock_runtime.record as r (name, version, since, fence, needed_until, body) \
    select 'upkeep', 1, 0, 0, now + 3600000000, '' from (select lock_runtime.micros()) u (now) \
    on conflict (name) do update set needed_until = excluded.needed_until \
    where r.needed_until < excluded.needed_until - $1 returning 1";
const REMOVE: &str = "select last, removed from lock_runtime.remove($1)";

/// Removes records from time to time, as long as the pool is in use.
pub(super) fn start(pool: &Arc<Pool>) {
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        let mut pause = SOON;
        loop {
            // Clients that start together do not remove together.
            sleep(pause.mul_f64(0.5 + rand::random::<f64>())).await;
            pause = INTERVAL;
            let Some(pool) = pool.upgrade() else {
                return;
            };
            if is_due(&pool, INTERVAL).await {
                // The other calls report the failures of the database.
                let _ = remove(&pool).await;
            }
        }
    });
}

/// Returns whether no client has removed records for this time. If so, this one has to.
async fn is_due(pool: &Arc<Pool>, after: Duration) -> bool {
    let micros = i64::try_from(after.as_micros()).unwrap_or(i64::MAX);
    let claimed = pool.call(CLAIM, &[(&micros, Type::INT8)]).await;
    claimed.is_ok_and(|rows| !rows.is_empty())
}

/// Removes records for a client that ends: where each of them is as brief as a job of cron, no
/// other one lives until the next removal. `first` precedes the names of all clients.
pub(super) async fn remove_briefly(pool: &Arc<Pool>, first: &str) {
    // What remains is left to the next client, and to those that live for an hour.
    let _ = pool.call(REMOVE, &[(&first, Type::TEXT)]).await;
    if is_due(pool, MISSED).await {
        let _ = timeout(BRIEFLY, remove(pool)).await;
    }
}

/// Removes the records that are no longer needed, page by page. Returns their number.
pub(super) async fn remove(pool: &Arc<Pool>) -> Result<u64, Failure> {
    let (mut after, mut count) = (Some(String::new()), 0);
    while let Some(last) = after {
        let rows = pool.call(REMOVE, &[(&last, Type::TEXT)]).await?;
        let Some(row) = rows.first() else {
            break;
        };
        let removed: i64 = row.try_get(1).map_err(Failure::Refused)?;
        count += removed.cast_unsigned();
        after = row.try_get(0).map_err(Failure::Refused)?;
        if after.is_some() {
            sleep(PAUSE).await;
        }
    }
    Ok(count)
}
