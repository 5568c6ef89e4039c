//! A server that comes back without its latest writes, as a promoted replica does: a lock that was
//! released before does not stay held for the rest of its lease.

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{LockClient, LockRequest};
use lock_tests::{RedisServer, place::in_time};
use tokio::time::Instant;

/// Longer than a test waits for a lock.
const LEASE: Duration = Duration::from_secs(60);
const WAIT: Duration = Duration::from_secs(20);

/// Requests in each mode, of which `one` is another reader or writer of the same key.
fn requests(locks: &LockClient, one: fn(&LockClient, &str) -> LockRequest) -> Vec<LockRequest> {
    let requests = vec![
        locks.exclusive("writer"),
        one(locks, "reader"),
        locks.permits("permits", NonZeroU32::MIN),
        locks.all(["one", "two"]),
    ];
    requests.into_iter().map(|it| it.lease(LEASE)).collect()
}

#[tokio::test]
async fn a_release_that_the_server_has_forgotten_is_repeated() {
    in_time(async {
        let server = RedisServer::start().await;
        let holder = LockClient::connect(&server.url()).await.unwrap();
        let mut guards = Vec::new();
        for request in requests(&holder, |locks, key| locks.shared(key)) {
            guards.push(request.acquire().await.unwrap());
        }
        let dropped = holder
            .exclusive("dropped")
            .lease(LEASE)
            .acquire()
            .await
            .unwrap();
        let kept = holder
            .exclusive("kept")
            .lease(LEASE)
            .min_hold(Duration::from_secs(4));
        let kept = kept.acquire().await.unwrap();
        let granted = Instant::now();
        let before = server.save_snapshot().await;
        drop(dropped);
        for guard in guards {
            guard.release().await.unwrap();
        }
        kept.release().await.unwrap();
        while holder
            .exclusive("dropped")
            .try_acquire()
            .await
            .unwrap()
            .is_none()
        {}
        server.restart_from(&before).await;

        // Another process, so that nothing but the store decides.
        let others = LockClient::connect(&server.url()).await.unwrap();
        for request in requests(&others, |locks, key| locks.exclusive(key)) {
            request
                .wait(WAIT)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        others
            .exclusive("dropped")
            .wait(WAIT)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let guard = others.exclusive("kept").wait(WAIT).acquire().await.unwrap();
        assert!(
            granted.elapsed() >= Duration::from_secs(4),
            "{:?}",
            granted.elapsed()
        );
        guard.release().await.unwrap();
    })
    .await;
}
