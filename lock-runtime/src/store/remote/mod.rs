//! What every store on a server needs: its connection, certificates, and the calls that are refused
//! in an outage.

#[cfg(any(feature = "redis", feature = "records"))]
use std::time::Duration;

use futures_util::future::BoxFuture;

#[cfg(any(feature = "redis", feature = "records"))]
use super::StoreError;
use crate::error::LockError;

#[cfg(any(feature = "redis", feature = "records"))]
pub(super) mod outage;
#[cfg(any(feature = "redis-rustls", feature = "postgres"))]
// Without TLS they are refused.
#[cfg_attr(
    not(any(feature = "redis-rustls", feature = "postgres-rustls")),
    allow(dead_code)
)]
pub(crate) mod pem;
#[cfg(any(feature = "redis-rustls", feature = "postgres-rustls"))]
pub(crate) mod tls;

/// A store, or its records, that connects in the background or at the first call.
pub(crate) trait Connecting: Send + Sync {
    /// Waits for the connection, and checks that the servers can keep locks.
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>>;

    /// Begins to connect, if it has not begun.
    fn begin(&self) {}
}

/// Executes `connect` for at most `limit`. An error names the `place`, such as
/// "at localhost:6379".
#[cfg(any(feature = "redis", feature = "records"))]
pub(super) async fn connect_within(
    limit: Duration,
    place: String,
    connect: impl Future<Output = Result<(), StoreError>>,
) -> Result<(), LockError> {
    let connected = tokio::time::timeout(limit, connect).await;
    let connected = connected.unwrap_or_else(|_| Err(StoreError::timed_out(limit)));
    connected.map_err(|error| cannot_keep_locks(&place, error))
}

#[cfg(any(feature = "redis", feature = "records"))]
pub(crate) fn cannot_keep_locks(place: &str, error: StoreError) -> LockError {
    let message = format!("cannot keep locks {place}");
    LockError::new(error.kind().into(), message).with_source(Some(error))
}
