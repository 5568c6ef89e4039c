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
    owner,
    protocol::{AcquireId, AllStep, Call, Cx, Granted, Refusal, Refused, Step, Together},
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

/// The next move of a request. As [`Step`], with the view of a granted lock.
enum Move {
    Call(Call),
    CallOrWake(Call),
    Wait(Instant),
    Done(Result<Entry, Refused>),
}

/// A request that the session knows. When dropped before its end, it is cancelled.
struct Pending<'a> {
    core: &'a Arc<Core>,
    key: &'a LockKey,
    terms: &'a Terms,
    id: AcquireId,
    is_over: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.core.visit(|state, cx| {
                state.discard_waker(self.id);
                state.session.cancel(self.id, cx);
            });
        }
    }
}

impl Pending<'_> {
    /// Passes one input to the session.
    fn input(&self, input: impl FnOnce(&mut State, &mut Cx<'_>) -> Step) -> Move {
        self.core.visit(|state, cx| {
            let step = input(state, cx);
            next_move(state, self.core, self.key, self.terms, step)
        })
    }

    /// Makes a call and passes its answer to the session.
    async fn call(&self, call: Call) -> Move {
        let answer = perform(&*self.core.store, &call).await;
        self.input(|state, cx| state.session.replied(self.id, answer, cx))
    }

    /// Returns the next move of a task that was woken. If there is none, registers the task.
    fn resume(&self, cx: &Context<'_>) -> Move {
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
    async fn wait(&self, at: Instant) -> Move {
        let mut alarm = pin!(sleep_until(at));
        poll_fn(|cx| {
            loop {
                match self.resume(cx) {
                    Move::Wait(at) => {
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
    async fn call_or_wake(&self, call: Call) -> Move {
        let mut calling = pin!(perform(&*self.core.store, &call));
        let answer = poll_fn(|cx| {
            match self.resume(cx) {
                Move::Wait(_) => {}
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

fn next_move(
    state: &mut State,
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    step: Step,
) -> Move {
    match step {
        Step::Call(call) => Move::Call(call),
        Step::CallOrWake(call) => Move::CallOrWake(call),
        Step::Wait(at) => Move::Wait(at),
        Step::Done(Err(refused)) => Move::Done(Err(refused)),
        Step::Done(Ok(granted)) => {
            let view = state.add_view(core, key, terms.mode, &granted);
            Move::Done(Ok(Entry::first(view, granted.contended)))
        }
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
        Ok((id, next_move(state, core, key, terms, step)))
    });
    let (id, mut next) = begun.map_err(|refused| error_of(core, key, terms, effort, refused))?;
    let mut pending = Pending {
        core,
        key,
        terms,
        id,
        is_over: false,
    };
    loop {
        next = match next {
            Move::Call(call) => {
                effort.attempt();
                pending.call(call).await
            }
            // Boxed: these are rare, and would enlarge the future of every waiter.
            Move::CallOrWake(call) => {
                effort.attempt();
                Box::pin(pending.call_or_wake(call)).await
            }
            Move::Wait(at) => pending.wait(at).await,
            Move::Done(outcome) => {
                pending.is_over = true;
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

/// Requests for several keys that are made in one call. When dropped before their end, they are
/// cancelled.
struct PendingAll<'a> {
    core: &'a Arc<Core>,
    together: Together,
}

impl Drop for PendingAll<'_> {
    fn drop(&mut self) {
        if !self.together.is_empty() {
            self.core
                .visit(|state, cx| state.session.cancel_all(&self.together, cx));
        }
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
    let mut pending = PendingAll { core, together };
    let outcome = loop {
        effort.attempt();
        let reply = core.store.acquire_all(&requests);
        let answer = within(terms.call_timeout(), reply).await;
        let together = &pending.together;
        let next = core.visit(|state, cx| {
            match state.session.all_replied(together, answer, cx) {
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
    pending.together.clear();
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
    let timed_out = |holder_ttl, hint| {
        let message = format!("still held after waiting for {waited:.1?}{hint}");
        LockError::new(LockErrorKind::WaitTimeout, message)
            .with_key(key)
            .with_retry_after(holder_ttl)
    };
    match last {
        Refusal::None => timed_out(None, ""),
        Refusal::Busy(None) => timed_out(
            None,
            ", by a holder without an expiry; `revoke` with `AlsoEndless` frees it",
        ),
        Refusal::Busy(holder_ttl) => timed_out(holder_ttl, ""),
        Refusal::Unavailable(error) => LockError::from_store(error).with_key(key),
    }
}
