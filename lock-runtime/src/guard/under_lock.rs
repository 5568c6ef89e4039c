//! A body under a lock: it runs in the lock's frame, is dropped on a loss or runs to its end, and
//! is followed by the release. `run`, the macro and the layer are built on it.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;

use crate::{
    error::LockError,
    guard::owner::ScopeFuture,
    guard::{LockGuard, LostFuture, ReleaseFuture},
    observe::log,
    request::spec::OnLost,
    shell::time::Instant,
};

impl LockGuard {
    /// Runs `body` under the lock, then releases it. When the lock is lost, the body is dropped at
    /// its next await point, unless the request has another [`OnLost`].
    ///
    /// The body runs in a frame of the lock, in which `reentrant` requests re-enter it. The release
    /// is awaited for at most one call time-out (min(lease/6, 500 ms)); one that is not confirmed
    /// is logged and continues in the background.
    ///
    /// # Errors
    /// `Lost`, also if the body has ended after the loss: see [`OnLost`]. Its output is then
    /// dropped, even if it is an error.
    ///
    /// # Cancellation
    /// Dropping the future drops the body, then releases the lock in the background.
    pub fn run<F: Future>(self, body: F) -> RunFuture<F> {
        RunFuture::new(self, body, |_| false)
    }

    /// Runs `body` as [`run`](Self::run) does, but keeps the lock: the future returns the output of
    /// `body` together with the guard. For work that continues afterwards, such as a response whose
    /// body is still to be sent.
    ///
    /// # Errors
    /// Those of `run`. The guard is dropped with the future. With [`OnLost::Ignore`] the guard of a
    /// lock that was lost is returned; its release returns `Lost`.
    ///
    /// # Cancellation
    /// Dropping the future drops the body, then releases the lock in the background.
    pub fn while_held<F: Future>(self, body: F) -> WhileHeldFuture<F> {
        self.while_held_unless(body, |_| false)
    }

    /// The same for a body whose output may be an error of its own, as `is_failure` tells. Such an
    /// output is returned despite a loss.
    #[doc(hidden)]
    pub fn while_held_unless<F: Future>(
        self,
        body: F,
        is_failure: fn(&F::Output) -> bool,
    ) -> WhileHeldFuture<F> {
        WhileHeldFuture {
            body: self.scope(body),
            lost: Some(self.lost()),
            guard: Some(self),
            is_failure,
        }
    }

    /// Logs the loss of a lock whose body has just ended, and returns the error if it replaces the
    /// output of the body.
    #[doc(hidden)]
    pub fn loss_at_end(&self, is_failure: bool) -> Option<LockError> {
        let now = Instant::now();
        let mut views = self.views().iter();
        let (view, (loss, at)) = views.find_map(|view| Some((view, view.loss_by(now)?)))?;
        let error = view.lost_error(loss);
        log::summarise(OUTLIVED, error.code(), error.name(), |left_out| {
            let (name, fence) = (view.name(), view.fence);
            let after = now.saturating_duration_since(at);
            tracing::warn!(name, key = %view.key.shown(), %fence, ?loss, ?after, left_out, "{OUTLIVED}");
        });
        self.on_lost().replaces_output(error, is_failure)
    }
}

const OUTLIVED: &str = "a body has ended after the loss of its lock";

/// The future of a body under a lock; see [`LockGuard::run`].
///
/// Written by hand, because an async block would store the body twice: as its argument and
/// where it is pinned.
#[pin_project]
#[must_use = "the body runs by `.await`"]
pub struct RunFuture<F: Future> {
    #[pin]
    stage: Stage<F>,
    on_lost: OnLost,
    is_failure: fn(&F::Output) -> bool,
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

impl<F: Future> RunFuture<F> {
    pub(crate) fn new(guard: LockGuard, body: F, is_failure: fn(&F::Output) -> bool) -> Self {
        Self {
            on_lost: guard.on_lost(),
            is_failure,
            stage: Stage::Running(guard.while_held_unless(body, is_failure)),
        }
    }
}

impl<F: Future> Future for RunFuture<F> {
    type Output = Result<F::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut stage = this.stage;
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
                    let released = ready!(release.poll(cx));
                    if let Some(output) = output.take() {
                        stage.set(Stage::Done);
                        let is_failure = (this.is_failure)(&output);
                        // An error has been logged already. That the store no longer held the lock
                        // is a loss, while a release that was not confirmed is none.
                        let loss = released
                            .err()
                            .and_then(|error| this.on_lost.replaces_output(error, is_failure));
                        return Poll::Ready(loss.map_or(Ok(output), Err));
                    }
                    Stage::Done
                }
                #[expect(
                    clippy::panic,
                    reason = "a future must not be polled after it was ready"
                )]
                Projected::Done => panic!("`RunFuture` was polled after it was ready"),
            };
            stage.set(next);
        }
    }
}

impl<F: Future> fmt::Debug for RunFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunFuture").finish_non_exhaustive()
    }
}

/// The future of a body under a lock that is kept afterwards; see [`LockGuard::while_held`].
#[pin_project]
#[must_use = "the body runs by `.await`: bind the guard in the output to a name, `_guard`; `_` releases the lock at once"]
pub struct WhileHeldFuture<F: Future> {
    /// Dropped before the guard.
    #[pin]
    body: ScopeFuture<F>,
    /// `None` once a body that continues after a loss has begun.
    lost: Option<LostFuture>,
    guard: Option<LockGuard>,
    is_failure: fn(&F::Output) -> bool,
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
        let guard = this.guard.as_ref();
        this.lost
            .take_if(|_| guard.is_some_and(|guard| guard.on_lost() != OnLost::Cancel));
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
                let loss = guard.loss_at_end((this.is_failure)(&output));
                Poll::Ready(loss.map_or_else(|| Ok((output, guard)), Err))
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
