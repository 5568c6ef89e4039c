//! A release in the memory of its acquire, wherever that stands.

use std::time::Duration;

use futures_util::poll;
use lock_runtime::{LockClient, LockErrorKind, RevokeScope};

const PROMPTLY: Duration = Duration::from_secs(10);

/// Waits until the lock is free.
async fn freed(locks: &LockClient) {
    locks
        .exclusive("k")
        .wait(PROMPTLY)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn a_release_in_place_is_awaited_and_tells_of_a_loss() {
    let locks = LockClient::in_memory();
    let mut acquire = locks.exclusive("k").acquire();
    let guard = (&mut acquire).await.unwrap();
    acquire.release(guard).await.unwrap();
    assert!(locks.exclusive("k").try_acquire().await.unwrap().is_some());
    freed(&locks).await;

    let mut acquire = locks.exclusive("k").acquire();
    let guard = (&mut acquire).await.unwrap();
    locks.revoke("k", RevokeScope::Leased).await.unwrap();
    let error = acquire.release(guard).await.unwrap_err();
    assert!(matches!(error.kind(), LockErrorKind::Lost(_)), "{error}");
}

#[tokio::test]
async fn an_acquire_that_still_waits_is_given_up_by_its_release() {
    let locks = LockClient::in_memory();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    let mut waiting = locks.exclusive("k").wait(PROMPTLY).acquire();
    assert!(poll!(&mut waiting).is_pending());
    waiting.release(guard).await.unwrap();
    freed(&locks).await;
    assert!(locks.inspect("k").await.unwrap().waiters.is_empty());
}

#[tokio::test]
async fn a_release_in_place_that_is_dropped_goes_on_in_the_background() {
    let locks = LockClient::in_memory();
    for polls in 0..2 {
        let mut acquire = locks.exclusive("k").acquire();
        let guard = (&mut acquire).await.unwrap();
        let mut release = acquire.release(guard);
        for _ in 0..polls {
            let _ = poll!(&mut release);
        }
        drop(release);
        freed(&locks).await;
    }
}
