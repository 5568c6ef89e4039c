//! The layer around a tonic server, over HTTP/2, with tonic's own client.

mod among_layers;
mod both_ways;
mod hall;
mod hang_ups;
mod once;
mod refusals;
mod serving;
mod streaming;

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tower::LockLayer;

/// Longer than any of these tests takes, and shorter than the default lease: a grant within this
/// time does not come from an expired lease.
const PROMPTLY: Duration = Duration::from_secs(10);

/// A layer with a lock for each item, which is in the metadata.
fn items(locks: &LockClient) -> LockLayer {
    LockLayer::new(locks.clone(), "item:{header.x-item}")
        .unwrap()
        .wait(PROMPTLY)
}

/// Waits until the lock of the item is free.
async fn freed(locks: &LockClient, item: &str) {
    let request = locks.exclusive(format!("item:{item}")).wait(PROMPTLY);
    request.acquire().await.unwrap().release().await.unwrap();
}

async fn is_free(locks: &LockClient, item: &str) -> bool {
    locks
        .inspect(format!("item:{item}"))
        .await
        .unwrap()
        .holders
        .is_empty()
}
