//! Locks and the operations on them, for the in-memory store and for stores of records. Pure logic:
//! the time is an argument.

pub(crate) mod entry;
#[cfg(test)]
#[path = "../../../sim/table.rs"]
mod simulated;
mod step;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, ops::DerefMut, time::Duration};

use foldhash::fast::RandomState;

use self::entry::{Entry, Place, Recorded, Slot};
use crate::{
    request::key::LockKey,
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Done, Grant, Hold, Holder, HolderId, Identity,
        IfBusy, Inspection, KeyPart, KeyRequest, MAX_PROPOSAL_SKEW, NextHolder, PollReply, Release,
        ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope, StoreEvent, Waiter,
    },
};

pub(crate) use self::step::{Fences, Step};

type Map = HashMap<LockKey, Entry, RandomState>;

/// Some of the locks.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Table {
    /// Of each kind.
    maps: [Map; 2],
}

/// Grants all requests or none, each in the table at its `place`.
pub(crate) fn acquire_all(
    tables: &mut [impl DerefMut<Target = Table>],
    place: impl Fn(&KeyRequest) -> usize,
    requests: &[KeyRequest],
    step: &mut Step<'_>,
) -> AcquireAllReply {
    let mut grants = Vec::with_capacity(requests.len());
    for (index, request) in requests.iter().enumerate() {
        // A request for several keys is never queued, whatever it says.
        let request = &KeyRequest {
            if_busy: IfBusy::Refuse,
            ..request.clone()
        };
        match tables[place(request)].verdict(request, step) {
            None => grants.push(None),
            Some(AcquireReply::Granted(grant)) => grants.push(Some(grant)),
            Some(reply) => return AcquireAllReply::Refused { index, reply },
        }
    }
    let grant_one = |(request, grant): (&KeyRequest, Option<_>)| {
        grant.unwrap_or_else(|| tables[place(request)].grant(request, step))
    };
    AcquireAllReply::Granted(requests.iter().zip(grants).map(grant_one).collect())
}

impl Table {
    fn map(&mut self, kind: LockKind) -> &mut Map {
        &mut self.maps[kind as usize]
    }

    fn entry(&self, key: &LockKey, kind: LockKind) -> Option<&Entry> {
        self.maps[kind as usize].get(key)
    }

    /// Adds a lock that is kept elsewhere.
    pub(crate) fn insert(&mut self, key: &LockKey, kind: LockKind, entry: Entry) {
        self.map(kind).insert(key.clone(), entry);
    }

    /// Returns a lock, to be kept elsewhere.
    #[cfg(feature = "records")]
    pub(in crate::store) fn remove(&mut self, key: &LockKey, kind: LockKind) -> Option<Entry> {
        self.map(kind).remove(key)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.maps.iter().map(Map::len).sum()
    }

    /// Advances the wait queue of a key. Returns its entry unless it is empty.
    fn advanced(
        &mut self,
        key: &LockKey,
        kind: LockKind,
        step: &mut Step<'_>,
    ) -> Option<&mut Entry> {
        let map = self.map(kind);
        let entry = map.get_mut(key)?;
        entry.advance(key, step);
        if entry.slots.is_empty() && entry.line.is_empty() {
            map.remove(key);
            return None;
        }
        map.get_mut(key)
    }

    /// Keeps the queue entry of the caller alive, and advances the wait queue.
    fn kept_alive(&mut self, hold: &Hold, step: &mut Step<'_>) -> Option<&mut Entry> {
        let kind = hold.mode.kind();
        step.asks = Some(hold.mode);
        let entry = self.map(kind).get_mut(&hold.key)?;
        entry.line.retain(|place| place.is_queued(step.now));
        if let Some(place) = entry.line.iter_mut().find(|place| place.is_of(hold)) {
            place.seen = step.latest;
        }
        self.advanced(&hold.key, kind, step)
    }

    /// Evaluates a request. Returns the reply, or `None` if it is to be granted. Grants nothing,
    /// except to waiters in the queue.
    pub(crate) fn verdict(
        &mut self,
        request: &KeyRequest,
        step: &mut Step<'_>,
    ) -> Option<AcquireReply> {
        let (mode, now) = (request.hold.mode, step.now);
        if now > request.deadline {
            return Some(AcquireReply::Late);
        }
        let (key, kind) = (&request.hold.key, mode.kind());
        if self.kept_alive(&request.hold, step).is_none() {
            if !step.grants_nothing {
                return None;
            }
            if step.is_exhausted {
                return Some(AcquireReply::ForeignKey(KeyPart::Fence));
            }
            self.insert(key, kind, Entry::new(mode));
        }
        let entry = self.map(kind).get_mut(key)?;
        if let Some(done) = entry.refuse_done(&request.hold, step) {
            return Some(AcquireReply::Done(done));
        }
        if let Some(grant) = entry.repeated(&request.hold, step) {
            return Some(AcquireReply::Granted(grant));
        }
        if step.is_exhausted {
            return Some(AcquireReply::ForeignKey(KeyPart::Fence));
        }
        let group = request.reader_group.filter(|_| mode == Mode::Shared);
        let is_of_a_group = group.is_some_and(|reader| entry.is_held_by(reader));
        let is_next = is_of_a_group || entry.next_waiter(now).is_none();
        if entry.admits(mode) && is_next && !step.grants_nothing {
            return None;
        }
        let holder_ttl = entry.holder_ttl(mode, step);
        if request.if_busy == IfBusy::Refuse {
            let has_waiters = entry.next_waiter(now).is_some();
            if !has_waiters && entry.retaining().is_some() {
                return Some(AcquireReply::Retained { holder_ttl });
            }
            return Some(AcquireReply::Busy {
                holder_ttl,
                has_waiters,
            });
        }
        entry.enqueue(&request.hold, new_holder(request), step);
        entry.want(&request.hold, step);
        Some(AcquireReply::Queued {
            counter: step.fences.latest(),
            holder_ttl,
        })
    }

    /// Grants a request that [`verdict`](Self::verdict) found free.
    pub(crate) fn grant(&mut self, request: &KeyRequest, step: &Step<'_>) -> Grant {
        let Hold { ref key, mode, .. } = request.hold;
        let map = self.map(mode.kind());
        if let Some(entry) = map.get_mut(key) {
            return entry.hold(mode, new_holder(request), step);
        }
        shrink(map, step.now);
        let entry = map.entry(key.clone()).or_insert_with(|| Entry::new(mode));
        entry.hold(mode, new_holder(request), step)
    }

    pub(crate) fn acquire(&mut self, request: &KeyRequest, step: &mut Step<'_>) -> AcquireReply {
        step.proposal = request.proposal;
        self.verdict(request, step)
            .unwrap_or_else(|| AcquireReply::Granted(self.grant(request, step)))
    }

    pub(crate) fn poll(&mut self, hold: &Hold, step: &mut Step<'_>) -> PollReply {
        let Some(entry) = self.kept_alive(hold, step) else {
            return PollReply::Gone;
        };
        if let Some(done) = entry.refuse_done(hold, step) {
            return PollReply::Done(done);
        }
        if let Some(grant) = entry.repeated(hold, step) {
            return PollReply::Granted(grant);
        }
        if entry.line.iter().any(|place| place.is_of(hold)) {
            entry.want(hold, step);
            return PollReply::Queued {
                counter: step.fences.latest(),
                holder_ttl: entry.holder_ttl(hold.mode, step),
            };
        }
        PollReply::Gone
    }

    /// Returns the slot of a holder that still holds the lock. Does not advance the wait queue.
    fn held(&mut self, hold: &Hold, now: Instant) -> Option<&mut Slot> {
        let entry = self.map(hold.mode.kind()).get_mut(&hold.key)?;
        entry.expire(now);
        entry.slot(hold.mode, hold.token)
    }

    /// Renews a hold, or only queries it if the lease is zero.
    pub(crate) fn renew(&mut self, renewal: &Renewal, now: Instant, begins: Instant) -> RenewReply {
        let held = self.held(&renewal.hold, now);
        held.map_or(RenewReply::Gone, |slot| {
            if !renewal.lease.is_zero() {
                slot.expires = slot.expires.max(begins + renewal.lease);
            }
            if let Some(at_most) = renewal.at_most {
                slot.expires = slot.expires.min(begins + at_most);
            }
            RenewReply::Renewed {
                ttl: slot.expires - now,
            }
        })
    }

    pub(crate) fn release(&mut self, release: &Release, step: &mut Step<'_>) -> ReleaseReply {
        let (hold, now) = (&release.hold, step.now);
        let given_back = self.give_back(release, step);
        let Some(next) = release.next.filter(|_| hold.mode == Mode::Exclusive) else {
            step.frees = true;
            let entry = self.advanced(&hold.key, hold.mode.kind(), step);
            if let Some(entry) = entry.filter(|entry| entry.is_done(now)) {
                entry.announce_done(&hold.key, step);
            }
            return given_back.unwrap_or_else(|reply| reply);
        };
        let next_hold = Hold::new(hold.key.clone(), Mode::Exclusive, next.token);
        step.caller = Some(next.token);
        if let Err(reply) = given_back {
            // The reply to an earlier release may have been lost.
            return match self.poll(&next_hold, step) {
                PollReply::Granted(grant) => ReleaseReply::Passed(grant),
                PollReply::Queued {
                    counter,
                    holder_ttl,
                } => ReleaseReply::Queued {
                    counter,
                    holder_ttl,
                },
                PollReply::Gone | PollReply::Done(_) => reply,
            };
        }
        let entry = self.map(LockKind::Lock).entry(hold.key.clone());
        let entry = entry.or_insert_with(|| Entry::new(Mode::Exclusive));
        entry.advance(&hold.key, step);
        let is_next = entry.admits(Mode::Exclusive) && entry.next_waiter(now).is_none();
        if is_next && !step.grants_nothing {
            return ReleaseReply::Passed(entry.hold(Mode::Exclusive, next, step));
        }
        entry.enqueue(&next_hold, next, step);
        ReleaseReply::Queued {
            counter: step.fences.latest(),
            holder_ttl: entry.holder_ttl(Mode::Exclusive, step),
        }
    }

    /// Releases a hold. Returns `Err` with the reply if there was nothing to release.
    fn give_back(
        &mut self,
        release: &Release,
        step: &Step<'_>,
    ) -> Result<ReleaseReply, ReleaseReply> {
        let hold = &release.hold;
        let entry = self.map(hold.mode.kind()).get_mut(&hold.key);
        let Some(entry) = entry.filter(|entry| entry.is_held_in(hold.mode)) else {
            return Err(ReleaseReply::NotHeld);
        };
        entry.expire(step.now);
        let slots = &mut entry.slots;
        let Some(index) = slots.iter().position(|slot| slot.is_held_by(hold.token)) else {
            let kept = slots.iter().any(|slot| slot.token == hold.token);
            return Err(if kept {
                ReleaseReply::Released
            } else {
                ReleaseReply::NotHeld
            });
        };
        let slot = slots.swap_remove(index);
        // With a `next`, the lock does not become free, so there is nothing to reserve.
        let keep_for = release.keep_for.filter(|_| release.next.is_none());
        if let Some(keep_for) = keep_for.filter(|keep_for| !keep_for.is_zero()) {
            // The token may have an earlier reserved slot, if a delayed request acquired the lock
            // again.
            slots.retain(|slot| slot.token != hold.token);
            let result = release.result.clone().map(|(fence, value)| {
                let at = step.fences.micros(step.latest);
                Box::new(Recorded { fence, at, value })
            });
            slots.push(Slot {
                kept: true,
                expires: step.latest + keep_for,
                result,
                ..slot
            });
        }
        Ok(ReleaseReply::Released)
    }

    pub(crate) fn abandon(&mut self, hold: &Hold, step: &mut Step<'_>) {
        if let Some(entry) = self.map(hold.mode.kind()).get_mut(&hold.key) {
            entry.line.retain(|place| !place.is_of(hold));
        }
        self.release(&Release::new(hold.clone()), step);
    }

    pub(crate) fn convert(&mut self, hold: &Hold, step: &mut Step<'_>) -> ConvertReply {
        self.converted(hold, step)
            .map_or(ConvertReply::NotHeld, ConvertReply::Converted)
    }

    fn converted(&mut self, hold: &Hold, step: &mut Step<'_>) -> Option<Grant> {
        if hold.mode.kind() != LockKind::Lock || step.is_exhausted {
            return None;
        }
        let entry = self.advanced(&hold.key, LockKind::Lock, step)?;
        let mut slots = entry.slots.iter_mut();
        let slot = slots.find(|slot| slot.is_held_by(hold.token))?;
        slot.fence = step.fences.next(0, step);
        let grant = slot.grant(step.now);
        entry.mode = Mode::Shared;
        // Readers at the front of the queue may be admitted now.
        entry.advance(&hold.key, step);
        Some(grant)
    }

    /// Returns the locks whose names begin with `prefix`.
    pub(in crate::store) fn names(&self, prefix: &str, now: Instant) -> Vec<(LockKey, LockKind)> {
        let kinds = [LockKind::Lock, LockKind::Permits].into_iter();
        let taken = |kind: LockKind| {
            let entries = self.maps[kind as usize].iter();
            let taken = entries.filter(move |(_, entry)| entry.is_taken(now));
            taken.map(move |(key, _)| (key.clone(), kind))
        };
        let all = kinds.flat_map(taken);
        all.filter(|(key, _)| key.as_str().starts_with(prefix))
            .collect()
    }

    /// Returns the result of a lock that is done.
    pub(crate) fn done(&self, key: &LockKey, now: Instant) -> Option<Done> {
        self.entry(key, LockKind::Lock)?.done(key, now)
    }

    pub(crate) fn inspect(&self, key: &LockKey, kind: LockKind, step: &Step<'_>) -> Inspection {
        let now = step.now;
        let Some(entry) = self.entry(key, kind) else {
            return Inspection::default();
        };
        let micros = step.fences.micros(now);
        let holder = |slot: &Slot| {
            let id = HolderId::of(key, slot.token, slot.kept);
            let client = Identity::unnamed(slot.token.client());
            // The number of a fencing token is the time of its grant, or a little ahead.
            let (since, skew) = (slot.fence.number(), MAX_PROPOSAL_SKEW.as_micros() as u64);
            let is_known = since <= micros.saturating_add(skew);
            let age = is_known.then(|| micros.saturating_sub(since));
            Holder::new(id, entry.mode, Some(slot.expires - now), client)
                .reservation(slot.kept)
                .done(slot.result.is_some())
                .held_for(age.map(Duration::from_micros))
        };
        let mut holders: Vec<_> = entry.living(now).map(holder).collect();
        holders.sort_by_key(|holder| holder.ttl);
        let waiter = |place: &Place| {
            let silent = place.silence(now);
            let client = Identity::unnamed(place.request.token.client());
            let waited = now.saturating_duration_since(place.came);
            Waiter::new(place.mode, place.request.lease, silent, client).waited(Some(waited))
        };
        Inspection {
            holders,
            waiters: entry.queued(now).map(waiter).collect(),
            fence: entry.living(now).map(|slot| slot.fence).max(),
            ..Inspection::default()
        }
    }

    pub(crate) fn revoke(
        &mut self,
        key: &LockKey,
        kind: LockKind,
        scope: RevokeScope,
        step: &mut Step<'_>,
    ) -> RevokeReply {
        let Some(entry) = self.map(kind).get_mut(key) else {
            return RevokeReply::NotHeld;
        };
        entry.expire(step.now);
        let is_meant = |slot: &Slot| match scope {
            RevokeScope::Holder(id) => HolderId::of(key, slot.token, slot.kept) == id,
            RevokeScope::Leased | RevokeScope::AlsoEndless => true,
        };
        let (before, events) = (entry.slots.len(), &mut step.events);
        entry.slots.retain(|slot| {
            if is_meant(slot) {
                let token = slot.token;
                events.push(StoreEvent::Revoked { token });
            }
            !is_meant(slot)
        });
        let reply = match before - entry.slots.len() {
            _ if before == 0 => RevokeReply::NotHeld,
            0 => RevokeReply::Changed,
            _ => RevokeReply::Revoked,
        };
        self.advanced(key, kind, step);
        reply
    }
}

fn new_holder(request: &KeyRequest) -> NextHolder {
    NextHolder::new(request.hold.token, request.lease, request.reserved)
}

/// Drops expired entries before the map has to grow, so that locks that are never released do not
/// pile up.
fn shrink(map: &mut Map, now: Instant) {
    if map.len() == map.capacity() {
        map.retain(|_, entry| entry.is_taken(now));
        // Otherwise each of the next insertions might visit all entries for a few expired ones.
        map.reserve(map.len());
    }
}
