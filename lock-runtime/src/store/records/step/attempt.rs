//! An operation on the records of locks, until it has taken effect. I/O-free: it returns the calls
//! to make, and receives their replies.

use std::{mem::take, time::Duration};

use super::{
    super::{Record, RecordName, Swap, SwapReply, Swapped, Timestamp},
    body::Body,
    cache::Cache,
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

/// Returns the round trip by which pauses are measured, and the longest pause, which is short
/// against the time-out of a call. A swap during an outage says nothing about the next one.
fn scale(round_trip: Duration) -> (Duration, Duration) {
    let round_trip = round_trip.min(Duration::from_millis(100));
    (round_trip, Duration::from_millis(20).max(2 * round_trip))
}

/// The rules of an operation. Evaluated again after each conflict.
type Rule<T> = Box<dyn FnMut(&mut Table, &mut Step<'_>) -> T + Send>;

/// An operation in progress.
pub(crate) struct Attempt<T> {
    pub(crate) locks: Vec<Lock>,
    caller: Option<Token>,
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
    conflicts: u32,
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
            writes: Writes::Changes,
            in_outage: InOutage::Try,
            rule: Box::new(rule),
            found: None,
            is_fresh: false,
            is_guarded: false,
            is_contended: false,
            cannot_lock: false,
            conflicts: 0,
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
        Self { caller, ..self }
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
                self.conflicts += 1;
            }
            Swapped::Early => {}
            Swapped::Guarded => self.is_guarded = true,
        }
        None
    }

    /// Returns the pause after which an acquisition begins, so that other clients can change the
    /// record first. `round_trip` is the time of the last swap.
    ///
    /// Those that lose a swap learn of the new record after the client that has won, which would
    /// also win the next one, as long as it changes the record again at once. Others that hold the
    /// lock or wait for it have something to change; a client that is not in the record yet gets
    /// its turn at random. Most pauses are short, and some long enough for a client far away.
    pub(crate) fn makes_way(&self, cache: &Cache, round_trip: Duration) -> Option<Duration> {
        const AT_RANDOM: u32 = 32;
        let (round_trip, longest) = scale(round_trip);
        if self.in_outage == InOutage::Try {
            return None;
        }
        let written = self
            .locks
            .iter()
            .filter_map(|lock| cache.written(&lock.name));
        let pause = round_trip
            .div_f64(rand::random_range(0.1..1.0))
            .min(longest);
        let pause = pause.checked_sub(written.max()?.elapsed())?;
        let client = self.caller.map(Token::client);
        let found = self.found.iter().flatten().zip(&self.locks);
        let mut bodies =
            found.filter_map(|(record, lock)| Body::read(&lock.name, &record.as_ref()?.body).ok());
        let is_among_others = bodies.any(|body| body.is_used_by_others(client));
        (is_among_others || rand::random_ratio(1, AT_RANDOM)).then_some(pause)
    }

    /// Returns the pause before the next step: after several conflicts each acquisition waits for a
    /// random time. Operations that keep a lock or make it free never do, as others wait for them.
    pub(crate) fn pause(&self, round_trip: Duration) -> Option<Duration> {
        const UNPAUSED: u32 = 4;
        let (round_trip, longest) = scale(round_trip);
        if self.in_outage == InOutage::Try {
            return None;
        }
        let doublings = self.conflicts.checked_sub(UNPAUSED)?.min(8);
        let longest = (round_trip * 2_u32.pow(doublings)).min(longest);
        Some(longest.mul_f64(rand::random()))
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
