//! Wake-ups in a cluster: the node that keeps the lock notifies the waiter, wherever it is, and
//! subscriptions end with their waiters.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use lock_runtime::LockClient;
use lock_tests::{
    RedisCluster, RedisServer,
    place::{eventually, in_time},
};
use tokio::time::{Instant, sleep};

use super::{LONG, channels, key_at, lock_name, no_slot_has_a_subscriber, place_on};

/// The upper limit of a hand-off by a push message. A poll comes after 750 ms at the earliest.
const TOLD: Duration = Duration::from_millis(150);

async fn in_line(locks: &LockClient, key: &str, places: usize) {
    let what = format!("{places} entries are in the wait queue of {key}");
    eventually(&what, async || {
        locks
            .inspect(key)
            .await
            .is_ok_and(|found| found.waiters.len() == places)
    })
    .await;
}

/// The median time of a hand-off from one process to another. A single one may be slow on a busy
/// machine, or come by a poll. `meanwhile` runs each time, while a request waits.
async fn hand_off(
    from: &LockClient,
    to: &LockClient,
    key: &str,
    meanwhile: impl AsyncFn(),
) -> Duration {
    let mut times = Vec::new();
    for _ in 0..5 {
        let guard = from.exclusive(key).wait(LONG).acquire().await.unwrap();
        let acquire = tokio::spawn(to.exclusive(key).wait(LONG).acquire());
        in_line(from, key, 1).await;
        meanwhile().await;
        // The waiter polls once more when its subscription begins.
        sleep(Duration::from_millis(150)).await;
        let released = Instant::now();
        guard.release().await.unwrap();
        let guard = acquire.await.unwrap().unwrap();
        times.push(released.elapsed());
        guard.release().await.unwrap();
    }
    times.sort_unstable();
    times[2]
}

/// The number of messages of this kind that a node has sent to the others.
async fn sent(node: &RedisServer, kind: &str) -> u64 {
    let info: String = node.query(&["CLUSTER", "INFO"]).await;
    let field = format!("cluster_stats_messages_{kind}_sent:");
    info.lines()
        .find_map(|line| line.strip_prefix(&field)?.trim().parse().ok())
        .unwrap_or(0)
}

#[tokio::test]
async fn a_message_reaches_the_waiter_and_not_the_other_nodes() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        for master in cluster.masters().await {
            let key = key_at(&cluster, &place, master).await;
            let usual = hand_off(&locks, &others, &key, async || {}).await;
            assert!(usual < TOLD, "{usual:?}");
            assert_eq!(sent(master, "publish").await, 0, "sent to no other node");
            assert!(sent(master, "publishshard").await >= 5);
        }
        no_slot_has_a_subscriber(&cluster).await;
    })
    .await;
}

#[tokio::test]
async fn a_waiter_gets_messages_after_a_failover_too() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let key = key_at(&cluster, &place, cluster.masters().await[0]).await;
        let owner = lock_name(&place, &key);
        // Only once: a node that has just been promoted does not give way at once, and blocks its
        // clients meanwhile.
        let first = AtomicBool::new(true);
        let failover = async || {
            if first.swap(false, Ordering::Relaxed) {
                cluster.failover(cluster.owner_of(&owner).await).await;
            }
        };
        let usual = hand_off(&locks, &others, &key, failover).await;
        assert!(usual < TOLD, "{usual:?}");
        no_slot_has_a_subscriber(&cluster).await;
    })
    .await;
}

#[tokio::test]
async fn a_waiter_gets_messages_after_the_slot_has_moved_too() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let [first, second, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, first).await;
        let owner = lock_name(&place, &key);
        let migrate = async || {
            let to = if cluster.owner_of(&owner).await.port() == first.port() {
                second
            } else {
                first
            };
            cluster.begin_migration(&owner, to).await.finish().await;
        };
        let usual = hand_off(&locks, &others, &key, migrate).await;
        assert!(usual < TOLD, "{usual:?}");
        no_slot_has_a_subscriber(&cluster).await;
    })
    .await;
}

#[tokio::test]
async fn a_waiter_gets_messages_after_a_lost_connection_too() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let node = cluster.masters().await[0];
        let key = key_at(&cluster, &place, node).await;
        let cut = async || drop(node.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await);
        let usual = hand_off(&locks, &others, &key, cut).await;
        assert!(usual < TOLD, "{usual:?}");
        no_slot_has_a_subscriber(&cluster).await;
    })
    .await;
}

#[tokio::test]
async fn acquire_uses_one_channel_per_slot_while_waiters_are_left() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let names: Vec<_> = (0..20).map(|number| format!("{{slot}}{number}")).collect();
        let mut guards = Vec::new();
        for name in &names {
            guards.push(locks.exclusive(name.as_str()).acquire().await.unwrap());
        }
        let mut waiting: Vec<_> = names
            .iter()
            .map(|name| tokio::spawn(others.exclusive(name.as_str()).wait(LONG).acquire()))
            .collect();
        for name in &names {
            in_line(&locks, name, 1).await;
        }
        eventually("the slot is listened to", async || {
            channels(&cluster).await.len() == 1
        })
        .await;
        // Longer than a channel outlives its waiters.
        sleep(Duration::from_millis(2500)).await;
        assert_eq!(channels(&cluster).await.len(), 1, "as long as they wait");
        for left in waiting.drain(..10) {
            left.abort();
        }
        drop(guards);
        for told in waiting {
            told.await.unwrap().unwrap().release().await.unwrap();
        }
        no_slot_has_a_subscriber(&cluster).await;
        for node in cluster.nodes() {
            let clients: String = node.query(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
            assert!(
                clients.lines().all(|line| line.contains(" ssub=0 ")),
                "{clients}"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn waiters_that_give_up_leave_no_channel_behind() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let guard = locks.exclusive("k").acquire().await.unwrap();
        for patience in 0..40 {
            let acquire = others.exclusive("k").wait(LONG).acquire();
            let _ = tokio::time::timeout(Duration::from_millis(patience), acquire).await;
        }
        guard.release().await.unwrap();
        no_slot_has_a_subscriber(&cluster).await;
        // A client that is gone has no subscription either.
        let guard = locks.exclusive("k").acquire().await.unwrap();
        let waiting = tokio::spawn(others.exclusive("k").wait(LONG).acquire());
        eventually("it is listened to", async || {
            channels(&cluster).await.len() == 1
        })
        .await;
        waiting.abort();
        drop(others);
        no_slot_has_a_subscriber(&cluster).await;
        guard.release().await.unwrap();
    })
    .await;
}
