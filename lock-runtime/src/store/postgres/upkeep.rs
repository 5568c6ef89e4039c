//! The removal of records that are no longer needed.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;
use tokio_postgres::types::Type;

use super::{connection::pool::Pool, failure::Failure};

const INTERVAL: Duration = Duration::from_secs(60 * 60);
/// For processes that do not live longer.
const SOON: Duration = Duration::from_secs(60);
/// The pause between two pages.
const PAUSE: Duration = Duration::from_millis(100);

/// Returns a row if no client has removed records for an hour. The name is that of no lock, as it
/// has no namespace.
const CLAIM: &str = "insert into lock_runtime.record as r (name, version, since, fence, needed_until, body) \
    select 'upkeep', 1, 0, 0, now + 3600000000, '' from (select lock_runtime.micros()) u (now) \
    on conflict (name) do update set needed_until = excluded.needed_until \
    where r.needed_until < excluded.needed_until - 3600000000 returning 1";
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
            let claimed = pool.call(CLAIM, &[]).await;
            if claimed.is_ok_and(|rows| !rows.is_empty()) {
                // The other calls report the failures of the database.
                let _ = remove(&pool).await;
            }
        }
    });
}

/// Removes those records that are no longer needed of the thousand after this name.
pub(super) async fn remove_after(pool: &Arc<Pool>, name: &str) {
    // It is done again by the next client, and each hour.
    let _ = pool.call(REMOVE, &[(&name, Type::TEXT)]).await;
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
