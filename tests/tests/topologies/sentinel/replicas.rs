//! `min_replicas`: a grant that too few replicas have is not reported, in whichever way it arrives.

use std::num::NonZeroU32;

use lock_runtime::{LockClient, LockErrorKind, LockRequest, RedisOptions};
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
        let builder =
            builder(&namespace).redis(RedisOptions::new().min_replicas(count(1), REPLICATED));
        let locks = builder.connect(&primary.url()).await.unwrap();
        // The scripts are loaded from now on.
        locks
            .exclusive("warm")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        Self {
            primary,
            replica,
            namespace,
            locks,
        }
    }

    /// A client of another process, which does not wait for replicas.
    async fn careless(&self) -> LockClient {
        builder(&self.namespace)
            .connect(&self.primary.url())
            .await
            .unwrap()
    }

    /// Returns whether the replica has the lock.
    async fn copied(&self, key: &str) -> bool {
        self.replica
            .query::<i64>(&["EXISTS", &format!("{}:{key}", self.namespace)])
            .await
            == 1
    }
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
async fn a_grant_is_on_its_replica_when_it_is_told() {
    // Rule 32.
    in_time(async {
        let pair = Pair::start().await;
        for request in each_way(&pair.locks) {
            let guard = request.acquire().await.unwrap();
            assert!(pair.copied("k").await || pair.copied("permits:k").await);
            guard.release().await.unwrap();
        }
        let reader = pair
            .locks
            .exclusive("k")
            .acquire()
            .await
            .unwrap()
            .downgrade()
            .await
            .unwrap();
        let kind: String = pair
            .replica
            .query(&["TYPE", &format!("{}:k", pair.namespace)])
            .await;
        assert_eq!(kind, "zset");
        reader.release().await.unwrap();
        no_key_left(&pair.primary, &pair.namespace).await;
    })
    .await;
}

#[tokio::test]
async fn without_replicas_nothing_is_granted_and_nothing_is_left() {
    in_time(async {
        let pair = Pair::start().await;
        pair.replica.stop();
        for request in each_way(&pair.locks) {
            let error = request.no_wait().acquire().await.unwrap_err();
            assert_says(
                &error,
                LockErrorKind::Unavailable,
                &["lock k: ", "0 of 1 replicas", "100ms"],
            );
        }
        let wait = Duration::from_millis(300);
        for request in [pair.locks.exclusive("k"), pair.locks.shared("k")] {
            let since = Instant::now();
            let error = request.wait(wait).acquire().await.unwrap_err();
            assert_says(&error, LockErrorKind::Unavailable, &["lock k: "]);
            assert!(since.elapsed() >= wait, "it goes on waiting");
        }
        no_key_left(&pair.primary, &pair.namespace).await;
        all_free(&pair.careless().await, &["k", "l"]).await;
        pair.replica.resume();
        pair.locks
            .exclusive("k")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn who_waits_has_the_lock_when_the_replicas_are_back() {
    in_time(async {
        let pair = Pair::start().await;
        pair.replica.stop();
        let mut waiting = pair.locks.exclusive("k").wait(LONG).acquire();
        timeout(WHILE, &mut waiting)
            .await
            .expect_err("the replica does not have it");
        pair.replica.resume();
        let guard = waiting.await.unwrap();
        assert!(pair.copied("k").await);
        guard.release().await.unwrap();
        no_key_left(&pair.primary, &pair.namespace).await;
    })
    .await;
}

#[tokio::test]
async fn a_lock_that_is_handed_over_waits_for_its_replicas_as_well() {
    in_time(async {
        let pair = Pair::start().await;
        let others = pair.careless().await;
        for request in [pair.locks.exclusive("k"), pair.locks.shared("k")] {
            let guard = others.exclusive("k").acquire().await.unwrap();
            let mut waiting = request.wait(LONG).acquire();
            let waits = || async { !others.inspect("k").await.unwrap().waiters.is_empty() };
            tokio::select! {
                early = &mut waiting => panic!("it is still held: {early:?}"),
                () = eventually("it is in the wait queue", waits) => {}
            }
            pair.replica.stop();
            guard.release().await.unwrap();
            timeout(WHILE, &mut waiting)
                .await
                .expect_err("the replica does not have it");
            pair.replica.resume();
            let guard = waiting.await.unwrap();
            eventually("it is on the replica", || pair.copied("k")).await;
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }
        no_key_left(&pair.primary, &pair.namespace).await;
    })
    .await;
}

#[tokio::test]
async fn a_lock_is_handed_over_at_once_where_the_replicas_are_there() {
    in_time(async {
        let pair = Pair::start().await;
        let others = pair.careless().await;
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let guard = others.exclusive("k").acquire().await.unwrap();
            let waiting = tokio::spawn(pair.locks.exclusive("k").wait(LONG).acquire());
            let waits = || async { !others.inspect("k").await.unwrap().waiters.is_empty() };
            eventually("it is in the wait queue", waits).await;
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
    in_time(async {
        let pair = Pair::start().await;
        let guard = pair.locks.exclusive("k").acquire().await.unwrap();
        let mut waiting = Box::pin(pair.locks.exclusive("k").wait(LONG).acquire());
        // The release comes after the time for local hand-offs, and before the head of the local
        // queue has called the store.
        sleep(Duration::from_millis(45)).await;
        timeout(Duration::from_millis(1), &mut waiting)
            .await
            .expect_err("it is held");
        sleep(Duration::from_millis(10)).await;
        pair.replica.stop();
        let since = Instant::now();
        guard.release().await.expect("it was given back");
        assert!(since.elapsed() < WHILE);
        timeout(WHILE, &mut waiting)
            .await
            .expect_err("the replica does not have it");
        pair.replica.resume();
        waiting.await.unwrap().release().await.unwrap();
        no_key_left(&pair.primary, &pair.namespace).await;
    })
    .await;
}

#[tokio::test]
async fn downgrade_that_no_replica_acknowledges_frees_the_lock() {
    in_time(async {
        let pair = Pair::start().await;
        let guard = pair.locks.exclusive("k").acquire().await.unwrap();
        pair.replica.stop();
        let error = guard.downgrade().await.unwrap_err();
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &["lock k: ", "0 of 1 replicas"],
        );
        no_key_left(&pair.primary, &pair.namespace).await;
        pair.replica.resume();
    })
    .await;
}

#[tokio::test]
async fn a_lock_that_is_passed_on_in_this_process_asks_no_replicas() {
    in_time(async {
        const MANY: usize = 100;
        let pair = Pair::start().await;
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
    in_time(async {
        let pair = Pair::start().await;
        let lease = Duration::from_millis(600);
        let guard = pair
            .locks
            .exclusive("k")
            .lease(lease)
            .acquire()
            .await
            .unwrap();
        pair.replica.stop();
        timeout(lease * 3, guard.held().lost())
            .await
            .expect_err("it is renewed");
        guard.release().await.unwrap();
        pair.replica.resume();
    })
    .await;
}

#[tokio::test]
async fn many_grants_share_one_more_connection_and_few_waits() {
    in_time(async {
        const MANY: usize = 300;
        let pair = Pair::start().await;
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
    in_time(async {
        let pair = Pair::start().await;
        for _ in 0..3 {
            pair.primary
                .command(&["CLIENT", "KILL", "TYPE", "normal"])
                .await;
            pair.primary.command(&["SCRIPT", "FLUSH"]).await;
            pair.locks
                .exclusive("k")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        pair.primary.restart_empty().await;
        pair.locks
            .exclusive("k")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn too_few_replicas_are_warned_of_when_connecting() {
    in_time(async {
        let server = RedisServer::start().await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let builder =
            LockClient::builder().redis(RedisOptions::new().min_replicas(count(1), REPLICATED));
        let locks = builder.connect(&server.url()).await.unwrap();
        assert!(
            traces
                .events()
                .iter()
                .any(|event| event.message.contains("too few replicas"))
        );
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
            LockClient::connect(&url_with(set.sentinels(), "", behind))
                .await
                .unwrap()
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
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &["1 of 2 replicas", "200ms"],
        );
        let one = connect("?min_replicas=1").await;
        one.exclusive("k")
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn connect_refuses_min_replicas_that_cannot_be_waited_for() {
    let waiting =
        |timeout| LockClient::builder().redis(RedisOptions::new().min_replicas(count(1), timeout));
    let error = waiting(REPLICATED).build_in_memory().unwrap_err();
    assert_says(
        &error,
        LockErrorKind::InvalidSpec,
        &["min_replicas", "replicas"],
    );
    for timeout in [Duration::ZERO, Duration::from_secs(1)] {
        let error = waiting(timeout)
            .connect("redis://127.0.0.1:1")
            .await
            .unwrap_err();
        assert_says(
            &error,
            LockErrorKind::InvalidSpec,
            &["min_replicas", "1 ms to 400 ms"],
        );
    }
}
