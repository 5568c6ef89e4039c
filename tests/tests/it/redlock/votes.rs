//! What becomes of single votes: schedules in which one server is late, deaf, ahead or held by somebody else, played on stores in this
//! process. A review has found each of them.

use std::{
    fmt,
    sync::{
        Arc, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{future::BoxFuture, poll};
use lock_runtime::{
    FencingToken, LockClient, LockErrorKind, LockKey, LockKind, Mode, RevokeReply, RevokeScope,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, IfBusy, Inspection, KeyPart, KeyRequest,
        Limits, Listener, MemoryStore, PollReply, QuorumMember, QuorumStore, RaiseReply, Release,
        ReleaseReply, RenewReply, Renewal, Store, StoreError, StoreErrorKind, Token,
    },
};
use tokio::time::{Instant, sleep};

const KEY: &str = "k";
const LEASE: Duration = Duration::from_secs(30);

/// A server whose answers fail or take their time.
#[derive(Default)]
struct Server {
    store: RwLock<Arc<MemoryStore>>,
    down: AtomicBool,
    silent: AtomicBool,
    /// Tells nothing unasked.
    mute: AtomicBool,
    /// Takes no fencing token from others.
    stubborn: AtomicBool,
    /// Something else lies under every name.
    foreign: AtomicBool,
    /// Milliseconds before a request is executed.
    late: AtomicU64,
}

fn is(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

fn set(flag: &AtomicBool, value: bool) {
    flag.store(value, Ordering::Relaxed);
}

impl Server {
    fn store(&self) -> Arc<MemoryStore> {
        self.store.read().unwrap().clone()
    }

    fn forget_everything(&self) {
        *self.store.write().unwrap() = Arc::default();
    }

    async fn reached(&self) -> Result<Arc<MemoryStore>, StoreError> {
        if is(&self.silent) {
            std::future::pending::<()>().await;
        }
        sleep(Duration::from_millis(self.late.load(Ordering::Relaxed))).await;
        if is(&self.down) {
            return Err(StoreError::new(StoreErrorKind::Unavailable, "down"));
        }
        Ok(self.store())
    }

    async fn holders(&self) -> usize {
        self.store()
            .inspect(&key(), LockKind::Lock)
            .await
            .unwrap()
            .holders
            .len()
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

type Reply<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

impl Store for Server {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Reply<'a, AcquireReply> {
        Box::pin(async { self.reached().await?.acquire(request).await })
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Reply<'a, AcquireAllReply> {
        Box::pin(async { self.reached().await?.acquire_all(requests).await })
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        Box::pin(async {
            match self.reached().await {
                Ok(store) => store.poll(holds).await,
                Err(error) => holds.iter().map(|_| Err(error.clone())).collect(),
            }
        })
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        Box::pin(async {
            match self.reached().await {
                Ok(store) => store.renew(renewals).await,
                Err(error) => renewals.iter().map(|_| Err(error.clone())).collect(),
            }
        })
    }

    fn release<'a>(&'a self, release: &'a Release) -> Reply<'a, ReleaseReply> {
        Box::pin(async { self.reached().await?.release(release).await })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Reply<'a, ConvertReply> {
        Box::pin(async { self.reached().await?.convert(hold).await })
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Reply<'a, ()> {
        Box::pin(async { self.reached().await?.abandon(hold).await })
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Reply<'a, Inspection> {
        Box::pin(async move { self.reached().await?.inspect(key, kind).await })
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Reply<'a, RevokeReply> {
        Box::pin(async move { self.reached().await?.revoke(key, kind, scope).await })
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        if !is(&self.mute) {
            self.store().listen(listener);
        }
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.store().name_of(key, kind, part)
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.store().server_of(key, kind)
    }

    fn limits(&self) -> Limits {
        self.store().limits()
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.store().settled().await })
    }
}

impl QuorumMember for Server {
    fn acquire_proposed<'a>(
        &'a self,
        request: &'a KeyRequest,
        proposal: FencingToken,
    ) -> Reply<'a, AcquireReply> {
        Box::pin(async move {
            let store = self.reached().await?;
            if is(&self.foreign) {
                Ok(AcquireReply::ForeignKey(KeyPart::Lock))
            } else {
                store.acquire_proposed(request, proposal).await
            }
        })
    }

    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> Reply<'a, RaiseReply> {
        Box::pin(async move {
            let store = self.reached().await?;
            if is(&self.stubborn) {
                return Err(StoreError::new(StoreErrorKind::Unavailable, "not now"));
            }
            store.raise(key, kind, fence).await
        })
    }
}

/// So many servers, beginning with the one that keeps the order of `KEY`.
struct Servers(Vec<Arc<Server>>);

impl Servers {
    fn start(count: usize) -> Self {
        Self((0..count).map(|_| Arc::default()).collect())
    }

    fn quorum(&self) -> QuorumStore {
        let Self(servers) = self;
        // FNV-1a of the name, as all clients find it.
        let hash = KEY.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
        let mut listed = servers.clone();
        listed.rotate_right(hash as usize % servers.len());
        let named = listed
            .into_iter()
            .map(|server| (String::from("server"), server as Arc<dyn QuorumMember>));
        QuorumStore::new(named, LEASE).unwrap()
    }

    fn client(&self) -> LockClient {
        LockClient::with_store(Arc::new(self.quorum()))
    }

    fn each<const N: usize>(&self) -> &[Arc<Server>; N] {
        self.0.as_slice().try_into().unwrap()
    }

    async fn holders(&self) -> Vec<usize> {
        let mut holders = Vec::new();
        for server in &self.0 {
            holders.push(server.holders().await);
        }
        holders
    }
}

fn key() -> LockKey {
    LockKey::new(KEY).unwrap()
}

fn hold() -> Hold {
    Hold::new(key(), Mode::Exclusive, Token::random())
}

fn request(hold: &Hold, lease: Duration) -> KeyRequest {
    KeyRequest::new(
        hold.clone(),
        lease,
        Instant::now() + Duration::from_millis(1500),
    )
}

/// PROTOCOL 1: the abandon of a refused request is said again after its deadline, when the same client holds the lock.
#[tokio::test(start_paused = true)]
async fn what_a_refused_request_has_given_up_frees_no_later_grant() {
    let servers = Servers::start(3);
    let [line, _, other] = servers.each();
    let (first, second, third) = (servers.client(), servers.client(), servers.client());
    let held = first.exclusive(KEY).acquire().await.unwrap();
    sleep(Duration::from_secs(1)).await;
    line.late.store(300, Ordering::Relaxed);
    let waiting = tokio::spawn(second.exclusive(KEY).wait(LEASE).acquire());
    sleep(Duration::from_millis(10)).await;
    line.late.store(0, Ordering::Relaxed);
    sleep(Duration::from_millis(690)).await;
    set(&other.down, true);
    held.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    sleep(Duration::from_secs(4)).await;
    set(&other.down, false);
    other
        .store()
        .revoke(&key(), LockKind::Lock, RevokeScope::Leased)
        .await
        .unwrap();
    let next = third
        .exclusive(KEY)
        .wait(Duration::from_secs(2))
        .acquire()
        .await;
    assert!(next.is_err() && !guard.is_lost(), "two holders");
}

/// It won with a majority while it stood in line at another server, and needs that one's vote when a third forgets it.
#[tokio::test(start_paused = true)]
async fn a_holder_that_still_stands_in_a_line_gets_that_vote_too() {
    let servers = Servers::start(3);
    let [_, soon, late] = servers.each();
    for (server, lease) in [
        (soon, Duration::from_millis(100)),
        (late, Duration::from_secs(8)),
    ] {
        server
            .store()
            .acquire(&request(&hold(), lease))
            .await
            .unwrap();
    }
    let guard = servers
        .client()
        .exclusive(KEY)
        .wait(LEASE)
        .acquire()
        .await
        .unwrap();
    sleep(LEASE * 2).await;
    assert_eq!(servers.holders().await, [1, 1, 1]);
    soon.forget_everything();
    sleep(LEASE).await;
    assert!(!guard.is_lost());
    assert_eq!(
        servers.holders().await,
        [1, 1, 1],
        "it votes for the holder again"
    );
}

/// PROTOCOL 28: a block of tokens counts only if a majority knows its end.
#[tokio::test(start_paused = true)]
async fn the_tokens_of_a_block_are_known_to_a_majority() {
    let servers = Servers::start(3);
    let [line, second, third] = servers.each();
    servers.0.iter().for_each(|server| set(&server.mute, true));
    let [holder, waiter, last] = [(); 3].map(|()| servers.quorum());
    let (held, waiting, next) = (hold(), hold(), hold());
    assert!(matches!(
        holder.acquire(&request(&held, LEASE)).await,
        Ok(AcquireReply::Granted(_))
    ));
    // The line node's numbers are far ahead, so the others have to be told.
    let Some(fence) = line
        .store()
        .inspect(&key(), LockKind::Lock)
        .await
        .unwrap()
        .fence
    else {
        panic!("it is held")
    };
    let ahead = FencingToken::new(fence.number() + 5_000_000).unwrap();
    line.store()
        .raise(&key(), LockKind::Lock, ahead)
        .await
        .unwrap();
    let mut queued = request(&waiting, LEASE).reserved(32);
    queued.if_busy = IfBusy::Queue;
    assert!(matches!(
        waiter.acquire(&queued).await,
        Ok(AcquireReply::Queued { .. })
    ));
    holder.release(&Release::new(held)).await.unwrap();
    sleep(Duration::from_millis(10)).await;
    set(&third.stubborn, true);
    let [Ok(PollReply::Granted(grant))] = waiter.poll(std::slice::from_ref(&waiting)).await[..]
    else {
        panic!("it is its turn")
    };
    waiter.release(&Release::new(waiting)).await.unwrap();
    sleep(Duration::from_millis(10)).await;
    set(&second.down, true);
    set(&third.stubborn, false);
    let Ok(AcquireReply::Granted(later)) = last.acquire(&request(&next, LEASE)).await else {
        panic!("it is free")
    };
    assert!(
        later.fence.number() > grant.fence.number() + u64::from(grant.reserved),
        "{later:?} after {grant:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_line_node_that_falls_silent_at_the_end_of_a_wait_makes_it_no_outage() {
    let servers = Servers::start(5);
    let (locks, others) = (servers.client(), servers.client());
    let _held = others.exclusive(KEY).acquire().await.unwrap();
    for wait in [1000, 2000, 2100, 2200, 2300, 2400, 2500, 2600].map(Duration::from_millis) {
        let waiting = tokio::spawn(locks.exclusive(KEY).wait(wait).acquire());
        sleep(wait - Duration::from_millis(120)).await;
        set(&servers.0[0].silent, true);
        assert_eq!(
            waiting.await.unwrap().unwrap_err().kind(),
            LockErrorKind::WaitTimeout,
            "{wait:?}"
        );
        set(&servers.0[0].silent, false);
        sleep(Duration::from_secs(2)).await;
    }
}

/// PROTOCOL 13: a renewal that is on its way asks for the votes that are missing.
#[tokio::test(start_paused = true)]
async fn no_vote_is_asked_for_once_it_is_given_back() {
    let servers = Servers::start(3);
    let [first, second, third] = servers.each();
    let (store, hold) = (servers.quorum(), hold());
    let renewals = [Renewal::new(hold.clone(), LEASE)];
    assert!(matches!(
        store.acquire(&request(&hold, LEASE)).await,
        Ok(AcquireReply::Granted(_))
    ));
    sleep(Duration::from_millis(10)).await;
    third.forget_everything();
    store.renew(&renewals).await;
    sleep(Duration::from_millis(10)).await;
    assert_eq!(
        servers.holders().await,
        [1, 1, 0],
        "it has only been noticed"
    );
    first.late.store(20, Ordering::Relaxed);
    second.late.store(20, Ordering::Relaxed);
    let release = Release::new(hold);
    let mut releasing = store.release(&release);
    assert!(poll!(&mut releasing).is_pending());
    let (released, _) = tokio::join!(releasing, store.renew(&renewals));
    assert_eq!(released.unwrap(), ReleaseReply::Released);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(servers.holders().await, [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn an_extended_vote_is_given_back_however_long_that_takes() {
    let servers = Servers::start(3);
    let guard = servers
        .client()
        .exclusive(KEY)
        .lease(Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    sleep(Duration::from_millis(10)).await;
    guard.extend(Duration::from_secs(25)).await.unwrap();
    sleep(Duration::from_millis(10)).await;
    set(&servers.0[2].down, true);
    guard.release().await.unwrap();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(servers.holders().await, [0, 0, 1]);
    set(&servers.0[2].down, false);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(servers.holders().await, [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn what_lies_at_one_server_is_not_the_lock() {
    for place in 0..5 {
        let servers = Servers::start(5);
        set(&servers.0[place].foreign, true);
        let (locks, others) = (servers.client(), servers.client());
        let guard = locks.exclusive(KEY).acquire().await.unwrap();
        let error = others.exclusive(KEY).no_wait().acquire().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Contended, "{place}: {error}");
        let waiting = tokio::spawn(others.exclusive(KEY).wait(Duration::from_secs(5)).acquire());
        sleep(Duration::from_millis(500)).await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        // At so many that no majority is left it is.
        servers
            .0
            .iter()
            .take(3)
            .for_each(|server| set(&server.foreign, true));
        let error = locks.exclusive(KEY).no_wait().acquire().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::ForeignKey, "{place}: {error}");
    }
}
