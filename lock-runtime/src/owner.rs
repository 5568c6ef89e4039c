//! Re-entrancy: the chain of locks that enclose the current flow of work.
//!
//! A [`Frame`] lives in a Tokio task-local, so it follows a future and never a thread. Siblings
//! under `join!` do not enclose each other, and a spawned task starts with an empty chain.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use pin_project::pin_project;
use tokio::task::futures::TaskLocalFuture;

use crate::{
    client::Core,
    error::{LockError, LockErrorKind},
    guard::HeldLock,
    holding::Holding,
    key::LockKey,
    spec::{Mode, Terms},
};

tokio::task_local! {
    static FRAME: Frame;
}

/// A held lock in a flow of work, and the frames around it.
#[derive(Clone, Debug)]
pub(crate) struct Frame(Arc<Node>);

#[derive(Debug)]
struct Node {
    held: HeldLock,
    outer: Option<Frame>,
}

impl Frame {
    /// A frame of `held` within the current frame.
    pub(crate) fn enclosing(held: HeldLock) -> Self {
        Self(Arc::new(Node {
            held,
            outer: Self::current(),
        }))
    }

    fn current() -> Option<Self> {
        FRAME.try_with(Self::clone).ok()
    }

    /// Runs `future` within this frame.
    pub(crate) fn scope<F: Future>(self, future: F) -> ScopeFuture<F> {
        ScopeFuture {
            inner: FRAME.scope(self, future),
        }
    }

    /// Runs `work` within this frame.
    pub(crate) fn run<T>(self, work: impl FnOnce() -> T) -> T {
        FRAME.sync_scope(self, work)
    }

    /// Iterates over the held locks, from the innermost frame to the outermost.
    fn chain(&self) -> impl Iterator<Item = &Arc<Holding>> {
        std::iter::successors(Some(self), |frame| frame.0.outer.as_ref())
            .flat_map(|frame| frame.0.held.holdings())
    }
}

/// Returns whether an enclosing scope of the current flow of work holds `key`.
///
/// The mode and the client make no difference, and a permit of that name counts too. This is for
/// code that must run under a lock of its callers: `debug_assert!(lock_runtime::is_held(&key))`.
/// It covers the scopes of [`LockRequest::run`](crate::LockRequest::run), the macro, the layer
/// and [`HeldLock::scope`].
pub fn is_held(key: &LockKey) -> bool {
    Frame::current().is_some_and(|frame| {
        frame
            .chain()
            .any(|holding| holding.hold().key == *key && !holding.validity().is_zero())
    })
}

/// Returns the lease that an enclosing scope holds on `key`, if this request may enter it, or
/// `None` if no scope holds the key.
pub(crate) fn enclosing(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
) -> Result<Option<Arc<Holding>>, LockError> {
    let Some(frame) = Frame::current() else {
        return Ok(None);
    };
    let same = |holding: &&Arc<Holding>| {
        let held = holding.hold();
        held.key == *key
            && held.mode.kind() == terms.mode.kind()
            && Arc::ptr_eq(holding.core(), core)
            && !holding.is_released()
    };
    let Some(holding) = frame.chain().find(same) else {
        return Ok(None);
    };
    if let Some(loss) = holding.loss() {
        // A request that is not `reentrant` would otherwise be advised to re-enter, which
        // would fail as well.
        return Err(holding.lost_error(loss));
    }
    let refused = |kind, message: &'static str| Err(LockError::new(kind, message).with_key(key));
    match (holding.hold().mode, terms.mode) {
        (Mode::Shared, Mode::Exclusive) => refused(
            LockErrorKind::WouldDeadlock,
            "an enclosing scope holds it for reading, so it can never be acquired for writing; acquire it for writing in that scope",
        ),
        (Mode::Permits(held), Mode::Permits(wanted)) if held != wanted => refused(
            LockErrorKind::ModeMismatch,
            "an enclosing scope holds it with another number of permits",
        ),
        _ if !terms.reentrant => refused(
            LockErrorKind::WouldDeadlock,
            "an enclosing scope of this flow holds it; set `reentrant`, or acquire it only once",
        ),
        _ => Ok(Some(holding.clone())),
    }
}

/// A future within the frame of a lock; see [`HeldLock::scope`].
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct ScopeFuture<F> {
    #[pin]
    inner: TaskLocalFuture<Frame, F>,
}

impl<F: Future> Future for ScopeFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().inner.poll(cx)
    }
}

impl<F> fmt::Debug for ScopeFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopeFuture").finish_non_exhaustive()
    }
}
