//! Named futures of a lock, for hand-written state machines: [`AcquireFuture`], and
//! [`ReleaseFuture`] in the same allocation.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;

use crate::{error::LockError, guard::LockGuard};

/// The future of [`LockRequest::acquire`](crate::LockRequest::acquire).
///
/// # Cancellation
/// Dropping it leaves nothing behind, as described there.
#[must_use = "the lock is acquired by `.await`: bind the guard to a name, `let _guard = ..`; `let _ = ..` releases it at once"]
pub struct AcquireFuture {
    steps: Pin<Box<dyn Steps>>,
}

impl AcquireFuture {
    pub(crate) fn new(
        acquire: impl Future<Output = Result<LockGuard, LockError>> + Send + 'static,
    ) -> Self {
        Self {
            steps: Box::pin(InOneBox {
                step: Step::Acquiring(acquire),
                release: LockGuard::release,
            }),
        }
    }

    /// Releases `guard`, as [`LockGuard::release`] does, in the allocation of this future.
    /// Middleware that keeps the future until then allocates once per request instead of twice.
    /// An acquire that is not ready yet is cancelled.
    ///
    /// # Errors
    /// As [`LockGuard::release`]: `Lost`, `ReleaseUnknown`.
    ///
    /// # Cancellation
    /// Dropping the future releases the lock in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let locks = lock_runtime::LockClient::in_memory();
    /// let mut acquire = locks.exclusive("order:42").acquire();
    /// let guard = (&mut acquire).await?;
    /// acquire.release(guard).await?;
    /// # Ok(()) }
    /// ```
    pub fn release(mut self, guard: LockGuard) -> ReleaseFuture {
        self.steps.as_mut().release(guard);
        ReleaseFuture { steps: self.steps }
    }
}

impl Future for AcquireFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match ready!(self.steps.as_mut().poll(cx)) {
            Ok(Some(guard)) => Poll::Ready(Ok(guard)),
            #[expect(clippy::unreachable, reason = "`release` takes this future")]
            Ok(None) => unreachable!("it is not a `ReleaseFuture` yet"),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl fmt::Debug for AcquireFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireFuture").finish_non_exhaustive()
    }
}

/// The future of [`AcquireFuture::release`].
///
/// # Cancellation
/// Dropping it releases the lock in the background.
#[must_use = "futures do nothing unless polled"]
pub struct ReleaseFuture {
    steps: Pin<Box<dyn Steps>>,
}

impl Future for ReleaseFuture {
    type Output = Result<(), LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.steps.as_mut().poll(cx).map_ok(drop)
    }
}

impl fmt::Debug for ReleaseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseFuture").finish_non_exhaustive()
    }
}

/// An acquire, then a release.
trait Steps: Send {
    /// Resolves with the guard after the acquire, and with `None` after the release.
    fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<LockGuard>, LockError>>;
    fn release(self: Pin<&mut Self>, guard: LockGuard);
}

#[pin_project]
struct InOneBox<A, R> {
    #[pin]
    step: Step<A, R>,
    release: fn(LockGuard) -> R,
}

#[pin_project(project = Projected)]
enum Step<A, R> {
    Acquiring(#[pin] A),
    Releasing(#[pin] R),
}

impl<A, R> Steps for InOneBox<A, R>
where
    A: Future<Output = Result<LockGuard, LockError>> + Send,
    R: Future<Output = Result<(), LockError>> + Send,
{
    fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<LockGuard>, LockError>> {
        match self.project().step.project() {
            Projected::Acquiring(acquire) => acquire.poll(cx).map_ok(Some),
            Projected::Releasing(release) => release.poll(cx).map_ok(|()| None),
        }
    }

    fn release(self: Pin<&mut Self>, guard: LockGuard) {
        let mut this = self.project();
        let release = (this.release)(guard);
        this.step.set(Step::Releasing(release));
    }
}
