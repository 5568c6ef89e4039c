//! The end of a lock is noticed: at once if the server reports it, by the local clock if the server
//! is silent.

use std::{
    future::Future as _,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use futures_util::FutureExt as _;
use lock_runtime::{LockClient, LockErrorKind, LockGuard, Loss};
use lock_tests::{
    Captured, Proxy, RedisServer,
    place::{LONG, in_time},
};
use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep},
};

use super::{LEASE, hold};

/// Waits for the loss, which must come from the local clock: not before the validity at `silent`
/// had passed, and soon after.
async fn expires(guard: LockGuard, silent: Instant, valid: Duration) {
    let error = guard.lost().await;
    assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Expired), "{error}");
    assert_eq!(error.key().unwrap().as_str(), "a");
    let after = silent.elapsed();
    assert!(
        after + Duration::from_millis(5) >= valid,
        "lost after {after:?}, but it was valid for {valid:?}"
    );
    assert!(
        after < LEASE + Duration::from_secs(5),
        "lost only after {after:?}"
    );
    assert!(guard.is_lost() && guard.validity().is_zero());
    assert_eq!(
        guard.release().await.unwrap_err().kind(),
        LockErrorKind::Lost(Loss::Expired)
    );
}

#[tokio::test]
async fn a_deleted_key_is_noticed_at_the_next_renewal() {
    in_time(async {
        let server = RedisServer::start().await;
        let (_locks, guard) = hold(&server.url(), LEASE).await;
        server.command(&["DEL", "lock:a"]).await;
        assert_eq!(guard.lost().await.kind(), LockErrorKind::Lost(Loss::Taken));
        assert_eq!(
            guard.release().await.unwrap_err().kind(),
            LockErrorKind::Lost(Loss::Taken)
        );
        assert!(
            server.keys("lock:*").await.is_empty(),
            "a renewal created it anew"
        );
    })
    .await;
}

#[tokio::test]
async fn a_lock_taken_by_another_is_not_taken_back() {
    in_time(async {
        let server = RedisServer::start().await;
        let (_locks, guard) = hold(&server.url(), LEASE).await;
        server
            .command(&["SET", "lock:a", "another", "PX", "20000"])
            .await;
        assert_eq!(guard.lost().await.kind(), LockErrorKind::Lost(Loss::Taken));
        guard.release().await.unwrap_err();
        assert_eq!(server.query::<String>(&["GET", "lock:a"]).await, "another");
    })
    .await;
}

#[tokio::test]
async fn a_stopped_server_is_noticed_by_the_own_clock() {
    in_time(async {
        let server = RedisServer::start().await;
        let (_locks, guard) = hold(&server.url(), LEASE).await;
        let (silent, valid) = (Instant::now(), guard.validity());
        server.stop();
        expires(guard, silent, valid).await;
        server.resume();
    })
    .await;
}

#[tokio::test]
async fn a_killed_server_is_noticed_by_the_own_clock() {
    in_time(async {
        let server = RedisServer::start().await;
        let (_locks, guard) = hold(&server.url(), LEASE).await;
        let (silent, valid) = (Instant::now(), guard.validity());
        server.kill();
        expires(guard, silent, valid).await;
    })
    .await;
}

#[tokio::test]
async fn a_silent_network_is_noticed_by_the_own_clock() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let (locks, guard) = hold(&proxy.url(), LEASE).await;
        let (silent, valid) = (Instant::now(), guard.validity());
        proxy.black_hole();
        assert_eq!(
            guard.verify().await.unwrap_err().kind(),
            LockErrorKind::Unavailable
        );
        expires(guard, silent, valid).await;
        proxy.let_through().await;
        locks
            .exclusive("a")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn replies_that_never_come_are_no_renewals() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let (_locks, guard) = hold(&proxy.url(), LEASE).await;
        let (silent, valid) = (Instant::now(), guard.validity());
        // Every renewal reaches the server, but the holder gets no confirmation.
        proxy.drop_all_replies();
        expires(guard, silent, valid).await;
    })
    .await;
}

#[tokio::test]
async fn lost_resolves_soon_after_the_server_comes_back_empty() {
    in_time(async {
        let server = RedisServer::start().await;
        let (_locks, guard) = hold(&server.url(), Duration::from_secs(60)).await;
        let start = Instant::now();
        server.restart_empty().await;
        assert_eq!(guard.lost().await.kind(), LockErrorKind::Lost(Loss::Taken));
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
        assert_eq!(
            guard.release().await.unwrap_err().kind(),
            LockErrorKind::Lost(Loss::Taken)
        );
    })
    .await;
}

/// Dropped with the body that contains it.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_body_is_dropped_at_its_await_when_the_lock_is_lost() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        for silent in [false, true] {
            let (dropped, finished) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(false));
            let flag = Flag(dropped.clone());
            let body = async |_| {
                let _flag = flag;
                if silent {
                    server.stop();
                } else {
                    server.command(&["DEL", "lock:a"]).await;
                }
                sleep(LONG).await;
                finished.store(true, Ordering::SeqCst);
            };
            let error = locks
                .exclusive("a")
                .lease(LEASE)
                .run(body)
                .await
                .unwrap_err();
            let expected = if silent { Loss::Expired } else { Loss::Taken };
            assert_eq!(error.kind(), LockErrorKind::Lost(expected));
            assert!(dropped.load(Ordering::SeqCst) && !finished.load(Ordering::SeqCst));
        }
        server.resume();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_once_and_to_all() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let locks = LockClient::in_memory();
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let mut listeners = JoinSet::new();
        for _ in 0..10 {
            listeners.spawn(guard.lost());
            let held = guard.held();
            listeners.spawn(async move { held.lost().await });
        }
        // Dropped listeners do not disturb the others.
        drop(guard.lost());
        tokio::task::yield_now().await;
        locks.revoke("a").await.unwrap();
        for error in listeners.join_all().await {
            assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Revoked));
        }
        assert_eq!(
            guard.lost().await.kind(),
            LockErrorKind::Lost(Loss::Revoked),
            "late listeners get the error too"
        );
        guard.release().await.unwrap_err();
        assert_eq!(
            traces
                .events()
                .iter()
                .filter(|event| event.message == "lost")
                .count(),
            1
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn validity_counts_down_without_renewal() {
    let locks = LockClient::in_memory();
    let lease = Duration::from_secs(10);
    let guard = locks
        .exclusive("a")
        .lease(lease)
        .no_renew()
        .acquire()
        .await
        .unwrap();
    let start = guard.validity();
    assert!(start < lease && start > lease.mul_f64(0.98), "{start:?}");
    advance(Duration::from_secs(3)).await;
    assert_eq!(guard.validity(), start - Duration::from_secs(3));
    assert!(!guard.is_lost());
    advance(start - Duration::from_secs(3)).await;
    assert!(guard.validity().is_zero() && guard.is_lost());
    assert!(
        locks.inspect("a").await.unwrap().holders.len() == 1,
        "the validity ends a moment before the lease"
    );
    drop(guard);
}

/// Revokes the lock when it is dropped.
struct Revokes(LockClient);

impl Wake for Revokes {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Revokes {
    fn drop(&mut self) {
        let revoked = self.0.revoke("a").into_future().now_or_never();
        revoked.expect("a store in memory replies at once").unwrap();
    }
}

/// `lost` drops the waker of its last poll between its look at the lock and the registration of the
/// next waker.
#[tokio::test]
async fn a_loss_in_the_middle_of_a_poll_is_noticed() {
    let locks = LockClient::in_memory();
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let mut lost = pin!(guard.lost());
    let revokes = Waker::from(Arc::new(Revokes(locks)));
    assert!(
        lost.as_mut()
            .poll(&mut Context::from_waker(&revokes))
            .is_pending()
    );
    drop(revokes);
    assert!(!guard.is_lost());
    let noticed = lost.now_or_never().expect("the task would sleep for ever");
    assert_eq!(noticed.kind(), LockErrorKind::Lost(Loss::Revoked));
}
