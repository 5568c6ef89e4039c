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
    error::LockError, guard::HeldLock, guard::view::View, protocol::may_enter,
    request::key::LockKey, request::spec::Terms, shell::core::Core,
};

tokio::task_local! {
    static FRAME: Arc<Frame>;
}

/// A held lock in a flow of work, and the frames around it.
#[derive(Debug)]
pub(crate) struct Frame {
    held: HeldLock,
    outer: Option<Arc<Frame>>,
}

impl Frame {
    /// A frame of `held` within the current frame.
    pub(crate) fn enclosing(held: HeldLock) -> Arc<Self> {
        let current = Self::current();
        // A task that starts its successor within its own scope adds a frame each time. Frames
        // without a lock of their own are left out, so that the chain does not grow.
        let mut frames = std::iter::successors(current.as_ref(), |frame| frame.outer.as_ref());
        let is_own = |view| held.views().iter().any(|own| Arc::ptr_eq(own, view));
        let outer = frames
            .find(|frame| (frame.held.views().iter()).any(|it| !it.is_released() && !is_own(it)))
            .cloned();
        Arc::new(Self { held, outer })
    }

    fn current() -> Option<Arc<Self>> {
        FRAME.try_with(Arc::clone).ok()
    }

    /// Runs `future` within this frame.
    pub(crate) fn scope<F: Future>(self: Arc<Self>, future: F) -> ScopeFuture<F> {
        ScopeFuture {
            inner: FRAME.scope(self, future),
        }
    }

    /// Runs `work` within this frame.
    pub(crate) fn run<T>(self: Arc<Self>, work: impl FnOnce() -> T) -> T {
        FRAME.sync_scope(self, work)
    }

    /// Iterates over the held locks, from the innermost frame to the outermost.
    fn chain(&self) -> impl Iterator<Item = &Arc<View>> {
        std::iter::successors(Some(self), |frame| frame.outer.as_deref())
            .flat_map(|frame| frame.held.views())
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
        let mut views = frame.chain();
        views.any(|view| view.key == *key && !view.validity().is_zero())
    })
}

/// Returns the lease that an enclosing scope holds on `key`, if this request may enter it, or
/// `None` if no scope holds the key.
pub(crate) fn enclosing(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
) -> Result<Option<Arc<View>>, LockError> {
    let Some(frame) = Frame::current() else {
        return Ok(None);
    };
    let is_same = |view: &&Arc<View>| {
        view.key == *key
            && view.mode.kind() == terms.mode.kind()
            && Arc::ptr_eq(&view.core, core)
            && !view.is_released()
    };
    let Some(view) = frame.chain().find(is_same) else {
        return Ok(None);
    };
    if let Some(loss) = view.loss() {
        // A request that is not `reentrant` would otherwise be advised to re-enter, which
        // would fail as well.
        return Err(view.lost_error(loss));
    }
    match may_enter(view.mode, terms) {
        Ok(()) => Ok(Some(view.clone())),
        Err((kind, message)) => Err(LockError::new(kind, message).with_key(key)),
    }
}

/// A future within the frame of a lock; see [`HeldLock::scope`].
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct ScopeFuture<F> {
    #[pin]
    inner: TaskLocalFuture<Arc<Frame>, F>,
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
