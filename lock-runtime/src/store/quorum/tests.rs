//! Tests of the resources that an acquisition leaves behind: votes, queue entries and memory.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use futures_util::FutureExt as _;

use tokio::time::Instant;

use super::*;
use crate::fence::FencingToken;
use crate::{
    client::LockClient,
    spec::{LockSpec, Mode},
    store::{MemoryStore, RaiseReply, StoreErrorKind, Token},
};

/// A server that can stop replying, or deny once that it holds a lock.
#[derive(Debug, Default)]
struct Server {
    store: MemoryStore,
    silent: AtomicBool,
    denies: AtomicBool,
    granted: Mutex<Vec<Token>>,
    /// The numbers of this server are ahead of those of the others.
    is_ahead: AtomicBool,
    raised: AtomicUsize,
    limits: Limits,
}

impl Server {
    fn answer<'a, T: Send + 'a>(&'a self, answer: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
        if self.silent.load(Ordering::Relaxed) {
            Box::pin(std::future::pending())
        } else {
            answer
        }
    }
}

impl Store for Server {
    fn acquire<'a>(
        &'a self,
        request: &'a KeyRequest,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        self.answer(self.store.acquire(request))
    }

    fn acquire_all<'a>(
        &'a self,
        requests: &'a [KeyRequest],
    ) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        self.answer(self.store.acquire_all(requests))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        self.answer(self.store.poll(holds))
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        let of_granted = |renewal: &Renewal| lock(&self.granted).contains(&renewal.hold.token);
        if renewals.iter().any(of_granted) && self.denies.swap(false, Ordering::Relaxed) {
            return Box::pin(async { renewals.iter().map(|_| Ok(RenewReply::Gone)).collect() });
        }
        self.answer(self.store.renew(renewals))
    }

    fn release<'a>(
        &'a self,
        release: &'a Release,
    ) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        self.answer(Box::pin(async {
            if self.is_ahead.load(Ordering::Relaxed) {
                let (key, kind) = (&release.hold.key, release.hold.mode.kind());
                let latest = self.store.inspect(key, kind).await?.fence;
                if let Some(ahead) =
                    latest.and_then(|latest| FencingToken::new(latest.number() + 5_000))
                {
                    self.store.raise(key, kind, ahead).await?;
                }
            }
            self.store.release(release).await
        }))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        self.answer(self.store.convert(hold))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        self.answer(self.store.abandon(hold))
    }

    fn inspect<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        self.answer(self.store.inspect(key, kind))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        self.answer(self.store.revoke(key, kind, scope))
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.store.name_of(key, kind, part)
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.store.server_of(key, kind)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.store.listen(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        self.store.settled()
    }
}

impl QuorumMember for Server {
    fn acquire_proposed<'a>(
        &'a self,
        request: &'a KeyRequest,
        proposal: FencingToken,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        self.answer(Box::pin(async move {
            let reply = self.store.acquire_proposed(request, proposal).await?;
            if let AcquireReply::Granted(_) = reply {
                lock(&self.granted).push(request.hold.token);
            }
            Ok(reply)
        }))
    }

    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> BoxFuture<'a, Result<RaiseReply, StoreError>> {
        self.raised.fetch_add(1, Ordering::Relaxed);
        self.answer(self.store.raise(key, kind, fence))
    }
}

#[tokio::test(start_paused = true)]
async fn release_without_a_majority_is_retried_then_forgotten() {
    let servers = [(); 3].map(|()| Arc::<Server>::default());
    let named = servers
        .iter()
        .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
    let lease = Duration::from_secs(3);
    let Ok(store) = QuorumStore::new(named, lease) else {
        panic!("three servers are valid")
    };
    let key = LockKey::new("a").unwrap();
    let hold = Hold::new(key.clone(), Mode::Exclusive, Token::random());
    let request = KeyRequest::new(hold.clone(), lease, Instant::now() + lease);
    assert!(matches!(
        store.acquire(&request).await,
        Ok(AcquireReply::Granted(_))
    ));

    let silence = |silent| {
        servers[1..]
            .iter()
            .for_each(|server| server.silent.store(silent, Ordering::Relaxed))
    };
    silence(true);
    assert!(store.release(&Release::new(hold.clone())).await.is_err());
    assert!(lock(&store.inner.session).rest(Instant::now()).0.is_empty());

    silence(false);
    tokio::time::sleep(Duration::from_secs(1)).await;
    for server in &servers {
        let Ok(seen) = server.store.inspect(&key, LockKind::Lock).await else {
            panic!("the server replies")
        };
        assert!(
            seen.holders.is_empty(),
            "it must be released before its lease expires"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_not_confirmed_is_given_up_where_it_is_held() {
    let servers = [(); 3].map(|()| Arc::<Server>::default());
    let named = servers
        .iter()
        .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
    let lease = Duration::from_secs(3);
    let Ok(store) = QuorumStore::new(named, lease) else {
        panic!("three servers are valid")
    };
    let store = Arc::new(store);
    let locks = LockClient::with_store(store.clone());
    let guard = locks
        .exclusive("a")
        .lease(lease)
        .no_wait()
        .acquire()
        .await
        .unwrap();
    let other = LockClient::with_store(store.clone());
    let waiting = tokio::spawn(async move {
        other
            .exclusive("a")
            .lease(lease)
            .wait(lease * 3)
            .no_renew()
            .acquire()
            .await
    });
    tokio::time::sleep(Duration::from_millis(100)).await;

    servers
        .iter()
        .for_each(|server| server.denies.store(true, Ordering::Relaxed));
    guard.release().await.unwrap();
    let released = Instant::now();
    let guard = waiting.await.unwrap().unwrap();
    assert!(
        servers
            .iter()
            .any(|server| !server.denies.load(Ordering::Relaxed)),
        "nothing was denied"
    );
    assert!(
        released.elapsed() < lease / 2,
        "the waiter waited for its own vote"
    );
    assert_eq!(lock(&store.inner.session).rest(Instant::now()).0.len(), 1);
    drop(guard);
}

/// Downgrades a lock at three servers, of which the first `silent` do not receive the request.
/// Everything must be released before its lease expires.
async fn downgraded_unheard_by(silent: usize) {
    let servers = [(); 3].map(|()| Arc::<Server>::default());
    let named = servers
        .iter()
        .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
    let lease = Duration::from_secs(6);
    let Ok(store) = QuorumStore::new(named, lease) else {
        panic!("three servers are valid")
    };
    let locks = LockClient::with_store(Arc::new(store));
    let guard = locks
        .write("a")
        .lease(lease)
        .no_wait()
        .no_renew()
        .acquire()
        .await
        .unwrap();
    // Wait for the last server, for which a majority does not wait.
    tokio::time::sleep(Duration::from_millis(10)).await;

    let silence = |silence| {
        servers[..silent]
            .iter()
            .for_each(|server| server.silent.store(silence, Ordering::Relaxed))
    };
    silence(true);
    let reader = guard.downgrade().await;
    silence(false);
    // Wait until the circuit breakers of the silent servers are half-open.
    tokio::time::sleep(Duration::from_secs(1)).await;
    match reader {
        Ok(reader) => reader.release().await.unwrap(),
        Err(error) => assert!(silent > 1, "{error}"),
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for server in &servers {
        let Ok(seen) = server
            .store
            .inspect(&LockKey::new("a").unwrap(), LockKind::Lock)
            .await
        else {
            panic!("the server replies")
        };
        assert!(seen.holders.is_empty(), "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_gives_back_what_it_holds_as_a_writer_still() {
    downgraded_unheard_by(1).await;
}

#[tokio::test(start_paused = true)]
async fn failed_downgrade_releases_the_votes_as_a_reader() {
    downgraded_unheard_by(2).await;
}

/// A server that misses a downgrade must not exclude readers until the writer's vote expires.
#[tokio::test(start_paused = true)]
async fn a_reader_that_is_renewed_gives_back_its_vote_as_a_writer() {
    let servers = [(); 3].map(|()| Arc::<Server>::default());
    let named = servers
        .iter()
        .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
    let lease = Duration::from_secs(6);
    let Ok(store) = QuorumStore::new(named, lease) else {
        panic!("three servers are valid")
    };
    let locks = LockClient::with_store(Arc::new(store));
    let guard = locks
        .write("a")
        .lease(lease)
        .no_wait()
        .acquire()
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;

    servers[0].silent.store(true, Ordering::Relaxed);
    let reader = guard.downgrade().await.unwrap();
    servers[0].silent.store(false, Ordering::Relaxed);
    // The circuit breaker of a silent server is open for half a second. The lock is renewed after a
    // third of the lease.
    tokio::time::sleep(lease * 3 / 4).await;
    let seen = servers[0]
        .store
        .inspect(&LockKey::new("a").unwrap(), LockKind::Lock)
        .await
        .unwrap();
    assert!(
        seen.holders
            .iter()
            .all(|holder| holder.mode == Mode::Shared),
        "{seen:?}"
    );
    reader.release().await.unwrap();
}

/// A reader whose grant was not heard polls again, after another reader has been granted the lock.
#[tokio::test(start_paused = true)]
async fn poll_gives_a_reader_a_larger_token_than_earlier_grants() {
    let servers = [(); 3].map(|()| Arc::<Server>::default());
    let named = servers
        .iter()
        .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
    let lease = Duration::from_secs(6);
    let Ok(store) = QuorumStore::new(named, lease) else {
        panic!("three are right")
    };
    let key = LockKey::new("a").unwrap();
    let granted = async |hold: &Hold| {
        let request = KeyRequest::new(hold.clone(), lease, Instant::now() + lease);
        match store.acquire(&request).await {
            Ok(AcquireReply::Granted(grant)) => grant.fence,
            reply => panic!("{reply:?}"),
        }
    };
    let [first, second] = [(); 2].map(|()| Hold::new(key.clone(), Mode::Shared, Token::random()));
    let before = granted(&first).await;
    let other = granted(&second).await;
    assert!(other > before);
    let [Ok(PollReply::Granted(again))] = store.poll(std::slice::from_ref(&first)).await[..] else {
        panic!("it holds the lock")
    };
    assert!(again.fence > other, "{} after {other}", again.fence);
    let repeated = granted(&first).await;
    assert!(repeated > again.fence);
}

/// The pause before a second check is no round trip. Otherwise the time-outs that depend on the
/// round trip would grow with each check.
#[tokio::test(start_paused = true)]
async fn a_second_look_does_not_count_as_a_round_trip() {
    let servers: Vec<_> = (0..5).map(|_| Arc::<Server>::default()).collect();
    let named = servers
        .iter()
        .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
    let lease = Duration::from_secs(30);
    let Ok(store) = QuorumStore::new(named, lease) else {
        panic!("five servers are valid")
    };
    let store = Arc::new(store);
    let locks = LockClient::with_store(store.clone());
    for number in 0..20 {
        let key = LockKey::new(format!("a{number}")).unwrap();
        let coordinator = lock(&store.inner.session).coordinator(&key, Instant::now());
        let coordinator = coordinator.unwrap();
        let dead = Hold::new(key.clone(), Mode::Exclusive, Token::random());
        let request = KeyRequest::new(dead, lease, Instant::now() + lease);
        assert!(matches!(
            servers[coordinator].store.acquire(&request).await,
            Ok(AcquireReply::Granted(_))
        ));
        let since = Instant::now();
        let guard = locks
            .exclusive(key.as_str())
            .lease(lease)
            .no_wait()
            .acquire()
            .await
            .unwrap();
        assert!(
            since.elapsed() >= Duration::from_millis(10),
            "there was no second check"
        );
        guard.release().await.unwrap();
    }
    let round_trip = lock(&store.inner.session).round_trip();
    assert!(round_trip < Duration::from_millis(2), "{round_trip:?}");
}

/// The coordinator's clock is ahead of all others, so the fencing token of a hand-off is larger
/// than the number that the next holder would propose.
#[tokio::test(start_paused = true)]
async fn the_next_holder_proposes_more_than_it_was_handed() {
    for count in [3, 5] {
        let servers: Vec<_> = (0..count).map(|_| Arc::<Server>::default()).collect();
        let key = LockKey::new("a").unwrap();
        let session = Session::new((0..count).map(|_| String::new()));
        let coordinator = session.coordinator(&key, Instant::now()).unwrap();
        servers[coordinator].is_ahead.store(true, Ordering::Relaxed);
        let client = || {
            let named = servers
                .iter()
                .map(|server| (String::new(), server.clone() as Arc<dyn QuorumMember>));
            let Ok(store) = QuorumStore::new(named, Duration::from_secs(30)) else {
                panic!("the number is odd")
            };
            LockClient::with_store(Arc::new(store))
        };
        let clients = [client(), client()];
        let mut guard = clients[0]
            .exclusive("a")
            .wait(Duration::from_secs(9))
            .acquire()
            .await
            .unwrap();
        let before: usize = servers
            .iter()
            .map(|server| server.raised.load(Ordering::Relaxed))
            .sum();
        for turn in 1..=20 {
            let locks = clients[turn % 2].clone();
            let waiting = tokio::spawn(async move {
                locks
                    .exclusive("a")
                    .wait(Duration::from_secs(9))
                    .acquire()
                    .await
            });
            tokio::time::sleep(Duration::from_millis(20)).await;
            guard.release().await.unwrap();
            guard = waiting.await.unwrap().unwrap();
        }
        let raised: usize = servers
            .iter()
            .map(|server| server.raised.load(Ordering::Relaxed))
            .sum();
        // Proposals follow the real clock: on a busy machine it may overtake the coordinator.
        let raised = raised - before;
        assert!(
            raised < 10,
            "{raised} numbers were written back to {count} servers in 20 hand-offs"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn acquire_beyond_the_limits_is_refused_before_any_call() {
    let second = Duration::from_secs(1);
    let limits = Limits::new()
        .shortest_lease(second)
        .longest_lease(3 * second)
        .keys_at_once(NonZeroUsize::MIN)
        .permits(false);
    let server = Arc::new(Server {
        limits,
        ..Server::default()
    });
    let locks = LockClient::with_store(server.clone());
    let of = |lease| LockSpec::exclusive().lease(lease);
    let Ok(guard) = locks.request("held", of(3 * second)).acquire().await else {
        panic!("the lease is within the limits")
    };
    // Every call stays without a reply, so only a request that makes none is ready at once.
    server.silent.store(true, Ordering::Relaxed);
    let permits = LockSpec::permits(NonZeroU32::MIN).lease(second);
    for (request, remedy) in [
        (locks.request("a", of(second / 2)), "use a longer lease"),
        (locks.request("held", of(4 * second)), "use a shorter lease"),
        (locks.request("a", permits), "use one server for permits"),
        (
            locks.request_all(["a", "b"], of(second).no_wait()),
            "let the request wait",
        ),
    ] {
        let Some(Err(error)) = request.acquire().now_or_never() else {
            panic!("not refused: {remedy}")
        };
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
        assert!(error.to_string().contains(remedy), "{error}");
        assert!(error.key().is_some(), "{error}");
    }
    let Some(Err(error)) = guard.extend(4 * second).now_or_never() else {
        panic!("the extension is not refused")
    };
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    server.silent.store(false, Ordering::Relaxed);
    assert!(guard.extend(3 * second).await.is_ok());
    let one_by_one = locks.request_all(["a", "b"], of(second)).acquire().await;
    assert!(one_by_one.is_ok(), "{one_by_one:?}");
}

#[test]
fn limits_of_a_quorum_are_those_of_all_its_servers() {
    let [second, minute] = [1, 60].map(Duration::from_secs);
    let limits = [
        Limits::new().shortest_lease(second),
        Limits::new()
            .longest_lease(minute)
            .keys_at_once(NonZeroUsize::MIN),
        Limits::new().push(false),
    ];
    let of = |longest_lease| {
        let servers = limits.map(|limits| {
            let server = Server {
                limits,
                ..Server::default()
            };
            (String::new(), Arc::new(server) as Arc<dyn QuorumMember>)
        });
        QuorumStore::new(servers, longest_lease).map(|store| store.limits())
    };
    let shared = Limits::new()
        .shortest_lease(second)
        .push(false)
        .permits(false);
    for (longest_lease, expected) in [(minute / 2, minute / 2), (2 * minute, minute)] {
        let Ok(limits) = of(longest_lease) else {
            panic!("three servers are valid")
        };
        assert_eq!(limits, shared.longest_lease(expected));
    }
}

#[tokio::test]
async fn acquire_and_renew_refuse_more_than_a_majority_can_grant() {
    let lease = Duration::from_secs(10);
    let servers: Vec<_> = (0..3)
        .map(|number| {
            let server: Arc<dyn QuorumMember> = Arc::new(MemoryStore::new());
            (format!("s{number}"), server)
        })
        .collect();
    let Ok(store) = QuorumStore::new(servers, lease) else {
        panic!("three servers are valid")
    };
    let request = |mode, lease| {
        let hold = Hold::new(LockKey::new("a").unwrap(), mode, Token::random());
        KeyRequest::new(hold, lease, Instant::now() + lease)
    };
    let two = Mode::Permits(std::num::NonZeroU32::new(2).unwrap());
    let long = lease + Duration::from_millis(1);
    for request in [request(two, lease), request(Mode::Exclusive, long)] {
        let errors = [
            store.acquire(&request).await.unwrap_err(),
            store
                .acquire_all(std::slice::from_ref(&request))
                .await
                .unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{error}");
        }
    }
    let request = request(Mode::Exclusive, lease);
    assert!(matches!(
        store.acquire(&request).await,
        Ok(AcquireReply::Granted(_))
    ));
    let renewals = [Renewal::new(request.hold.clone(), long)];
    let reply = store.renew(&renewals).await.remove(0);
    assert_eq!(reply.unwrap_err().kind(), StoreErrorKind::Unsupported);
}
