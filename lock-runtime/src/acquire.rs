//! The acquire path: from a request through the local wait queue to the store, and to a guard.

mod in_line;
mod question;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

pub(crate) use self::question::STRAGGLE;
use self::{
    in_line::wait_in_line,
    question::{MISMATCH, Outcome, Question},
};
use crate::{
    call::within,
    client::Core,
    error::{LockError, LockErrorKind, Loss},
    gate::Refusal,
    guard::{Entries, Entry, LockGuard},
    holding::Holding,
    key::LockKey,
    owner, runtime,
    spec::{LockKind, Mode, Terms, Wait},
    store::{AcquireAllReply, AcquireReply, Hold, StoreError, Token},
};

/// Lower bound of a call's time-out: a request with a shorter wait still makes one acquire
/// attempt.
pub(crate) const SHORTEST_CALL: Duration = Duration::from_millis(50);

/// Inline storage for one key, which is the common case.
pub(crate) type Keys = SmallVec<[LockKey; 1]>;

/// Acquires every key and returns one guard for all of them.
pub(crate) async fn acquire(
    core: &Arc<Core>,
    keys: &[LockKey],
    terms: &Terms,
) -> Result<LockGuard, LockError> {
    // A request has at least one key.
    runtime::check().map_err(|error| error.with_key(&keys[0]))?;
    let patience = Patience::new(terms);
    let [key] = keys else {
        // Boxed: this is rare, and would enlarge the future of every other request.
        let several = Box::pin(acquire_several(core, keys, terms, &patience)).await;
        return several.map_err(|error| error.with_effort(&patience));
    };
    let entry = match enter_again(core, key, terms)? {
        Some(entry) => entry,
        None => acquire_one(core, key, terms, &patience)
            .await
            .map_err(|error| error.with_effort(&patience))?,
    };
    Ok(LockGuard::new(smallvec![entry]))
}

/// Acquires every key in the given order. The keys are sorted and unique, so two requests cannot
/// deadlock (PROTOCOL 18).
async fn acquire_several(
    core: &Arc<Core>,
    keys: &[LockKey],
    terms: &Terms,
    patience: &Patience,
) -> Result<LockGuard, LockError> {
    let mut entries = Entries::new();
    let mut fresh = Keys::new();
    // A request that can never be granted is refused before it waits.
    for key in keys {
        match enter_again(core, key, terms)? {
            Some(entry) => entries.push(entry),
            None => fresh.push(key.clone()),
        }
    }
    if fresh.len() > 1 && terms.wait == Wait::No && terms.mode.kind() == LockKind::Lock {
        let all = match acquire_at_once(core, &fresh, terms, patience).await {
            Err(error)
                if error.kind() == LockErrorKind::Unavailable && patience.is_fresh(terms) =>
            {
                // The tokens of the first attempt may be the reason for a refusal of the second.
                let second = acquire_at_once(core, &fresh, terms, patience).await;
                second.map_err(|again| {
                    if again.kind() == LockErrorKind::Contended {
                        error
                    } else {
                        again
                    }
                })
            }
            result => result,
        };
        entries.extend(all?);
    } else {
        for key in &fresh {
            entries.push(acquire_one(core, key, terms, patience).await?);
        }
    }
    // The first lock may have been lost while the request waited for the last one.
    match entries.iter().find_map(Entry::lost) {
        Some(error) => Err(error),
        None => Ok(LockGuard::new(entries)),
    }
}

/// Adds a guard to a lock that an enclosing scope holds.
fn enter_again(core: &Arc<Core>, key: &LockKey, terms: &Terms) -> Result<Option<Entry>, LockError> {
    let entry = owner::enclosing(core, key, terms)?
        .map(Entry::again)
        .transpose()?
        .flatten();
    if entry.is_some() {
        tracing::debug!(%key, "re-entered");
    }
    Ok(entry)
}

/// The time limit of a request, and the number of calls that it has made to the store.
struct Patience {
    since: Instant,
    until: Option<Instant>,
    attempts: AtomicU32,
}

impl fmt::Display for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waited {:.1?}", self.since.elapsed())?;
        match self.attempts.load(Ordering::Relaxed) {
            0 => f.write_str(" behind other requests of this process"),
            1 => f.write_str(", 1 attempt"),
            attempts => write!(f, ", {attempts} attempts"),
        }
    }
}

impl Patience {
    fn new(terms: &Terms) -> Self {
        let since = Instant::now();
        let until = match terms.wait {
            Wait::No => None,
            Wait::AtMost(wait) => Some(since + wait),
        };
        Self {
            since,
            until,
            attempts: AtomicU32::new(0),
        }
    }

    /// Counts one more call to the store.
    fn attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the time limit has passed.
    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// Counts a call made at `now` and returns its time-out.
    fn for_call(&self, terms: &Terms, now: Instant) -> Duration {
        self.attempt();
        let left = self.until.map(|until| until.saturating_duration_since(now));
        left.map_or(terms.call_timeout(), |left| {
            terms.call_timeout().min(left.max(SHORTEST_CALL))
        })
    }

    /// Returns whether less time has passed than one call may take. In that case the connection
    /// was broken and the store not silent, so a request that does not wait makes a second
    /// attempt under a fresh token.
    fn is_fresh(&self, terms: &Terms) -> bool {
        self.since.elapsed() < terms.call_timeout()
    }
}

async fn acquire_one(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    patience: &Patience,
) -> Result<Entry, LockError> {
    let entry = match patience.until {
        None => Entry::first(try_once(core, key, terms, patience).await?, false),
        Some(until) => match ask_beside(core, key, terms, patience).await? {
            Beside::Granted(holding) => Entry::first(holding, false),
            Beside::Line { refused } => {
                wait_in_line(core, key, terms, patience, until, refused).await?
            }
        },
    };
    tracing::debug!(%key, fence = %entry.fence(), waited = ?patience.since.elapsed(), "acquired");
    Ok(entry)
}

/// Makes one acquire attempt without entering a wait queue. It is refused at once if other
/// requests wait (PROTOCOL 16).
async fn try_once(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    patience: &Patience,
) -> Result<Arc<Holding>, LockError> {
    check_gates(core, key, terms)?;
    let ask = async || {
        let hold = Hold::new(key.clone(), terms.mode, Token::random());
        let now = Instant::now();
        Question::new(core, hold, terms, patience.for_call(terms, now), now)
            .ask()
            .await
    };
    let mut outcome = ask().await?;
    if let Outcome::Unanswered(error) = outcome {
        outcome = match patience.is_fresh(terms) {
            false => Outcome::Unanswered(error),
            // The token of the first attempt may be the reason for a refusal of the second.
            true => match ask().await? {
                Outcome::Refused { .. } | Outcome::Queued { .. } => Outcome::Unanswered(error),
                second => second,
            },
        };
    }
    match outcome {
        Outcome::Granted(holding) => Ok(holding),
        Outcome::Refused { holder_ttl } | Outcome::Queued { holder_ttl, .. } => {
            Err(contended(key, holder_ttl))
        }
        Outcome::Unanswered(error) => Err(LockError::from_store(error).with_key(key)),
    }
}

/// The outcome of an acquire attempt that bypasses the local queue.
enum Beside {
    Granted(Arc<Holding>),
    /// The request enters the local queue.
    Line {
        /// Because the lock is not free.
        refused: bool,
    },
}

/// Makes one acquire attempt that bypasses the local queue. Only for modes with several
/// holders and while no waiter of the local queue has been refused, so that they are not
/// admitted one by one.
async fn ask_beside(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    patience: &Patience,
) -> Result<Beside, LockError> {
    let kind = terms.mode.kind();
    let others_wait = || core.gates.last_refusal(key, kind).is_some();
    if terms.mode == Mode::Exclusive || core.gates.is_closed() || others_wait() {
        return Ok(Beside::Line { refused: false });
    }
    let hold = Hold::new(key.clone(), terms.mode, Token::random());
    let now = Instant::now();
    let mut question = Question::new(core, hold, terms, patience.for_call(terms, now), now);
    question.request.then_queues = true;
    match question.ask().await? {
        Outcome::Granted(holding) => Ok(Beside::Granted(holding)),
        Outcome::Refused { .. } | Outcome::Queued { .. } => Ok(Beside::Line { refused: true }),
        Outcome::Unanswered(_) => Ok(Beside::Line { refused: false }),
    }
}

/// Refuses a request that does not wait if other requests of this process wait for the lock. The
/// error follows from the latest reply of the store to those requests.
fn check_gates(core: &Core, key: &LockKey, terms: &Terms) -> Result<(), LockError> {
    if core.gates.is_closed() {
        return Err(shutting_down(key));
    }
    match core.gates.last_refusal(key, terms.mode.kind()) {
        None => Ok(()),
        Some(Refusal::None | Refusal::Busy(_)) => Err(contended(key, None)),
        Some(Refusal::Unavailable(_)) if core.driver.excludes(key, terms.mode) => {
            Err(contended(key, None))
        }
        // It is unknown whether the lock is held.
        Some(Refusal::Unavailable(error)) => Err(LockError::from_store(error).with_key(key)),
    }
}

/// The error of a request whose wait has ended.
fn in_vain(last: Refusal, key: &LockKey, patience: &Patience) -> LockError {
    let waited = patience.since.elapsed();
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

fn contended(key: &LockKey, holder_ttl: Option<Duration>) -> LockError {
    LockError::new(LockErrorKind::Contended, "another task or process holds it")
        .with_key(key)
        .with_retry_after(holder_ttl)
}

fn shutting_down(key: &LockKey) -> LockError {
    LockError::new(LockErrorKind::ShuttingDown, "the client was shut down").with_key(key)
}

/// Acquires all keys or none, in one call.
async fn acquire_at_once(
    core: &Arc<Core>,
    keys: &[LockKey],
    terms: &Terms,
    patience: &Patience,
) -> Result<Vec<Entry>, LockError> {
    keys.iter()
        .try_for_each(|key| check_gates(core, key, terms))?;
    patience.attempt();
    let timeout = terms.call_timeout();
    let hold = |key: &LockKey| Hold::new(key.clone(), terms.mode, Token::random());
    let sent = Instant::now();
    let mut questions: Vec<_> = keys
        .iter()
        .map(|key| Question::new(core, hold(key), terms, timeout, sent))
        .collect();
    questions
        .iter_mut()
        .for_each(|question| question.in_flight = true);
    let requests: Vec<_> = questions
        .iter()
        .map(|question| question.request.clone())
        .collect();
    let reply = within(timeout, core.store.acquire_all(&requests))
        .await
        .map_err(|error| LockError::from_store(error).with_key(&requests[0].hold.key))?;
    let grants = match reply {
        AcquireAllReply::Granted(grants) if grants.len() == requests.len() => grants,
        // The number of grants does not match; every token is abandoned.
        AcquireAllReply::Granted(_) => return Err(LockError::from_store(StoreError::late())),
        AcquireAllReply::Refused { index, reply } => {
            questions
                .iter_mut()
                .for_each(|question| question.in_flight = false);
            let key = &requests[index.min(requests.len() - 1)].hold.key;
            let error = |kind, message| LockError::new(kind, message).with_key(key);
            return Err(match reply {
                AcquireReply::Busy { holder_ttl, .. } | AcquireReply::Queued { holder_ttl, .. } => {
                    contended(key, holder_ttl)
                }
                AcquireReply::ForeignKey(part) => core.foreign(key, terms.mode.kind(), part),
                AcquireReply::ModeMismatch => error(LockErrorKind::ModeMismatch, MISMATCH),
                AcquireReply::Granted(_) | AcquireReply::Late => {
                    error(LockErrorKind::Unavailable, "the request came too late")
                }
            });
        }
    };
    let mut entries = Vec::with_capacity(questions.len());
    for (question, grant) in questions.iter_mut().zip(grants) {
        let hold = question.request.hold.clone();
        let Some(holding) = Holding::start(core, hold, grant, sent, *terms) else {
            let error = LockError::new(
                LockErrorKind::Lost(Loss::Expired),
                "the answer took longer than the lease",
            );
            return Err(error.with_key(&question.request.hold.key));
        };
        question.in_flight = false;
        tracing::debug!(key = %holding.hold().key, fence = %holding.fence(), "acquired");
        entries.push(Entry::first(holding, false));
    }
    Ok(entries)
}
