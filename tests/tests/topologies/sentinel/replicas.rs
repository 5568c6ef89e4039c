//! `min_replicas`: a grant that too few replicas have is not reported, in whichever way it arrives.

use std::num::NonZeroU32;

use lock_runtime::{LockClient, LockError, LockErrorKind, LockGuard, LockRequest, RedisOptions};
use lock_tests::{
    Captured, RedisServer, SentinelSet,
    place::{LONG, all_free, eventually, in_time, no_key_left},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{Duration, HOUR, assert_says, builder, namespace, url_with};

/// The time for which a grant waits for its replicas.
const REPLICATED: Duration = Duration::from_millis(100);
/// Much longer than a grant takes.
const WHILE: Duration = Duration::from_secs(1);

pub(super) fn count(replicas: u32) -> NonZeroU32 {
    NonZeroU32::new(replicas).unwrap()
}

/// A primary, its replica, and a client whose grants wait for that replica.
struct Pair {
    primary: RedisServer,
    replica: RedisServer,
    namespace: String,
    locks: LockClient,
}

impl Pair {
    async fn start() -> Self {
        let primary = RedisServer::start().await;
        let replica = RedisServer::builder().replica_of(&primary).start().await;
        let namespace = namespace();
        let options = RedisOptions::new().min_replicas(count(1), REPLICATED);
        let builder = builder(&namespace).redis(options);
        let locks = builder.connect(&primary.url()).await.unwrap();
        // The scripts are loaded from now on.
        once(locks.exclusive("warm")).await;
        Self {
            primary,
            replica,
            namespace,
            locks,
        }
    }

    /// A client of another process, which does not wait for replicas.
    async fn careless(&self) -> LockClient {
        let builder = builder(&self.namespace);
        builder.connect(&self.primary.url()).await.unwrap()
    }

    /// Returns whether the replica has the lock.
    async fn copied(&self, key: &str) -> bool {
        let key = format!("{}:{key}", self.namespace);
        self.replica.query::<i64>(&["EXISTS", &key]).await == 1
    }

    /// Resumes the stopped replica once a request has waited for it in vain.
    async fn resume_for(&self, waiting: &mut (impl Future<Output = Granted> + Unpin)) {
        let early = timeout(WHILE, waiting).await;
        early.expect_err("the replica does not have it");
        self.replica.resume();
    }

    async fn no_key_left(&self) {
        no_key_left(&self.primary, &self.namespace).await;
    }
}

type Granted = Result<LockGuard, LockError>;

/// Runs a test on a pair of its own.
async fn on_a_pair(test: impl AsyncFnOnce(Pair)) {
    in_time(async { test(Pair::start().await).await }).await;
}

async fn once(request: LockRequest) {
    let guard = request.acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// Waits until a request for the lock is in the wait queue.
async fn someone_waits(locks: &LockClient) {
    eventually("it is in the wait queue", async || {
        !locks.inspect("k").await.unwrap().waiters.is_empty()
    })
    .await;
}

/// The number of `WAIT` calls.
async fn waits(server: &RedisServer) -> u64 {
    let stats: String = server.query(&["INFO", "commandstats"]).await;
    let calls = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_wait:calls="));
    calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
}

/// A request of each kind.
fn each_way(locks: &LockClient) -> [LockRequest; 5] {
    [
        locks.exclusive("k"),
        locks.shared("k"),
        locks.permits("k", count(2)),
        locks.all(["k", "l"]),
        locks.all(["k", "l"]).wait(REPLICATED),
    ]
}

#[tokio::test]
async fn a_grant_is_on_its_replica_before_the_client_gets_it() {
    // Rule 32.
    on_a_pair(async |pair| {
        for request in each_way(&pair.locks) {
            let guard = request.acquire().await.unwrap();
            assert!(pair.copied("k").await || pair.copied("permits:k").await);
            guard.release().await.unwrap();
        }
        let writer = pair.locks.exclusive("k").acquire().await.unwrap();
        let reader = writer.downgrade().await.unwrap();
        let key = format!("{}:k", pair.namespace);
        assert_eq!(pair.replica.query::<String>(&["TYPE", &key]).await, "zset");
        reader.release().await.unwrap();
        pair.no_key_left().await;
    })
    .await;
}

#[tokio::test]
async fn without_replicas_nothing_is_granted_and_nothing_is_left() {
    on_a_pair(async |pair| {
        pair.replica.stop();
        for request in each_way(&pair.locks) {
            let error = request.no_wait().acquire().await.unwrap_err();
            let words = ["lock k: ", "0 of 1 replicas", "100ms"];
            assert_says(&error, LockErrorKind::Unavailable, &words);
        }
        let wait = Duration::from_millis(300);
        for request in [pair.locks.exclusive("k"), pair.locks.shared("k")] {
            let since = Instant::now();
            let error = request.wait(wait).acquire().await.unwrap_err();
            assert_says(&error, LockErrorKind::Unavailable, &["lock k: "]);
            assert!(since.elapsed() >= wait, "it goes on waiting");
        }
        pair.no_key_left().await;
        all_free(&pair.careless().await, &["k", "l"]).await;
        pair.replica.resume();
        once(pair.locks.exclusive("k").wait(LONG)).await;
    })
    .await;
}

#[tokio::test]
async fn who_waits_has_the_lock_when_the_replicas_are_back() {
    on_a_pair(async |pair| {
        pair.replica.stop();
        let mut waiting = pair.locks.exclusive("k").wait(LONG).acquire();
        pair.resume_for(&mut waiting).await;
        let guard = waiting.await.unwrap();
        assert!(pair.copied("k").await);
        guard.release().await.unwrap();
        pair.no_key_left().await;
    })
    .await;
}

#[tokio::test]
async fn a_lock_that_is_handed_over_waits_for_its_replicas_as_well() {
    on_a_pair(async |pair| {
        let others = pair.careless().await;
        for request in [pair.locks.exclusive("k"), pair.locks.shared("k")] {
            let guard = others.exclusive("k").acquire().await.unwrap();
            let mut waiting = request.wait(LONG).acquire();
            tokio::select! {
                early = &mut waiting => panic!("it is still held: {early:?}"),
                () = someone_waits(&others) => {}
            }
            pair.replica.stop();
            guard.release().await.unwrap();
            pair.resume_for(&mut waiting).await;
            let guard = waiting.await.unwrap();
            eventually("it is on the replica", || pair.copied("k")).await;
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }
        pair.no_key_left().await;
    })
    .await;
}

#[tokio::test]
async fn a_lock_is_handed_over_at_once_where_the_replicas_are_there() {
    on_a_pair(async |pair| {
        let others = pair.careless().await;
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let guard = others.exclusive("k").acquire().await.unwrap();
            let waiting = tokio::spawn(pair.locks.exclusive("k").wait(LONG).acquire());
            someone_waits(&others).await;
            let since = Instant::now();
            guard.release().await.unwrap();
            let guard = waiting.await.unwrap().unwrap();
            fastest = fastest.min(since.elapsed());
            guard.release().await.unwrap();
        }
        // A poll would come after 750 ms at the earliest.
        assert!(fastest < Duration::from_millis(200), "{fastest:?}");
    })
    .await;
}

/// The holder releases the lock while the replica is stopped and another request of this process
/// waits. The lock is not handed off locally, as the time for local hand-offs is over.
#[tokio::test]
async fn a_lock_that_is_taken_up_again_waits_for_its_replicas_as_well() {
    on_a_pair(async |pair| {
        let guard = pair.locks.exclusive("k").acquire().await.unwrap();
        let mut waiting = Box::pin(pair.locks.exclusive("k").wait(LONG).acquire());
        // The release comes after the time for local hand-offs, and before the head of the local
        // queue has called the store.
        sleep(Duration::from_millis(45)).await;
        let early = timeout(Duration::from_millis(1), &mut waiting).await;
        early.expect_err("it is held");
        sleep(Duration::from_millis(10)).await;
        pair.replica.stop();
        let since = Instant::now();
        guard.release().await.expect("it was given back");
        assert!(since.elapsed() < WHILE);
        pair.resume_for(&mut waiting).await;
        waiting.await.unwrap().release().await.unwrap();
        pair.no_key_left().await;
    })
    .await;
}

#[tokio::test]
async fn downgrade_that_no_replica_acknowledges_frees_the_lock() {
    on_a_pair(async |pair| {
        let guard = pair.locks.exclusive("k").acquire().await.unwrap();
        pair.replica.stop();
        let error = guard.downgrade().await.unwrap_err();
        let words = ["lock k: ", "0 of 1 replicas"];
        assert_says(&error, LockErrorKind::Unavailable, &words);
        pair.no_key_left().await;
        pair.replica.resume();
    })
    .await;
}

#[tokio::test]
async fn a_lock_that_is_passed_on_in_this_process_asks_no_replicas() {
    on_a_pair(async |pair| {
        const MANY: usize = 100;
        let before = waits(&pair.primary).await;
        let mut passing: JoinSet<_> = (0..MANY)
            .map(|_| pair.locks.exclusive("k").wait(LONG).acquire())
            .collect();
        let mut latest = None;
        while let Some(guard) = passing.join_next().await {
            let guard = guard.unwrap().unwrap();
            assert!(latest.replace(guard.fence()) < Some(guard.fence()));
            guard.release().await.unwrap();
        }
        let waits = waits(&pair.primary).await - before;
        assert!(waits < MANY as u64 / 3, "{waits} waits for {MANY} grants");
    })
    .await;
}

#[tokio::test]
async fn renewals_wait_for_no_replica() {
    on_a_pair(async |pair| {
        let lease = Duration::from_millis(600);
        let request = pair.locks.exclusive("k").lease(lease);
        let guard = request.acquire().await.unwrap();
        pair.replica.stop();
        let lost = timeout(lease * 3, guard.held().lost()).await;
        lost.expect_err("it is renewed");
        guard.release().await.unwrap();
        pair.replica.resume();
    })
    .await;
}

#[tokio::test]
async fn many_grants_share_one_more_connection_and_few_waits() {
    on_a_pair(async |pair| {
        const MANY: usize = 300;
        let connections = pair.primary.clients().await.len();
        let before = waits(&pair.primary).await;
        let mut acquiring: JoinSet<_> = (0..MANY)
            .map(|i| pair.locks.exclusive(format!("k{i}")).lease(HOUR).acquire())
            .collect();
        let mut guards = Vec::new();
        while let Some(guard) = acquiring.join_next().await {
            guards.push(guard.unwrap().unwrap());
        }
        assert_eq!(pair.primary.clients().await.len(), connections);
        let waits = waits(&pair.primary).await - before;
        assert!(waits < MANY as u64 / 3, "{waits} waits for {MANY} grants");
        for guard in guards {
            guard.release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_lost_connection_for_waiting_is_made_again() {
    on_a_pair(async |pair| {
        for _ in 0..3 {
            let kill = ["CLIENT", "KILL", "TYPE", "normal"];
            pair.primary.command(&kill).await;
            pair.primary.command(&["SCRIPT", "FLUSH"]).await;
            once(pair.locks.exclusive("k")).await;
        }
        pair.primary.restart_empty().await;
        once(pair.locks.exclusive("k").wait(LONG)).await;
    })
    .await;
}

#[tokio::test]
async fn too_few_replicas_are_warned_of_when_connecting() {
    in_time(async {
        let server = RedisServer::start().await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let options = RedisOptions::new().min_replicas(count(1), REPLICATED);
        let builder = LockClient::builder().redis(options);
        let locks = builder.connect(&server.url()).await.unwrap();
        let mut said = traces.events().into_iter();
        assert!(said.any(|event| event.message.contains("too few replicas")));
        let error = locks.exclusive("k").no_wait().acquire().await.unwrap_err();
        assert_says(&error, LockErrorKind::Unavailable, &["0 of 1 replicas"]);
        no_key_left(&server, "lock").await;
    })
    .await;
}

#[tokio::test]
async fn the_url_of_sentinels_says_how_many_replicas() {
    in_time(async {
        let set = SentinelSet::start().await;
        let connect = async |behind: &str| {
            let url = url_with(set.sentinels(), "", behind);
            LockClient::connect(&url).await.unwrap()
        };
        let two = connect("?min_replicas=2&replica_timeout=200ms").await;
        let guard = two.exclusive("k").acquire().await.unwrap();
        for replica in set.replicas().await {
            assert_eq!(replica.query::<i64>(&["EXISTS", "lock:k"]).await, 1);
        }
        guard.release().await.unwrap();
        // A stopped replica is missing. The Sentinels keep the primary.
        set.replicas().await[0].stop();
        let error = two.exclusive("k").no_wait().acquire().await.unwrap_err();
        let words = ["1 of 2 replicas", "200ms"];
        assert_says(&error, LockErrorKind::Unavailable, &words);
        let one = connect("?min_replicas=1").await;
        once(one.exclusive("k").wait(LONG)).await;
    })
    .await;
}

#[tokio::test]
async fn connect_refuses_min_replicas_that_cannot_be_waited_for() {
    let waiting =
        |timeout| LockClient::builder().redis(RedisOptions::new().min_replicas(count(1), timeout));
    let error = waiting(REPLICATED).build_in_memory().unwrap_err();
    let words = ["min_replicas", "replicas"];
    assert_says(&error, LockErrorKind::InvalidSpec, &words);
    for timeout in [Duration::ZERO, Duration::from_secs(1)] {
        let connecting = waiting(timeout).connect("redis://127.0.0.1:1");
        let error = connecting.await.unwrap_err();
        let words = ["min_replicas", "1 ms to 400 ms"];
        assert_says(&error, LockErrorKind::InvalidSpec, &words);
    }
}
