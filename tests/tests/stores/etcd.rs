//! The etcd store, on real clusters. `tests/run.sh --stores` installs them.

mod access;
mod faults;
mod operators;

use std::time::Duration;

use lock_runtime::{FencingToken, LockClient, LockError, LockErrorKind};
use lock_tests::{EtcdCluster, place::LONG, unique};
use tokio::time::{Instant, sleep};

/// A client of a cluster with a namespace of its own.
async fn client(cluster: &EtcdCluster) -> LockClient {
    client_of(cluster, &unique("ns")).await
}

async fn client_of(cluster: &EtcdCluster, namespace: &str) -> LockClient {
    let builder = LockClient::builder().namespace(namespace);
    builder.connect(&cluster.url()).await.unwrap()
}

/// Acquires and releases a lock without waiting for it.
pub(crate) async fn once(locks: &LockClient, key: &str) -> Result<FencingToken, LockError> {
    let guard = locks.exclusive(key).no_wait().acquire().await?;
    let fence = guard.fence();
    guard.release().await?;
    Ok(fence)
}

/// Releases a lock in an outage of five seconds, and returns for how long it is held afterwards.
///
/// The clock that the clients advance together stands still meanwhile, and the lease with it.
pub(crate) async fn held_after_an_outage(
    [locks, other]: [LockClient; 2],
    begin: impl FnOnce(),
    end: impl AsyncFnOnce(),
) -> Duration {
    let request = locks.exclusive("held").lease(Duration::from_secs(20));
    let held = request.acquire().await.unwrap();
    until_served(&other, "k").await;
    begin();
    let error = held.release().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::ReleaseUnknown, "{error:#}");
    // By then the pause before the next attempt is seconds long.
    sleep(Duration::from_secs(5)).await;
    end().await;
    until_served(&other, "k").await;
    until_served(&other, "held").await.0
}

/// The time until a request succeeds, while those before it are refused as unavailable, and its
/// fencing token.
pub(crate) async fn until_served(locks: &LockClient, key: &str) -> (Duration, FencingToken) {
    let begun = Instant::now();
    loop {
        match once(locks, key).await {
            Ok(fence) => return (begun.elapsed(), fence),
            Err(error) => {
                use LockErrorKind::{Contended, ReleaseUnknown, Unavailable};
                let kinds = [Unavailable, ReleaseUnknown, Contended];
                assert!(kinds.contains(&error.kind()), "{error:#}");
                assert!(begun.elapsed() < LONG, "{error:#}");
            }
        }
        sleep(Duration::from_millis(5)).await;
    }
}
