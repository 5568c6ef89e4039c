//! Votes for another acquisition: of a client that is dead, or of one that asks for the same locks.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, LockErrorKind, LockKey, LockRequest, Mode,
    store::{
        AcquireReply, Hold, IfBusy, Instant, KeyRequest, MemoryStore, QuorumMember, QuorumStore,
        Store, Token, redis::RedisStore,
    },
};
use tokio::time::{sleep, timeout};

use super::{LONGEST_LEASE, Servers};
use lock_tests::place::{LONG, all_free, begun, eventually};

/// From the moment at which a majority is free until a waiter has the lock.
const SOON: Duration = Duration::from_millis(250);
/// How long a request may take that does not wait.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Which of `servers` keeps the wait queue of a key: FNV-1a of the key.
fn queue_node(key: &str, servers: usize) -> usize {
    let hash = key.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    hash as usize % servers
}

/// Five stores in this process, and clients of them.
struct Stores([Arc<MemoryStore>; 5]);

impl Stores {
    fn new() -> Self {
        Self(Default::default())
    }

    fn client(&self) -> LockClient {
        let servers = self.0.iter().map(|store| {
            (
                String::from("store"),
                store.clone() as Arc<dyn QuorumMember>,
            )
        });
        LockClient::with_store(Arc::new(QuorumStore::new(servers, LONGEST_LEASE).unwrap()))
    }

    /// A vote for a client that died before it asked the other servers, at the one that keeps the
    /// wait queue.
    async fn plant(&self, key: &str, mode: Mode) {
        let hold = Hold::new(LockKey::new(key).unwrap(), mode, Token::random());
        let request = KeyRequest::new(hold, LONGEST_LEASE, Instant::now() + LONGEST_LEASE);
        self.0[queue_node(key, 5)].acquire(&request).await.unwrap();
    }
}

/// A store that keeps the wait queue, in which a client stands that will not ask for its turn.
async fn stand_in_line(store: &dyn Store, key: &str) {
    let hold = Hold::new(LockKey::new(key).unwrap(), Mode::Exclusive, Token::random());
    let mut request = KeyRequest::new(hold, LONGEST_LEASE, Instant::now() + LONGEST_LEASE);
    request.if_busy = IfBusy::Queue;
    let reply = store.acquire(&request).await.unwrap();
    assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
}

/// The modes of a dead vote and of a request that it may hold up.
const MODES: [(Mode, Mode); 3] = [
    (Mode::Exclusive, Mode::Exclusive),
    (Mode::Exclusive, Mode::Shared),
    (Mode::Shared, Mode::Exclusive),
];

fn request(locks: &LockClient, key: &str, mode: Mode, wait: Option<Duration>) -> LockRequest {
    let request = if mode == Mode::Shared {
        locks.shared(key)
    } else {
        locks.exclusive(key)
    };
    let request = request.lease(LONGEST_LEASE);
    wait.map_or_else(
        || request.clone().no_wait(),
        |wait| request.clone().wait(wait),
    )
}

#[tokio::test(start_paused = true)]
async fn a_dead_vote_holds_no_request_up_at_stores_in_this_process() {
    for (dead, mode) in MODES {
        for wait in [None, Some(LONG)] {
            let stores = Stores::new();
            stores.plant("a", dead).await;
            let since = Instant::now();
            let guard = request(&stores.client(), "a", mode, wait).acquire().await;
            // A reader in the queue may have to wait for a writer in front, and finds out first
            // whether that one lives.
            let within = if wait.is_none() { AT_ONCE } else { SOON * 2 };
            assert!(
                guard.is_ok() && since.elapsed() < within,
                "{mode:?} behind {dead:?}: {guard:?} after {:?}",
                since.elapsed()
            );
        }
    }
}

/// The second look of a request that does not wait takes no time that a short lease would not
/// leave.
#[tokio::test(start_paused = true)]
async fn a_dead_vote_holds_no_request_with_a_short_lease_up() {
    for (dead, mode) in MODES {
        let stores = Stores::new();
        stores.plant("a", dead).await;
        let guard = request(&stores.client(), "a", mode, None)
            .lease(Duration::from_millis(500))
            .acquire()
            .await;
        assert!(guard.is_ok(), "{mode:?} behind {dead:?}: {guard:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn acquire_no_wait_refuses_a_reader_behind_a_waiting_writer() {
    let stores = Stores::new();
    stores.plant("a", Mode::Exclusive).await;
    stand_in_line(&*stores.0[queue_node("a", 5)], "a").await;
    let refused = request(&stores.client(), "a", Mode::Shared, None)
        .acquire()
        .await;
    assert_eq!(refused.unwrap_err().kind(), LockErrorKind::Contended);
}

#[tokio::test]
async fn a_dead_vote_holds_no_request_up() {
    let servers = Servers::shared().await;
    let locks = servers.client().await;
    let node = &servers.all()[queue_node("a", 5)];
    let name = format!("{}:a", servers.namespace);
    for (dead, mode) in MODES {
        for wait in [None, Some(LONG)] {
            let until = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + LONGEST_LEASE;
            let until = until.as_millis().to_string();
            if dead == Mode::Shared {
                node.command(&["ZADD", &name, &until, "dead"]).await;
                node.command(&["PEXPIREAT", &name, &until]).await;
            } else {
                node.command(&["SET", &name, "dead", "PXAT", &until]).await;
            }
            // Without a second look a request that does not wait is refused.
            let guard = request(&locks, "a", mode, wait).acquire().await;
            assert!(
                guard.is_ok(),
                "{mode:?} behind {dead:?}, {wait:?}: {guard:?}"
            );
            drop(guard.unwrap().release().await);
            node.command(&["DEL", &name]).await;
            let free = || async { locks.inspect("a").await.unwrap().holders.is_empty() };
            eventually("it is free", free).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn release_to_a_dead_next_holder_delays_no_waiter() {
    // At whatever time between two polls of the waiter.
    for after in (0..60).map(|step| Duration::from_millis(29) * step) {
        let stores = Stores::new();
        let (holder, locks) = (stores.client(), stores.client());
        let guard = holder
            .exclusive("a")
            .lease(LONGEST_LEASE)
            .acquire()
            .await
            .unwrap();
        stand_in_line(&*stores.0[queue_node("a", 5)], "a").await;
        let mut waiting = begun(
            locks
                .exclusive("a")
                .lease(LONGEST_LEASE)
                .wait(LONG)
                .acquire(),
        )
        .await;
        assert!(timeout(after, &mut waiting).await.is_err());
        let since = Instant::now();
        guard.release().await.unwrap();
        let guard = waiting.await;
        assert!(guard.is_ok());
        assert!(
            since.elapsed() < SOON,
            "released after {after:?}, granted {:?} later",
            since.elapsed()
        );
    }
}

#[tokio::test]
async fn release_to_a_dead_next_holder_delays_no_waiter_on_servers() {
    let servers = Servers::shared().await;
    let (holder, locks) = (servers.client().await, servers.client().await);
    let url = servers.all()[queue_node("a", 5)].url();
    let line = RedisStore::connect(&url, &servers.namespace).await.unwrap();
    for after in [10, 300, 900].map(Duration::from_millis) {
        let guard = holder
            .exclusive("a")
            .lease(LONGEST_LEASE)
            .wait(LONG)
            .acquire()
            .await
            .unwrap();
        stand_in_line(&line, "a").await;
        let mut waiting = begun(
            locks
                .exclusive("a")
                .lease(LONGEST_LEASE)
                .wait(LONG)
                .acquire(),
        )
        .await;
        assert!(timeout(after, &mut waiting).await.is_err());
        let since = Instant::now();
        guard.release().await.unwrap();
        let next = waiting.await.unwrap();
        // Without a look at the others it is granted when the dead one's vote ends, or after 0.8 s.
        assert!(
            since.elapsed() < SOON * 2,
            "released after {after:?}, granted {:?} later",
            since.elapsed()
        );
        next.release().await.unwrap();
        sleep(LONGEST_LEASE).await;
    }
}

/// Two clients that ask for the same locks at the same time, without waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_requests_for_the_same_locks_one_is_granted() {
    const KEYS: [&str; 3] = ["a", "b", "c"];
    let servers = Servers::shared().await;
    let clients = servers.clients_of_three(2).await;
    let mut refused = 0;
    for _ in 0..200 {
        let requests = clients
            .iter()
            .map(|locks| tokio::spawn(locks.all(KEYS).lease(LONGEST_LEASE).no_wait().acquire()));
        let outcomes: Vec<_> = join_all(requests)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        refused += usize::from(outcomes.iter().all(Result::is_err));
        for outcome in outcomes {
            match outcome {
                Ok(guard) => guard.release().await.unwrap(),
                Err(error) => assert_eq!(error.kind(), LockErrorKind::Contended, "{error}"),
            }
        }
        all_free(&clients[0], &KEYS).await;
    }
    assert_eq!(refused, 0, "both were refused, in 200 rounds");
}
