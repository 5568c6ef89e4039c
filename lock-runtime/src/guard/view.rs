//! The view of a held lock that its guards, frames and listeners share. Reading it takes no mutex
//! of the client.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::runtime::Handle;

use crate::{
    error::{LockError, LockErrorKind, Loss},
    guard::fence::FencingToken,
    observe::watch::{Watch, WatchedRequest},
    protocol::{ExtendError, Granted, HeldId},
    request::key::LockKey,
    request::name::RequestName,
    request::spec::Mode,
    shell::call::perform,
    shell::core::Core,
    shell::runtime,
    shell::sync::lock,
    shell::time::Instant,
};

/// A lock that this process holds or has held. The session writes it through the effects of its
/// inputs.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) core: Arc<Core>,
    pub(crate) id: HeldId,
    pub(crate) key: LockKey,
    pub(crate) mode: Mode,
    pub(crate) fence: FencingToken,
    /// The name of its request.
    pub(crate) name: Option<RequestName>,
    pub(crate) watch: Watch,
    /// The runtime on which the lock was acquired. It may outlive the driver's runtime.
    pub(crate) runtime: Option<Handle>,
    /// When `max_hold` has passed.
    ends_at: Option<Instant>,
    /// In nanoseconds since the client was created.
    valid_until: AtomicU64,
    /// The number of renewals that the store has confirmed.
    renewals: AtomicU64,
    /// The end of the hold: the release of its last guard, or a loss before, with its time.
    end: OnceLock<Option<(Loss, Instant)>>,
    /// The wakers to be woken by a loss, by listener number.
    listeners: Mutex<Vec<(u64, Waker)>>,
}

impl View {
    /// The name of the lock for `lock_runtime.guard`, where its store has that function.
    #[cfg(feature = "postgres")]
    pub(crate) fn guarded_name(&self) -> Option<String> {
        self.core.store.guarded_name(&self.key, self.mode.kind())
    }

    pub(crate) fn new(
        core: &Arc<Core>,
        key: &LockKey,
        mode: Mode,
        granted: &Granted,
        (name, watch): (Option<RequestName>, Watch),
    ) -> Arc<Self> {
        Arc::new(Self {
            core: core.clone(),
            id: granted.held,
            key: key.clone(),
            mode,
            fence: granted.fence,
            name,
            watch,
            runtime: Handle::try_current().ok(),
            ends_at: granted.ends_at,
            valid_until: AtomicU64::new(core.nanos(granted.valid_until)),
            renewals: AtomicU64::new(0),
            end: OnceLock::new(),
            listeners: Mutex::default(),
        })
    }

    pub(crate) fn renewals(&self) -> u64 {
        self.renewals.load(Ordering::Relaxed)
    }

    fn valid_until(&self) -> Instant {
        let nanos = self.valid_until.load(Ordering::Acquire);
        self.core.epoch + Duration::from_nanos(nanos)
    }

    /// Returns how long the lock is surely still held; zero after a loss or a release.
    pub(crate) fn validity(&self) -> Duration {
        if self.end.get().is_some() {
            return Duration::ZERO;
        }
        let valid_until = self.valid_until();
        let end = self.ends_at.map_or(valid_until, |at| at.min(valid_until));
        end.saturating_duration_since(Instant::now())
    }

    /// Returns how the lock was lost, if it was. The local clock decides, so the driver
    /// need not have noticed.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.loss_by(Instant::now()).map(|(loss, _)| loss)
    }

    /// Returns how and when the lock was lost, if it was lost by `now`.
    pub(crate) fn loss_by(&self, now: Instant) -> Option<(Loss, Instant)> {
        self.end.get().copied().unwrap_or_else(|| {
            if let Some(at) = self.ends_at.filter(|at| *at <= now) {
                return Some((Loss::MaxHold, at));
            }
            let at = self.valid_until();
            (at <= now).then_some((Loss::Expired, at))
        })
    }

    pub(crate) fn lost_error(&self, loss: Loss) -> LockError {
        let message = match loss {
            Loss::Expired => "lost: renewal did not succeed before the lease ran out",
            Loss::Taken => "lost: the store no longer knows this grant",
            Loss::Revoked => "lost: it was revoked",
            Loss::MaxHold => "lost: max_hold has passed",
        };
        self.named(LockError::new(LockErrorKind::Lost(loss), message))
    }

    /// Adds the lock and the name of the request to an error.
    pub(crate) fn named(&self, error: LockError) -> LockError {
        error.with_key(&self.key).with_name(self.name.as_ref())
    }

    /// The name of the request.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_ref().map(RequestName::as_str)
    }

    /// Records that the hold begins, after the client's mutex is unlocked.
    pub(crate) fn begun(&self, request: Option<&WatchedRequest>) {
        let name = self.name.as_ref();
        self.watch
            .begun(name, &self.key, self.mode, self.fence, request);
    }

    /// Returns whether the last guard has left.
    pub(crate) fn is_released(&self) -> bool {
        self.end.get() == Some(&None)
    }

    /// Resolves with the loss once there is one. Until then `listener` is registered to be woken.
    pub(crate) fn poll_loss(&self, listener: u64, cx: &Context<'_>) -> Poll<Loss> {
        if let Some(loss) = self.loss() {
            return Poll::Ready(loss);
        }
        self.unlisten(listener);
        lock(&self.listeners).push((listener, cx.waker().clone()));
        // The lock may have been lost after the first check, and before the registration.
        self.loss().map_or(Poll::Pending, Poll::Ready)
    }

    /// Removes a listener.
    pub(crate) fn unlisten(&self, listener: u64) {
        let mut listeners = lock(&self.listeners);
        let index = listeners.iter().position(|(number, _)| *number == listener);
        let removed = index.map(|index| listeners.swap_remove(index));
        // A waker may own a task, and with it a listener of this lock.
        drop(listeners);
        drop(removed);
    }

    pub(crate) fn extended(&self, valid_until: Instant, is_renewal: bool) {
        let nanos = self.core.nanos(valid_until);
        self.valid_until.store(nanos, Ordering::Release);
        let renewals = u64::from(is_renewal);
        self.renewals.fetch_add(renewals, Ordering::Relaxed);
    }

    pub(crate) fn released(&self) {
        // Set once, as the session refers to a view only until it has ended.
        let _ = self.end.set(None);
    }

    /// Records a loss. Returns the wakers of its listeners.
    pub(crate) fn lost(&self, loss: Loss) -> Vec<Waker> {
        let now = Instant::now();
        // The client's task may be late.
        let at = match loss {
            Loss::Expired => self.valid_until().min(now),
            Loss::MaxHold => self.ends_at.map_or(now, |at| at.min(now)),
            Loss::Taken | Loss::Revoked => now,
        };
        let _ = self.end.set(Some((loss, at)));
        let listeners = std::mem::take(&mut *lock(&self.listeners));
        listeners.into_iter().map(|(_, waker)| waker).collect()
    }

    /// Extends the lease to at least `lease` from now. Zero only queries whether the
    /// lock is held.
    pub(crate) async fn extend(&self, lease: Duration) -> Result<(), LockError> {
        let core = &self.core;
        let begun = core.visit(|state, cx| state.session.extend(self.id, lease, cx));
        let call = begun.map_err(|error| self.extend_error(error))?;
        runtime::check().map_err(|error| self.named(error))?;
        let sent = Instant::now();
        let answer = perform(&*core.store, &call).await;
        core.visit(|state, cx| state.session.extend_replied(self.id, answer, sent, cx))
            .map_err(|error| self.extend_error(error))
    }

    fn extend_error(&self, error: ExtendError) -> LockError {
        match (error, self.loss()) {
            (ExtendError::Lost(loss), _) | (ExtendError::Released, Some(loss)) => {
                self.lost_error(loss)
            }
            (ExtendError::Released, None) => {
                let message = "no longer held: it was released";
                self.named(LockError::new(LockErrorKind::Released, message))
            }
            (ExtendError::Store(error), _) => self.named(LockError::from_store(error)),
        }
    }
}
