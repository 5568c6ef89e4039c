//! Tests of the resources that an acquisition leaves behind: votes, queue entries and memory.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use futures_util::FutureExt as _;
use tokio::time::sleep;

use super::*;
use crate::{
    client::LockClient,
    guard::fence::FencingToken,
    observe::health::Verdict,
    protocol::majority::ServerRequest,
    request::spec::{LockSpec, Mode},
    shell::time::Instant,
    store::{Grant, Holder, MemoryStore, RaiseReply, Token},
};

/// A server that can stop replying, or deny once that it holds a lock.
#[derive(Debug, Default)]
struct Server {
    store: MemoryStore,
    silent: AtomicBool,
    denies: AtomicBool,
    /// Renewals fail.
    fails: AtomicBool,
    granted: Mutex<Vec<Token>>,
    /// Executes a conversion only after the reader and before the writer has been given up.
    converts_late: AtomicBool,
    converted: Mutex<Option<Hold>>,
    /// The numbers of this server are ahead of those of the others.
    is_ahead: AtomicBool,
    raised: AtomicUsize,
    limits: Limits,
}

impl Server {
    fn new(limits: Limits) -> Arc<Self> {
        let server = Self::default();
        Arc::new(Self { limits, ..server })
    }

    fn answer<'a, T: Send + 'a>(&'a self, answer: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
        if self.silent.load(Ordering::Relaxed) {
            Box::pin(std::future::pending())
        } else {
            answer
        }
    }

    async fn holders(&self) -> Vec<Holder> {
        let seen = self.store.inspect(&key(), LockKind::Lock).await;
        seen.unwrap().holders
    }
}

fn key() -> LockKey {
    LockKey::new("a").unwrap()
}

fn servers(count: usize) -> Vec<Arc<Server>> {
    (0..count).map(|_| Arc::default()).collect()
}

/// Three servers, and the store of one client.
fn three(longest_lease: Duration) -> (Vec<Arc<Server>>, Arc<QuorumStore>) {
    let servers = servers(3);
    let store = store_of(&servers, longest_lease);
    (servers, store)
}

/// Creates the store of one client of these servers.
fn store_of(servers: &[Arc<Server>], longest_lease: Duration) -> Arc<QuorumStore> {
    let servers = servers.iter().cloned();
    let named = servers.map(|server| (String::new(), server as Arc<dyn QuorumMember>));
    Arc::new(QuorumStore::new(named, longest_lease).unwrap())
}

#[test]
fn a_server_that_is_listed_twice_is_refused() {
    let [one, other] = [(), ()].map(|()| Arc::new(Server::default()));
    let named = [&one, &other, &one].map(|it| (String::new(), it.clone() as Arc<dyn QuorumMember>));
    let error = QuorumStore::new(named, Duration::from_secs(10)).unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
    assert!(error.to_string().contains("twice"), "{error}");
}

fn set(servers: &[Arc<Server>], fault: fn(&Server) -> &AtomicBool, is_set: bool) {
    for server in servers {
        fault(server).store(is_set, Ordering::Relaxed);
    }
}

/// Requests the lock for a new acquisition, which must be granted it.
async fn granted(store: &dyn Store, key: &LockKey, mode: Mode, lease: Duration) -> (Hold, Grant) {
    let hold = Hold::new(key.clone(), mode, Token::random());
    let grant = granted_again(store, &hold, lease).await;
    (hold, grant)
}

async fn granted_again(store: &dyn Store, hold: &Hold, lease: Duration) -> Grant {
    let request = KeyRequest::new(hold.clone(), lease, Instant::now() + lease);
    match store.acquire(&request).await {
        Ok(AcquireReply::Granted(grant)) => grant,
        reply => panic!("{reply:?}"),
    }
}

impl Store for Server {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        self.answer(Box::pin(async move {
            let reply = self.store.acquire(request).await?;
            if let AcquireReply::Granted(_) = reply {
                lock(&self.granted).push(request.hold.token);
            }
            Ok(reply)
        }))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        self.answer(self.store.acquire_all(requests))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        self.answer(self.store.poll(holds))
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        if self.fails.load(Ordering::Relaxed) {
            let failed = |_| Err(StoreError::timed_out(Duration::ZERO));
            return Box::pin(async move { renewals.iter().map(failed).collect() });
        }
        let of_granted = |renewal: &Renewal| lock(&self.granted).contains(&renewal.hold.token);
        if renewals.iter().any(of_granted) && self.denies.swap(false, Ordering::Relaxed) {
            return Box::pin(async { renewals.iter().map(|_| Ok(RenewReply::Gone)).collect() });
        }
        self.answer(self.store.renew(renewals))
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        self.answer(Box::pin(async {
            if self.is_ahead.load(Ordering::Relaxed) {
                let (key, kind) = (&release.hold.key, release.hold.mode.kind());
                if let Some(latest) = self.store.inspect(key, kind).await?.fence {
                    self.store.raise(key, kind, latest.later(5_000)).await?;
                }
            }
            self.store.release(release).await
        }))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        if self.converts_late.load(Ordering::Relaxed) {
            *lock(&self.converted) = Some(hold.clone());
            return Box::pin(std::future::pending());
        }
        self.answer(self.store.convert(hold))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        let is_writer = hold.mode == Mode::Exclusive;
        let converted = is_writer.then(|| lock(&self.converted).take()).flatten();
        self.answer(Box::pin(async move {
            if let Some(reader) = converted {
                sleep(Duration::from_millis(1)).await;
                self.store.convert(&reader).await?;
            }
            self.store.abandon(hold).await
        }))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        self.answer(self.store.inspect(key, kind))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
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
    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> Replied<'a, RaiseReply> {
        self.raised.fetch_add(1, Ordering::Relaxed);
        self.answer(self.store.raise(key, kind, fence))
    }
}

#[tokio::test(start_paused = true)]
async fn release_without_a_majority_is_retried_then_forgotten() {
    let lease = Duration::from_secs(3);
    let (servers, store) = three(lease);
    let (hold, _) = granted(&*store, &key(), Mode::Exclusive, lease).await;

    set(&servers[1..], |server| &server.silent, true);
    assert!(store.release(&Release::new(hold.clone())).await.is_err());
    assert!(lock(&store.inner.session).rest(Instant::now()).0.is_empty());

    set(&servers[1..], |server| &server.silent, false);
    sleep(Duration::from_secs(1)).await;
    for server in &servers {
        let holders = server.holders().await;
        assert_eq!(holders, [], "it must be released before its lease expires");
    }
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_not_confirmed_is_given_up_where_it_is_held() {
    let lease = Duration::from_secs(3);
    let (servers, store) = three(lease);
    let spec = LockSpec::exclusive().lease(lease);
    let locks = LockClient::with_store(store.clone());
    let guard = locks.request("a", spec.clone().no_wait()).acquire().await;
    let guard = guard.unwrap();
    let other = LockClient::with_store(store.clone());
    let waits = other.request("a", spec.wait(lease * 3).no_renew());
    let waiting = tokio::spawn(waits.acquire());
    sleep(Duration::from_millis(100)).await;

    set(&servers, |server| &server.denies, true);
    guard.release().await.unwrap();
    let released = Instant::now();
    let guard = waiting.await.unwrap().unwrap();
    let mut denies = servers.iter().map(|it| it.denies.load(Ordering::Relaxed));
    assert!(denies.any(|denies| !denies), "nothing was denied");
    let took = released.elapsed();
    assert!(took < lease / 2, "the waiter waited for its own vote");
    assert_eq!(lock(&store.inner.session).rest(Instant::now()).0.len(), 1);
    drop(guard);
}

/// Downgrades a lock at three servers, of which the first `faulty` have this fault meanwhile.
/// Everything must be released before its lease expires.
async fn downgraded(faulty: usize, fault: fn(&Server) -> &AtomicBool, spec: LockSpec) {
    let lease = Duration::from_secs(6);
    let (servers, store) = three(lease);
    let locks = LockClient::with_store(store);
    let spec = spec.lease(lease).no_wait().no_renew();
    let guard = locks.request("a", spec).acquire().await.unwrap();
    // Wait for the last server, for which a majority does not wait.
    sleep(Duration::from_millis(10)).await;

    set(&servers[..faulty], fault, true);
    let reader = guard.downgrade().await;
    set(&servers[..faulty], fault, false);
    // Wait until the circuit breakers of the silent servers are half-open.
    sleep(Duration::from_secs(1)).await;
    match reader {
        Ok(reader) => reader.release().await.unwrap(),
        Err(error) => assert!(faulty > 1, "{error}"),
    }
    sleep(Duration::from_secs(2)).await;
    for server in &servers {
        assert_eq!(server.holders().await, []);
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_gives_back_what_it_holds_as_a_writer_still() {
    downgraded(1, |server| &server.silent, LockSpec::exclusive()).await;
}

#[tokio::test(start_paused = true)]
async fn failed_downgrade_releases_the_votes_as_a_reader() {
    let spec = LockSpec::exclusive();
    for spec in [spec.clone(), spec.min_hold(Duration::from_secs(2))] {
        downgraded(2, |server| &server.silent, spec).await;
    }
}

/// A conversion that is executed late makes a reader of the writer, after the reader was given up.
#[tokio::test(start_paused = true)]
async fn a_writer_that_is_converted_while_it_is_given_up_leaves_no_reader() {
    for faulty in [1, 2] {
        downgraded(faulty, |it| &it.converts_late, LockSpec::exclusive()).await;
    }
}

/// A server that misses a downgrade must not exclude readers until the writer's vote expires.
#[tokio::test(start_paused = true)]
async fn a_reader_that_is_renewed_gives_back_its_vote_as_a_writer() {
    let lease = Duration::from_secs(6);
    let (servers, store) = three(lease);
    let locks = LockClient::with_store(store);
    let spec = LockSpec::exclusive().lease(lease).no_wait();
    let guard = locks.request("a", spec).acquire().await.unwrap();
    sleep(Duration::from_millis(10)).await;

    set(&servers[..1], |server| &server.silent, true);
    let reader = guard.downgrade().await.unwrap();
    set(&servers[..1], |server| &server.silent, false);
    // The circuit breaker of a silent server is open for half a second. The lock is renewed after a
    // third of the lease.
    sleep(lease * 3 / 4).await;
    let holders = servers[0].holders().await;
    let are_readers = holders.iter().all(|holder| holder.mode == Mode::Shared);
    assert!(are_readers, "{holders:?}");
    reader.release().await.unwrap();
}

/// A reader whose grant was not heard polls again, after another reader has been granted the lock.
#[tokio::test(start_paused = true)]
async fn poll_gives_a_reader_a_larger_token_than_earlier_grants() {
    let lease = Duration::from_secs(6);
    let (_servers, store) = three(lease);
    let (first, before) = granted(&*store, &key(), Mode::Shared, lease).await;
    let (_, other) = granted(&*store, &key(), Mode::Shared, lease).await;
    assert!(other.fence > before.fence);
    let [Ok(PollReply::Granted(again))] = store.poll(std::slice::from_ref(&first)).await[..] else {
        panic!("it holds the lock")
    };
    let (other, again) = (other.fence, again.fence);
    assert!(again > other, "{again} after {other}");
    let repeated = granted_again(&*store, &first, lease).await;
    assert!(repeated.fence > again);
}

/// The pause before a second check is no round trip. Otherwise the time-outs that depend on the
/// round trip would grow with each check.
#[tokio::test(start_paused = true)]
async fn a_second_look_does_not_count_as_a_round_trip() {
    let (servers, lease) = (servers(5), Duration::from_secs(30));
    let store = store_of(&servers, lease);
    let locks = LockClient::with_store(store.clone());
    for number in 0..20 {
        let key = LockKey::new(format!("a{number}")).unwrap();
        let coordinator = lock(&store.inner.session).coordinator(&key, Instant::now());
        let coordinator = &servers[coordinator.unwrap()].store;
        granted(coordinator, &key, Mode::Exclusive, lease).await;
        let since = Instant::now();
        let spec = LockSpec::exclusive().lease(lease).no_wait();
        let guard = locks.request(key, spec).acquire().await.unwrap();
        let took = since.elapsed();
        assert!(took >= Duration::from_millis(10), "no second check");
        guard.release().await.unwrap();
    }
    let round_trip = lock(&store.inner.session).round_trip;
    assert!(round_trip < Duration::from_millis(2), "{round_trip:?}");
}

/// The coordinator's clock is ahead of all others, so the fencing token of a hand-off is larger
/// than the number that the next holder would propose.
#[tokio::test(start_paused = true)]
async fn the_next_holder_proposes_more_than_it_was_handed() {
    for count in [3, 5] {
        let servers = servers(count);
        let session = MajoritySession::new((0..count).map(|_| String::new()));
        let coordinator = session.coordinator(&key(), Instant::now()).unwrap();
        servers[coordinator].is_ahead.store(true, Ordering::Relaxed);
        let client = || LockClient::with_store(store_of(&servers, Duration::from_secs(30)));
        let clients = [client(), client()];
        let request = |turn: usize| {
            let request = clients[turn % 2].exclusive("a");
            request.wait(Duration::from_secs(9)).acquire()
        };
        let raised = || -> usize {
            let numbers = servers.iter().map(|server| &server.raised);
            numbers.map(|raised| raised.load(Ordering::Relaxed)).sum()
        };
        let mut guard = request(0).await.unwrap();
        let before = raised();
        for turn in 1..=20 {
            let waiting = tokio::spawn(request(turn));
            sleep(Duration::from_millis(20)).await;
            guard.release().await.unwrap();
            guard = waiting.await.unwrap().unwrap();
        }
        // Proposals follow the real clock: on a busy machine it may overtake the coordinator.
        let raised = raised() - before;
        assert!(raised < 10, "{raised} write-backs to {count} servers");
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
    let server = Server::new(limits);
    let locks = LockClient::with_store(server.clone());
    let of = |lease| LockSpec::exclusive().lease(lease);
    let guard = locks.request("held", of(3 * second)).acquire().await;
    let guard = guard.unwrap();
    // Every call stays without a reply, so only a request that makes none is ready at once.
    server.silent.store(true, Ordering::Relaxed);
    let permits = LockSpec::permits(NonZeroU32::MIN).lease(second);
    let both = locks.request_all(["a", "b"], of(second).no_wait());
    for (request, remedy) in [
        (locks.request("a", of(second / 2)), "use a longer lease"),
        (locks.request("held", of(4 * second)), "use a shorter lease"),
        (locks.request("a", permits), "use one server for permits"),
        (both, "let the request wait"),
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
    let servers = limits.map(Server::new);
    let shared = Limits::new()
        .shortest_lease(second)
        .in_turn(true)
        .push(false)
        .permits(false);
    for (longest_lease, expected) in [(minute / 2, minute / 2), (2 * minute, minute)] {
        let limits = store_of(&servers, longest_lease).limits();
        assert_eq!(limits, shared.longest_lease(expected));
    }
}

#[tokio::test]
async fn acquire_and_renew_refuse_more_than_a_majority_can_grant() {
    let lease = Duration::from_secs(10);
    let (_servers, store) = three(lease);
    let request = |mode, lease| {
        let hold = Hold::new(key(), mode, Token::random());
        KeyRequest::new(hold, lease, Instant::now() + lease)
    };
    let two = Mode::Permits(NonZeroU32::new(2).unwrap());
    let long = lease + Duration::from_millis(1);
    for request in [request(two, lease), request(Mode::Exclusive, long)] {
        let error = store.acquire(&request).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{error}");
        let error = store.acquire_all(&[request]).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{error}");
    }
    let (hold, _) = granted(&*store, &key(), Mode::Exclusive, lease).await;
    let renewals = [Renewal::new(hold, long)];
    let reply = store.renew(&renewals).await.remove(0);
    assert_eq!(reply.unwrap_err().kind(), StoreErrorKind::Unsupported);
}

/// Otherwise a failed renewal would count as a sign of life, and the next request would wait for
/// that server.
#[tokio::test]
async fn renewals_that_all_fail_are_a_failure_of_their_server() {
    let [server] = &servers(1)[..] else { panic!() };
    let key = LockKey::new("a").unwrap();
    let hold = Hold::new(key, Mode::Exclusive, Token::random());
    let request = ServerRequest::Renew(vec![Renewal::new(hold, Duration::ZERO); 2]);
    assert!(calls::perform(&**server, &request).await.is_ok());
    set(std::slice::from_ref(server), |server| &server.fails, true);
    assert!(calls::perform(&**server, &request).await.is_err());
}

/// The servers have no health of their own: each is asked about a lock.
#[tokio::test(start_paused = true)]
async fn the_health_of_custom_stores_is_known_in_a_second() {
    let (servers, store) = three(Duration::from_secs(3));
    let locks = LockClient::with_store(store);
    for (silent, verdict) in [
        (0, Verdict::Healthy),
        (1, Verdict::Degraded),
        (2, Verdict::Unavailable),
    ] {
        set(&servers[..silent], |server| &server.silent, true);
        let since = Instant::now();
        let health = locks.health().await;
        assert_eq!(health.verdict(), verdict, "{health}");
        let reachable = health.servers().iter().filter(|server| server.reachable);
        assert_eq!(reachable.count(), 3 - silent, "{health}");
        assert!(since.elapsed() <= Duration::from_millis(1_100));
    }
}
