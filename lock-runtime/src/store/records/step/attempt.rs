//! An operation on the records of locks, until it has taken effect. I/O-free: it returns the calls
//! to make, and receives their replies.

use std::{mem::take, time::Duration};

use super::{
    super::{Record, RecordName, Swap, SwapReply, Swapped, Timestamp},
    cache::Cache,
    clock::Now,
    evaluation::{Caused, Evaluation, Lock, Terms, Writes, evaluate},
    outcome::{Outcome, Passed},
};
use crate::{
    shell::time::Instant,
    store::{
        ClientId, StoreError, Token,
        remote::outage::InOutage,
        table::{Step, Table},
    },
};

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
    /// When this process has written the records, if no other one is known to have since.
    written: Option<Instant>,
    /// It acquires a lock that others hold or wait for.
    is_among_others: bool,
}

/// The next step of an operation.
pub(crate) enum Next<T> {
    /// Read its records.
    Read,
    /// Make this swap.
    Swap(Box<Pending<T>>),
    /// Ask again after the [`pause`](Attempt::pause).
    Pause,
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
            written: None,
            is_among_others: false,
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

    /// Returns the contended record that the operation changes without a lock of the database, if
    /// it is one. Those of this process change it one after the other, as they would conflict.
    pub(crate) fn in_turn(&self) -> Option<&RecordName> {
        match &self.locks[..] {
            [lock] if self.is_contended && self.cannot_lock => Some(&lock.name),
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
            is_shared,
            revoked,
        } = evaluation;
        let lets_others_first = is_shared && !self.is_fresh && self.in_outage != InOutage::Try;
        if lets_others_first && swap.is_some() && !self.is_among_others {
            self.is_among_others = true;
            return Ok(Next::Pause);
        }
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

    /// Returns the pause before the next step, in which others change the record. `round_trip` is
    /// the time of the last swap.
    ///
    /// Those that lose a swap learn of the new record after the client that wins it, so this client
    /// would win all further ones. If it acquires a lock that others hold or wait for, it lets them
    /// make the next swap. Operations that keep a lock or make it free never pause: the others
    /// wait for them, and a lease may end. Of many others, a part makes the next swap, at random.
    pub(crate) fn pause(&self, round_trip: Duration) -> Option<Duration> {
        const UNPAUSED: u32 = 4;
        const LONGEST: Duration = Duration::from_millis(20);
        if self.in_outage == InOutage::Try {
            return None;
        }
        if self.conflicts == 0 && self.is_among_others {
            let pause = round_trip.mul_f64(rand::random_range(1.0..1.5));
            return Some(pause.saturating_sub(self.written?.elapsed()));
        }
        let doublings = self.conflicts.checked_sub(UNPAUSED)?.min(8);
        let longest = (round_trip * 2_u32.pow(doublings)).min(LONGEST.max(2 * round_trip));
        Some(longest.mul_f64(rand::random()))
    }

    /// Takes the records that this process has seen last.
    fn take_cached(&mut self, cache: &Cache, or_absent: bool) {
        let names = || self.locks.iter().map(|lock| &lock.name);
        let found = names().map(|name| match cache.get(name) {
            None if or_absent => Some(None),
            cached => cached,
        });
        self.found = found.collect();
        self.written = names().filter_map(|name| cache.written(name)).max();
        self.is_fresh = false;
    }
}
