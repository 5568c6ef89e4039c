//! First come first served within a process, and nobody barges in.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use lock_runtime::{
    LockClient, LockGuard, LockKey, LockKind, RevokeReply, RevokeScope,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, Inspection, KeyPart, KeyRequest, Limits,
        Listener, MemoryStore, PollReply, Release, ReleaseReply, RenewReply, Renewal, Store,
        StoreError, Token,
    },
};
use lock_tests::Captured;
use tokio::{sync::mpsc, task::JoinSet};

use crate::place::{LONG, Place, begun, eventually, in_time, on_every_store};

on_every_store! {
    a_hundred_waiters_are_served_in_their_order,
    whoever_gives_up_leaves_the_line_to_the_next,
    nobody_barges_in_while_others_wait,
}

async fn a_hundred_waiters_are_served_in_their_order(place: Place) {
    let locks = place.client().await;
    let first = locks.exclusive("a").acquire().await.unwrap();
    let (served, mut order) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for number in 0..100 {
        let waiting = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let served = served.clone();
        tasks.spawn(async move {
            let guard = waiting.await.unwrap();
            served.send(number).unwrap();
            guard.release().await.unwrap();
        });
    }
    first.release().await.unwrap();
    for expected in 0..100 {
        assert_eq!(order.recv().await, Some(expected));
    }
    tasks.join_all().await;
}

async fn whoever_gives_up_leaves_the_line_to_the_next(place: Place) {
    let locks = place.client().await;
    let first = locks.exclusive("a").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..10 {
        waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    }
    let last = waiting.pop().unwrap();
    // The head, some in the middle, and each next head.
    for index in [0, 4, 2] {
        drop(waiting.remove(index));
        tokio::task::yield_now().await;
    }
    first.release().await.unwrap();
    drop(waiting);
    last.await.unwrap().release().await.unwrap();
}

async fn nobody_barges_in_while_others_wait(place: Place) {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let (locks, others) = (place.client().await, place.client().await);
    let guard = others.exclusive("a").acquire().await.unwrap();
    let waiting = tokio::spawn(locks.exclusive("a").wait(LONG).acquire());
    traces
        .wait_for(|event| event.message == "waiting for its holder")
        .await;
    guard.release().await.unwrap();
    // The store would grant it now, and the one who waits looks only now and then.
    assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
    assert!(locks.all(["a", "b"]).try_acquire().await.unwrap().is_none());
    waiting.await.unwrap().unwrap().release().await.unwrap();
    locks
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("nobody waits")
        .release()
        .await
        .unwrap();
}

/// PROTOCOL 17 and 1: the next in line goes on under the name of the one before it, unless an answer to that is still out.
#[tokio::test(start_paused = true)]
async fn a_place_is_inherited_and_a_token_in_doubt_is_not() {
    in_time(async {
        let spy = Arc::new(Spy::default());
        let (locks, others) = (
            LockClient::with_store(spy.clone()),
            LockClient::with_store(spy.clone()),
        );
        let guard = others.exclusive("a").acquire().await.unwrap();
        spy.take_asked();

        let head = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let next = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        assert_eq!(spy.take_asked().len(), 1, "only the head asks");
        drop(head);
        let next = tokio::spawn(next);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(
            spy.take_asked().is_empty(),
            "the place was inherited, and is kept by polls"
        );
        assert_eq!(locks.inspect("a").await.unwrap().waiters.len(), 1);
        next.abort();
        eventually("the last one gives the place up", async || {
            locks.inspect("a").await.unwrap().waiters.is_empty()
        })
        .await;

        // A head is dropped while the store has its question.
        spy.answers.lock().unwrap().silent = true;
        let head = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        let next = begun(locks.exclusive("a").wait(LONG).acquire()).await;
        drop(head);
        spy.answers.lock().unwrap().silent = false;
        let in_doubt = spy.take_asked();
        assert_eq!(in_doubt.len(), 1);
        let next = tokio::spawn(next);
        guard.release().await.unwrap();
        let guard = next.await.unwrap().unwrap();
        let asked = spy.take_asked();
        assert!(
            !asked.is_empty() && asked.iter().all(|token| !in_doubt.contains(token)),
            "a name in doubt was used"
        );
        guard.release().await.unwrap();
    })
    .await;
}

/// A store that tells under which names it was asked, and may keep silent.
#[derive(Debug, Default)]
pub(super) struct Spy {
    store: MemoryStore,
    pub(super) answers: Mutex<Answers>,
}

#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) silent: bool,
    /// Released after the next question, and before its answer comes.
    pub(super) releases: Option<LockGuard>,
    asked: Vec<Token>,
}

impl Spy {
    fn take_asked(&self) -> Vec<Token> {
        std::mem::take(&mut self.answers.lock().unwrap().asked)
    }
}

impl Store for Spy {
    fn acquire<'a>(
        &'a self,
        request: &'a KeyRequest,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        let mut answers = self.answers.lock().unwrap();
        answers.asked.push(request.hold.token);
        if answers.silent {
            return Box::pin(std::future::pending());
        }
        let releases = answers.releases.take();
        Box::pin(async move {
            let reply = self.store.acquire(request).await;
            if let Some(guard) = releases {
                guard.release().await.unwrap();
            }
            reply
        })
    }

    fn acquire_all<'a>(
        &'a self,
        requests: &'a [KeyRequest],
    ) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        self.store.acquire_all(requests)
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        self.store.poll(holds)
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        self.store.renew(renewals)
    }

    fn release<'a>(
        &'a self,
        release: &'a Release,
    ) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        self.store.release(release)
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        self.store.convert(hold)
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        self.store.abandon(hold)
    }

    fn inspect<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        self.store.inspect(key, kind)
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        self.store.revoke(key, kind, scope)
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.store.listen(listener);
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.store.name_of(key, kind, part)
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.store.server_of(key, kind)
    }

    fn limits(&self) -> Limits {
        self.store.limits()
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        self.store.settled()
    }
}
