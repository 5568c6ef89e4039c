//! One step of the rules on the records of locks. Pure logic: it returns the changes to make.

use std::{mem::take, ops::RangeInclusive, time::Duration};

use super::{
    super::{Change, Record, RecordName, Swap, Timestamp, Version},
    body::{Body, Origin, StoredSlot},
    clock::Now,
};
use crate::{
    guard::fence::FencingToken,
    request::{key::LockKey, spec::LockKind},
    shell::time::Instant,
    store::{
        ClientId, StoreError, StoreEvent, Token, Waiter,
        table::{Fences, Step, Table, entry::Entry},
    },
};

/// The number of revoked holders that a record remembers: of more, the first ones learn at their
/// next renewal that the lock is not theirs, and not why. Each takes 16 bytes in the record.
const REVOKED: usize = 100;
/// A change is not written if all it does is to renew queue entries by less than this.
const POLLED_AGAIN: Duration =
    Duration::from_millis(Waiter::POLL_INTERVAL.as_millis() as u64 * 3 / 4);

/// A lock and the name of its record.
#[derive(Clone, Debug)]
pub(crate) struct Lock {
    pub(crate) key: LockKey,
    pub(crate) kind: LockKind,
    pub(crate) name: RecordName,
}

impl Lock {
    pub(crate) fn new(key: &LockKey, kind: LockKind) -> Self {
        Self {
            key: key.clone(),
            kind,
            name: RecordName::of_lock(key, kind),
        }
    }
}

/// The circumstances of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) now: Now,
    /// The acquisition whose grant the reply contains.
    pub(crate) caller: Option<Token>,
    /// No lock can be granted, because a transaction of the user has compared the fencing token of
    /// the previous holder.
    pub(crate) is_guarded: bool,
    pub(crate) writes: Writes,
}

/// When a step writes its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    /// If they have changed, and durably if safety depends on it.
    Changes,
    /// The same, but always durably.
    Durably,
    /// Always, so that delayed swaps fail.
    Always,
}

/// The result of a step, which takes effect with its swap.
pub(crate) struct Evaluation<T> {
    pub(crate) outcome: T,
    /// `None` if nothing changes.
    pub(crate) swap: Option<Swap>,
    /// The events that it causes.
    pub(crate) events: Vec<Caused>,
    /// Whether the caller is in a wait queue afterwards.
    pub(crate) is_queued: bool,
    /// The holders that an operator has revoked before.
    pub(crate) revoked: Vec<Token>,
}

/// An event that a step causes.
pub(crate) struct Caused {
    /// The record of the lock.
    pub(crate) record: RecordName,
    /// The client that it concerns.
    pub(crate) client: ClientId,
    pub(crate) event: StoreEvent,
}

/// Applies `rule` to the locks whose records are `found`, in the same order.
///
/// # Errors
/// `IncompatibleFormat` if a record cannot be read.
pub(crate) fn evaluate<T>(
    locks: &[Lock],
    found: &[Option<Record>],
    terms: &Terms,
    rule: impl FnOnce(&mut Table, &mut Step<'_>) -> T,
) -> Result<Evaluation<T>, StoreError> {
    let mut bodies = Vec::with_capacity(locks.len());
    for (lock, record) in locks.iter().zip(found) {
        bodies.push(match record {
            Some(record) => Body::read(&lock.name, &record.body)?,
            None => Body::default(),
        });
    }
    let Now {
        reached,
        latest: not_passed,
        ..
    } = terms.now;
    let origin = Origin::before(reached, &bodies);
    let now = origin.instant(reached.micros());
    let fences = Fences::since(now, reached.micros());
    let latest = bodies.iter().map(|body| body.fence).max();
    // A damaged number is no reason to begin anew.
    let token = |number| FencingToken::new(number).unwrap_or(FencingToken::LAST);
    let latest = latest.filter(|number| *number > 0).map(token);
    latest.map(|latest| fences.raise(latest));

    let mut table = Table::default();
    for (lock, body) in locks.iter().zip(&bodies) {
        if let Some(entry) = body.entry(origin) {
            table.insert(&lock.key, lock.kind, entry);
        }
    }
    let mut step = Step::new(now, &fences, terms.caller);
    step.begins = now + terms.now.unsure;
    step.latest = origin.instant(not_passed.micros());
    step.grants_nothing |= terms.is_guarded;
    let outcome = rule(&mut table, &mut step);
    let events = take(&mut step.events);

    let issued = (fences.latest() > latest).then(|| Issued {
        first: FencingToken::next(latest, reached.micros()).unwrap_or(FencingToken::LAST),
        last: fences.latest(),
    });
    let mut result = Evaluation {
        outcome,
        swap: None,
        events: Vec::new(),
        is_queued: false,
        revoked: Vec::new(),
    };
    let mut swap = Swap::new(Vec::new(), reached);
    swap.durable = terms.writes == Writes::Durably;
    for ((lock, record), before) in locks.iter().zip(found).zip(&bodies) {
        let entry = table.remove(&lock.key, lock.kind);
        let mut after = Body::after(before, entry.as_ref(), issued.as_ref(), reached, origin);
        after.revoke(before, &events, terms);
        let revoked = before.revoked.iter().map(|token| Token::from_bytes(*token));
        result.revoked.extend(revoked);
        result.is_queued |= terms.caller.is_some_and(|caller| after.awaits(caller));
        for event in &events {
            if let Some(client) = concerned(event, lock, entry.as_ref(), now) {
                result.events.push(Caused {
                    record: lock.name.clone(),
                    client,
                    event: event.clone(),
                });
            }
        }
        if terms.writes != Writes::Always && !after.is_worth_writing_over(before) {
            continue;
        }
        // A crash must not take a fencing token back.
        swap.durable |= after.fence > before.fence || !after.relies_on_less_than(before);
        // Nor a result.
        swap.durable |= after.result != before.result;
        swap.changes.push(Change {
            name: lock.name.clone(),
            known: record.as_ref().map(|record| record.version),
            record: Record::new(Version::random(), after.write(&lock.name)?),
            fences: after.fences(),
            needed_until: after.needed_until(not_passed),
        });
    }
    if !swap.changes.is_empty() {
        result.swap = Some(swap);
    }
    Ok(result)
}

/// Returns the client that an event of this lock concerns.
fn concerned(
    event: &StoreEvent,
    lock: &Lock,
    entry: Option<&Entry>,
    now: Instant,
) -> Option<ClientId> {
    match event {
        StoreEvent::Granted { hold, .. } => (hold.key == lock.key).then(|| hold.token.client()),
        StoreEvent::Revoked { token } => Some(token.client()),
        StoreEvent::Wanted { key, token } => (*key == lock.key).then(|| token.client()),
        StoreEvent::FreeIn { key, kind, .. } if *key == lock.key && *kind == lock.kind => {
            Some(entry?.next_waiter(now)?.request.token.client())
        }
        _ => None,
    }
}

/// The fencing tokens that a step has issued.
struct Issued {
    first: FencingToken,
    last: Option<FencingToken>,
}

impl Body {
    fn after(
        before: &Self,
        entry: Option<&Entry>,
        issued: Option<&Issued>,
        now: Timestamp,
        origin: Origin,
    ) -> Self {
        let (fence, since) = (before.fence, before.since);
        let mut after = Self::of(entry, fence, since, origin);
        after.revoked.clone_from(&before.revoked);
        // Another lock of the step may have got them.
        let has_new_holder = after.slots.iter().any(|slot| slot.fence > fence);
        let Some(Issued { first, last }) = issued.filter(|_| has_new_holder) else {
            return after;
        };
        after.fence = last.map_or(fence, FencingToken::number);
        // The tokens of the previous holders stay valid if one of them is still a holder.
        if !after.has_holder_of(before, now) {
            after.since = first.number();
        }
        after
    }

    /// Returns whether one of the holders of `before` is still a holder.
    fn has_holder_of(&self, before: &Self, now: Timestamp) -> bool {
        let old = before.slots.iter();
        let mut old = old.filter(|slot| slot.expires > now.micros());
        old.any(|old| self.slots.iter().any(|new| new.token == old.token))
    }

    /// Remembers the holders that the step has revoked, and refuses their fencing tokens.
    fn revoke(&mut self, before: &Self, events: &[StoreEvent], terms: &Terms) {
        let revoked = events.iter().filter_map(|event| match event {
            StoreEvent::Revoked { token } => Some(token.to_bytes()),
            _ => None,
        });
        let count = self.revoked.len();
        self.revoked.extend(revoked);
        let mut revoked = self.revoked[count..].iter();
        let is_revoked = revoked.any(|it| before.slots.iter().any(|slot| slot.token == *it));
        // A transaction that has compared its token goes on. A new holder has refused the others.
        let refuses = is_revoked && !terms.is_guarded && self.fence == before.fence;
        if refuses && !self.has_holder_of(before, terms.now.reached) {
            self.since = self.fence.saturating_add(1);
        }
        let superfluous = self.revoked.len().saturating_sub(REVOKED);
        self.revoked.drain(..superfluous);
    }

    fn fences(&self) -> Option<RangeInclusive<FencingToken>> {
        Some(FencingToken::new(self.since)?..=FencingToken::new(self.fence)?)
    }

    /// Returns the clients that hold the lock or wait for it.
    pub(super) fn clients(&self) -> impl Iterator<Item = ClientId> {
        let slots = self.slots.iter().map(|slot| slot.token);
        let tokens = slots.chain(self.queue.iter().map(|place| place.token));
        tokens.map(|token| Token::from_bytes(token).client())
    }

    fn awaits(&self, token: Token) -> bool {
        self.queue
            .iter()
            .any(|place| place.token == token.to_bytes())
    }

    fn is_worth_writing_over(&self, before: &Self) -> bool {
        if self == before {
            return false;
        }
        let polled = self.queue.iter().zip(&before.queue);
        let mut polled = polled.map(|(new, old)| new.seen.abs_diff(old.seen));
        let polled_again = POLLED_AGAIN.as_micros() as u64;
        !self.equals_apart_from_polls(before) || polled.any(|time| time >= polled_again)
    }

    /// Returns whether every holder of this record was a holder before, for as long. A crash that
    /// brings the earlier record back then costs waiting and no more.
    ///
    /// A hand-off must survive a crash: the previous holder, which would hold the lock again, may
    /// repeat its release, and the lock would go to another waiter.
    fn relies_on_less_than(&self, before: &Self) -> bool {
        let is_same_mode = self.mode() == before.mode();
        let is_covered = |slot: &StoredSlot| {
            let mut old = before.slots.iter();
            is_same_mode && old.any(|old| old.token == slot.token && old.expires >= slot.expires)
        };
        self.slots.iter().all(is_covered)
    }

    fn needed_until(&self, now: Timestamp) -> Timestamp {
        let slots = self.slots.iter().map(|slot| slot.expires);
        let places = self
            .queue
            .iter()
            .map(|place| place.seen.saturating_add(Waiter::TTL.as_micros() as u64));
        let last = slots.chain(places).fold(now.micros(), u64::max);
        Timestamp::from_micros(last).later(FencingToken::KEPT_FOR)
    }
}
