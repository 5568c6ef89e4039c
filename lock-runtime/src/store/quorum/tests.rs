//! What the shell around a campaign leaves behind.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::store::MemoryStore;

/// A server that can stop answering.
#[derive(Debug)]
struct Server {
    store: MemoryStore,
    silent: AtomicBool,
}

impl Server {
    fn answer<'a, T: Send + 'a>(&'a self, answer: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
        if self.silent.load(Ordering::Relaxed) { Box::pin(std::future::pending()) } else { answer }
    }
}

impl Store for Server {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        self.answer(self.store.acquire(request))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        self.answer(self.store.acquire_all(requests))
    }

    fn poll<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<PollReply, StoreError>> {
        self.answer(self.store.poll(hold))
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        self.answer(self.store.renew(renewals))
    }

    fn release<'a>(&'a self, release: &'a Release) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        self.answer(self.store.release(release))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        self.answer(self.store.convert(hold))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        self.answer(self.store.abandon(hold))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, family: Family) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        self.answer(self.store.inspect(key, family))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        self.answer(self.store.revoke(key, family, scope))
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.store.listen(listener);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_no_majority_hears_is_remembered_no_longer_than_it_is_said() {
    let server = || Arc::new(Server { store: MemoryStore::new(), silent: AtomicBool::new(false) });
    let servers = [(); 3].map(|()| server());
    let named = servers.iter().map(|server| (String::new(), server.clone() as Arc<dyn Store>));
    let lease = Duration::from_secs(3);
    let Ok(store) = QuorumStore::new(named, lease) else { panic!("three are right") };
    let key = LockKey::new("a").unwrap();
    let hold = Hold::new(key.clone(), Mode::Exclusive, Token::random());
    let request = KeyRequest::new(hold.clone(), lease, Instant::now() + lease);
    assert!(matches!(store.acquire(&request).await, Ok(AcquireReply::Granted(_))));

    let silence = |silent| servers[1..].iter().for_each(|server| server.silent.store(silent, Ordering::Relaxed));
    silence(true);
    assert!(store.release(&Release::new(hold.clone())).await.is_err());
    assert!(lock(&store.inner.campaigns).is_empty());

    silence(false);
    tokio::time::sleep(Duration::from_secs(1)).await;
    for server in &servers {
        let Ok(seen) = server.store.inspect(&key, Family::Lock).await else { panic!("it answers") };
        assert!(seen.holders.is_empty(), "it is given back before its lease ends");
    }
}
