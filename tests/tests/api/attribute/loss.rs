//! A body whose lock is lost ends at its current await point, or runs to its end with `on_lost =
//! error` and `on_lost = ignore`.

use std::{cell::Cell, future::Future, pin::Pin, time::Duration};

use axum::{
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use futures_util::FutureExt as _;
use lock_runtime::{
    HeldLock, LockClient, LockError, LockErrorKind, LockSpec, Loss, OnLost, distributed_lock,
};
use lock_tests::Captured;
use tokio::{
    task::yield_now,
    time::{advance, sleep},
};
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
                locks.revoke("a").await.unwrap();
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

#[distributed_lock(key = "a", global, on_lost = ignore, held = lock)]
async fn finishing(locks: &LockClient) -> Result<bool, LockError> {
    locks.revoke("a").await?;
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

#[distributed_lock(key = "a", global, on_lost = cancel, held = lock)]
async fn cancelled(locks: &LockClient, reached: &Cell<bool>) -> Result<(), LockError> {
    locks.revoke("a").await?;
    let own: HeldLock = lock.clone();
    own.lost().await;
    yield_now().await;
    reached.set(true);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_body_whose_loss_is_ignored_gives_its_result_and_two_warnings() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    with_client(async |locks| {
        assert!(finishing(locks).await.unwrap(), "its own lock was lost");
        assert_eq!(holders(locks, "a").await, 0);
        let warnings = traces.events();
        let warnings = warnings.iter().filter(|event| event.level <= Level::WARN);
        let warnings: Vec<_> = warnings
            .map(|event| {
                (
                    event.message.as_str(),
                    event.field("key"),
                    event.field("name"),
                )
            })
            .collect();
        let name = Some(concat!(module_path!(), "::finishing"));
        let ended = "a body has ended after the loss of its lock";
        let expected = [("lost", Some("a"), name), (ended, Some("a"), name)];
        assert_eq!(warnings, expected);
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

/// Lets the lock expire without an await point.
fn outlive(lock: &HeldLock) {
    let step = advance(lock.validity() + Duration::from_secs(1));
    assert!(
        step.now_or_never().is_none(),
        "only its await point is left"
    );
    assert!(lock.is_lost());
}

#[derive(Debug, PartialEq)]
enum PayError {
    Declined,
    Lock(LockErrorKind),
}

impl From<LockError> for PayError {
    fn from(error: LockError) -> Self {
        Self::Lock(error.kind())
    }
}

/// Functions whose bodies end after the loss, with what they return.
mod outliving {
    use super::*;

    type Paid = Result<u32, PayError>;

    #[distributed_lock(key = "a", global, held = lock)]
    pub(super) async fn cancelled(paid: Paid) -> Paid {
        outlive(lock);
        paid
    }

    #[distributed_lock(key = "a", global, held = lock, on_lost = error)]
    pub(super) async fn refused(paid: Paid) -> Paid {
        outlive(lock);
        yield_now().await;
        paid
    }

    #[distributed_lock(key = "a", global, held = lock, on_lost = ignore)]
    pub(super) async fn ignored(paid: Paid) -> Paid {
        outlive(lock);
        yield_now().await;
        paid
    }

    #[distributed_lock(key = "a", global, held = lock, on_lost = OnLost::Error, on_busy = skip)]
    pub(super) async fn of_expression(paid: Paid) -> Result<u32, PayError> {
        outlive(lock);
        paid
    }

    #[distributed_lock(key = "a", global, held = lock, map_err = |error| Err(error.into()))]
    pub(super) async fn mapped(paid: Paid) -> Paid {
        outlive(lock);
        paid
    }

    #[distributed_lock(key = "a", global, held = lock, spec = LockSpec::exclusive().on_lost(OnLost::Error))]
    pub(super) fn boxed(paid: Paid) -> Pin<Box<dyn Future<Output = Paid> + Send>> {
        Box::pin(async move {
            outlive(lock);
            paid
        })
    }

    #[distributed_lock(key = "a", global, held = lock)]
    pub(super) async fn generic<T, E: From<LockError>>(paid: Result<T, E>) -> Result<T, E> {
        outlive(lock);
        paid
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_ends_after_the_loss_returns_no_success_but_its_own_error() {
    use outliving::*;

    // Without its limit of time, as the clock advances.
    let locks = LockClient::in_memory();
    let calls = async {
        let lost = Err(PayError::Lock(LockErrorKind::Lost(Loss::Expired)));
        let declined = || Err(PayError::Declined);
        assert_eq!(cancelled(Ok(1)).await, lost);
        assert_eq!(cancelled(declined()).await, declined());
        assert_eq!(refused(Ok(1)).await, lost);
        assert_eq!(refused(declined()).await, declined());
        assert_eq!(ignored(Ok(1)).await, Ok(1));
        assert_eq!(ignored(declined()).await, declined());
        assert_eq!(of_expression(Ok(1)).await, lost);
        assert_eq!(of_expression(declined()).await, declined());
        assert_eq!(mapped(Ok(1)).await, lost);
        assert_eq!(mapped(declined()).await, declined());
        assert_eq!(boxed(Ok(1)).await, lost);
        assert_eq!(boxed(declined()).await, declined());
        assert_eq!(generic(Ok(1)).await, lost);
        assert_eq!(generic::<u32, _>(declined()).await, declined());
    };
    locks.as_default(calls).await;
}

#[distributed_lock(key = "a", global, held = lock, map_err = |error| error.code())]
async fn no_result() -> &'static str {
    outlive(lock);
    "done"
}

#[distributed_lock(key = "a", global, held = lock)]
async fn response(status: StatusCode) -> Response {
    outlive(lock);
    status.into_response()
}

#[tokio::test(start_paused = true)]
async fn what_is_no_result_is_replaced_and_a_response_unless_it_is_an_error() {
    let locks = LockClient::in_memory();
    let calls = async {
        assert_eq!(no_result().await, "lost_expired");
        assert_eq!(response(StatusCode::OK).await.status(), 500);
        assert_eq!(response(StatusCode::NOT_FOUND).await.status(), 404);
    };
    locks.as_default(calls).await;
}
