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
    time::Duration,
};

use futures_util::future::BoxFuture;
use smallvec::{SmallVec, smallvec};
use tokio::time::{Instant, sleep_until};

use crate::{
    call::{perform, within},
    core::{Core, State},
    error::{LockError, LockErrorKind},
    guard::{Entries, Entry, LockGuard},
    key::LockKey,
    on_drop::OnDrop,
    owner,
    protocol::{AcquireId, AllStep, Call, Cx, Granted, Refusal, Refused, Step},
    runtime,
    spec::{LockKind, Terms, Wait},
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
) -> Result<LockGuard, LockError> {
    // A request has at least one key.
    runtime::check().map_err(|error| error.with_key(&keys[0]))?;
    let effort = Effort::new();
    let [key] = keys else {
        // Boxed: this is rare, and would enlarge the future of every other request.
        let several = Box::pin(acquire_several(core, keys, terms, &effort)).await;
        return several.map_err(|error| error.with_effort(&effort));
    };
    let entry = match reenter(core, key, terms)? {
        Some(entry) => entry,
        None => acquire_one(core, key, terms, &effort, effort.since)
            .await
            .map_err(|error| error.with_effort(&effort))?,
    };
    Ok(LockGuard::new(smallvec![entry]))
}

/// Acquires every key in the given order. The keys are sorted and unique, so two requests cannot
/// deadlock (rule 18).
async fn acquire_several(
    core: &Arc<Core>,
    keys: &[LockKey],
    terms: &Terms,
    effort: &Effort,
) -> Result<LockGuard, LockError> {
    let mut entries = Entries::new();
    let mut fresh = Keys::new();
    // A request that can never be granted is refused before it waits.
    for key in keys {
        match reenter(core, key, terms)? {
            Some(entry) => entries.push(entry),
            None => fresh.push(key.clone()),
        }
    }
    if fresh.len() > 1 && terms.wait == Wait::No && terms.mode.kind() == LockKind::Lock {
        entries.extend(acquire_together(core, &fresh, terms, effort).await?);
    } else {
        for key in &fresh {
            entries.push(acquire_one(core, key, terms, effort, Instant::now()).await?);
        }
    }
    // The first lock may have been lost while the request waited for the last one.
    match entries.iter().find_map(Entry::lost) {
        Some(error) => Err(error),
        None => Ok(LockGuard::new(entries)),
    }
}

/// Adds a guard to a lock that an enclosing scope holds.
fn reenter(core: &Arc<Core>, key: &LockKey, terms: &Terms) -> Result<Option<Entry>, LockError> {
    let entry = owner::enclosing(core, key, terms)?
        .map(Entry::again)
        .transpose()?
        .flatten();
    if entry.is_some() {
        tracing::debug!(%key, "re-entered");
    }
    Ok(entry)
}

/// The time that a request has taken, and the number of calls that it has made to the store.
struct Effort {
    since: Instant,
    attempts: AtomicU32,
}

impl Effort {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            attempts: AtomicU32::new(0),
        }
    }

    /// Counts one more call to the store.
    fn attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waited {:.1?}", self.since.elapsed())?;
        match self.attempts.load(Ordering::Relaxed) {
            0 => f.write_str(" behind other requests of this process"),
            1 => f.write_str(", 1 attempt"),
            attempts => write!(f, ", {attempts} attempts"),
        }
    }
}

/// A request that the session knows.
struct Pending<'a> {
    core: &'a Arc<Core>,
    key: &'a LockKey,
    terms: &'a Terms,
    id: AcquireId,
}

impl Pending<'_> {
    /// Passes one input to the session.
    fn input(&self, input: impl FnOnce(&mut State, &mut Cx<'_>) -> Step) -> Step<Entry> {
        self.core.visit(|state, cx| {
            let step = input(state, cx);
            with_guard(state, self.core, self.key, self.terms, step)
        })
    }

    /// Ends a request whose future is dropped before its end.
    fn cancel(&self) {
        self.core.visit(|state, cx| {
            state.discard_waker(self.id);
            state.session.cancel(self.id, cx);
        });
    }

    /// Makes a call and passes its answer to the session.
    async fn call(&self, call: Call) -> Step<Entry> {
        let answer = perform(&*self.core.store, &call).await;
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
    async fn call_or_wake(&self, call: Call) -> Step<Entry> {
        let mut calling = pin!(perform(&*self.core.store, &call));
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

/// Returns the step with the first guard of a lock that was granted.
fn with_guard(
    state: &mut State,
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    step: Step,
) -> Step<Entry> {
    match step {
        Step::Call(call) => Step::Call(call),
        Step::CallOrWake(call) => Step::CallOrWake(call),
        Step::Wait(at) => Step::Wait(at),
        Step::Done(outcome) => Step::Done(outcome.map(|granted| {
            let view = state.add_view(core, key, terms.mode, &granted);
            Entry::first(view, granted.contended)
        })),
    }
}

async fn acquire_one(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    effort: &Effort,
    now: Instant,
) -> Result<Entry, LockError> {
    let begun = core.visit_at(now, |state, cx| {
        let (id, step) = state.session.begin(key, terms, effort.since, cx)?;
        Ok((id, with_guard(state, core, key, terms, step)))
    });
    let (id, mut next) = begun.map_err(|refused| error_of(core, key, terms, effort, refused))?;
    let pending = Pending {
        core,
        key,
        terms,
        id,
    };
    let cancels = OnDrop::new(|| pending.cancel());
    loop {
        next = match next {
            Step::Call(call) => {
                effort.attempt();
                pending.call(call).await
            }
            // Boxed: these are rare, and would enlarge the future of every waiter.
            Step::CallOrWake(call) => {
                effort.attempt();
                Box::pin(pending.call_or_wake(call)).await
            }
            Step::Wait(at) => pending.wait(at).await,
            Step::Done(outcome) => {
                cancels.disarm();
                let entry =
                    outcome.map_err(|refused| error_of(core, key, terms, effort, refused))?;
                tracing::debug!(
                    %key,
                    fence = %entry.fence(),
                    waited = ?effort.since.elapsed(),
                    "acquired"
                );
                return Ok(entry);
            }
        };
    }
}

/// Acquires all keys or none, in one call.
async fn acquire_together(
    core: &Arc<Core>,
    keys: &[LockKey],
    terms: &Terms,
    effort: &Effort,
) -> Result<Vec<Entry>, LockError> {
    let refused =
        |(index, refused): (usize, Refused)| error_of(core, &keys[index], terms, effort, refused);
    let begun = core.visit(|state, cx| state.session.begin_all(keys, terms, effort.since, cx));
    let (together, mut requests) = begun.map_err(refused)?;
    let cancels = OnDrop::new(|| core.visit(|state, cx| state.session.cancel_all(&together, cx)));
    let outcome = loop {
        effort.attempt();
        let reply = core.store.acquire_all(&requests);
        let answer = within(terms.call_timeout(), reply).await;
        let next = core.visit(|state, cx| {
            match state.session.all_replied(&together, answer, cx) {
                AllStep::Call(requests) => Ok(requests),
                // The views exist before a loss can be reported to them.
                AllStep::Done(outcome) => Err(outcome.map(|granted| {
                    let entry = |(key, granted): (&LockKey, Granted)| {
                        let view = state.add_view(core, key, terms.mode, &granted);
                        Entry::first(view, false)
                    };
                    keys.iter().zip(granted).map(entry).collect::<Vec<_>>()
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
    for (key, entry) in keys.iter().zip(&entries) {
        tracing::debug!(%key, fence = %entry.fence(), "acquired");
    }
    Ok(entries)
}

/// The error of a request that was not granted.
fn error_of(
    core: &Core,
    key: &LockKey,
    terms: &Terms,
    effort: &Effort,
    refused: Refused,
) -> LockError {
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
        Refused::Contended(holder_ttl) => {
            error(LockErrorKind::Contended, "another task or process holds it")
                .with_retry_after(holder_ttl)
        }
        Refused::TimedOut(last) => timed_out(last, key, effort.since.elapsed()),
        Refused::Store(error) => LockError::from_store(error).with_key(key),
        Refused::ForeignKey(part) => core.foreign(key, terms.mode.kind(), part),
        Refused::ModeMismatch => error(
            LockErrorKind::ModeMismatch,
            "it is held with another number of permits, or by something that is not a permit; use the same number everywhere",
        ),
    }
}

/// The error of a request whose wait has ended.
fn timed_out(last: Refusal, key: &LockKey, waited: Duration) -> LockError {
    tracing::debug!(%key, ?waited, "wait timed out");
    let (holder_ttl, hint) = match last {
        Refusal::None => (None, ""),
        Refusal::Busy(None) => (
            None,
            ", by a holder without an expiry; `revoke` with `AlsoEndless` frees it",
        ),
        Refusal::Busy(holder_ttl) => (holder_ttl, ""),
        Refusal::Unavailable(error) => return LockError::from_store(error).with_key(key),
    };
    let message = format!("still held after waiting for {waited:.1?}{hint}");
    LockError::new(LockErrorKind::WaitTimeout, message)
        .with_key(key)
        .with_retry_after(holder_ttl)
}
