use std::time::Duration;

use lock_runtime::{LockClient, LockError, distributed_lock};
use tokio::time::{MissedTickBehavior, interval};
# use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
# static RUNS: AtomicU32 = AtomicU32::new(0);

#[distributed_lock(
    key = "send-invoices", global, client = locks, no_wait, min_hold = "55s", on_busy = skip
)]
async fn send_invoices(locks: &LockClient) -> Result<(), LockError> {
    // ...
#   RUNS.fetch_add(1, Relaxed);
    Ok(())
}

async fn every_minute(locks: LockClient) {
    let mut ticks = interval(Duration::from_secs(60));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        if let Err(error) = send_invoices(&locks).await {
            eprintln!("invoices not sent: {error:#}");
        }
    }
}
# #[tokio::main(flavor = "current_thread", start_paused = true)]
# async fn main() {
# let locks = LockClient::in_memory();
# let other = async {
#     tokio::time::sleep(Duration::from_secs(20)).await;
#     every_minute(locks.clone()).await
# };
# let both = async { tokio::join!(every_minute(locks.clone()), other) };
# assert!(tokio::time::timeout(Duration::from_secs(170), both).await.is_err());
# assert_eq!(RUNS.load(Relaxed), 3);
# }
