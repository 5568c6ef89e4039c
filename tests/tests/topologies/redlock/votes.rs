//! Single votes: schedules in which one server is late, silent, ahead or held by another client,
//! run on stores in this process. Each of them once broke a promise.

use std::{
    future::pending,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::poll;
use lock_runtime::{
    FencingToken, LockClient, LockErrorKind, LockKey, LockKind, Mode,
    store::{
        AcquireReply, Hold, IfBusy, Instant, KeyPart, KeyRequest, MemoryStore, PollReply,
        QuorumMember, QuorumStore, Release, ReleaseReply, Renewal, RevokeScope, Store, StoreError,
        StoreErrorKind, Token,
    },
};
use lock_tests::{
    FaultyStore,
    faulty_store::{Operation, Outcome},
};
use tokio::time::sleep;

const KEY: &str = "k";
const LEASE: Duration = Duration::from_secs(30);

/// A server and its faults.
#[derive(Default)]
struct Server {
    store: RwLock<Arc<MemoryStore>>,
    down: AtomicBool,
    silent: AtomicBool,
    /// Sends no events to clients that connect now.
    mute: AtomicBool,
    /// Accepts no fencing token from other servers.
    stubborn: AtomicBool,
    /// Has foreign data under every name.
    foreign: AtomicBool,
    /// The milliseconds before a request is executed.
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

    /// The server as a client sees it.
    fn connect(self: Arc<Self>) -> Arc<dyn QuorumMember> {
        // A mute server's events go to the listeners of a store that executes nothing.
        let listened = match is(&self.mute) {
            true => Arc::default(),
            false => self.store(),
        };
        FaultyStore::new(listened, move |call| self.clone().reply(call.operation))
    }

    async fn reply(self: Arc<Self>, operation: Operation) -> Outcome {
        let unavailable = |message| Err(StoreError::new(StoreErrorKind::Unavailable, message));
        if is(&self.silent) {
            pending::<()>().await;
        }
        sleep(Duration::from_millis(self.late.load(Ordering::Relaxed))).await;
        match operation {
            _ if is(&self.down) => unavailable("down"),
            Operation::Acquire(_) if is(&self.foreign) => {
                Ok(Box::new(AcquireReply::ForeignKey(KeyPart::Lock)))
            }
            Operation::Raise(..) if is(&self.stubborn) => unavailable("not now"),
            operation => operation.execute(&*self.store()).await,
        }
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

/// The servers of a quorum, beginning with the coordinator of `KEY`.
struct Servers(Vec<Arc<Server>>);

impl Servers {
    fn start(count: usize) -> Self {
        Self((0..count).map(|_| Arc::default()).collect())
    }

    fn quorum(&self) -> QuorumStore {
        let Self(servers) = self;
        // FNV-1a of the name, by which all clients find the coordinator.
        let hash = KEY.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
        let mut listed = servers.clone();
        listed.rotate_right(hash as usize % servers.len());
        let named = listed
            .into_iter()
            .map(|server| (String::from("server"), server.connect()));
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

/// Rule 1: the abandon of a refused request is repeated after its deadline, when the same
/// client holds the lock.
#[tokio::test(start_paused = true)]
async fn abandon_of_a_refused_request_frees_no_later_grant() {
    let servers = Servers::start(3);
    let [coordinator, _, other] = servers.each();
    let (first, second, third) = (servers.client(), servers.client(), servers.client());
    let held = first.exclusive(KEY).acquire().await.unwrap();
    sleep(Duration::from_secs(1)).await;
    coordinator.late.store(300, Ordering::Relaxed);
    let waiting = tokio::spawn(second.exclusive(KEY).wait(LEASE).acquire());
    sleep(Duration::from_millis(10)).await;
    coordinator.late.store(0, Ordering::Relaxed);
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

/// The holder won with a majority while another server still had it in its queue. It needs the vote
/// of that server when a third one forgets it.
#[tokio::test(start_paused = true)]
async fn renew_gets_the_vote_of_a_server_that_still_queues_the_holder() {
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

/// Rule 28: a fence block counts only if a majority knows its end.
#[tokio::test(start_paused = true)]
async fn poll_reserves_a_fence_block_that_a_majority_knows() {
    let servers = Servers::start(3);
    let [coordinator, second, third] = servers.each();
    servers.0.iter().for_each(|server| set(&server.mute, true));
    let [holder, waiter, last] = [(); 3].map(|()| servers.quorum());
    let (held, waiting, next) = (hold(), hold(), hold());
    assert!(matches!(
        holder.acquire(&request(&held, LEASE)).await,
        Ok(AcquireReply::Granted(_))
    ));
    // The coordinator's fencing tokens are far ahead, so those of the others have to be raised.
    let Some(fence) = coordinator
        .store()
        .inspect(&key(), LockKind::Lock)
        .await
        .unwrap()
        .fence
    else {
        panic!("it is held")
    };
    let ahead = FencingToken::new(fence.number() + 5_000_000).unwrap();
    coordinator
        .store()
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
async fn acquire_times_out_if_the_coordinator_falls_silent_at_the_end() {
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

/// Rule 13: a renewal in flight requests the missing votes.
#[tokio::test(start_paused = true)]
async fn release_ends_the_requests_for_missing_votes() {
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
async fn release_frees_an_extended_vote_however_long_that_takes() {
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
async fn acquire_reports_foreign_data_only_without_a_majority() {
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
        // With foreign data on three of five servers, no majority is left.
        servers
            .0
            .iter()
            .take(3)
            .for_each(|server| set(&server.foreign, true));
        let error = locks.exclusive(KEY).no_wait().acquire().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::ForeignKey, "{place}: {error}");
    }
}
