//! A body under a lock: it runs in the lock's frame, is dropped on a loss, and is followed by the
//! release. `run`, the macro and the layer are built on it.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;

use crate::{
    error::LockError,
    guard::{LockGuard, LostFuture, ReleaseFuture},
    owner::ScopeFuture,
};

impl LockGuard {
    /// Runs `body` under the lock, and drops it when the lock is lost.
    ///
    /// The body runs in a frame of the lock, in which `reentrant` requests re-enter it. At its
    /// end the release is awaited, for at most one call time-out (min(lease/6, 500 ms)). A
    /// release that fails is logged and never replaces the result of the body.
    ///
    /// # Errors
    /// `Lost` if the lock was lost before the body was ready.
    ///
    /// # Cancellation
    /// Dropping the future drops the body, then releases the lock in the background.
    pub fn cancel_on_loss<F: Future>(self, body: F) -> CancelOnLossFuture<F> {
        CancelOnLossFuture::new(self, body, OnLoss::Cancel)
    }

    /// Runs `body` as [`cancel_on_loss`](Self::cancel_on_loss) does, but keeps the lock: the
    /// future returns the output of `body` together with the guard. For work that continues
    /// afterwards, such as a response whose body is still to be sent.
    ///
    /// # Errors
    /// `Lost` if the lock was lost before the body was ready. The body is dropped with
    /// the future.
    ///
    /// # Cancellation
    /// Dropping the future drops the body, then releases the lock in the background.
    pub fn while_held<F: Future>(self, body: F) -> WhileHeldFuture<F> {
        WhileHeldFuture::new(self, body, OnLoss::Cancel)
    }
}

/// The future of a body under a lock; see [`LockGuard::cancel_on_loss`].
///
/// Written by hand, because an async block would store the body twice: as its argument and
/// where it is pinned.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct CancelOnLossFuture<F: Future> {
    #[pin]
    stage: Stage<F>,
}

#[pin_project(project = Projected)]
enum Stage<F: Future> {
    Running(#[pin] WhileHeldFuture<F>),
    Releasing {
        #[pin]
        release: ReleaseFuture,
        output: Option<F::Output>,
    },
    Done,
}

impl<F: Future> CancelOnLossFuture<F> {
    pub(crate) fn new(guard: LockGuard, body: F, on_loss: OnLoss) -> Self {
        Self {
            stage: Stage::Running(WhileHeldFuture::new(guard, body, on_loss)),
        }
    }
}

impl<F: Future> Future for CancelOnLossFuture<F> {
    type Output = Result<F::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut stage = self.project().stage;
        loop {
            let next = match stage.as_mut().project() {
                Projected::Running(body) => match ready!(body.poll(cx)) {
                    Ok((output, guard)) => Stage::Releasing {
                        release: guard.release(),
                        output: Some(output),
                    },
                    Err(error) => {
                        stage.set(Stage::Done);
                        return Poll::Ready(Err(error));
                    }
                },
                Projected::Releasing { release, output } => {
                    // An error has been logged already; it never replaces the result of the body.
                    let _released = ready!(release.poll(cx));
                    if let Some(output) = output.take() {
                        stage.set(Stage::Done);
                        return Poll::Ready(Ok(output));
                    }
                    Stage::Done
                }
                #[expect(
                    clippy::panic,
                    reason = "a future must not be polled after it was ready"
                )]
                Projected::Done => panic!("`CancelOnLossFuture` was polled after it was ready"),
            };
            stage.set(next);
        }
    }
}

impl<F: Future> fmt::Debug for CancelOnLossFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelOnLossFuture").finish_non_exhaustive()
    }
}

/// The effect of a loss on the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnLoss {
    /// The body is dropped at its current await point.
    Cancel,
    /// The body runs to its end.
    Finish,
}

/// The future of a body under a lock that is kept afterwards; see [`LockGuard::while_held`].
#[pin_project]
#[must_use = "the body runs by `.await`: bind the guard in the output to a name, `_guard`; `_` releases the lock at once"]
pub struct WhileHeldFuture<F: Future> {
    /// Dropped before the guard.
    #[pin]
    body: ScopeFuture<F>,
    /// `None` for a body that continues after a loss.
    lost: Option<LostFuture>,
    guard: Option<LockGuard>,
}

impl<F: Future> WhileHeldFuture<F> {
    fn new(guard: LockGuard, body: F, on_loss: OnLoss) -> Self {
        let lost = (on_loss == OnLoss::Cancel).then(|| guard.lost());
        Self {
            body: guard.scope(body),
            lost,
            guard: Some(guard),
        }
    }
}

impl<F: Future> Future for WhileHeldFuture<F> {
    type Output = Result<(F::Output, LockGuard), LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        // Checked before the body: a process that was paused must not continue work whose lock
        // has ended in the meantime.
        if let Poll::Ready(error) = poll_loss(this.lost, cx) {
            return Poll::Ready(Err(error));
        }
        let body = match this.guard {
            Some(guard) => guard.within_span(|| this.body.poll(cx)),
            None => this.body.poll(cx),
        };
        match body {
            Poll::Ready(output) => {
                #[expect(
                    clippy::panic,
                    reason = "a future must not be polled after it was ready"
                )]
                let Some(guard) = this.guard.take() else {
                    panic!("`WhileHeldFuture` was polled after it was ready")
                };
                Poll::Ready(Ok((output, guard)))
            }
            // The body itself may have caused the loss.
            Poll::Pending => poll_loss(this.lost, cx).map(Err),
        }
    }
}

fn poll_loss(lost: &mut Option<LostFuture>, cx: &mut Context<'_>) -> Poll<LockError> {
    lost.as_mut()
        .map_or(Poll::Pending, |lost| Pin::new(lost).poll(cx))
}

impl<F: Future> fmt::Debug for WhileHeldFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WhileHeldFuture").finish_non_exhaustive()
    }
}
