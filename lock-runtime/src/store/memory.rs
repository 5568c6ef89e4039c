//! Locks in this process: the embedded default, and the reference that every other store is tested against.

use std::{
    collections::HashMap,
    fmt,
    hash::BuildHasher,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use foldhash::fast::RandomState;
use futures_util::future::BoxFuture;
use tokio::{sync::mpsc::UnboundedSender, time::Instant};

use super::{
    AcquireAllReply, AcquireReply, ConvertReply, Events, Grant, Hold, Holder, Inspection, KeyRequest, PollReply,
    Release, ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope, Store, StoreError, StoreEvent, Token,
};
use crate::{
    fence::FencingToken,
    key::LockKey,
    spec::{Family, Mode},
    sync::lock,
};

/// Enough that tasks on two different keys rarely meet, few enough that an idle store is small.
const SHARDS: usize = 32;

/// A store in this process. It never fails, and forgets everything when it is dropped.
///
/// Time is tokio's, so a paused clock works. Fencing tokens come from one counter for all keys: that keeps them
/// increasing per key without a memory of keys that nobody holds.
pub struct MemoryStore {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    latest_fence: AtomicU64,
    listeners: Mutex<Vec<UnboundedSender<StoreEvent>>>,
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Shard {
    locks: HashMap<LockKey, Entry, RandomState>,
    permits: HashMap<LockKey, Entry, RandomState>,
}

/// What lies under one name: always at least one slot, the expired ones among them until somebody looks.
struct Entry {
    mode: Mode,
    slots: Vec<Slot>,
}

struct Slot {
    token: Token,
    /// Nobody's any more: it only blocks until it expires (`min_hold`).
    kept: bool,
    expires: Instant,
    fence: FencingToken,
}

impl Slot {
    fn is_held_by(&self, token: Token) -> bool {
        self.token == token && !self.kept
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::default(),
            latest_fence: AtomicU64::new(0),
            listeners: Mutex::default(),
        }
    }

    fn shard_of(&self, key: &LockKey) -> usize {
        // The bits that the maps within a shard do not use first.
        (self.hasher.hash_one(key) >> 32) as usize % SHARDS
    }

    fn shard(&self, key: &LockKey) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.shard_of(key)])
    }

    fn next_fence(&self) -> FencingToken {
        let micros = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let next = |latest| FencingToken::next(FencingToken::new(latest), micros);
        let update =
            self.latest_fence.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |latest| Some(next(latest).number()));
        let (Ok(latest) | Err(latest)) = update;
        next(latest)
    }

    fn grant(&self, shard: &mut Shard, request: &KeyRequest, now: Instant) -> Grant {
        let Hold { ref key, mode, token } = request.hold;
        let fence = self.next_fence();
        let slot = Slot { token, kept: false, expires: now + request.lease, fence };
        let map = shard.map(mode.family());
        match map.get_mut(key) {
            Some(entry) => match entry.slots.iter_mut().find(|slot| slot.is_held_by(token)) {
                // A repeated shared request: the same time, a larger token.
                Some(slot) => {
                    slot.fence = fence;
                    return Grant::new(fence, slot.expires - now);
                }
                None => entry.slots.push(slot),
            },
            None => {
                shrink(map, now);
                map.insert(key.clone(), Entry { mode, slots: vec![slot] });
            }
        }
        Grant::new(fence, request.lease)
    }

    fn acquire_now(&self, request: &KeyRequest) -> AcquireReply {
        let now = Instant::now();
        let mut shard = self.shard(&request.hold.key);
        match shard.verdict(request, now) {
            Verdict::Free => AcquireReply::Granted(self.grant(&mut shard, request, now)),
            Verdict::Reply(reply) => reply,
        }
    }

    fn acquire_all_now(&self, requests: &[KeyRequest]) -> AcquireAllReply {
        let now = Instant::now();
        let mut order: Vec<usize> = requests.iter().map(|request| self.shard_of(&request.hold.key)).collect();
        order.sort_unstable();
        order.dedup();
        // Every caller locks shards from the first to the last, so two callers cannot wait for each other.
        let mut shards: Vec<_> = order.iter().map(|&index| lock(&self.shards[index])).collect();
        let place = |request: &KeyRequest| order.binary_search(&self.shard_of(&request.hold.key)).unwrap_or_default();

        let mut grants = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            match shards[place(request)].verdict(request, now) {
                Verdict::Free => grants.push(None),
                Verdict::Reply(AcquireReply::Granted(grant)) => grants.push(Some(grant)),
                Verdict::Reply(reply) => return AcquireAllReply::Refused { index, reply },
            }
        }
        let grant_one = |(request, grant): (&KeyRequest, Option<Grant>)| {
            grant.unwrap_or_else(|| self.grant(&mut shards[place(request)], request, now))
        };
        AcquireAllReply::Granted(requests.iter().zip(grants).map(grant_one).collect())
    }

    fn poll_now(&self, hold: &Hold) -> PollReply {
        let now = Instant::now();
        let mut shard = self.shard(&hold.key);
        match shard.slot(hold, now) {
            None => PollReply::Gone,
            Some(slot) => {
                if hold.mode != Mode::Exclusive {
                    slot.fence = self.next_fence();
                }
                PollReply::Granted(Grant::new(slot.fence, slot.expires - now))
            }
        }
    }

    fn renew_now(&self, renewal: &Renewal) -> RenewReply {
        let now = Instant::now();
        let mut shard = self.shard(&renewal.hold.key);
        match shard.slot(&renewal.hold, now) {
            None => RenewReply::Gone,
            Some(slot) => {
                slot.expires = slot.expires.max(now + renewal.lease);
                RenewReply::Renewed { ttl: slot.expires - now }
            }
        }
    }

    fn release_now(&self, release: &Release) -> ReleaseReply {
        let now = Instant::now();
        let hold = &release.hold;
        let family = hold.mode.family();
        let mut shard = self.shard(&hold.key);
        let Some(entry) = shard.live(&hold.key, family, now) else { return ReleaseReply::NotHeld };
        let next = release.next.filter(|_| hold.mode == Mode::Exclusive);
        if let (Mode::Exclusive, Some((next, _))) = (entry.mode, next)
            && let [slot] = entry.slots.as_slice()
            && slot.is_held_by(next)
        {
            return ReleaseReply::Passed(Grant::new(slot.fence, slot.expires - now));
        }
        if entry.mode != hold.mode {
            return ReleaseReply::NotHeld;
        }
        let Some(index) = entry.slots.iter().position(|slot| slot.is_held_by(hold.token)) else {
            let kept = entry.slots.iter().any(|slot| slot.token == hold.token);
            return if kept { ReleaseReply::Released } else { ReleaseReply::NotHeld };
        };
        let slot = &mut entry.slots[index];
        if let Some((token, lease)) = next {
            let fence = self.next_fence();
            *slot = Slot { token, kept: false, expires: now + lease, fence };
            return ReleaseReply::Passed(Grant::new(fence, lease));
        }
        match release.keep_for {
            Some(keep_for) if !keep_for.is_zero() => {
                slot.kept = true;
                slot.expires = now + keep_for;
                let fence = slot.fence;
                // The token may have been kept before, when a straggling request took the lock once more.
                entry.slots.retain(|slot| slot.token != hold.token || slot.fence == fence);
            }
            _ => {
                entry.slots.swap_remove(index);
                if entry.slots.is_empty() {
                    shard.map(family).remove(&hold.key);
                }
            }
        }
        ReleaseReply::Released
    }

    fn convert_now(&self, hold: &Hold) -> ConvertReply {
        if hold.mode.family() != Family::Lock {
            return ConvertReply::NotHeld;
        }
        let now = Instant::now();
        let mut shard = self.shard(&hold.key);
        let Some(entry) = shard.live(&hold.key, Family::Lock, now) else { return ConvertReply::NotHeld };
        let Some(slot) = entry.slots.iter_mut().find(|slot| slot.is_held_by(hold.token)) else {
            return ConvertReply::NotHeld;
        };
        slot.fence = self.next_fence();
        entry.mode = Mode::Shared;
        ConvertReply::Converted(Grant::new(slot.fence, slot.expires - now))
    }

    fn inspect_now(&self, key: &LockKey, family: Family) -> Inspection {
        let now = Instant::now();
        let mut shard = self.shard(key);
        let Some(entry) = shard.live(key, family, now) else { return Inspection::default() };
        let holder = |slot: &Slot| Holder::new(entry.mode, Some(slot.expires - now));
        let mut holders: Vec<_> = entry.slots.iter().map(holder).collect();
        holders.sort_by_key(|holder| holder.ttl);
        Inspection { holders, fence: entry.slots.iter().map(|slot| slot.fence).max() }
    }

    fn revoke_now(&self, key: &LockKey, family: Family) -> RevokeReply {
        let now = Instant::now();
        let mut shard = self.shard(key);
        if shard.live(key, family, now).is_none() {
            return RevokeReply::NotHeld;
        }
        let revoked = shard.map(family).remove(key);
        drop(shard);
        for slot in revoked.iter().flat_map(|entry| &entry.slots) {
            lock(&self.listeners).retain(|listener| listener.send(StoreEvent::Revoked { token: slot.token }).is_ok());
        }
        RevokeReply::Revoked
    }
}

/// Drops what has expired before the map has to grow, so that locks nobody released do not pile up.
fn shrink(map: &mut HashMap<LockKey, Entry, RandomState>, now: Instant) {
    if map.len() == map.capacity() {
        map.retain(|_, entry| entry.slots.iter().any(|slot| slot.expires > now));
    }
}

enum Verdict {
    Free,
    Reply(AcquireReply),
}

impl Shard {
    fn map(&mut self, family: Family) -> &mut HashMap<LockKey, Entry, RandomState> {
        match family {
            Family::Lock => &mut self.locks,
            Family::Permits => &mut self.permits,
        }
    }

    /// The entry of a key without its expired slots; none if no slot is left.
    fn live(&mut self, key: &LockKey, family: Family, now: Instant) -> Option<&mut Entry> {
        let map = self.map(family);
        let entry = map.get_mut(key)?;
        entry.slots.retain(|slot| slot.expires > now);
        if entry.slots.is_empty() {
            map.remove(key);
            return None;
        }
        map.get_mut(key)
    }

    fn slot(&mut self, hold: &Hold, now: Instant) -> Option<&mut Slot> {
        let entry = self.live(&hold.key, hold.mode.family(), now).filter(|entry| entry.mode == hold.mode)?;
        entry.slots.iter_mut().find(|slot| slot.is_held_by(hold.token))
    }

    fn verdict(&mut self, request: &KeyRequest, now: Instant) -> Verdict {
        let Hold { ref key, mode, token } = request.hold;
        if now > request.deadline {
            return Verdict::Reply(AcquireReply::Late);
        }
        let Some(entry) = self.live(key, mode.family(), now) else { return Verdict::Free };
        let longest = entry.slots.iter().map(|slot| slot.expires - now).max();
        let busy = |holder_ttl| Verdict::Reply(AcquireReply::Busy { holder_ttl });
        let own = entry.slots.iter().find(|slot| slot.is_held_by(token));
        match (mode, entry.mode) {
            (Mode::Exclusive, Mode::Exclusive) => match own {
                Some(slot) => Verdict::Reply(AcquireReply::Granted(Grant::new(slot.fence, slot.expires - now))),
                None => busy(longest),
            },
            (Mode::Shared, Mode::Shared) => Verdict::Free,
            (Mode::Permits(wanted), Mode::Permits(held)) if wanted == held => {
                if own.is_some() || entry.slots.len() < held.get() as usize {
                    Verdict::Free
                } else {
                    busy(entry.slots.iter().map(|slot| slot.expires - now).min())
                }
            }
            (Mode::Permits(_), Mode::Permits(_)) => Verdict::Reply(AcquireReply::ModeMismatch),
            _ => busy(longest),
        }
    }
}

/// An operation that is executed when its future is polled, and has no await point.
fn now<'a, T>(operation: impl FnOnce() -> T + Send + 'a) -> BoxFuture<'a, Result<T, StoreError>> {
    Box::pin(async move { Ok(operation()) })
}

impl Store for MemoryStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        now(|| self.acquire_now(request))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        now(|| self.acquire_all_now(requests))
    }

    fn poll<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<PollReply, StoreError>> {
        now(|| self.poll_now(hold))
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        Box::pin(async { renewals.iter().map(|renewal| Ok(self.renew_now(renewal))).collect() })
    }

    fn release<'a>(&'a self, release: &'a Release) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        now(|| self.release_now(release))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        now(|| self.convert_now(hold))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        now(|| {
            self.release_now(&Release::new(hold.clone()));
        })
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, family: Family) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        now(move || self.inspect_now(key, family))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
        _scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        now(move || self.revoke_now(key, family))
    }

    fn events(&self) -> Events {
        let (sender, events) = Events::channel();
        let mut listeners = lock(&self.listeners);
        listeners.retain(|listener| !listener.is_closed());
        listeners.push(sender);
        events
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn request(key: &str, mode: Mode) -> KeyRequest {
        let hold = Hold::new(LockKey::new(key).unwrap(), mode, Token::random());
        KeyRequest::new(hold, Duration::from_secs(30), Instant::now() + Duration::from_secs(1))
    }

    #[tokio::test(start_paused = true)]
    async fn locks_that_nobody_released_do_not_pile_up() {
        let store = MemoryStore::new();
        for i in 0..100_000 {
            let granted = store.acquire_now(&request(&format!("k{i}"), Mode::Exclusive));
            assert!(matches!(granted, AcquireReply::Granted(_)));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let kept: usize = store.shards.iter().map(|shard| lock(shard).locks.len()).sum();
        assert!(kept < 1_000, "{kept} entries");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_executed_after_its_deadline_does_nothing() {
        let store = MemoryStore::new();
        let late = request("k", Mode::Exclusive);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(store.acquire_now(&late), AcquireReply::Late);
        assert!(store.inspect_now(&late.hold.key, Family::Lock).holders.is_empty());
    }
}
