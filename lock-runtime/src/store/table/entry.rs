//! The holders and the wait queue of one name.

use std::{collections::VecDeque, mem::discriminant, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::Step;
use crate::{
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{Done, Grant, Hold, HolderId, NextHolder, StoreEvent, Token, Waiter},
};

/// The slots and the queue entries of one name, at least one of them. Expired ones remain until
/// the next access.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Entry {
    /// The mode of the slots. It has no meaning if there are none. The number of permits is that of
    /// the first slot; the holders of the others may have requested another one.
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
    /// The result of its work. The slot is a reservation then.
    pub(crate) result: Option<Box<Recorded>>,
}

/// A result, the fencing token of the work, and when it was recorded, in microseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub(crate) fence: FencingToken,
    pub(crate) at: u64,
    pub(crate) value: Arc<[u8]>,
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
    /// Returns the time since the latest request, or until then: after the clock of the store was
    /// set back, an entry from before is as old as it is new.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        let (early, late) = (self.seen.min(now), self.seen.max(now));
        late - early
    }

    fn is_live(&self, now: Instant) -> bool {
        self.silence(now) < Waiter::STALE_AFTER
    }

    pub(crate) fn is_queued(&self, now: Instant) -> bool {
        self.silence(now) < Waiter::TTL
    }

    /// The number of permits is part of their name.
    pub(crate) fn is_of(&self, hold: &Hold) -> bool {
        self.request.token == hold.token
            && (self.mode.kind() == LockKind::Lock || self.mode == hold.mode)
    }
}

/// The time after which another attempt is useful while a transaction of the user keeps a free lock
/// from being granted. Its end is no event.
const GUARDED: Duration = Duration::from_millis(40);

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

    pub(crate) fn is_done(&self, now: Instant) -> bool {
        self.living(now).any(|slot| slot.result.is_some())
    }

    /// Returns the result of a lock that is done.
    pub(crate) fn done(&self, key: &LockKey, now: Instant) -> Option<Done> {
        let mut living = self.living(now);
        living.find_map(|slot| {
            let Recorded { value, fence, at } = slot.result.as_deref()?;
            let id = HolderId::of(key, slot.token, true);
            Some(Done::new(value.to_vec(), *fence, *at, id))
        })
    }

    /// Refuses a request if the lock is done, and notifies the next waiter.
    pub(crate) fn refuse_done(&mut self, hold: &Hold, step: &mut Step<'_>) -> Option<Arc<Done>> {
        let done = self.done(&hold.key, step.now)?;
        if self.line.iter().any(|place| place.is_of(hold)) {
            self.line.retain(|place| !place.is_of(hold));
            self.announce_done(&hold.key, step);
        }
        Some(Arc::new(done))
    }

    /// Notifies the next waiter that the lock is done.
    pub(crate) fn announce_done(&self, key: &LockKey, step: &mut Step<'_>) {
        if let Some(next) = self.next_waiter(step.now) {
            let (key, kind, ttl) = (key.clone(), next.mode.kind(), Duration::ZERO);
            step.events.push(StoreEvent::FreeIn { key, kind, ttl });
        }
    }

    /// Drops the slots that have expired.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.slots.retain(|slot| slot.expires > now);
    }

    pub(crate) fn slot(&mut self, mode: Mode, token: Token) -> Option<&mut Slot> {
        let is_held = self.is_held_in(mode);
        let mut slots = self.slots.iter_mut();
        slots.find(|slot| is_held && slot.is_held_by(token))
    }

    /// Returns whether the slots are of this mode, whatever the number of permits.
    pub(crate) fn is_held_in(&self, mode: Mode) -> bool {
        discriminant(&self.mode) == discriminant(&mode)
    }

    /// Returns the grant of a holder again. The fencing token of a reader may not be the latest, so
    /// it gets a larger one.
    pub(crate) fn repeated(&mut self, hold: &Hold, step: &Step<'_>) -> Option<Grant> {
        let slot = self.slot(hold.mode, hold.token)?;
        if hold.mode != Mode::Exclusive {
            if step.is_exhausted {
                return None;
            }
            slot.fence = step.fences.next(0, step);
        }
        Some(slot.grant(step.now))
    }

    /// Returns whether the current holders admit another one in `mode`. Each number of permits
    /// counts all holders (rule 38).
    pub(crate) fn admits(&self, mode: Mode) -> bool {
        match (mode, self.mode) {
            _ if self.slots.is_empty() => true,
            (Mode::Shared, Mode::Shared) => true,
            (Mode::Permits(wanted), Mode::Permits(_)) => self.slots.len() < wanted.get() as usize,
            _ => false,
        }
    }

    pub(crate) fn hold(&mut self, mode: Mode, request: NextHolder, step: &Step<'_>) -> Grant {
        let is_writer = mode == Mode::Exclusive;
        let reserved = if is_writer { request.reserved } else { 0 };
        let fence = step.fences.next(reserved, step);
        if self.slots.is_empty() {
            self.mode = mode;
        }
        let slot = Slot {
            token: request.token,
            kept: false,
            expires: step.begins + request.lease,
            fence: fence.later(reserved),
            result: None,
        };
        let ttl = slot.expires - step.now;
        self.slots.push(slot);
        Grant::new(fence, ttl).reserved(reserved)
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
            let next = self.next_waiter(now).filter(|next| self.admits(next.mode));
            if let Some(next) = next.filter(|_| step.frees && step.is_guarded()) {
                let (key, kind, ttl) = (key.clone(), next.mode.kind(), GUARDED);
                step.events.push(StoreEvent::FreeIn { key, kind, ttl });
            }
            return;
        }
        let mut index = 0;
        while let Some(place) = self.line.get(index) {
            if !place.is_live(now) {
                index += 1;
                continue;
            }
            if self.is_held_in(place.mode) && self.is_held_by(place.request.token) {
                self.line.remove(index);
                continue;
            }
            let is_caller = step.caller == Some(place.request.token);
            let asks = is_caller && step.asks == Some(place.mode);
            let is_admitted = self.admits(place.mode);
            if !is_admitted || self.is_of_another_number(place.mode) && !asks {
                let free_in = || match is_admitted {
                    true => Some(Duration::ZERO),
                    false => self.free_in(place.mode, now),
                };
                if step.frees
                    && let Some(ttl) = free_in().filter(|ttl| *ttl < Waiter::POLL_INTERVAL)
                {
                    let (key, kind) = (key.clone(), place.mode.kind());
                    step.events.push(StoreEvent::FreeIn { key, kind, ttl });
                }
                break;
            }
            let (mode, mut request) = (place.mode, place.request);
            request.lease = request.lease.min(Grant::HANDOFF_LEASE);
            self.line.remove(index);
            let grant = self.hold(mode, request, step);
            // A dead process does not renew its short lease, which may end before the next waiter
            // polls.
            step.frees |= request.lease < Waiter::POLL_INTERVAL;
            if !is_caller {
                let hold = Hold::new(key.clone(), mode, request.token);
                step.events.push(StoreEvent::granted(hold, grant));
            }
        }
    }

    /// Returns the holder that may retain the lock, idle.
    pub(crate) fn retaining(&self) -> Option<Token> {
        let mut slots = self.slots.iter().filter(|slot| !slot.kept);
        let is_writer = self.mode == Mode::Exclusive;
        let holder = slots.next().filter(|_| is_writer)?.token;
        holder.retains().then_some(holder)
    }

    /// Notifies a holder that may retain the lock that a request of another client waits.
    pub(crate) fn want(&self, hold: &Hold, step: &mut Step<'_>) {
        let of_another = |token: &Token| token.client() != hold.token.client();
        if let Some(token) = self.retaining().filter(of_another) {
            let key = hold.key.clone();
            step.events.push(StoreEvent::Wanted { key, token });
        }
    }

    pub(crate) fn next_waiter(&self, now: Instant) -> Option<&Place> {
        self.line.iter().find(|place| place.is_live(now))
    }

    /// Returns whether the holders are permits and the first of them requested another number than
    /// `mode`. A client of an earlier version does not find its own permit among them, so a waiter
    /// polls for it.
    fn is_of_another_number(&self, mode: Mode) -> bool {
        !self.slots.is_empty() && self.is_held_in(mode) && self.mode != mode
    }

    /// Returns the time until the holders admit another one in `mode`, if none is released or
    /// renewed before.
    fn free_in(&self, mode: Mode, now: Instant) -> Option<Duration> {
        let left = self.slots.iter().map(|slot| slot.expires - now);
        let Mode::Permits(wanted) = mode else {
            return left.max();
        };
        let mut left: SmallVec<[_; 8]> = left.collect();
        left.sort_unstable();
        left.get(left.len().saturating_sub(wanted.get() as usize))
            .copied()
    }

    /// Returns the time after which another attempt for `mode` is useful, if no holder is
    /// released or renewed before.
    pub(crate) fn holder_ttl(&self, mode: Mode, step: &Step<'_>) -> Option<Duration> {
        let now = step.now;
        match self.next_waiter(now) {
            // The others poll at their usual pace.
            next if step.is_guarded()
                && self.admits(mode)
                && next.is_none_or(|next| step.caller == Some(next.request.token)) =>
            {
                Some(GUARDED)
            }
            // The holders admit the request, but this waiter is before it, and is skipped unless
            // it polls.
            Some(next) if self.admits(mode) => Some(next.seen + Waiter::STALE_AFTER - now),
            _ => self.free_in(mode, now),
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
