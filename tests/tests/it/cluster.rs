//! Locks on a Redis Cluster: each key goes to the node that keeps it, also when that is another one than a moment ago, a node that is
//! gone costs nobody else anything, and who waits is told.

mod access;
mod failing;
mod finding;
mod moving;
mod several;
mod storms;
mod told;

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{RedisCluster, RedisServer};

use crate::place::{LONG, Place, cluster_url, eventually};

const HOUR: Duration = Duration::from_secs(3600);

/// A namespace of its own on a cluster of its own.
fn place_on(cluster: &RedisCluster) -> Place {
    Place::at(cluster_url(cluster))
}

/// Names of locks that `node` keeps.
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

/// A key of each primary, in their order.
async fn key_of_each(cluster: &RedisCluster, place: &Place) -> [String; 3] {
    let mut keys = Vec::new();
    for master in cluster.masters().await {
        keys.push(key_at(cluster, place, master).await);
    }
    keys.try_into().expect("there are three primaries")
}

/// The key in the store.
fn lock_name(place: &Place, key: &str) -> String {
    format!("{}:{key}", place.namespace())
}

/// The fence of a lock whose name has a hash tag.
fn fence_name(place: &Place, key: &str) -> String {
    format!("f:{}", lock_name(place, key))
}

/// Takes the lock and gives it back.
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

/// The sharded channels that somebody listens to, at any node.
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

async fn nobody_listens(cluster: &RedisCluster) {
    eventually("nobody listens to a slot", async || {
        channels(cluster).await.is_empty()
    })
    .await;
}
