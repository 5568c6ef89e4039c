//! A clock for a database that shows its clients none: they advance it together.
//!
//! The clock is a value in the database, in microseconds. A client advances it by the time that
//! has passed on its own monotonic clock since it learned the value; system clocks differ, and are
//! not used. The value never runs ahead of real time, by the following rules.
//!
//! Let `v` be a value, written at `w` by a call that was decided on at `t`, and `L` the instant
//! from which a client counts it: the next value is `v` + `t'` - `L`. `L` is the arrival of the
//! reply or message that showed `v`, or the instant at which a client sent its own `v`; so `L` is
//! not before `t`. Let `T(x)` be the value at `x`, plus the time since it was written. The claim,
//! for a call that is executed at `x`, and any value or time `r` on which a call executed at a
//! later `y` relies: `r` is at most `T(x)` + (`y` - `x`) + [`LAG`]. So a lease that ends at
//! `T(x)` + `LAG` + `ttl` is over for no client before `x` + `ttl`.
//!
//! 1. A client relies on `v` + `t` - `L` with `t` - `L` at most [`RECENT`], or only if the value is
//!    still `v` when the call is executed ([`Tick::Replace`]). If `v` was written by `x`, then in
//!    the first case `r` is at most `v` + `RECENT`, and `v` at most `T(x)`; in the second one `r`
//!    is at most `T(y)`, of a value that has not changed since `x`.
//! 2. If `v` was written after `x`, then by induction `v` is at most `T(x)` + (`t` - `x`) +
//!    `RECENT`, or `T(x)` + `RECENT` if `t` is before `x`. Counted from an `L` that is not before
//!    `t`, this holds for the next value. Only if `t` is before `x` and `x` before `w`, an `L`
//!    before `w` adds up to `w` - `t`, once: a client counts from the sending of its own value only
//!    if the reply came within `LAG` - `RECENT`.
//! 3. `T(x)` is at most the value after the call, plus the time since it was written. So each call
//!    knows an instant after which the value was written, or writes it.

use std::{
    future::Future,
    sync::{Mutex, OnceLock, Weak},
    time::Duration,
};

use super::{Inbox, Timestamp};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreErrorKind},
};

/// The age up to which a value is used although another client may have replaced it.
const RECENT: Duration = Duration::from_millis(200);
/// The longest time by which one client can be ahead of the time that another one relies on.
const LAG: Duration = Duration::from_millis(250);
/// The time within which a reply has to come for a client to count from the sending of its own
/// value. Shorter than `LAG` - `RECENT`, as clocks run at different rates.
const PROMPT: Duration = Duration::from_millis(45);
/// The time without an answer of the database after which a client writes only over the value that
/// it knows: if others have raised it, their value may be as old. Longer than calls take, as one of
/// several such calls succeeds.
const HEARD_ONLY: Duration = Duration::from_secs(1);
/// The value is not raised by less.
const STEP: Duration = Duration::from_millis(50);

/// A clock that the clients of a database advance together, for a database that shows them no
/// clock of its own.
///
/// The database keeps it as one value, which only grows. Each call whose reply contains a time
/// [runs](Self::run) with a [`Tick`] of the clock within its own atomic step. Messages about new
/// values ([`heard`](Self::heard)) keep the clock from running slow while several clients make
/// calls.
///
/// The clock loses about one part in two hundred for each millisecond that a call takes, and stands
/// while no client makes a call. It never runs faster than the clocks of the clients, and the times
/// of their systems do not matter.
#[derive(Debug, Default)]
pub struct SharedClock {
    known: Mutex<Option<Known>>,
    inbox: OnceLock<Weak<dyn Inbox>>,
    #[cfg(test)]
    broken: Option<Mutation>,
}

/// The change of the clock that a call makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tick {
    /// The call is executed only if there is no value. The value becomes this one.
    Start(u64),
    /// The call is executed only if the value is `known`. The value becomes `to`.
    Replace {
        /// The present value.
        known: u64,
        /// The new value.
        to: u64,
    },
    /// The value becomes this one if it is smaller. The call is executed in any case.
    Raise(u64),
    /// The value is left as it is.
    Keep,
}

/// A reply to a call that has run with a [`Tick`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Ticked<T> {
    /// The value after the call. `None` if there is none.
    pub value: Option<u64>,
    /// Whether the call has changed the value.
    pub is_taken: bool,
    /// The reply, if the call was executed.
    pub reply: T,
}

impl<T> Ticked<T> {
    /// Creates a reply.
    pub fn new(value: Option<u64>, is_taken: bool, reply: T) -> Self {
        Self {
            value,
            is_taken,
            reply,
        }
    }
}

/// The outcome of [`SharedClock::run`]. The times are `now` and `latest` of a reply.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Run<T> {
    /// The call was executed.
    Done {
        /// A time that the clock has reached.
        now: Timestamp,
        /// A time that it has not passed.
        latest: Timestamp,
        /// The reply.
        reply: T,
    },
    /// The clock has not reached the time before which the call is not executed.
    Early {
        /// A time that the clock has reached.
        now: Timestamp,
        /// A time that it has not passed.
        latest: Timestamp,
    },
}

/// The part of the clock in one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub(crate) tick: Tick,
    begun: Instant,
    /// A time that the clock has reached, if the call is executed.
    pub(crate) reached: u64,
    /// If the call is executed, the value was written after this instant.
    written_after: Instant,
    /// A time that the clock has not passed, if one is known without a call.
    pub(crate) latest: Option<u64>,
}

/// The times after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Learned {
    Time {
        now: Timestamp,
        latest: Timestamp,
    },
    /// The call was not executed.
    Again,
    /// The value is smaller than before, or gone.
    LostData,
}

/// A rule that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// An old value is raised as well, although another client may have replaced it.
    RaisesOld,
    /// An old value is kept, so that the two times are far apart.
    KeepsOld,
    /// Each value is counted from the sending of the call that returned it.
    CountsFromSending,
    /// A client counts from the sending of its own value, however long the reply took.
    CountsSlowReplies,
    /// The lead over a value that another client has written has no end.
    LeadsForEver,
    /// The latest time is the value.
    KnowsTheTime,
    /// The value that a client reads first counts as recent.
    TrustsTheFirst,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// The latest value. `None` if it is gone.
    value: Option<u64>,
    /// When the client learned it.
    learned: Instant,
    /// The time to count from.
    base: Base,
    /// An earlier base that is further on: each value of another client is late by its way.
    lead: Option<Base>,
    /// The value was the latest one after this instant.
    latest_after: Instant,
    /// The value was written after this instant, if one is known.
    written_after: Option<Instant>,
}

/// The time of the clock at an instant.
#[derive(Clone, Copy, Debug)]
struct Base {
    micros: u64,
    at: Instant,
}

impl Base {
    fn age(self, now: Instant) -> Duration {
        now.saturating_duration_since(self.at)
    }

    fn reached(self, now: Instant) -> u64 {
        later(self.micros, self.age(now))
    }
}

fn later(micros: u64, by: Duration) -> u64 {
    Timestamp::from_micros(micros).later(by).micros()
}

/// Returns a time that the clock has not passed, with a value that was written after this instant.
/// The clocks of others may be 1 % faster.
fn not_passed(value: u64, written_after: Instant, now: Instant) -> u64 {
    let age = now.saturating_duration_since(written_after);
    later(value, age + age / 100 + LAG)
}

impl SharedClock {
    /// Creates a clock whose value is not known yet.
    pub fn new() -> Self {
        Self::default()
    }

    #[cfg(test)]
    pub(crate) fn without(broken: Option<Mutation>) -> Self {
        Self {
            broken,
            ..Self::default()
        }
    }

    /// Informs `inbox` when the value was lost.
    pub fn listen(&self, inbox: Weak<dyn Inbox>) {
        // Only the first one is a store of locks.
        let _ = self.inbox.set(inbox);
    }

    /// Runs a call with a tick, and again while the tick is refused, unless the clock has not
    /// reached `not_before`. Nothing may send the call a second time: a tick that was taken would
    /// seem to be refused.
    ///
    /// # Errors
    /// Those of the call. `Unavailable` if the database has lost the clock.
    ///
    /// # Cancellation
    /// Dropping the future drops that of the call.
    pub async fn run<T, F>(
        &self,
        not_before: Timestamp,
        mut call: impl FnMut(Tick) -> F,
    ) -> Result<Run<T>, StoreError>
    where
        F: Future<Output = Result<Ticked<T>, StoreError>>,
    {
        loop {
            let turn = self.turn(Instant::now());
            if turn.reached < not_before.micros() {
                let Some(latest) = turn.latest else {
                    // After a loss of data; the next read learns the time.
                    let message = "the clock of the locks is not known yet";
                    let error = StoreError::new(StoreErrorKind::Unavailable, message);
                    return Err(error.with_unsent(true));
                };
                let [now, latest] = [turn.reached, latest].map(Timestamp::from_micros);
                return Ok(Run::Early { now, latest });
            }
            let Ticked {
                value,
                is_taken,
                reply,
            } = call(turn.tick).await?;
            match self.ended(turn, value, is_taken, Instant::now()) {
                Learned::Time { now, latest } => return Ok(Run::Done { now, latest, reply }),
                Learned::Again => {}
                Learned::LostData => {
                    if let Some(inbox) = self.inbox.get().and_then(Weak::upgrade) {
                        inbox.connected(false);
                        inbox.connected(true);
                    }
                    let message = "the database has lost the clock of the locks";
                    return Err(StoreError::new(StoreErrorKind::Unavailable, message));
                }
            }
        }
    }

    /// Records a value that the database has sent as it was written.
    pub fn heard(&self, value: u64) {
        self.heard_at(value, Instant::now());
    }

    /// Returns the latest value that the client knows.
    #[cfg(feature = "zookeeper")]
    pub(crate) fn value(&self) -> Option<u64> {
        lock(&self.known).as_ref().and_then(|known| known.value)
    }

    pub(crate) fn turn(&self, now: Instant) -> Turn {
        let known = *lock(&self.known);
        let Some(known) = known else {
            let system = Timestamp::of_system().micros();
            return Turn {
                tick: Tick::Start(system),
                begun: now,
                reached: system,
                written_after: now,
                latest: None,
            };
        };
        let reached = self.reached(&known, now);
        let (tick, written_after) = match known.value {
            None => (Tick::Start(reached), now),
            Some(value) => self.tick(&known, value, reached, now),
        };
        let latest = known.value.zip(known.written_after);
        Turn {
            tick,
            begun: now,
            reached,
            written_after,
            latest: latest.map(|(value, after)| not_passed(value, after, now).max(reached)),
        }
    }

    /// Chooses the tick, and the instant after which the value was written if the call is executed.
    fn tick(&self, known: &Known, value: u64, reached: u64, now: Instant) -> (Tick, Instant) {
        let mut written_after = known.written_after;
        if self.breaks(Mutation::TrustsTheFirst) {
            written_after = written_after.or(Some(known.learned));
        }
        let kept = written_after.filter(|after| {
            let age = now.saturating_duration_since(*after);
            age <= RECENT || self.breaks(Mutation::KeepsOld)
        });
        let to = reached.max(value.saturating_add(1));
        let is_recent = known.base.age(now) <= RECENT
            && now.saturating_duration_since(known.latest_after) <= HEARD_ONLY;
        match kept {
            Some(after) if reached.saturating_sub(value) < STEP.as_micros() as u64 => {
                (Tick::Keep, after)
            }
            // If the value is not smaller, it was written after the known one was the latest.
            _ if is_recent || self.breaks(Mutation::RaisesOld) => {
                (Tick::Raise(to), known.latest_after)
            }
            _ => (Tick::Replace { known: value, to }, now),
        }
    }

    pub(crate) fn ended(
        &self,
        turn: Turn,
        value: Option<u64>,
        is_taken: bool,
        now: Instant,
    ) -> Learned {
        let mut known = lock(&self.known);
        if let Some(old) = known.filter(|old| old.learned < turn.begun && value < old.value) {
            let micros = self.reached(&old, now);
            *known = Some(Known {
                value,
                learned: now,
                base: Base { micros, at: now },
                lead: None,
                latest_after: turn.begun,
                written_after: None,
            });
            return Learned::LostData;
        }
        let is_required = matches!(turn.tick, Tick::Start(_) | Tick::Replace { .. });
        let Some(value) = value else {
            // Another call may have noticed it before.
            return if is_required {
                Learned::Again
            } else {
                Learned::LostData
            };
        };
        match &mut *known {
            Some(known) if known.value > Some(value) => {}
            Some(known) if known.value == Some(value) => {
                known.latest_after = known.latest_after.max(turn.begun);
                if is_taken {
                    known.written_after = known.written_after.max(Some(turn.begun));
                }
            }
            old => {
                let before = old.as_ref().map(|old| old.latest_after);
                let is_prompt = now.saturating_duration_since(turn.begun) <= PROMPT
                    || self.breaks(Mutation::CountsSlowReplies);
                let from_sending =
                    is_taken && is_prompt || self.breaks(Mutation::CountsFromSending);
                let at = if from_sending { turn.begun } else { now };
                *old = Some(Known {
                    value: Some(value),
                    learned: now,
                    base: Base { micros: value, at },
                    lead: old.as_ref().map(|old| self.best(old, now)),
                    latest_after: before.map_or(turn.begun, |before| before.max(turn.begun)),
                    written_after: if is_taken { Some(turn.begun) } else { before },
                });
            }
        }
        let is_executed = is_taken || !is_required;
        let Some(known) = known.filter(|_| is_executed) else {
            return Learned::Again;
        };
        let written_after = if is_taken {
            turn.begun
        } else {
            turn.written_after
        };
        let now_reached = self.reached(&known, now);
        let latest = match self.breaks(Mutation::KnowsTheTime) {
            true => value,
            false => not_passed(value, written_after, now).max(now_reached),
        };
        Learned::Time {
            now: Timestamp::from_micros(now_reached),
            latest: Timestamp::from_micros(latest),
        }
    }

    pub(crate) fn heard_at(&self, value: u64, now: Instant) {
        let mut known = lock(&self.known);
        if let Some(old) = known.filter(|old| old.value < Some(value)) {
            *known = Some(Known {
                value: Some(value),
                learned: now,
                base: Base {
                    micros: value,
                    at: now,
                },
                lead: Some(self.best(&old, now)),
                latest_after: old.latest_after,
                written_after: old.value.map(|_| old.latest_after),
            });
        }
    }

    /// Returns the time that the clock has reached, as far as the client knows.
    fn reached(&self, known: &Known, now: Instant) -> u64 {
        self.best(known, now).reached(now)
    }

    /// Returns the base that is further on.
    fn best(&self, known: &Known, now: Instant) -> Base {
        let counts = |lead: &Base| lead.age(now) <= RECENT || self.breaks(Mutation::LeadsForEver);
        match known.lead.filter(counts) {
            Some(lead) if lead.reached(now) > known.base.reached(now) => lead,
            _ => known.base,
        }
    }

    /// Returns whether a simulator has switched this rule off.
    fn breaks(&self, mutation: Mutation) -> bool {
        #[cfg(test)]
        return self.broken == Some(mutation);
        #[cfg(not(test))]
        {
            let _ = mutation;
            false
        }
    }
}
