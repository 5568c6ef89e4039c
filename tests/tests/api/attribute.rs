//! `#[distributed_lock]` and the effects of its arguments, on the in-memory store.

mod answers;
mod arguments;
mod cost;
mod keys;
mod loss;
mod owners;
mod positions;
mod property;
mod returns;
mod several;
mod statuses;

use lock_runtime::{LockClient, LockErrorKind};

/// Runs a test with a client of its own, which the attribute uses. No other client has the same
/// locks.
async fn with_client<T>(test: impl AsyncFnOnce(&LockClient) -> T) -> T {
    let locks = LockClient::in_memory();
    lock_tests::place::in_time(locks.as_default(test(&locks))).await
}

/// The number of exclusive or shared holders of a key.
async fn holders(locks: &LockClient, key: &str) -> usize {
    locks.inspect(key).await.unwrap().holders.len()
}

const WOULD_WAIT: [LockErrorKind; 2] = [LockErrorKind::Contended, LockErrorKind::WaitTimeout];
