//! Locks on a Redis Cluster: each request goes to the node that keeps the key, even if the key has
//! just moved there; a failed node affects only its own keys; and waiters are notified.

mod access;
mod failing;
mod finding;
mod moving;
mod several;
mod storms;
mod told;

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{
    RedisCluster, RedisServer,
    place::{LONG, Place, cluster_url, eventually},
};

const HOUR: Duration = Duration::from_secs(3600);

/// A namespace of its own on the given cluster.
fn place_on(cluster: &RedisCluster) -> Place {
    Place::at(cluster_url(cluster))
}

/// The names of `count` locks that `node` keeps.
async fn keys_at(
    cluster: &RedisCluster,
    place: &Place,
    node: &RedisServer,
    count: usize,
) -> Vec<String> {
    let mut keys = Vec::new();
    for number in 0.. {
        let key = format!("{{{number}}}");
        if cluster.owner_of(&lock_name(place, &key)).await.port() == node.port() {
            keys.push(key);
        }
        if keys.len() == count {
            break;
        }
    }
    keys
}

async fn key_at(cluster: &RedisCluster, place: &Place, node: &RedisServer) -> String {
    keys_at(cluster, place, node, 1).await.remove(0)
}

/// The name of one lock of each primary, in the order of the primaries.
async fn key_of_each(cluster: &RedisCluster, place: &Place) -> [String; 3] {
    let mut keys = Vec::new();
    for master in cluster.masters().await {
        keys.push(key_at(cluster, place, master).await);
    }
    keys.try_into().expect("there are three primaries")
}

/// The key of the lock in the store.
fn lock_name(place: &Place, key: &str) -> String {
    format!("{}:{key}", place.namespace())
}

/// The key of the fence in the store, for a lock whose name has a hash tag.
fn fence_name(place: &Place, key: &str) -> String {
    format!("f:{}", lock_name(place, key))
}

/// Acquires and releases the lock.
async fn use_lock(locks: &LockClient, key: &str) {
    locks
        .exclusive(key)
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// The sharded channels that have subscribers, at any node.
async fn channels(cluster: &RedisCluster) -> Vec<String> {
    let mut channels = Vec::new();
    for node in cluster.nodes().iter().filter(|node| node.is_running()) {
        channels.extend(
            node.query::<Vec<String>>(&["PUBSUB", "SHARDCHANNELS"])
                .await,
        );
    }
    channels
}

async fn no_slot_has_a_subscriber(cluster: &RedisCluster) {
    eventually("no slot has a subscriber", async || {
        channels(cluster).await.is_empty()
    })
    .await;
}
