use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_runtime::{LockClient, LockError, distributed_lock};
use tokio::time::sleep;
# use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
# static RUNS: AtomicI64 = AtomicI64::new(0);

const HOUR: i64 = 60 * 60;
const LOOK_BACK: i64 = 24 * HOUR;

/// Writes the report of the hour that ends at `at`, in seconds since 1970.
#[distributed_lock(key = "report:{at}", once = "48h", client = locks, no_wait, on_busy = skip)]
async fn report(locks: &LockClient, at: i64) -> Result<(), LockError> {
    // ... of the hour before `at`, whatever the time is now
#   RUNS.fetch_add(1, Relaxed);
    Ok(())
}

/// The full hours of the look-back until `now`.
fn due(now: i64) -> impl Iterator<Item = i64> {
    ((now - LOOK_BACK) / HOUR + 1..=now / HOUR).map(|hour| hour * HOUR)
}

async fn look_each_minute(locks: LockClient) {
    loop {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for at in due(now.as_secs() as i64) {
            if let Err(error) = report(&locks, at).await {
                eprintln!("report {at} is not written: {error:#}"); // the next look tries again
            }
        }
        sleep(Duration::from_secs(60)).await;
    }
}
# #[tokio::main(flavor = "current_thread", start_paused = true)]
# async fn main() {
# assert_eq!(due(25 * HOUR).collect::<Vec<_>>(), (2..=25).map(|it| it * HOUR).collect::<Vec<_>>());
# assert_eq!(due(25 * HOUR - 1).last(), Some(24 * HOUR));
# let locks = LockClient::in_memory();
# let look = || look_each_minute(locks.clone());
# let both = async { tokio::join!(look(), look()) };
# assert!(tokio::time::timeout(Duration::from_secs(600), both).await.is_err());
# // It may have begun an hour.
# assert!((24..=25).contains(&RUNS.load(Relaxed)));
# }
