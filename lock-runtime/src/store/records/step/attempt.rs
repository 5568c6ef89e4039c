//! An operation on the records of locks, until it has taken effect. I/O-free: it returns the calls
//! to make, and receives their replies.

use std::{mem::take, time::Duration};

use super::{
    super::{Record, RecordName, Swap, SwapReply, Swapped, Timestamp},
    cache::{Cache, Rivals},
    clock::Now,
    evaluation::{Caused, Evaluation, Lock, Terms, Writes, evaluate},
    outcome::{Outcome, Passed},
    turns::Turn,
};
use crate::store::{
    ClientId, StoreError, Token,
    remote::outage::InOutage,
    table::{Step, Table},
};

/// The longest pause, which is short against the time-out of a call.
const LONGEST_PAUSE: Duration = Duration::from_millis(40);

/// Returns a pause of this many round trips.
fn paused(round_trip: Duration, round_trips: f64) -> Duration {
    round_trip.mul_f64(round_trips).min(LONGEST_PAUSE)
}

/// Returns a random number of round trips, in which each of the others has its turn. Of two clients
/// the call that each makes to learn of the record is enough of a pause.
fn among(rivals: Rivals) -> f64 {
    rand::random::<f64>() * rivals.outside.saturating_sub(1) as f64
}

/// The rules of an operation. Evaluated again after each conflict.
type Rule<T> = Box<dyn FnMut(&mut Table, &mut Step<'_>) -> T + Send>;

/// An operation in progress.
pub(crate) struct Attempt<T> {
    pub(crate) locks: Vec<Lock>,
    pub(crate) caller: Option<Token>,
    /// The client that makes the operation, also one for several tokens.
    client: Option<ClientId>,
    writes: Writes,
    pub(crate) in_outage: InOutage,
    rule: Rule<T>,
    /// The records as far as they are known.
    found: Option<Vec<Option<Record>>>,
    /// They were read by this operation, not by an earlier one.
    is_fresh: bool,
    is_guarded: bool,
    is_contended: bool,
    cannot_lock: bool,
}

/// The next step of an operation.
pub(crate) enum Next<T> {
    /// Read its records.
    Read,
    /// Make this swap.
    Swap(Box<Pending<T>>),
    /// The operation has ended. Nothing changes.
    Done(T, Vec<Token>),
}

/// A swap to be made, and its effects.
pub(crate) struct Pending<T> {
    pub(crate) swap: Swap,
    pub(crate) is_queued: bool,
    pub(crate) events: Vec<Caused>,
    pub(crate) revoked: Vec<Token>,
    /// The time at which leases were judged, which the clock of the database had reached.
    pub(crate) now: Timestamp,
    /// The time by which new leases begin later.
    unsure: Duration,
    outcome: T,
}

impl<T> Pending<T> {
    /// Returns the time by which the remaining leases of the step are shorter after its execution,
    /// between two bounds of the clock.
    pub(crate) fn passed(&self, reply: &SwapReply) -> Passed {
        Passed {
            at_least: reply.now.since(self.now),
            at_most: reply.latest.since(self.now).max(self.unsure),
        }
    }
}

impl<T: Outcome> Attempt<T> {
    pub(crate) fn new(
        locks: Vec<Lock>,
        rule: impl FnMut(&mut Table, &mut Step<'_>) -> T + Send + 'static,
    ) -> Self {
        Self {
            locks,
            caller: None,
            client: None,
            writes: Writes::Changes,
            in_outage: InOutage::Try,
            rule: Box::new(rule),
            found: None,
            is_fresh: false,
            is_guarded: false,
            is_contended: false,
            cannot_lock: false,
        }
    }

    /// Begins with the records that were seen last. Those that were not seen are assumed to be
    /// absent if `or_absent` is set, and otherwise read first.
    pub(crate) fn cached(mut self, cache: &Cache, or_absent: bool) -> Self {
        self.take_cached(cache, or_absent);
        self.is_contended = self.locks.iter().any(|lock| cache.is_contended(&lock.name));
        self
    }

    pub(crate) fn caller(self, caller: Option<Token>) -> Self {
        let client = caller.map(Token::client);
        Self { caller, ..self }.of_client(client)
    }

    pub(crate) fn of_client(self, client: Option<ClientId>) -> Self {
        Self { client, ..self }
    }

    pub(crate) fn writes(self, writes: Writes) -> Self {
        Self { writes, ..self }
    }

    pub(crate) fn in_outage(self, in_outage: InOutage) -> Self {
        Self { in_outage, ..self }
    }

    /// Returns whether the operation would have begun with these records.
    pub(crate) fn has_found(&self, records: &[Option<Record>]) -> bool {
        self.found.as_deref() == Some(records)
    }

    /// Returns whether the database should lock the records, because other clients have changed
    /// them in the meantime.
    pub(crate) fn locks_records(&self) -> bool {
        self.is_contended && !self.cannot_lock
    }

    /// Repeats its swaps instead.
    pub(crate) fn without_locks(mut self) -> Self {
        self.cannot_lock = true;
        self
    }

    /// Returns the turn of an operation that changes a contended record without a lock of the
    /// database. Those of this process change it one after the other, as they would conflict.
    pub(crate) fn in_turn(&self) -> Option<Turn> {
        match &self.locks[..] {
            [lock] if self.is_contended && self.cannot_lock => Some(Turn {
                name: lock.name.clone(),
                acquires: self.in_outage != InOutage::Try,
            }),
            _ => None,
        }
    }

    /// Begins with the record that was seen last, by another operation.
    pub(crate) fn begin_again(&mut self, cache: &Cache) {
        self.take_cached(cache, false);
    }

    /// Returns the client that waits if the operation queues a request.
    pub(crate) fn waiter(&self) -> Option<ClientId> {
        self.caller.map(Token::client)
    }

    /// Returns the next step. `now` is the time by the clock of the database, if it is known.
    pub(crate) fn next(&mut self, now: Option<Now>) -> Result<Next<T>, StoreError> {
        let (Some(found), Some(now)) = (&self.found, now) else {
            return Ok(Next::Read);
        };
        let terms = Terms {
            now,
            caller: self.caller,
            is_guarded: self.is_guarded,
            writes: self.writes,
        };
        let evaluation = match evaluate(&self.locks, found, &terms, &mut self.rule) {
            // The cached record may be the mistake.
            Err(_) if !self.is_fresh => return Ok(Next::Read),
            evaluation => evaluation?,
        };
        let Evaluation {
            mut outcome,
            swap,
            events,
            is_queued,
            revoked,
        } = evaluation;
        Ok(match swap {
            Some(swap) => Next::Swap(Box::new(Pending {
                swap,
                is_queued,
                events,
                revoked,
                now: now.reached,
                unsure: now.unsure,
                outcome,
            })),
            None if self.is_fresh => {
                outcome.shorten(Passed {
                    at_least: Duration::ZERO,
                    at_most: now.unsure,
                });
                Next::Done(outcome, revoked)
            }
            None => Next::Read,
        })
    }

    pub(crate) fn names(&self) -> Vec<RecordName> {
        self.locks.iter().map(|lock| lock.name.clone()).collect()
    }

    /// Records the reply to [`Next::Read`] or the records that the database has locked for it.
    pub(crate) fn was_read(&mut self, records: Vec<Option<Record>>) {
        (self.found, self.is_fresh) = (Some(records), true);
    }

    /// Records the reply to a swap. Returns the outcome if it took effect.
    pub(crate) fn was_swapped(&mut self, pending: Pending<T>, reply: SwapReply) -> Option<T> {
        match reply.outcome {
            Swapped::Done => {
                let passed = pending.passed(&reply);
                let mut outcome = pending.outcome;
                outcome.shorten(passed);
                return Some(outcome);
            }
            Swapped::Conflict(mut present) => {
                // Those of the locks that were not to be changed may be outdated as well.
                let is_whole = present.len() == self.locks.len();
                self.found = is_whole.then(|| take(&mut present));
                self.is_fresh = is_whole;
                self.is_contended = true;
                self.is_guarded = false;
            }
            Swapped::Early => {}
            Swapped::Guarded => self.is_guarded = true,
        }
        None
    }

    /// Returns the pause before an acquisition or a poll, zero included, in which other clients can
    /// change the record first. If there are any, the operation reads the record afterwards.
    /// `round_trip` is the usual time of a swap. Operations that keep a lock or make it free never
    /// pause, as others wait for them.
    ///
    /// Those that lose a swap learn of the new record after the client that has won, which would
    /// also win the next one, as long as it changes the record again at once. If the others do not
    /// get their turn in spite of the read, most pauses are short, and some long enough for a
    /// client far away; a client that no record has shown yet gets its turn at random. A request
    /// that queues behind them takes no turn away, unless they do not get theirs: then it reads and
    /// pauses as well. After a conflict the next step has no pause: the conflict shows the present
    /// record, and the next attempt must come before that changes.
    pub(crate) fn makes_way(
        &mut self,
        cache: &Cache,
        round_trip: Duration,
        now: Option<Now>,
    ) -> Option<Duration> {
        /// The shares of acquisitions that pause at random, nearby and far away.
        const AT_RANDOM: (f64, f64) = (1.0 / 128.0, 1.0 / 16.0);
        /// The time of the round trips between two of them, within these bounds.
        const SELDOM: Duration = Duration::from_millis(100);
        /// The changes of two turns.
        const FAIR: u32 = 4;
        if self.in_outage == InOutage::Try {
            return None;
        }
        let written = self.locks.iter().filter_map(|it| cache.written(&it.name));
        let since = written.max()?.elapsed();
        // The others have had the time.
        if since > LONGEST_PAUSE {
            return None;
        }
        let rivals = self.rivals(cache);
        let farther = rand::random_range(0.1..1.0_f64).recip();
        if !rivals.are_there {
            let pause = paused(round_trip, farther).checked_sub(since);
            let share = round_trip.div_duration_f64(SELDOM);
            let share = share.clamp(AT_RANDOM.0, AT_RANDOM.1);
            return pause.filter(|_| rand::random_bool(share));
        }
        let is_fair = rivals.waited < FAIR;
        if is_fair && matches!(self.next(now), Ok(Next::Swap(pending)) if pending.is_queued) {
            return None;
        }
        self.found = None;
        let farther = if is_fair { 0.0 } else { farther };
        Some(paused(round_trip, among(rivals).max(farther)).saturating_sub(since))
    }

    fn rivals(&self, cache: &Cache) -> Rivals {
        let each = self.locks.iter();
        let each = each.map(|it| cache.rivals(&it.name, self.client));
        each.max().unwrap_or_default()
    }

    /// Takes the records that this process has seen last.
    fn take_cached(&mut self, cache: &Cache, or_absent: bool) {
        let found = self.locks.iter().map(|lock| match cache.get(&lock.name) {
            None if or_absent => Some(None),
            cached => cached,
        });
        self.found = found.collect();
        self.is_fresh = false;
    }
}
