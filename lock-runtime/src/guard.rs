//! What a holder has in hand: [`LockGuard`] owns the lock, [`HeldLock`] is a view of it, [`Lost`] tells when it is gone.

use std::{
    fmt,
    future::Future,
    ops::Deref,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use crate::{
    driver::CleanUp,
    error::{LockError, LockErrorKind, Loss},
    fence::FencingToken,
    giving_back::give_back,
    holding::{Holding, Left},
    key::LockKey,
    owner::{Frame, InScope},
    runtime,
    spec::{MAX_LEASE, MIN_LEASE, Mode, call_timeout},
    store::{Hold, Release, ReleaseReply},
};

/// A lock in hand. It is renewed in the background until it is released or dropped.
///
/// [`release`](Self::release) gives the lock back and tells whether that went well. Dropping the guard does the same in the
/// background; call [`LockClient::shutdown`](crate::LockClient::shutdown) at the end of `main`, so that the process does not
/// end before.
///
/// The guard derefs to [`HeldLock`], where the fencing token and the loss are.
#[must_use = "the lock is released when the guard is dropped"]
#[derive(Debug)]
pub struct LockGuard {
    held: HeldLock,
    entries: Entries,
}

impl LockGuard {
    /// A guard of one or more leases. They are put in the order of their keys: those that were entered again come first.
    pub(crate) fn new(mut entries: Entries) -> Self {
        entries.sort_by(|one, other| one.holding.hold().key.cmp(&other.holding.hold().key));
        let holdings = entries.iter().map(|entry| entry.holding.clone()).collect();
        let contended = entries.iter().any(|entry| entry.contended);
        Self {
            held: HeldLock {
                holdings,
                contended,
            },
            entries,
        }
    }

    /// A view of the lock, to hand around. Keeping it does not keep the lock.
    pub fn held(&self) -> HeldLock {
        self.held.clone()
    }

    /// Gives the lock back and waits for the store's answer, for at most one call timeout (min(lease/6, 500 ms)).
    ///
    /// A guard that re-entered gives back nothing: the lock goes with the last guard.
    ///
    /// # Errors
    /// `Lost` if the lock was lost before; `ReleaseUnknown` if the store did not answer, or `NoRuntime`: the release goes on in
    /// the background, and the lock ends with its lease at the latest.
    ///
    /// # Cancellation
    /// Dropping the future releases in the background.
    pub async fn release(mut self) -> Result<(), LockError> {
        let mut entries = std::mem::take(&mut self.entries);
        if entries.len() == 1
            && let Some(entry) = entries.pop()
        {
            return entry.release().await;
        }
        // All at once: several keys must not take several times as long.
        let releases = entries.into_iter().map(Entry::release);
        join_all(releases).await.into_iter().collect()
    }

    /// Keeps the lock for at least `lease` from now (100 ms to 24 h), once; renewals go on as before and never shorten it.
    ///
    /// # Errors
    /// `InvalidSpec` for a lease out of range, `Lost`, `NoRuntime`, `Unavailable`.
    ///
    /// # Cancellation
    /// Dropping the future leaves the lock held; it may or may not have been extended.
    pub async fn extend(&self, lease: Duration) -> Result<(), LockError> {
        if !(MIN_LEASE..=MAX_LEASE).contains(&lease) {
            let message = format!("a lease of {lease:?} is out of range; give 100 ms to 24 h");
            return Err(LockError::new(LockErrorKind::InvalidSpec, message).with_key(self.key()));
        }
        for holding in self.held.holdings.iter() {
            holding.extend(lease).await?;
        }
        Ok(())
    }

    /// Makes a writer a reader, without a moment in which nobody holds the lock. The reader has a fencing token of its own; to the
    /// writer's views the lock is released.
    ///
    /// # Errors
    /// `ModeMismatch` for a guard that is not exclusive, re-entered or was re-entered, or has several keys: it is released. `Lost`. `Unavailable` or
    /// `NoRuntime`: the lock is given back in the background.
    ///
    /// # Cancellation
    /// Dropping the future gives the lock back in the background.
    pub async fn downgrade(mut self) -> Result<LockGuard, LockError> {
        let (Some(entry), true) = (self.entries.pop(), self.entries.is_empty()) else {
            return Err(mismatch(
                self.key(),
                "only a lock of one key can be downgraded",
            ));
        };
        if entry.holding.hold().mode != Mode::Exclusive {
            return Err(mismatch(
                self.key(),
                "only an exclusive lock can be downgraded",
            ));
        }
        Ok(LockGuard::new(smallvec![entry.downgrade().await?]))
    }
}

fn mismatch(key: &LockKey, message: &'static str) -> LockError {
    LockError::new(LockErrorKind::ModeMismatch, message).with_key(key)
}

impl Deref for LockGuard {
    type Target = HeldLock;

    fn deref(&self) -> &HeldLock {
        &self.held
    }
}

/// Most guards have one key.
pub(crate) type Entries = SmallVec<[Entry; 1]>;

/// One guard's part in a lease. Dropped, it leaves the rest to the driver.
pub(crate) struct Entry {
    holding: Arc<Holding>,
    /// See [`HeldLock::was_contended`].
    contended: bool,
    step: Step,
}

enum Step {
    Holding,
    /// It may be a writer or a reader.
    Converting,
    Done,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.holding.hold().key.fmt(f)
    }
}

impl Entry {
    /// The first guard of a lease, which was to be had at the first question unless it was `contended`.
    pub(crate) fn first(holding: Arc<Holding>, contended: bool) -> Self {
        Self {
            holding,
            contended,
            step: Step::Holding,
        }
    }

    /// One more guard on a lease that an enclosing scope holds; none if it was released meanwhile.
    pub(crate) fn again(holding: Arc<Holding>) -> Result<Option<Self>, LockError> {
        Ok(holding.enter()?.then(|| Self::first(holding, false)))
    }

    pub(crate) fn fence(&self) -> FencingToken {
        self.holding.fence()
    }

    /// How its lease was lost, if it was.
    pub(crate) fn lost(&self) -> Option<LockError> {
        self.holding
            .loss()
            .map(|loss| self.holding.lost_error(loss))
    }

    async fn release(mut self) -> Result<(), LockError> {
        if let Err(error) = runtime::check() {
            // Dropped here, it goes on in the background.
            let error = error.with_key(&self.holding.hold().key);
            tracing::warn!(%error, "release not confirmed; going on in the background");
            return Err(error);
        }
        let left = self.holding.leave();
        self.step = Step::Done;
        let holding = &self.holding;
        let release = match left {
            Left::Shared => return Ok(()),
            Left::Lost(loss) => return Err(holding.lost_error(loss)),
            Left::Last(release) => release,
        };
        let Some(release) = holding.part(release) else {
            return Ok(());
        };
        let mut returning = Returning {
            holding,
            release,
            settled: false,
        };
        let key = &holding.hold().key;
        let patience = call_timeout(holding.terms().lease);
        let reply = give_back(holding.core(), &returning.release, patience).await;
        returning.settled = reply.is_ok();
        match reply {
            Ok(ReleaseReply::Released | ReleaseReply::Passed(_) | ReleaseReply::Queued { .. }) => {
                tracing::debug!(%key, fence = %holding.fence(), "released");
                Ok(())
            }
            Ok(ReleaseReply::NotHeld) => {
                tracing::warn!(%key, fence = %holding.fence(), "lost before its release");
                Err(holding.lost_error(Loss::Taken))
            }
            Err(error) => {
                tracing::warn!(%key, %error, "release not confirmed; going on in the background");
                let message = "release not confirmed; it goes on in the background, and the lease ends it at the latest";
                Err(LockError::new(LockErrorKind::ReleaseUnknown, message)
                    .with_key(key)
                    .with_source(Some(error)))
            }
        }
    }

    async fn downgrade(mut self) -> Result<Self, LockError> {
        runtime::check().map_err(|error| error.with_key(&self.holding.hold().key))?;
        match self.holding.leave_alone() {
            None => {
                return Err(mismatch(
                    &self.holding.hold().key,
                    "a lock that was entered again cannot be downgraded",
                ));
            }
            Some(Left::Lost(loss)) => {
                self.step = Step::Done;
                return Err(self.holding.lost_error(loss));
            }
            Some(Left::Last(_) | Left::Shared) => {}
        }
        self.step = Step::Converting;
        let reader = self.holding.convert().await?;
        self.step = Step::Done;
        tracing::debug!(key = %reader.hold().key, fence = %reader.fence(), "downgraded");
        self.holding
            .core()
            .gates
            .released(&reader.hold().key, reader.hold().mode.family());
        Ok(Self::first(reader, self.contended))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let holding = &self.holding;
        let (core, lease) = (holding.core(), holding.terms().lease);
        match std::mem::replace(&mut self.step, Step::Done) {
            Step::Done => {}
            Step::Holding => {
                if let Left::Last(release) = holding.leave()
                    && let Some(release) = holding.part(release)
                {
                    core.driver.clean_up(core, CleanUp::release(release, lease));
                }
            }
            Step::Converting => {
                let hold = holding.hold();
                let reader = Hold::new(hold.key.clone(), Mode::Shared, hold.token);
                // A straggling conversion is executed by then or never: the writer is gone.
                core.driver
                    .clean_up(core, CleanUp::abandon(hold.clone(), lease, None));
                let straggler = Instant::now() + call_timeout(lease);
                core.driver
                    .clean_up(core, CleanUp::abandon(reader, lease, Some(straggler)));
            }
        }
    }
}

/// A release under way. Dropped before its outcome is known, it goes on in the background.
struct Returning<'a> {
    holding: &'a Holding,
    release: Release,
    settled: bool,
}

impl Drop for Returning<'_> {
    fn drop(&mut self) {
        if !self.settled {
            let core = self.holding.core();
            let clean_up = CleanUp::release_again(self.release.clone(), self.holding.terms().lease);
            core.driver.clean_up(core, clean_up);
        }
    }
}

/// A view of a lock that is held, or was: its name, its fencing token, its loss. Keeping it does not keep the lock.
///
/// Cheap to clone, `'static`, and fit for `http::Extensions`. Of several keys it is the first one's where it speaks of one.
#[derive(Clone)]
pub struct HeldLock {
    holdings: SmallVec<[Arc<Holding>; 1]>,
    contended: bool,
}

impl HeldLock {
    pub(crate) fn holdings(&self) -> &[Arc<Holding>] {
        &self.holdings
    }

    fn first(&self) -> &Arc<Holding> {
        // A request has at least one key, so a guard has at least one lease.
        &self.holdings[0]
    }

    /// The name of the lock.
    pub fn key(&self) -> &LockKey {
        &self.first().hold().key
    }

    /// The fencing token: send it with every write that the lock protects.
    pub fn fence(&self) -> FencingToken {
        self.first().fence()
    }

    /// Every key with its fencing token, in the order of the keys.
    pub fn fences(&self) -> impl Iterator<Item = (&LockKey, FencingToken)> {
        self.holdings
            .iter()
            .map(|holding| (&holding.hold().key, holding.fence()))
    }

    /// How long the lock is surely still held, by this process's clock, if no renewal succeeds any more. Zero: lost or released.
    pub fn validity(&self) -> Duration {
        self.holdings
            .iter()
            .map(|holding| holding.validity())
            .min()
            .unwrap_or_default()
    }

    /// How many renewals in the background the store has confirmed so far, of all keys together. A lock that was passed on, or
    /// downgraded, counts anew; [`extend`](LockGuard::extend) and [`verify`](Self::verify) do not count.
    pub fn renewals(&self) -> u64 {
        self.holdings.iter().map(|holding| holding.renewals()).sum()
    }

    /// Was the lock held by somebody else, or did others wait for it, when it was asked for? Of several keys: one of them.
    ///
    /// `false` for a lock that was free at the first question, and for one that was entered again. A store that did not
    /// answer at first does not make it contended.
    pub fn was_contended(&self) -> bool {
        self.contended
    }

    /// Was the lock lost? A lock that was released was not.
    pub fn is_lost(&self) -> bool {
        self.loss().is_some()
    }

    fn loss(&self) -> Option<LockError> {
        self.holdings
            .iter()
            .find_map(|holding| holding.loss().map(|loss| holding.lost_error(loss)))
    }

    /// Resolves with the reason when the lock is lost; never, if it is released before.
    ///
    /// The holder finds out by itself, from its own clock, also when the store is silent. The future needs no runtime: the
    /// client's task, which runs where the lock was acquired, wakes it.
    pub fn lost(&self) -> Lost {
        Lost {
            held: self.clone(),
            listener: self.first().core().next_id(),
        }
    }

    /// Runs `future` in a frame of this lock: requests within it that are `reentrant` enter the lock again instead of waiting
    /// for it, and those that are not are refused as `WouldDeadlock`.
    ///
    /// A spawned task is in no frame; this takes one along: `tokio::spawn(held.scope(work))`. What enters again there keeps
    /// the lock until it is done, also when the guard is gone by then; after a release a `reentrant` request waits like anybody.
    /// A loss does not end `future`: its own guards tell of it, [`lost`](Self::lost) does, and requests for the same lock are
    /// refused as `Lost` from then on.
    pub fn scope<F: Future>(&self, future: F) -> InScope<F> {
        Frame::enclosing(self.clone()).scope(future)
    }

    /// Runs `work` in a frame of this lock, as [`scope`](Self::scope) does a future. For `poll` functions written by hand.
    pub fn in_scope<T>(&self, work: impl FnOnce() -> T) -> T {
        Frame::enclosing(self.clone()).run(work)
    }

    /// Asks the store whether the lock is held.
    ///
    /// # Errors
    /// `Lost`, `NoRuntime`, `Unavailable`.
    ///
    /// # Cancellation
    /// Dropping the future has no effect on the lock.
    pub async fn verify(&self) -> Result<(), LockError> {
        for holding in self.holdings.iter() {
            holding.extend(Duration::ZERO).await?;
        }
        Ok(())
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

/// Resolves when a lock is lost; see [`HeldLock::lost`].
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Lost {
    held: HeldLock,
    listener: u64,
}

impl Future for Lost {
    type Output = LockError;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LockError> {
        let loss = |holding: &Arc<Holding>| match holding.poll_loss(self.listener, cx) {
            Poll::Ready(loss) => Some(holding.lost_error(loss)),
            Poll::Pending => None,
        };
        self.held
            .holdings
            .iter()
            .find_map(loss)
            .map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        self.held
            .holdings
            .iter()
            .for_each(|holding| holding.unlisten(self.listener));
    }
}
