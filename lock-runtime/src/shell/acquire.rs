//! The acquire path: from a request to a guard. The session decides; this code makes the calls in
//! the caller's task, and waits.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use smallvec::{SmallVec, smallvec};

#[cfg(test)]
use crate::shell::simulated::{Planted, planted};
use crate::{
    error::{LockError, LockErrorKind},
    guard::owner,
    guard::view::View,
    guard::{Entries, Entry, LockGuard},
    observe::watch::WatchedRequest,
    protocol::{AcquireId, AllStep, Call, Cx, Granted, Refusal, Refused, Step},
    request::key::LockKey,
    request::name::RequestName,
    request::spec::{LockKind, Terms, Wait},
    shell::call::{perform, within},
    shell::core::{ClientState, Core},
    shell::runtime,
    shell::sync::OnDrop,
    shell::time::{Instant, sleep_until},
    store::StoreError,
};

/// Inline storage for one key, which is the common case.
pub(crate) type Keys = SmallVec<[LockKey; 1]>;

/// The future of [`LockRequest::acquire`](crate::LockRequest::acquire).
///
/// # Cancellation
/// Dropping it leaves nothing behind, as described there.
#[must_use = "the lock is acquired by `.await`: bind the guard to a name, `let _guard = ..`; `let _ = ..` releases it at once"]
pub struct AcquireFuture(BoxFuture<'static, Result<LockGuard, LockError>>);

impl AcquireFuture {
    pub(crate) fn new(
        acquire: impl Future<Output = Result<LockGuard, LockError>> + Send + 'static,
    ) -> Self {
        Self(Box::pin(acquire))
    }
}

impl Future for AcquireFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for AcquireFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireFuture").finish_non_exhaustive()
    }
}

/// Acquires every key and returns one guard for all of them.
pub(crate) async fn acquire(
    core: &Arc<Core>,
    keys: &[LockKey],
    terms: &Terms,
    (name, attempt): (Option<&RequestName>, &WatchedRequest),
) -> Result<LockGuard, LockError> {
    // A request has at least one key.
    runtime::check().map_err(|error| error.with_key(&keys[0]))?;
    let acquiring = Acquiring {
        core,
        terms,
        name,
        attempt,
        since: Instant::now(),
        attempts: AtomicU32::new(0),
    };
    let [key] = keys else {
        // Boxed: this is rare, and would enlarge the future of every other request.
        return Box::pin(acquiring.acquire_several(keys)).await;
    };
    let entry = match acquiring.reenter(key)? {
        Some(entry) => entry,
        None => acquiring.acquire_one(key, terms, acquiring.since).await?,
    };
    Ok(LockGuard::new(smallvec![entry], terms.on_lost))
}

/// A request that is being acquired, the time that it has taken, and the number of calls that it
/// has made to the store.
struct Acquiring<'a> {
    core: &'a Arc<Core>,
    terms: &'a Terms,
    name: Option<&'a RequestName>,
    attempt: &'a WatchedRequest,
    since: Instant,
    attempts: AtomicU32,
}

impl fmt::Display for Acquiring<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waited {:.1?}", self.since.elapsed())?;
        match self.attempts.load(Ordering::Relaxed) {
            0 => f.write_str(" behind other requests of this process"),
            1 => f.write_str(", 1 attempt"),
            attempts => write!(f, ", {attempts} attempts"),
        }
    }
}

impl Acquiring<'_> {
    /// Counts one more call to the store.
    fn attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// Acquires every key in the given order. The keys are sorted and unique, so two requests
    /// cannot deadlock (rule 18).
    async fn acquire_several(&self, keys: &[LockKey]) -> Result<LockGuard, LockError> {
        let mut entries = Entries::new();
        let mut fresh = Keys::new();
        // A request that can never be granted is refused before it waits.
        for key in keys {
            match self.reenter(key)? {
                Some(entry) => entries.push(entry),
                None => fresh.push(key.clone()),
            }
        }
        let is_for_locks = self.terms.mode.kind() == LockKind::Lock;
        let together = match fresh.len() > 1 && self.terms.wait == Wait::No && is_for_locks {
            true => self.acquire_together(&fresh).await?,
            false => None,
        };
        if let Some(together) = together {
            entries.extend(together);
        } else {
            // If a later key is refused, nothing stays reserved.
            let terms = &Terms {
                min_hold: None,
                ..*self.terms
            };
            let first = entries.len();
            for key in &fresh {
                entries.push(self.acquire_one(key, terms, Instant::now()).await?);
            }
            if let Some(min_hold) = self.terms.min_hold {
                (entries[first..].iter()).for_each(|entry| entry.reserve(min_hold));
            }
        }
        // The first lock may have been lost while the request waited for the last one.
        match entries.iter().find_map(Entry::lost) {
            Some(error) => Err(error),
            None => Ok(LockGuard::new(entries, self.terms.on_lost)),
        }
    }

    /// Adds a guard to a lock that an enclosing scope holds.
    fn reenter(&self, key: &LockKey) -> Result<Option<Entry>, LockError> {
        let Some(view) = owner::enclosing(self.core, key, self.terms)? else {
            return Ok(None);
        };
        let entry = Entry::again(view)?;
        if entry.is_some() {
            tracing::debug!(key = %key.shown(), "re-entered");
        }
        Ok(entry)
    }

    async fn acquire_one(
        &self,
        key: &LockKey,
        terms: &Terms,
        now: Instant,
    ) -> Result<Entry, LockError> {
        let begun = self.core.visit_at(now, |state, cx| {
            let (id, step) = state.session.begin(key, terms, self.since, cx)?;
            Ok((id, self.with_guard(state, key, step)))
        });
        let (id, mut next) = begun.map_err(|refused| self.error_of(key, refused))?;
        let acquiring = self;
        let pending = Pending { acquiring, key, id };
        let cancels = OnDrop::new(|| pending.cancel());
        let outcome = loop {
            next = match next {
                Step::Call(ref call) => pending.call(call).await,
                // Boxed: these are rare, and would enlarge the future of every waiter.
                Step::CallOrWake(ref call) => Box::pin(pending.call_or_wake(call)).await,
                Step::Wait(at) => pending.wait(at).await,
                Step::Done(outcome) => break outcome,
            };
        };
        cancels.disarm();
        let entry = match outcome {
            Ok(entry) => entry,
            Err(refused) => {
                let mut error = self.error_of(key, refused);
                if error.kind() == LockErrorKind::WaitTimeout {
                    // Boxed, as it is rare.
                    let holder = self.core.names.describe_holder(key, self.terms.mode.kind());
                    error = error.with_hint(Box::pin(holder).await.as_deref());
                }
                return Err(error);
            }
        };
        entry.begun(self.attempt);
        tracing::debug!(key = %key.shown(), fence = %entry.fence(), waited = ?self.since.elapsed(), "acquired");
        Ok(entry)
    }

    /// Acquires all keys or none, in one call. Returns `None` if they are to be acquired one by
    /// one, as one of them may be idle.
    async fn acquire_together(&self, keys: &[LockKey]) -> Result<Option<Vec<Entry>>, LockError> {
        let Self { core, terms, .. } = *self;
        let refused = |(index, refused): (usize, Refused)| self.error_of(&keys[index], refused);
        let in_turn = if core.limits.in_turn { keys.len() } else { 1 };
        let patience = terms.patience(in_turn);
        let times = (self.since, patience);
        let begun = core.visit(|state, cx| state.session.begin_all(keys, terms, times, cx));
        let (together, mut requests) = begun.map_err(refused)?;
        let cancels =
            OnDrop::new(|| core.visit(|state, cx| state.session.cancel_all(&together, cx)));
        let outcome = loop {
            self.attempt();
            let reply = core.store.acquire_all(&requests);
            let answer = within(patience, reply).await;
            let next = core.visit(|state, cx| {
                match state.session.all_replied(&together, answer, cx) {
                    AllStep::Call(requests) => Ok(requests),
                    AllStep::OneByOne => Err(Ok(None)),
                    // The views exist before a loss can be reported to them.
                    AllStep::Done(outcome) => Err(outcome.map(|granted| {
                        let granted = keys.iter().zip(granted);
                        let entry = |(key, granted)| self.first_guard(state, key, granted);
                        Some(granted.map(entry).collect::<Vec<_>>())
                    })),
                }
            });
            match next {
                Ok(again) => requests = again,
                Err(outcome) => break outcome,
            }
        };
        cancels.disarm();
        let entries = outcome.map_err(refused)?;
        for (key, entry) in keys.iter().zip(entries.iter().flatten()) {
            entry.begun(self.attempt);
            tracing::debug!(key = %key.shown(), fence = %entry.fence(), "acquired");
        }
        Ok(entries)
    }

    /// Returns the step with the first guard of a lock that was granted.
    fn with_guard(&self, state: &mut ClientState, key: &LockKey, step: Step) -> Step<Entry> {
        match step {
            Step::Call(call) => Step::Call(call),
            Step::CallOrWake(call) => Step::CallOrWake(call),
            Step::Wait(at) => Step::Wait(at),
            Step::Done(outcome) => {
                Step::Done(outcome.map(|granted| self.first_guard(state, key, granted)))
            }
        }
    }

    fn first_guard(&self, state: &mut ClientState, key: &LockKey, granted: Granted) -> Entry {
        let watched = (self.name.cloned(), self.attempt.granted(granted.source));
        let view = View::new(self.core, key, self.terms.mode, &granted, watched);
        Entry::first(state.add_view(view), granted.contended)
    }

    /// The error of a request that was not granted.
    fn error_of(&self, key: &LockKey, refused: Refused) -> LockError {
        let error = |kind, message: &'static str| LockError::new(kind, message).with_key(key);
        match refused {
            Refused::ShuttingDown => error(LockErrorKind::ShuttingDown, "the client was shut down"),
            Refused::Full => error(
                LockErrorKind::Overloaded,
                "too many requests wait for it in this process; `max_waiters` is the limit",
            ),
            Refused::FullInAll => error(
                LockErrorKind::Overloaded,
                "too many requests wait in this process, for all locks together; \
                 `LockClientBuilder::max_waiters_in_all` is the limit",
            ),
            Refused::Unended => error(
                LockErrorKind::Overloaded,
                "too many requests that were given up in this process are yet to be ended at the store; \
                 limit the rate of its callers, and see whether the store answers",
            ),
            Refused::Contended(holder_ttl) => {
                let held = error(LockErrorKind::Contended, "another task or process holds it");
                held.with_free_in(holder_ttl)
            }
            Refused::TimedOut(last) => self.timed_out(key, last),
            Refused::Store(error) => self.failed(key, error),
            Refused::ForeignKey(part) => self.core.foreign(key, self.terms.mode.kind(), part),
            Refused::Done(done) => error(
                LockErrorKind::Done,
                "it is done, and keeps the result of its work; `once` returns the result",
            )
            .with_result(done),
            Refused::ModeMismatch => error(
                LockErrorKind::ModeMismatch,
                "its key holds data of another kind of lock; choose another name for one of the two",
            ),
        }
    }

    /// The error of a request whose wait has ended.
    fn timed_out(&self, key: &LockKey, last: Refusal) -> LockError {
        let waited = self.since.elapsed();
        tracing::debug!(key = %key.shown(), ?waited, "wait timed out");
        let (holder_ttl, hint) = match last {
            Refusal::None => (None, ""),
            Refusal::Busy(None) => (
                None,
                ", by a holder without an expiry; `revoke` with `also_endless` frees it",
            ),
            Refusal::Busy(holder_ttl) => (holder_ttl, ""),
            Refusal::Unavailable(error) => return self.failed(key, error),
        };
        let message = format!("still held after waiting for {waited:.1?}{hint}");
        let error = LockError::new(LockErrorKind::WaitTimeout, message).with_key(key);
        error.with_free_in(holder_ttl)
    }

    /// The error of a request that the store has not executed.
    fn failed(&self, key: &LockKey, error: StoreError) -> LockError {
        let error = LockError::from_store(error).with_key(key);
        error.with_effort(self)
    }
}

/// A request that the session knows.
struct Pending<'a> {
    acquiring: &'a Acquiring<'a>,
    key: &'a LockKey,
    id: AcquireId,
}

impl Pending<'_> {
    /// Passes one input to the session.
    fn input(&self, input: impl FnOnce(&mut ClientState, &mut Cx<'_>) -> Step) -> Step<Entry> {
        self.acquiring.core.visit(|state, cx| {
            let step = input(state, cx);
            self.acquiring.with_guard(state, self.key, step)
        })
    }

    /// Ends a request whose future is dropped before its end.
    fn cancel(&self) {
        #[cfg(test)]
        if planted(Planted::CancelsNothing) {
            return;
        }
        self.acquiring.core.visit(|state, cx| {
            #[cfg(test)]
            if planted(Planted::CancelsNoneThatIsWoken) && !state.has_waker(self.id) {
                return;
            }
            state.discard_waker(self.id);
            state.session.cancel(self.id, cx);
        });
    }

    /// Makes a call and passes its answer to the session.
    async fn call(&self, call: &Call) -> Step<Entry> {
        self.acquiring.attempt();
        let answer = perform(&*self.acquiring.core.store, call).await;
        self.input(|state, cx| state.session.replied(self.id, answer, cx))
    }

    /// Returns the next move of a task that was woken. If there is none, registers the task.
    fn resume(&self, cx: &Context<'_>) -> Step<Entry> {
        self.input(|state, session_cx| {
            let step = state.session.resume(self.id, session_cx);
            match step {
                Step::Wait(_) => state.set_waker(self.id, cx.waker()),
                _ => state.discard_waker(self.id),
            }
            step
        })
    }

    /// Waits for the next move.
    async fn wait(&self, at: Instant) -> Step<Entry> {
        let mut alarm = pin!(sleep_until(at));
        poll_fn(|cx| {
            loop {
                match self.resume(cx) {
                    Step::Wait(at) => {
                        let at = at.for_timer();
                        if alarm.deadline() != at {
                            alarm.as_mut().reset(at);
                        }
                        if alarm.as_mut().poll(cx).is_pending() {
                            return Poll::Pending;
                        }
                    }
                    next => return Poll::Ready(next),
                }
            }
        })
        .await
    }

    /// Makes a call that a wake-up may end.
    async fn call_or_wake(&self, call: &Call) -> Step<Entry> {
        self.acquiring.attempt();
        let mut calling = pin!(perform(&*self.acquiring.core.store, call));
        let answer = poll_fn(|cx| {
            match self.resume(cx) {
                Step::Wait(_) => {}
                next => return Poll::Ready(Err(next)),
            }
            calling.as_mut().poll(cx).map(Ok)
        });
        match answer.await {
            Err(next) => next,
            Ok(answer) => self.input(|state, cx| {
                state.discard_waker(self.id);
                state.session.replied(self.id, answer, cx)
            }),
        }
    }
}
