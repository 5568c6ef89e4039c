//! A body whose lock is lost ends at its current await point, or continues with `on_lost = finish`.

use std::{cell::Cell, time::Duration};

use lock_runtime::{
    HeldLock, LockClient, LockError, LockErrorKind, Loss, RevokeScope, distributed_lock,
};
use lock_tests::Captured;
use tokio::{task::yield_now, time::sleep};
use tracing::Level;

use super::{holders, with_client};

/// The progress of a body, and whether its local values were dropped.
#[derive(Default)]
struct Progress {
    steps: Cell<u32>,
    dropped: Cell<bool>,
}

impl Progress {
    async fn step(&self) {
        self.steps.set(self.steps.get() + 1);
        // Long enough for the detection of a revocation.
        sleep(Duration::from_millis(100)).await;
    }
}

struct Owned<'a>(&'a Progress);

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        self.0.dropped.set(true);
    }
}

/// Await points of every kind: plain, in a loop, in a match, in a nested block, in an argument, in
/// `join!` and `select!`.
#[distributed_lock(key = "a", global)]
async fn many_await_points(progress: &Progress) -> Result<u32, LockError> {
    let _owned = Owned(progress);
    progress.step().await;
    for _ in 0..2 {
        progress.step().await;
    }
    async { progress.step().await }.await;
    match progress.steps.get() {
        4 => progress.step().await,
        steps => unreachable!("{steps}"),
    }
    let nested = async {
        progress.step().await;
        Ok::<_, LockError>(1)
    };
    let number = std::convert::identity(nested.await?);
    tokio::join!(progress.step());
    tokio::select! {
        () = progress.step() => {}
        () = std::future::pending() => {}
    }
    if number == 1 {
        progress.step().await;
    }
    Ok(progress.steps.get())
}

const AWAIT_POINTS: u32 = 9;

#[tokio::test(start_paused = true)]
async fn a_lost_lock_ends_the_body_at_each_of_its_await_points() {
    with_client(async |locks| {
        assert_eq!(
            many_await_points(&Progress::default()).await.unwrap(),
            AWAIT_POINTS
        );
        for point in 1..=AWAIT_POINTS {
            let progress = Progress::default();
            let revoke = async {
                while progress.steps.get() < point {
                    sleep(Duration::from_millis(10)).await;
                }
                locks.revoke("a", RevokeScope::Leased).await.unwrap();
            };
            let (lost, ()) = tokio::join!(many_await_points(&progress), revoke);
            assert_eq!(
                lost.unwrap_err().kind(),
                LockErrorKind::Lost(Loss::Revoked),
                "at point {point}"
            );
            assert!(progress.dropped.get(), "at point {point}");
            sleep(Duration::from_secs(1)).await;
            assert_eq!(progress.steps.get(), point, "the body ran on");
            assert_eq!(holders(locks, "a").await, 0);
        }
    })
    .await;
}

/// A call that is dropped ends at the same points.
#[tokio::test(start_paused = true)]
async fn a_dropped_call_ends_the_body_at_each_of_its_await_points() {
    with_client(async |locks| {
        for point in 1..=AWAIT_POINTS {
            let progress = Progress::default();
            let reached = async {
                while progress.steps.get() < point {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::select! {
                _ = many_await_points(&progress) => panic!("it has {AWAIT_POINTS} await points"),
                () = reached => {}
            }
            assert!(
                progress.dropped.get() && progress.steps.get() == point,
                "at point {point}"
            );
            locks
                .exclusive("a")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

#[distributed_lock(key = "a", global, on_lost = finish, guard = lock)]
async fn finishing(locks: &LockClient) -> Result<bool, LockError> {
    locks.revoke("a", RevokeScope::Leased).await?;
    lock.lost().await;
    // Another client may hold the lock by now, and the body continues.
    locks
        .exclusive("a")
        .reentrant()
        .no_wait()
        .acquire()
        .await
        .expect_err("it was lost");
    yield_now().await;
    Ok(lock.is_lost())
}

#[distributed_lock(key = "a", global, on_lost = cancel, guard = lock)]
async fn cancelled(locks: &LockClient, reached: &Cell<bool>) -> Result<(), LockError> {
    locks.revoke("a", RevokeScope::Leased).await?;
    let own: HeldLock = lock.clone();
    own.lost().await;
    yield_now().await;
    reached.set(true);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_body_that_finishes_gives_its_result_and_one_warning() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    with_client(async |locks| {
        assert!(finishing(locks).await.unwrap(), "its own lock was lost");
        assert_eq!(holders(locks, "a").await, 0);
        let warnings: Vec<_> = traces
            .events()
            .into_iter()
            .filter(|event| event.level <= Level::WARN)
            .collect();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert_eq!(
            (warnings[0].message.as_str(), warnings[0].field("key")),
            ("lost", Some("a"))
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_body_is_cancelled_if_it_says_so_or_says_nothing() {
    with_client(async |locks| {
        let reached = Cell::new(false);
        let error = cancelled(locks, &reached).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Revoked));
        assert!(!reached.get());
    })
    .await;
}
