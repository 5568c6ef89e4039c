//! A holder detects the loss of its lock by its own clock, whatever the server does.

mod noticed;
mod outlived;
mod paused;
mod retained;
mod survived;

use std::time::Duration;

use lock_runtime::{LockClient, LockGuard};

/// Long enough for a busy machine to renew in time, short enough to be waited for.
const LEASE: Duration = Duration::from_millis(1500);

async fn hold(url: &str, lease: Duration) -> (LockClient, LockGuard) {
    let locks = LockClient::connect(url).await.unwrap();
    let guard = locks.exclusive("a").lease(lease).acquire().await.unwrap();
    (locks, guard)
}
