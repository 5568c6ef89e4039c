//! The in-memory store: the embedded default, and the reference against which every other store
//! is tested.

use std::{
    collections::HashMap,
    fmt,
    future::ready,
    hash::BuildHasher as _,
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Duration,
};

use foldhash::fast::RandomState;
use futures_util::future::BoxFuture;

use super::{
    AcquireAllReply, AcquireReply, ClientId, ConvertReply, Cursor, Done, Hold, HolderId,
    Inspection, KeyPart, KeyRequest, Limits, Listener, Listeners, Page, PollReply, QuorumMember,
    RaiseReply, Release, ReleaseReply, RenewReply, Renewal, Replied, Replies, RevokeReply,
    RevokeScope, Store, Token,
    remote::Connecting,
    table::{Fences, Step, Table, acquire_all},
};
use crate::{
    error::LockError,
    guard::fence::FencingToken,
    observe::health::{Health, ServerHealth},
    request::key::LockKey,
    request::spec::LockKind,
    shell::sync::lock,
    shell::time::Instant,
};

/// Large enough that tasks on two different keys rarely share a shard, small enough that an
/// idle store takes little memory.
const SHARDS: usize = 32;

/// A store in this process. It never fails, and forgets everything when it is dropped.
///
/// It uses tokio's clock, so a paused clock works. Fencing tokens come from one counter for all
/// keys. So they increase for each key, and keys that are not held take no memory.
#[derive(Default)]
pub struct MemoryStore {
    shards: [Mutex<Table>; SHARDS],
    hasher: RandomState,
    fences: Fences,
    listeners: Listeners,
    /// The names of the clients, each with the end of its time to live.
    clients: Mutex<HashMap<ClientId, (String, Instant)>>,
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// Creates an empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn shard_of(&self, key: &LockKey) -> usize {
        // Bits that the maps within a shard do not use first.
        (self.hasher.hash_one(key) >> 32) as usize % SHARDS
    }

    fn shard(&self, key: &LockKey) -> MutexGuard<'_, Table> {
        lock(&self.shards[self.shard_of(key)])
    }

    fn acquire_now(&self, request: &KeyRequest) -> AcquireReply {
        let Hold { key, token, .. } = &request.hold;
        self.step(key, Some(*token), |table, step| {
            table.acquire(request, step)
        })
    }

    fn release_now(&self, release: &Release) -> ReleaseReply {
        let key = &release.hold.key;
        self.step(key, None, |table, step| table.release(release, step))
    }

    /// Executes one step on one lock. Its events are sent afterwards, when no mutex is locked any
    /// more.
    fn step<T>(
        &self,
        key: &LockKey,
        caller: Option<Token>,
        operation: impl FnOnce(&mut Table, &mut Step<'_>) -> T,
    ) -> T {
        let mut step = Step::new(Instant::now(), &self.fences, caller);
        let outcome = operation(&mut self.shard(key), &mut step);
        self.notify(step);
        outcome
    }

    fn notify(&self, step: Step<'_>) {
        for event in step.events {
            self.listeners.notify(&event);
        }
    }

    fn acquire_all_now(&self, requests: &[KeyRequest]) -> AcquireAllReply {
        let shard_of = |request: &KeyRequest| self.shard_of(&request.hold.key);
        let mut order: Vec<_> = requests.iter().map(shard_of).collect();
        order.sort_unstable();
        order.dedup();
        // All callers lock the shards in ascending order, so two callers cannot deadlock.
        let mut shards: Vec<_> = order.iter().map(|&it| lock(&self.shards[it])).collect();
        let place = |request: &_| order.binary_search(&shard_of(request)).unwrap_or_default();
        let mut step = Step::new(Instant::now(), &self.fences, None);
        let reply = acquire_all(&mut shards, place, requests, &mut step);
        drop(shards);
        self.notify(step);
        reply
    }
}

/// Returns a future that executes `operation` when it is polled, without an await point.
fn now<'a, T>(operation: impl FnOnce() -> T + Send + 'a) -> Replied<'a, T> {
    Box::pin(async move { Ok(operation()) })
}

impl Connecting for MemoryStore {
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        Box::pin(ready(Ok(())))
    }
}

impl Store for MemoryStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        now(|| self.acquire_now(request))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        now(|| self.acquire_all_now(requests))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        let poll = |hold: &Hold| {
            self.step(&hold.key, Some(hold.token), |table, step| {
                table.poll(hold, step)
            })
        };
        Box::pin(async move { holds.iter().map(poll).map(Ok).collect() })
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        let renew = |renewal: &Renewal| {
            let now = Instant::now();
            self.shard(&renewal.hold.key).renew(renewal, now, now)
        };
        Box::pin(async move { renewals.iter().map(renew).map(Ok).collect() })
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        now(|| self.release_now(release))
    }

    fn release_owned(self: Arc<Self>, release: Release) -> Replied<'static, ReleaseReply> {
        now(move || self.release_now(&release))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        now(|| self.step(&hold.key, None, |table, step| table.convert(hold, step)))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        now(|| self.step(&hold.key, None, |table, step| table.abandon(hold, step)))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        now(move || {
            let step = Step::new(Instant::now(), &self.fences, None);
            self.shard(key).inspect(key, kind, &step)
        })
    }

    fn done<'a>(&'a self, key: &'a LockKey) -> Replied<'a, Option<Done>> {
        now(move || self.shard(key).done(key, Instant::now()))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        now(move || {
            self.step(key, None, |table, step| {
                table.revoke(key, kind, scope, step)
            })
        })
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        // The table has the times of grants.
        let _ = grants;
        now(move || {
            let (mut clients, now) = (lock(&self.clients), Instant::now());
            clients.insert(client, (name.to_owned(), now + keep_for));
            clients.retain(|_, (_, until)| *until > now);
        })
    }

    fn names_of<'a>(&'a self, ids: &'a [ClientId]) -> Replied<'a, Vec<Option<String>>> {
        now(move || {
            let clients = lock(&self.clients);
            let name = |id| clients.get(id).map(|(name, _)| name.clone());
            ids.iter().map(name).collect()
        })
    }

    /// The cursor is the number of a shard.
    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Replied<'a, Page> {
        now(move || {
            let shard = cursor.and_then(|cursor| cursor.as_str().parse().ok());
            let shard = shard.unwrap_or(0).min(SHARDS - 1);
            let locks = lock(&self.shards[shard]).names(prefix, Instant::now());
            let next = (shard + 1 < SHARDS).then(|| Cursor::new((shard + 1).to_string()));
            Page::new(locks, next)
        })
    }

    fn name_of(&self, _key: &LockKey, _kind: LockKind, _part: KeyPart) -> Option<String> {
        None
    }

    fn server_of(&self, _key: &LockKey, _kind: LockKind) -> u64 {
        0
    }

    fn limits(&self) -> Limits {
        Limits::new().results(true).retains(true)
    }

    fn serves_any_runtime(&self) -> bool {
        true
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.listeners.add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        Box::pin(ready(Health::new(vec![ServerHealth::memory()], Vec::new())))
    }
}

impl QuorumMember for MemoryStore {
    fn raise<'a>(
        &'a self,
        _key: &'a LockKey,
        _kind: LockKind,
        fence: FencingToken,
    ) -> Replied<'a, RaiseReply> {
        now(move || self.fences.raise(fence))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::request::spec::Mode;

    fn request(key: &str, mode: Mode) -> KeyRequest {
        let hold = Hold::new(LockKey::new(key).unwrap(), mode, Token::random());
        let deadline = Instant::now() + Duration::from_secs(1);
        KeyRequest::new(hold, Duration::from_secs(30), deadline)
    }

    fn inspect(store: &MemoryStore, request: &KeyRequest) -> Inspection {
        let key = &request.hold.key;
        let step = Step::new(Instant::now(), &store.fences, None);
        store.shard(key).inspect(key, LockKind::Lock, &step)
    }

    #[tokio::test(start_paused = true)]
    async fn locks_that_were_never_released_do_not_pile_up() {
        let store = MemoryStore::new();
        for i in 0..100_000 {
            let granted = store.acquire_now(&request(&format!("k{i}"), Mode::Exclusive));
            assert!(matches!(granted, AcquireReply::Granted(_)));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let kept: usize = store.shards.iter().map(|shard| lock(shard).len()).sum();
        assert!(kept < 1_000, "{kept} entries");
    }

    #[tokio::test(start_paused = true)]
    async fn acquire_all_queues_no_request() {
        let store = MemoryStore::new();
        let held = request("k", Mode::Exclusive);
        let granted = store.acquire_now(&held);
        assert!(matches!(granted, AcquireReply::Granted(_)), "{granted:?}");
        let reply = store.acquire_all_now(&[request("k", Mode::Exclusive).queued()]);
        let AcquireAllReply::Refused { index: 0, reply } = reply else {
            panic!("{reply:?}");
        };
        assert!(matches!(reply, AcquireReply::Busy { .. }), "{reply:?}");
        let found = inspect(&store, &held);
        assert!(found.waiters.is_empty(), "{found:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn no_fencing_token_is_granted_twice_at_the_end_of_the_numbers() {
        let store = MemoryStore::new();
        let acquire = |key, mode| store.acquire_now(&request(key, mode));
        let (writer, reader) = (request("w", Mode::Exclusive), request("r", Mode::Shared));
        let held = store.acquire_now(&writer);
        assert!(matches!(held, AcquireReply::Granted(_)), "{held:?}");
        let shared = store.acquire_now(&reader);
        assert!(matches!(shared, AcquireReply::Granted(_)), "{shared:?}");
        let waiter = request("w", Mode::Exclusive).queued();
        let queued = store.acquire_now(&waiter);
        assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");

        let almost = FencingToken::new(FencingToken::LAST.number() - 1).unwrap();
        store.fences.raise(almost);
        let refused = AcquireReply::ForeignKey(KeyPart::Fence);
        let permits = Mode::Permits(std::num::NonZeroU32::MIN);
        for mode in [Mode::Exclusive, Mode::Exclusive, Mode::Shared, permits] {
            assert_eq!(acquire("free", mode), refused, "{mode:?}");
            assert_eq!(store.acquire_all_now(&[request("free", mode)]), {
                let reply = refused.clone();
                AcquireAllReply::Refused { index: 0, reply }
            });
        }
        assert_eq!(acquire("r", Mode::Shared), refused);
        // A writer has its token, and a reader would need another one.
        assert_eq!(store.acquire_now(&writer), held);
        assert_eq!(store.acquire_now(&reader), refused);
        let converted = store.convert(&writer.hold).await.unwrap();
        assert_eq!(converted, ConvertReply::NotHeld);
        store.release_now(&Release::new(writer.hold));
        let polled = store.poll(&[waiter.hold]).await.remove(0).unwrap();
        assert!(matches!(polled, PollReply::Queued { .. }), "{polled:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_executed_after_its_deadline_does_nothing() {
        let store = MemoryStore::new();
        let late = request("k", Mode::Exclusive);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(store.acquire_now(&late), AcquireReply::Late);
        assert!(inspect(&store, &late).holders.is_empty());
    }
}
