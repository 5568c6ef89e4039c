//! The holders and the wait queue of one name.

use std::{collections::VecDeque, time::Duration};

use smallvec::SmallVec;

use super::Step;
use crate::{
    fence::FencingToken,
    key::LockKey,
    spec::{LockKind, Mode},
    store::{
        ENTRY_STALE_AFTER, ENTRY_TTL, Grant, HANDOFF_LEASE, Heir, Hold, NextHolder, POLL_INTERVAL,
        StoreEvent, Token,
    },
    time::Instant,
};

/// The slots and the queue entries of one name, at least one of them. Expired ones remain until
/// the next access.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Entry {
    /// The mode of the slots. It has no meaning if there are none.
    pub(crate) mode: Mode,
    pub(crate) slots: SmallVec<[Slot; 1]>,
    pub(crate) line: VecDeque<Place>,
}

#[cfg_attr(test, derive(Clone))]
pub(crate) struct Slot {
    pub(crate) token: Token,
    /// The slot is no longer held. It only reserves the lock until it expires (`min_hold`).
    pub(crate) kept: bool,
    pub(crate) expires: Instant,
    /// The last fencing token that is reserved for the slot.
    pub(crate) fence: FencingToken,
}

impl Slot {
    pub(crate) fn is_held_by(&self, token: Token) -> bool {
        self.token == token && !self.kept
    }

    pub(crate) fn grant(&self, now: Instant) -> Grant {
        Grant::new(self.fence, self.expires - now)
    }
}

/// A queue entry.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Place {
    pub(crate) mode: Mode,
    pub(crate) request: NextHolder,
    pub(crate) seen: Instant,
    pub(crate) came: Instant,
}

impl Place {
    fn is_live(&self, now: Instant) -> bool {
        now < self.seen + ENTRY_STALE_AFTER
    }

    pub(crate) fn is_queued(&self, now: Instant) -> bool {
        now < self.seen + ENTRY_TTL
    }

    /// The number of permits is part of their name.
    pub(crate) fn is_of(&self, hold: &Hold) -> bool {
        self.request.token == hold.token
            && (self.mode.kind() == LockKind::Lock || self.mode == hold.mode)
    }
}

impl Entry {
    pub(crate) fn new(mode: Mode) -> Self {
        Self {
            mode,
            slots: SmallVec::new(),
            line: VecDeque::new(),
        }
    }

    /// Returns the slots that have not expired.
    pub(crate) fn living(&self, now: Instant) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(move |slot| slot.expires > now)
    }

    /// Returns the queue entries that have not expired.
    pub(crate) fn queued(&self, now: Instant) -> impl Iterator<Item = &Place> {
        self.line.iter().filter(move |place| place.is_queued(now))
    }

    /// Returns whether there is a holder, a reservation or a waiter.
    pub(crate) fn is_taken(&self, now: Instant) -> bool {
        self.living(now).next().is_some() || self.queued(now).next().is_some()
    }

    pub(crate) fn is_held_by(&self, token: Token) -> bool {
        self.slots.iter().any(|slot| slot.is_held_by(token))
    }

    /// Drops the slots that have expired.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.slots.retain(|slot| slot.expires > now);
    }

    pub(crate) fn slot(&mut self, mode: Mode, token: Token) -> Option<&mut Slot> {
        let mut slots = self.slots.iter_mut();
        slots.find(|slot| self.mode == mode && slot.is_held_by(token))
    }

    /// Returns the grant of a holder again. The fencing token of a reader may not be the latest, so
    /// it gets a larger one.
    pub(crate) fn repeated(&mut self, hold: &Hold, step: &Step<'_>) -> Option<Grant> {
        let slot = self.slot(hold.mode, hold.token)?;
        if hold.mode != Mode::Exclusive {
            slot.fence = step.fences.next(0, step);
        }
        Some(slot.grant(step.now))
    }

    /// Returns whether the current holders admit another one in `mode`.
    pub(crate) fn admits(&self, mode: Mode) -> bool {
        match (mode, self.mode) {
            _ if self.slots.is_empty() => true,
            (Mode::Shared, Mode::Shared) => true,
            (Mode::Permits(wanted), Mode::Permits(held)) => {
                wanted == held && self.slots.len() < held.get() as usize
            }
            _ => false,
        }
    }

    pub(crate) fn hold(&mut self, mode: Mode, request: NextHolder, step: &Step<'_>) -> Grant {
        let is_writer = mode == Mode::Exclusive;
        let reserved = if is_writer { request.reserved } else { 0 };
        let fence = step.fences.next(reserved, step);
        self.mode = mode;
        let slot = Slot {
            token: request.token,
            kept: false,
            expires: step.now + request.lease,
            fence: fence.later(reserved),
        };
        self.slots.push(slot);
        Grant::new(fence, request.lease).reserved(reserved)
    }

    /// Drops expired slots and queue entries, and hands the lock off to the next waiters (rule 15).
    pub(crate) fn advance(&mut self, key: &LockKey, step: &mut Step<'_>) {
        let now = step.now;
        self.expire(now);
        if self.line.is_empty() {
            return;
        }
        self.line.retain(|place| place.is_queued(now));
        #[cfg(test)]
        if step.lets_nobody_in {
            return;
        }
        if step.grants_nothing {
            return;
        }
        let mut index = 0;
        while let Some(place) = self.line.get(index) {
            if !place.is_live(now) {
                index += 1;
                continue;
            }
            if self.mode == place.mode && self.is_held_by(place.request.token) {
                self.line.remove(index);
                continue;
            }
            if !self.admits(place.mode) {
                if step.frees
                    && let Some(ttl) = self.ends_in(now).filter(|ttl| *ttl < POLL_INTERVAL)
                {
                    let (key, kind) = (key.clone(), place.mode.kind());
                    step.events.push(StoreEvent::FreeIn { key, kind, ttl });
                }
                break;
            }
            let (mode, mut request) = (place.mode, place.request);
            request.lease = request.lease.min(HANDOFF_LEASE);
            self.line.remove(index);
            let grant = self.hold(mode, request, step);
            // A dead process does not renew its short lease, which may end before the next waiter
            // polls.
            step.frees |= request.lease < POLL_INTERVAL;
            if step.caller != Some(request.token) {
                let hold = Hold::new(key.clone(), mode, request.token);
                let next = self
                    .line
                    .iter()
                    .skip(index)
                    .find(|place| place.is_live(now));
                let next = next.filter(|next| next.mode == Mode::Exclusive);
                step.events.push(StoreEvent::Granted {
                    hold,
                    grant,
                    is_named: step.heir == Some(request.token),
                    next: next.map(|next| Heir::new(next.request, None)),
                });
            }
        }
    }

    /// Grants a free lock to the acquisition that its releaser has named, and notifies its client.
    pub(crate) fn grant_heir(&mut self, key: &LockKey, mut heir: NextHolder, step: &mut Step<'_>) {
        heir.lease = heir.lease.min(HANDOFF_LEASE);
        self.line.retain(|place| place.request.token != heir.token);
        let grant = self.hold(Mode::Exclusive, heir, step);
        step.events.push(StoreEvent::Granted {
            hold: Hold::new(key.clone(), Mode::Exclusive, heir.token),
            grant,
            is_named: true,
            next: None,
        });
    }

    pub(crate) fn next_waiter(&self, now: Instant) -> Option<&Place> {
        self.line.iter().find(|place| place.is_live(now))
    }

    /// Returns the time until the holders admit another one, if none is released or renewed
    /// before.
    fn ends_in(&self, now: Instant) -> Option<Duration> {
        let left = self.slots.iter().map(|slot| slot.expires - now);
        if matches!(self.mode, Mode::Permits(_)) {
            left.min()
        } else {
            left.max()
        }
    }

    /// Returns the time after which another attempt for `mode` is useful, if no holder is
    /// released or renewed before.
    pub(crate) fn holder_ttl(&self, mode: Mode, now: Instant) -> Option<Duration> {
        match self.next_waiter(now) {
            // The holders admit the request, but this waiter is before it, and is skipped unless
            // it polls.
            Some(next) if self.admits(mode) => Some(next.seen + ENTRY_STALE_AFTER - now),
            _ => self.ends_in(now),
        }
    }

    /// Adds a queue entry, or keeps the existing one.
    pub(crate) fn enqueue(&mut self, hold: &Hold, request: NextHolder, step: &Step<'_>) {
        match self.line.iter_mut().find(|place| place.is_of(hold)) {
            Some(place) => place.seen = step.latest,
            None => self.line.push_back(Place {
                mode: hold.mode,
                request,
                seen: step.latest,
                came: step.now,
            }),
        }
    }
}
