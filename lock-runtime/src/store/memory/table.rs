//! What lies in a shard of the store, and what becomes of it. Decides only; it is told the time.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use foldhash::fast::RandomState;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    fence::FencingToken,
    key::LockKey,
    spec::{Family, Mode},
    store::{
        AcquireReply, ConvertReply, FORESIGHT, FORGOTTEN, Grant, HANDED_OVER, Hold, Holder, IfBusy,
        Inspection, KeyRequest, LONGEST_POLL, PollReply, RaiseReply, Release, ReleaseReply,
        RenewReply, Renewal, RevokeReply, STALE, Token, Waiter,
    },
};

#[cfg(test)]
mod probe;

/// The latest fencing token of all keys.
#[derive(Debug)]
pub(crate) struct Fences {
    latest: AtomicU64,
    /// When the first was asked for, by the clock of the steps and in microseconds since 1970.
    epoch: (Instant, u64),
}

impl Default for Fences {
    fn default() -> Self {
        let micros = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_micros() as u64);
        Self {
            latest: AtomicU64::new(0),
            epoch: (Instant::now(), micros),
        }
    }
}

impl Fences {
    /// The next token at `now`, with `spare` more reserved after it.
    fn next(&self, spare: u32, step: &Step<'_>) -> FencingToken {
        let (began, micros) = self.epoch;
        let micros = micros + step.now.saturating_duration_since(began).as_micros() as u64;
        let farthest = micros + FORESIGHT.as_micros() as u64;
        let micros = step
            .proposal
            .map_or(micros, |proposal| proposal.number().min(farthest));
        let next = |latest| FencingToken::next(FencingToken::new(latest), micros);
        let last = |latest| next(latest).later(spare).number();
        let (Ok(latest) | Err(latest)) =
            self.latest
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |latest| {
                    Some(last(latest))
                });
        next(latest)
    }

    /// Makes the next token larger than `fence`.
    pub(crate) fn raise(&self, fence: FencingToken) -> RaiseReply {
        let latest = FencingToken::new(self.latest.fetch_max(fence.number(), Ordering::Relaxed));
        latest
            .filter(|latest| *latest >= fence)
            .map_or(RaiseReply::Raised, |latest| RaiseReply::NotRaised {
                latest,
            })
    }

    fn latest(&self) -> Option<FencingToken> {
        FencingToken::new(self.latest.load(Ordering::Relaxed))
    }
}

/// One step: when it happens, and whom it gives a lock out of the line.
pub(crate) struct Step<'a> {
    pub(crate) now: Instant,
    fences: &'a Fences,
    /// What a grant's fencing token is to be, if that is possible.
    pub(crate) proposal: Option<FencingToken>,
    /// Whose reply tells of its grant, so that it needs no other word.
    caller: Option<Token>,
    /// To be told when nothing is locked any more.
    pub(crate) handed_over: Vec<(Hold, Grant)>,
    /// A holder was released, or granted a lease that ends before the next waiter polls: the next waiter is to be informed when
    /// the lock may be free.
    frees: bool,
    /// What may be free after that time, where the next waiter polls later. An event for the listeners as well.
    pub(crate) kept: Vec<(LockKey, Family, Duration)>,
    /// PROTOCOL 15 switched off: nobody in line is let in by this step.
    #[cfg(test)]
    pub(crate) lets_nobody_in: bool,
}

impl<'a> Step<'a> {
    pub(crate) fn new(now: Instant, fences: &'a Fences, caller: Option<Token>) -> Self {
        Self {
            now,
            fences,
            proposal: None,
            caller,
            handed_over: Vec::new(),
            frees: false,
            kept: Vec::new(),
            #[cfg(test)]
            lets_nobody_in: false,
        }
    }
}

type Map = HashMap<LockKey, Entry, RandomState>;

/// Some of the locks.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Table {
    locks: Map,
    permits: Map,
}

/// What lies under one name: at least one slot or one place in line, those that are over among them until somebody looks.
#[cfg_attr(test, derive(Clone))]
struct Entry {
    /// How the slots are held; of no meaning without one.
    mode: Mode,
    slots: SmallVec<[Slot; 1]>,
    line: VecDeque<Place>,
}

#[cfg_attr(test, derive(Clone))]
struct Slot {
    token: Token,
    /// Nobody's any more: it only blocks until it expires (`min_hold`).
    kept: bool,
    expires: Instant,
    /// The last one that is reserved for it.
    fence: FencingToken,
}

impl Slot {
    fn is_held_by(&self, token: Token) -> bool {
        self.token == token && !self.kept
    }

    fn grant(&self, now: Instant) -> Grant {
        Grant::new(self.fence, self.expires - now)
    }
}

/// A place in line.
#[cfg_attr(test, derive(Clone))]
struct Place {
    token: Token,
    mode: Mode,
    lease: Duration,
    spare: u32,
    seen: Instant,
}

impl Place {
    fn is_live(&self, now: Instant) -> bool {
        now < self.seen + STALE
    }

    /// With permits their number is part of the name.
    fn is_of(&self, hold: &Hold) -> bool {
        self.token == hold.token && (self.mode.family() == Family::Lock || self.mode == hold.mode)
    }
}

impl Entry {
    fn new(mode: Mode) -> Self {
        Self {
            mode,
            slots: SmallVec::new(),
            line: VecDeque::new(),
        }
    }

    fn slot(&mut self, mode: Mode, token: Token) -> Option<&mut Slot> {
        self.slots
            .iter_mut()
            .find(|slot| self.mode == mode && slot.is_held_by(token))
    }

    /// Do the holders let somebody in beside them?
    fn admits(&self, mode: Mode) -> bool {
        match (mode, self.mode) {
            _ if self.slots.is_empty() => true,
            (Mode::Shared, Mode::Shared) => true,
            (Mode::Permits(wanted), Mode::Permits(held)) => {
                wanted == held && self.slots.len() < held.get() as usize
            }
            _ => false,
        }
    }

    fn hold(&mut self, hold: &Hold, lease: Duration, spare: u32, step: &Step<'_>) -> Grant {
        let spare = if hold.mode == Mode::Exclusive {
            spare
        } else {
            0
        };
        let fence = step.fences.next(spare, step);
        self.mode = hold.mode;
        let slot = Slot {
            token: hold.token,
            kept: false,
            expires: step.now + lease,
            fence: fence.later(spare),
        };
        self.slots.push(slot);
        Grant::new(fence, lease).spare(spare)
    }

    /// Drops what is over, and hands the lock over to those whose turn it is (PROTOCOL 15).
    fn advance(&mut self, key: &LockKey, step: &mut Step<'_>) {
        let now = step.now;
        self.slots.retain(|slot| slot.expires > now);
        if self.line.is_empty() {
            return;
        }
        self.line.retain(|place| now < place.seen + FORGOTTEN);
        #[cfg(test)]
        if step.lets_nobody_in {
            return;
        }
        let mut index = 0;
        while let Some(place) = self.line.get(index) {
            if !place.is_live(now) {
                index += 1;
                continue;
            }
            if self.mode == place.mode && self.slots.iter().any(|slot| slot.is_held_by(place.token))
            {
                self.line.remove(index);
                continue;
            }
            if !self.admits(place.mode) {
                if step.frees
                    && let Some(ttl) = self.ends_in(now).filter(|ttl| *ttl < LONGEST_POLL)
                {
                    step.kept.push((key.clone(), place.mode.family(), ttl));
                }
                break;
            }
            let hold = Hold::new(key.clone(), place.mode, place.token);
            let (lease, spare) = (place.lease.min(HANDED_OVER), place.spare);
            self.line.remove(index);
            let grant = self.hold(&hold, lease, spare, step);
            // The next waiter's poll may come after the end of a short lease, which a dead process does not renew.
            step.frees |= lease < LONGEST_POLL;
            if step.caller != Some(hold.token) {
                step.handed_over.push((hold, grant));
            }
        }
    }

    fn next_waiter(&self, now: Instant) -> Option<&Place> {
        self.line.iter().find(|place| place.is_live(now))
    }

    /// The time until the holders admit another one, if none is released or renewed before.
    fn ends_in(&self, now: Instant) -> Option<Duration> {
        let left = self.slots.iter().map(|slot| slot.expires - now);
        if matches!(self.mode, Mode::Permits(_)) {
            left.min()
        } else {
            left.max()
        }
    }

    /// The time after which it is worth asking again for `mode`, if no holder is released or renewed before.
    fn holder_ttl(&self, mode: Mode, now: Instant) -> Option<Duration> {
        match self.next_waiter(now) {
            // The holders admit it, and this waiter is before it, which is passed over unless it polls.
            Some(next) if self.admits(mode) => Some(next.seen + STALE - now),
            _ => self.ends_in(now),
        }
    }

    /// Stands in line, or keeps the place it has.
    fn enqueue(&mut self, hold: &Hold, lease: Duration, spare: u32, now: Instant) {
        match self.line.iter_mut().find(|place| place.is_of(hold)) {
            Some(place) => place.seen = now,
            None => self.line.push_back(Place {
                token: hold.token,
                mode: hold.mode,
                lease,
                spare,
                seen: now,
            }),
        }
    }
}

/// What is said to a request before anything is granted.
pub(crate) enum Verdict {
    Free,
    Reply(AcquireReply),
}

impl Table {
    fn map(&mut self, family: Family) -> &mut Map {
        match family {
            Family::Lock => &mut self.locks,
            Family::Permits => &mut self.permits,
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.locks.len() + self.permits.len()
    }

    /// The entry of a key, advanced; none if nothing is left in it.
    fn advanced(
        &mut self,
        key: &LockKey,
        family: Family,
        step: &mut Step<'_>,
    ) -> Option<&mut Entry> {
        let map = self.map(family);
        let entry = map.get_mut(key)?;
        entry.advance(key, step);
        if entry.slots.is_empty() && entry.line.is_empty() {
            map.remove(key);
            return None;
        }
        map.get_mut(key)
    }

    /// After something was given back.
    fn settle(&mut self, key: &LockKey, family: Family, step: &mut Step<'_>) {
        self.advanced(key, family, step);
    }

    /// Whoever asks is still there.
    fn keep_place(&mut self, hold: &Hold, now: Instant) {
        if let Some(entry) = self.map(hold.mode.family()).get_mut(&hold.key) {
            entry.line.retain(|place| now < place.seen + FORGOTTEN);
            if let Some(place) = entry.line.iter_mut().find(|place| place.is_of(hold)) {
                place.seen = now;
            }
        }
    }

    /// How a request stands. Nothing is granted but to those in line.
    pub(crate) fn verdict(&mut self, request: &KeyRequest, step: &mut Step<'_>) -> Verdict {
        let Hold {
            ref key,
            mode,
            token,
        } = request.hold;
        let now = step.now;
        if now > request.deadline {
            return Verdict::Reply(AcquireReply::Late);
        }
        step.proposal = request.proposal;
        self.keep_place(&request.hold, now);
        let Some(entry) = self.advanced(key, mode.family(), step) else {
            return Verdict::Free;
        };
        if let Some(slot) = entry.slot(mode, token) {
            confirm(slot, mode, step);
            return Verdict::Reply(AcquireReply::Granted(slot.grant(now)));
        }
        if let (Mode::Permits(wanted), Mode::Permits(held)) = (mode, entry.mode)
            && wanted != held
            && !entry.slots.is_empty()
        {
            return Verdict::Reply(AcquireReply::ModeMismatch);
        }
        let is_of_a_group = mode == Mode::Shared
            && request
                .beside
                .is_some_and(|beside| entry.slots.iter().any(|slot| slot.is_held_by(beside)));
        if entry.admits(mode) && (is_of_a_group || entry.next_waiter(now).is_none()) {
            return Verdict::Free;
        }
        let holder_ttl = entry.holder_ttl(mode, now);
        if request.if_busy == IfBusy::Refuse {
            let has_waiters = entry.next_waiter(now).is_some();
            return Verdict::Reply(AcquireReply::Busy {
                holder_ttl,
                has_waiters,
            });
        }
        entry.enqueue(&request.hold, request.lease, request.spare, now);
        Verdict::Reply(AcquireReply::Queued {
            counter: step.fences.latest(),
            holder_ttl,
        })
    }

    /// Grants what [`verdict`](Self::verdict) found free.
    pub(crate) fn grant(&mut self, request: &KeyRequest, step: &Step<'_>) -> Grant {
        let Hold { ref key, mode, .. } = request.hold;
        let map = self.map(mode.family());
        if let Some(entry) = map.get_mut(key) {
            return entry.hold(&request.hold, request.lease, request.spare, step);
        }
        shrink(map, step.now);
        let entry = map.entry(key.clone()).or_insert_with(|| Entry::new(mode));
        entry.hold(&request.hold, request.lease, request.spare, step)
    }

    pub(crate) fn acquire(&mut self, request: &KeyRequest, step: &mut Step<'_>) -> AcquireReply {
        match self.verdict(request, step) {
            Verdict::Free => AcquireReply::Granted(self.grant(request, step)),
            Verdict::Reply(reply) => reply,
        }
    }

    pub(crate) fn poll(&mut self, hold: &Hold, step: &mut Step<'_>) -> PollReply {
        let now = step.now;
        self.keep_place(hold, now);
        let Some(entry) = self.advanced(&hold.key, hold.mode.family(), step) else {
            return PollReply::Gone;
        };
        let holder_ttl = entry.holder_ttl(hold.mode, now);
        if let Some(slot) = entry.slot(hold.mode, hold.token) {
            confirm(slot, hold.mode, step);
            return PollReply::Granted(slot.grant(now));
        }
        if entry.line.iter().any(|place| place.is_of(hold)) {
            return PollReply::Queued {
                counter: step.fences.latest(),
                holder_ttl,
            };
        }
        PollReply::Gone
    }

    /// The slot of a holder, if it still holds. Nobody in line is let in.
    fn held(&mut self, hold: &Hold, now: Instant) -> Option<&mut Slot> {
        let entry = self.map(hold.mode.family()).get_mut(&hold.key)?;
        entry.slots.retain(|slot| slot.expires > now);
        entry.slot(hold.mode, hold.token)
    }

    pub(crate) fn renew(&mut self, renewal: &Renewal, now: Instant) -> RenewReply {
        match self.held(&renewal.hold, now) {
            None => RenewReply::Gone,
            Some(slot) => {
                slot.expires = slot.expires.max(now + renewal.lease);
                RenewReply::Renewed {
                    ttl: slot.expires - now,
                }
            }
        }
    }

    pub(crate) fn release(&mut self, release: &Release, step: &mut Step<'_>) -> ReleaseReply {
        let (hold, now) = (&release.hold, step.now);
        let given_back = self.give_back(release, now);
        let Some(next) = release.next.filter(|_| hold.mode == Mode::Exclusive) else {
            step.frees = true;
            self.advanced(&hold.key, hold.mode.family(), step);
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
                PollReply::Gone => reply,
            };
        }
        let entry = self
            .locks
            .entry(hold.key.clone())
            .or_insert_with(|| Entry::new(Mode::Exclusive));
        entry.advance(&hold.key, step);
        if entry.admits(Mode::Exclusive) && entry.next_waiter(now).is_none() {
            return ReleaseReply::Passed(entry.hold(&next_hold, next.lease, next.spare, step));
        }
        entry.enqueue(&next_hold, next.lease, next.spare, now);
        ReleaseReply::Queued {
            counter: step.fences.latest(),
            holder_ttl: entry.holder_ttl(Mode::Exclusive, now),
        }
    }

    /// The reply; `Err` where there was nothing to give back.
    fn give_back(&mut self, release: &Release, now: Instant) -> Result<ReleaseReply, ReleaseReply> {
        let hold = &release.hold;
        let Some(entry) = self.map(hold.mode.family()).get_mut(&hold.key) else {
            return Err(ReleaseReply::NotHeld);
        };
        entry.slots.retain(|slot| slot.expires > now);
        if entry.mode != hold.mode {
            return Err(ReleaseReply::NotHeld);
        }
        let Some(index) = entry
            .slots
            .iter()
            .position(|slot| slot.is_held_by(hold.token))
        else {
            let kept = entry.slots.iter().any(|slot| slot.token == hold.token);
            return Err(if kept {
                ReleaseReply::Released
            } else {
                ReleaseReply::NotHeld
            });
        };
        let slot = &mut entry.slots[index];
        match kept_for(release) {
            Some(keep_for) => {
                slot.kept = true;
                slot.expires = now + keep_for;
                let fence = slot.fence;
                // The token may have been kept before, when a straggling request took the lock once more.
                entry
                    .slots
                    .retain(|slot| slot.token != hold.token || slot.fence == fence);
            }
            None => {
                entry.slots.swap_remove(index);
            }
        }
        Ok(ReleaseReply::Released)
    }

    pub(crate) fn abandon(&mut self, hold: &Hold, step: &mut Step<'_>) {
        if let Some(entry) = self.map(hold.mode.family()).get_mut(&hold.key) {
            entry.line.retain(|place| !place.is_of(hold));
        }
        self.release(&Release::new(hold.clone()), step);
    }

    pub(crate) fn convert(&mut self, hold: &Hold, step: &mut Step<'_>) -> ConvertReply {
        if hold.mode.family() != Family::Lock {
            return ConvertReply::NotHeld;
        }
        let now = step.now;
        let Some(entry) = self.advanced(&hold.key, Family::Lock, step) else {
            return ConvertReply::NotHeld;
        };
        let Some(slot) = entry
            .slots
            .iter_mut()
            .find(|slot| slot.is_held_by(hold.token))
        else {
            return ConvertReply::NotHeld;
        };
        slot.fence = step.fences.next(0, step);
        let grant = slot.grant(now);
        entry.mode = Mode::Shared;
        // Readers in front of the line may come in.
        entry.advance(&hold.key, step);
        ConvertReply::Converted(grant)
    }

    pub(crate) fn inspect(&self, key: &LockKey, family: Family, now: Instant) -> Inspection {
        let map = match family {
            Family::Lock => &self.locks,
            Family::Permits => &self.permits,
        };
        let Some(entry) = map.get(key) else {
            return Inspection::default();
        };
        let living = || entry.slots.iter().filter(|slot| slot.expires > now);
        let mut holders: Vec<_> = living()
            .map(|slot| Holder::new(entry.mode, Some(slot.expires - now)))
            .collect();
        holders.sort_by_key(|holder| holder.ttl);
        let remembered = entry
            .line
            .iter()
            .filter(|place| now < place.seen + FORGOTTEN);
        let waiter = |place: &Place| {
            Waiter::new(
                place.mode,
                place.lease,
                now.saturating_duration_since(place.seen),
            )
        };
        Inspection {
            holders,
            waiters: remembered.map(waiter).collect(),
            fence: living().map(|slot| slot.fence).max(),
        }
    }

    /// Who held the lock that was revoked.
    pub(crate) fn revoke(
        &mut self,
        key: &LockKey,
        family: Family,
        step: &mut Step<'_>,
    ) -> (RevokeReply, Vec<Token>) {
        let now = step.now;
        let Some(entry) = self.map(family).get_mut(key) else {
            return (RevokeReply::NotHeld, Vec::new());
        };
        entry.slots.retain(|slot| slot.expires > now);
        let holders: Vec<_> = entry.slots.drain(..).map(|slot| slot.token).collect();
        self.settle(key, family, step);
        (
            if holders.is_empty() {
                RevokeReply::NotHeld
            } else {
                RevokeReply::Revoked
            },
            holders,
        )
    }
}

/// How long what is given back is kept for nobody.
fn kept_for(release: &Release) -> Option<Duration> {
    // With somebody to take it up the lock does not become free, so there is nothing to keep it from.
    release
        .keep_for
        .filter(|keep_for| !keep_for.is_zero() && release.next.is_none())
}

/// A grant that is told again. A reader's own fencing token may not be the latest, so it is told a larger one.
fn confirm(slot: &mut Slot, mode: Mode, step: &Step<'_>) {
    if mode != Mode::Exclusive {
        slot.fence = step.fences.next(0, step);
    }
}

/// Drops what is over before the map has to grow, so that locks nobody released do not pile up.
fn shrink(map: &mut Map, now: Instant) {
    if map.len() == map.capacity() {
        map.retain(|_, entry| {
            entry.slots.iter().any(|slot| slot.expires > now)
                || entry.line.iter().any(|place| now < place.seen + FORGOTTEN)
        });
    }
}
