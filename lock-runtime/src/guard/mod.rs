//! The types of a held lock: [`LockGuard`] owns the lock, [`HeldLock`] is a view of it, and
//! [`LostFuture`] resolves when it is lost.

pub(crate) mod fence;
pub mod fencing;
pub(crate) mod owner;
pub(crate) mod under_lock;
pub(crate) mod view;

mod release;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};

pub use self::release::ReleaseFuture;
#[cfg(test)]
use crate::shell::simulated::{Planted, planted};
use crate::{
    error::{LockError, LockErrorKind},
    guard::fence::FencingToken,
    guard::owner::{Frame, ScopeFuture},
    guard::view::View,
    observe::text::Short,
    observe::watch::{Grant, WatchedRequest},
    protocol::ConvertError,
    request::key::LockKey,
    request::spec::{LockSpec, Mode, OnLost},
    shell::call::perform,
    shell::core::log_loss,
    shell::runtime,
    shell::sync::OnDrop,
};

/// A held lock. It is renewed in the background until it is released or dropped.
///
/// [`release`](Self::release) releases the lock and returns whether that succeeded. Dropping the
/// guard releases the lock in the background. Call
/// [`LockClient::shutdown`](crate::LockClient::shutdown) at the end of `main`, so that the
/// process does not end before the release.
///
/// The guard has the methods of a [`HeldLock`]. It cannot be cloned; [`held`](Self::held) returns a
/// view to share.
#[must_use = "dropping the guard releases the lock: bind it to a name, `let _guard = ..`; `let _ = ..` drops it at once"]
#[derive(Debug)]
pub struct LockGuard {
    held: HeldLock,
    entries: Entries,
    on_lost: OnLost,
}

impl LockGuard {
    /// A guard of one or more leases. They are sorted by key, because re-entered ones come first.
    pub(crate) fn new(mut entries: Entries, on_lost: OnLost) -> Self {
        entries.sort_by(|one, other| one.view.key.cmp(&other.view.key));
        let views = entries.iter().map(|entry| entry.view.clone()).collect();
        let contended = entries.iter().any(|entry| entry.contended);
        Self {
            held: HeldLock { views, contended },
            entries,
            on_lost,
        }
    }

    /// Runs `work` within the span of the hold, of the first key if there are several.
    pub(crate) fn within_span<T>(&self, work: impl FnOnce() -> T) -> T {
        self.held.first().watch.span.within(work)
    }

    /// What is recorded of the grant. It is re-entered if enclosing scopes hold all of the keys.
    pub(crate) fn recorded(&self) -> Grant {
        Grant {
            fence: self.fence(),
            is_reentered: self.entries.iter().all(|entry| entry.is_reentered),
            was_contended: self.was_contended(),
        }
    }

    /// Returns a view of the lock that can be shared. The view does not keep the lock.
    pub fn held(&self) -> HeldLock {
        self.held.clone()
    }

    /// The name of the lock. See [`HeldLock::key`].
    pub fn key(&self) -> &LockKey {
        self.held.key()
    }

    /// The fencing token. See [`HeldLock::fence`].
    pub fn fence(&self) -> FencingToken {
        self.held.fence()
    }

    /// Every key with its fencing token. See [`HeldLock::fences`].
    pub fn fences(&self) -> impl Iterator<Item = (&LockKey, FencingToken)> {
        self.held.fences()
    }

    /// Returns the time for which the lock is certain to be held. See [`HeldLock::validity`].
    pub fn validity(&self) -> Duration {
        self.held.validity()
    }

    pub(crate) fn views(&self) -> &[Arc<View>] {
        self.held.views()
    }

    /// Returns the number of renewals that the store has confirmed. See [`HeldLock::renewals`].
    pub fn renewals(&self) -> u64 {
        self.held.renewals()
    }

    /// Returns whether the lock was contended when it was requested. See
    /// [`HeldLock::was_contended`].
    pub fn was_contended(&self) -> bool {
        self.held.was_contended()
    }

    /// Returns the treatment of a body under the lock when the lock is lost, as the request set it.
    pub fn on_lost(&self) -> OnLost {
        self.on_lost
    }

    /// Returns whether the lock was lost. See [`HeldLock::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.held.is_lost()
    }

    /// Resolves with the reason when the lock is lost. See [`HeldLock::lost`].
    pub fn lost(&self) -> LostFuture {
        self.held.lost()
    }

    /// Runs `future` in a frame of this lock. See [`HeldLock::scope`].
    pub fn scope<F: Future>(&self, future: F) -> ScopeFuture<F> {
        self.held.scope(future)
    }

    /// Runs `work` in a frame of this lock. See [`HeldLock::in_scope`].
    pub fn in_scope<T>(&self, work: impl FnOnce() -> T) -> T {
        self.held.in_scope(work)
    }

    /// Verifies at the store that the lock is held. See [`HeldLock::verify`].
    ///
    /// # Errors
    /// `Lost`, `NoRuntime`, `Unavailable`.
    ///
    /// # Cancellation
    /// Dropping the future has no effect on the lock.
    pub async fn verify(&self) -> Result<(), LockError> {
        self.held.verify().await
    }

    /// Extends the lease to at least `lease` from now (100 ms to 24 h), once. Renewals continue
    /// as before and never shorten it at a store. Over several servers, a later renewal that one of
    /// them misses may show less.
    ///
    /// Afterwards, [`validity`](Self::validity) is `lease` without the time of the call, of two
    /// calls on a store of records such as PostgreSQL, 1 % and 2 ms; on etcd and ZooKeeper it may
    /// be 200 ms shorter. It ends with `max_hold`.
    ///
    /// # Errors
    /// `InvalidSpec` for a lease out of range or beyond the limits of the store, `Lost`,
    /// `NoRuntime`, `Unavailable`.
    ///
    /// # Cancellation
    /// Dropping the future leaves the lock held; it may or may not have been extended.
    pub async fn extend(&self, lease: Duration) -> Result<(), LockError> {
        if !(LockSpec::MIN_LEASE..=LockSpec::MAX_LEASE).contains(&lease) {
            let lease = Short(lease);
            let message = format!("a lease of {lease} is out of range; give 100 ms to 24 h");
            let error = LockError::new(LockErrorKind::InvalidSpec, message);
            return Err(self.held.first().named(error));
        }
        let view = self.held.first();
        let checked = view.core.limits.check_lease(lease);
        checked.map_err(|error| view.named(error))?;
        self.held.extend(lease).await
    }

    /// Converts a writer to a reader without releasing the lock in between. The reader has its own
    /// fencing token; the writer's views treat the lock as released.
    ///
    /// # Errors
    /// `ModeMismatch` for a guard that is not exclusive, re-entered or was re-entered, or has
    /// several keys; the guard is released. `Lost`. `Unavailable` or `NoRuntime`; the lock is
    /// released in the background.
    ///
    /// # Cancellation
    /// Dropping the future releases the lock in the background.
    pub async fn downgrade(mut self) -> Result<LockGuard, LockError> {
        let on_lost = self.on_lost;
        let (Some(entry), true) = (self.entries.pop(), self.entries.is_empty()) else {
            let message = "only a lock of one key can be downgraded";
            return Err(mismatch(self.held.first(), message));
        };
        if entry.view.mode != Mode::Exclusive {
            let message = "only an exclusive lock can be downgraded";
            return Err(mismatch(&entry.view, message));
        }
        Ok(LockGuard::new(smallvec![entry.downgrade().await?], on_lost))
    }
}

fn mismatch(view: &View, message: &'static str) -> LockError {
    view.named(LockError::new(LockErrorKind::ModeMismatch, message))
}

/// Inline storage for one key, which is the common case.
pub(crate) type Entries = SmallVec<[Entry; 1]>;

/// A guard's share in a lease. Dropping it releases the guard in the background.
pub(crate) struct Entry {
    view: Arc<View>,
    /// See [`HeldLock::was_contended`].
    contended: bool,
    /// An enclosing scope had the lock before.
    is_reentered: bool,
    has_left: bool,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.key.fmt(f)
    }
}

impl Entry {
    /// The first guard of a lease, which was granted at the first attempt unless it
    /// was `contended`.
    pub(crate) fn first(view: Arc<View>, contended: bool) -> Self {
        Self {
            view,
            contended,
            is_reentered: false,
            has_left: false,
        }
    }

    /// Adds a guard to the lease of an enclosing scope. Returns `None` if the lease was
    /// released in the meantime.
    pub(crate) fn again(view: Arc<View>) -> Result<Option<Self>, LockError> {
        let core = &view.core;
        match core.visit(|state, cx| state.session.reenter(view.id, cx)) {
            Ok(true) => {
                let mut entry = Self::first(view, false);
                entry.is_reentered = true;
                Ok(Some(entry))
            }
            Ok(false) => Ok(None),
            Err(loss) => Err(view.lost_error(loss)),
        }
    }

    pub(crate) fn fence(&self) -> FencingToken {
        self.view.fence
    }

    /// Records that the hold begins, after the client's mutex is unlocked.
    pub(crate) fn begun(&self, request: &WatchedRequest) {
        self.view.begun(Some(request));
    }

    /// Returns the error of the loss if the lease was lost.
    pub(crate) fn lost(&self) -> Option<LockError> {
        self.view.loss().map(|loss| self.view.lost_error(loss))
    }

    /// Reserves the lock for at least `min_hold` from now.
    pub(crate) fn reserve(&self, min_hold: Duration) {
        let View { core, id, .. } = &*self.view;
        core.visit(|state, cx| state.session.reserve(*id, min_hold, cx));
    }

    async fn downgrade(mut self) -> Result<Self, LockError> {
        let view = &self.view;
        let (core, key) = (&view.core, &view.key);
        runtime::check().map_err(|error| view.named(error))?;
        let refused = |error| match error {
            ConvertError::Reentered => {
                mismatch(view, "a lock that was re-entered cannot be downgraded")
            }
            ConvertError::Lost(loss) => view.lost_error(loss),
            ConvertError::Store(error) => view.named(LockError::from_store(error)),
        };
        let begun = core.visit(|state, cx| state.session.convert(view.id, cx));
        let (id, call) = begun.map_err(refused)?;
        self.has_left = true;
        let given_up = OnDrop::new(|| {
            core.visit(|state, cx| state.session.convert_dropped(id, cx));
        });
        let answer = perform(&*core.store, &call).await;
        given_up.disarm();
        let converted = core.visit(|state, cx| {
            let granted = state.session.convert_replied(id, answer, cx)?;
            let watched = (view.name.clone(), view.watch.downgraded(view.name.as_ref()));
            let reader = View::new(core, key, Mode::Shared, &granted, watched);
            Ok(state.add_view(reader))
        });
        if let Err(ConvertError::Lost(loss)) = &converted {
            let name = view.name();
            log_loss("lost before its downgrade", name, key, view.fence, *loss);
            view.watch.meter.lost(*loss);
        }
        let reader = converted.map_err(refused)?;
        reader.begun(None);
        tracing::debug!(key = %key.shown(), fence = %reader.fence, "downgraded");
        Ok(Self::first(reader, self.contended))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        #[cfg(test)]
        if planted(Planted::KeepsDroppedGuard) {
            return;
        }
        if !self.has_left {
            let View { core, id, .. } = &*self.view;
            core.visit(|state, cx| state.session.guard_dropped(*id, cx));
        }
    }
}

/// A view of a lock that is or was held: its name, its fencing token and its loss. The view does
/// not keep the lock.
///
/// Cheap to clone, `'static`, and suitable for `http::Extensions`. For a lock on several keys,
/// methods that return a single key or token return those of the first key.
///
/// With the feature `axum` it is an extractor of a handler, by value (`lock: HeldLock`) and before
/// the extractor of the body.
#[derive(Clone)]
pub struct HeldLock {
    views: SmallVec<[Arc<View>; 1]>,
    contended: bool,
}

impl HeldLock {
    pub(crate) fn views(&self) -> &[Arc<View>] {
        &self.views
    }

    fn first(&self) -> &Arc<View> {
        // A request has at least one key, so a guard has at least one lease.
        &self.views[0]
    }

    /// The name of the lock.
    pub fn key(&self) -> &LockKey {
        &self.first().key
    }

    /// The fencing token. Send it with every write that the lock protects.
    pub fn fence(&self) -> FencingToken {
        self.first().fence
    }

    /// Every key with its fencing token, in the order of the keys.
    pub fn fences(&self) -> impl Iterator<Item = (&LockKey, FencingToken)> {
        self.views.iter().map(|view| (&view.key, view.fence))
    }

    /// Returns the time for which the lock is certain to be held, by the clock of this process, if
    /// no further renewal succeeds. Zero after a loss or a release.
    pub fn validity(&self) -> Duration {
        let validities = self.views.iter().map(|view| view.validity());
        validities.min().unwrap_or_default()
    }

    /// Returns the number of background renewals that the store has confirmed so far, for all keys
    /// together. The count starts again when the lock is handed off or downgraded.
    /// [`extend`](LockGuard::extend) and [`verify`](Self::verify) do not count.
    pub fn renewals(&self) -> u64 {
        self.views.iter().map(|view| view.renewals()).sum()
    }

    /// Returns whether another holder had the lock, or other requests waited for it, when it was
    /// requested. With several keys, one contended key suffices.
    ///
    /// `false` for a lock that was free at the first attempt, and for one that was re-entered. A
    /// store that did not reply at first does not make the lock contended.
    pub fn was_contended(&self) -> bool {
        self.contended
    }

    /// Returns whether the lock was lost. A released lock was not.
    pub fn is_lost(&self) -> bool {
        self.views.iter().any(|view| view.loss().is_some())
    }

    /// Resolves with the reason when the lock is lost, or never if it is released before.
    ///
    /// The loss is detected by the local clock, even if the store does not reply. The future needs
    /// no runtime. It is woken by the client's task, which runs where the lock was acquired, or by
    /// the library's thread if that task is late.
    pub fn lost(&self) -> LostFuture {
        LostFuture {
            held: self.clone(),
            listener: self.first().core.next_listener(),
        }
    }

    /// Runs `future` in a frame of this lock. Within it, requests that are `reentrant`
    /// re-enter the lock instead of waiting for it, and other requests for it are refused
    /// as `WouldDeadlock`.
    ///
    /// A spawned task has no frame; this method gives it one: `tokio::spawn(held.scope(work))`. A
    /// guard that re-entered there keeps the lock until it is released, even if the first guard is
    /// gone by then. After a release, a `reentrant` request waits like any other. A loss does not
    /// end `future`: its guards and [`lost`](Self::lost) report the loss, and requests for the same
    /// lock are refused as `Lost` from then on.
    pub fn scope<F: Future>(&self, future: F) -> ScopeFuture<F> {
        Frame::enclosing(self.clone()).scope(future)
    }

    /// Runs `work` in a frame of this lock, as [`scope`](Self::scope) does with a future. For
    /// hand-written `poll` functions.
    pub fn in_scope<T>(&self, work: impl FnOnce() -> T) -> T {
        Frame::enclosing(self.clone()).run(work)
    }

    /// Verifies at the store that the lock is held.
    ///
    /// # Errors
    /// `Lost`, `NoRuntime`, `Unavailable`.
    ///
    /// # Cancellation
    /// Dropping the future has no effect on the lock.
    pub async fn verify(&self) -> Result<(), LockError> {
        self.extend(Duration::ZERO).await
    }

    /// Extends all of its leases at once.
    async fn extend(&self, lease: Duration) -> Result<(), LockError> {
        let extended = self.views.iter().map(|view| view.extend(lease));
        join_all(extended).await.into_iter().collect()
    }
}

impl fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldLock")
            .field("fences", &self.fences().collect::<Vec<_>>())
            .field("validity", &self.validity())
            .finish_non_exhaustive()
    }
}

/// A future that resolves when a lock is lost; see [`HeldLock::lost`].
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct LostFuture {
    held: HeldLock,
    listener: u64,
}

impl Future for LostFuture {
    type Output = LockError;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LockError> {
        let loss = |view: &Arc<View>| match view.poll_loss(self.listener, cx) {
            Poll::Ready(loss) => Some(view.lost_error(loss)),
            Poll::Pending => None,
        };
        let found = self.held.views.iter().find_map(loss);
        found.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for LostFuture {
    fn drop(&mut self) {
        for view in &self.held.views {
            view.unlisten(self.listener);
        }
    }
}
