//! `ReleaseFuture`, kept by a caller under its name, wherever its release stands.

use std::time::Duration;

use futures_util::poll;
use lock_runtime::{LockClient, LockErrorKind, LockGuard, future::ReleaseFuture};

const PROMPTLY: Duration = Duration::from_secs(10);
const KEYS: [&[&str]; 2] = [&["k"], &["k", "l"]];

/// A caller that keeps its release until it polls it.
struct Caller {
    release: ReleaseFuture,
}

async fn acquire(locks: &LockClient, keys: &[&'static str]) -> LockGuard {
    locks
        .all(keys.iter().copied())
        .wait(PROMPTLY)
        .acquire()
        .await
        .unwrap()
}

/// Waits until the locks are free.
async fn freed(locks: &LockClient, keys: &[&'static str]) {
    acquire(locks, keys).await.release().await.unwrap();
}

#[tokio::test]
async fn a_release_future_resolves_with_the_release_or_its_loss() {
    let locks = LockClient::in_memory();
    for keys in KEYS {
        let release = acquire(&locks, keys).await.release();
        let caller = Caller { release };
        assert!(
            locks
                .all(keys.iter().copied())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        caller.release.await.unwrap();
        assert!(
            locks
                .all(keys.iter().copied())
                .try_acquire()
                .await
                .unwrap()
                .is_some()
        );
        freed(&locks, keys).await;

        let release = acquire(&locks, keys).await.release();
        locks.revoke("k").await.unwrap();
        let error = release.await.unwrap_err();
        assert!(matches!(error.kind(), LockErrorKind::Lost(_)), "{error}");
        freed(&locks, keys).await;
    }
}

#[tokio::test]
async fn a_release_future_that_is_dropped_goes_on_in_the_background() {
    let locks = LockClient::in_memory();
    for keys in KEYS {
        for polls in 0..2 {
            let mut release = Box::pin(acquire(&locks, keys).await.release());
            for _ in 0..polls {
                let _ = poll!(&mut release);
            }
            drop(release);
            freed(&locks, keys).await;
        }
    }
}

/// A second release would remove the guard of another scope from a re-entered lock.
#[tokio::test]
#[should_panic(expected = "`ReleaseFuture` was polled after it was ready")]
async fn a_release_future_releases_once() {
    let locks = LockClient::in_memory();
    let outer = acquire(&locks, KEYS[0]).await;
    let inner = locks.exclusive("k").reentrant().acquire();
    let mut release = Box::pin(outer.scope(inner).await.unwrap().release());
    (&mut release).await.unwrap();
    let _ = poll!(&mut release);
}
