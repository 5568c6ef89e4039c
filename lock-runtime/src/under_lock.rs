//! A body under a lock: runs in the lock's frame, dropped on loss, its end awaits the release. `run`, the macro and the
//! layer all stand on it.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::future::BoxFuture;
use pin_project::pin_project;

use crate::{
    error::LockError,
    guard::{LockGuard, Lost},
    owner::{Frame, InScope},
};

impl LockGuard {
    /// Runs `body` under the lock: in a frame of it, where `reentrant` requests enter again; dropped when the lock is lost;
    /// with the release awaited at its end, for at most one call timeout (min(lease/6, 500 ms)). A release that fails is traced
    /// and never replaces the body's result.
    ///
    /// # Errors
    /// `Lost`, when the lock was lost before the body was ready.
    ///
    /// # Cancellation
    /// Dropping the future drops the body, then releases in the background.
    pub fn cancel_on_loss<F: Future>(self, body: F) -> UnderLock<F> {
        let held = self.held();
        let lost = held.lost();
        UnderLock { state: State::Running { body: Frame::enclosing(held).scope(body), lost, guard: Some(self) } }
    }
}

/// The future of a body under a lock; see [`LockGuard::cancel_on_loss`].
///
/// Written by hand, because an async block would keep the body twice: as its argument and where it is pinned.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct UnderLock<F: Future> {
    #[pin]
    state: State<F>,
}

#[pin_project(project = Stage)]
enum State<F: Future> {
    /// The body is dropped before the guard.
    Running {
        #[pin]
        body: InScope<F>,
        lost: Lost,
        guard: Option<LockGuard>,
    },
    Releasing {
        release: BoxFuture<'static, Result<(), LockError>>,
        output: Option<F::Output>,
    },
    Done,
}

impl<F: Future> Future for UnderLock<F> {
    type Output = Result<F::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                Stage::Running { body, lost, guard } => {
                    // First, as a process that was paused must not go on with work whose lock has ended meanwhile.
                    if let Poll::Ready(error) = Pin::new(&mut *lost).poll(cx) {
                        state.set(State::Done);
                        return Poll::Ready(Err(error));
                    }
                    if let Poll::Ready(output) = body.poll(cx) {
                        // It is taken here only, and the stage is left for good.
                        let Some(guard) = guard.take() else { continue };
                        State::Releasing { release: Box::pin(guard.release()), output: Some(output) }
                    } else {
                        let error = ready!(Pin::new(lost).poll(cx));
                        state.set(State::Done);
                        return Poll::Ready(Err(error));
                    }
                }
                Stage::Releasing { release, output } => {
                    // What went wrong has been traced; it never replaces the body's result.
                    let _released = ready!(release.as_mut().poll(cx));
                    if let Some(output) = output.take() {
                        state.set(State::Done);
                        return Poll::Ready(Ok(output));
                    }
                    State::Done
                }
                #[expect(clippy::panic, reason = "a future must not be polled after it was ready")]
                Stage::Done => panic!("`UnderLock` was polled after it was ready"),
            };
            state.set(next);
        }
    }
}

impl<F: Future> fmt::Debug for UnderLock<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnderLock").finish_non_exhaustive()
    }
}
