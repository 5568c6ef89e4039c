//! The same behind Sentinels, on the nodes of a cluster and on independent servers.

use lock_runtime::{LockClient, RedisOptions};
use lock_tests::{
    RedisCluster, RedisServer, SentinelSet,
    place::{cluster_url_of, in_time, redlock_url},
};

use super::{ALL, Secret, app, outlive, rotate};

fn builder(secret: &Secret) -> lock_runtime::LockClientBuilder {
    LockClient::builder().redis(RedisOptions::new().credentials(secret.provide()))
}

#[tokio::test]
async fn the_nodes_of_a_cluster() {
    in_time(async {
        let cluster = RedisCluster::builder().user("app", "one", ALL).start();
        let (cluster, secret) = (cluster.await, Secret::new(app("one")));
        let urls = cluster.nodes().iter().map(RedisServer::url);
        let locks = builder(&secret)
            .connect(&cluster_url_of(urls))
            .await
            .unwrap();
        let refuse = async || rotate(cluster.nodes(), "two").await;
        outlive(&locks, refuse, async || secret.set(Ok(app("two")))).await;
    })
    .await;
}

#[tokio::test]
async fn independent_servers() {
    in_time(async {
        let servers = RedisServer::builder().user("app", "one", ALL).start_all(3);
        let (servers, secret) = (servers.await, Secret::new(app("one")));
        let options = RedisOptions::new()
            .credentials(secret.provide())
            .longest_lease(std::time::Duration::from_secs(4));
        let builder = LockClient::builder().redis(options);
        let urls = servers.iter().map(RedisServer::url);
        let locks = builder.connect(&redlock_url(urls)).await.unwrap();
        lock_tests::place::eventually("they vote", async || {
            locks.exclusive("vote").no_wait().acquire().await.is_ok()
        })
        .await;
        let refuse = async || rotate(&servers, "two").await;
        outlive(&locks, refuse, async || secret.set(Ok(app("two")))).await;
    })
    .await;
}

#[tokio::test]
async fn a_primary_and_its_sentinels() {
    in_time(async {
        let set = SentinelSet::builder()
            .user("app", "one", ALL)
            .sentinel_user("app", "uno", ALL)
            .start()
            .await;
        let (secret, watching) = (Secret::new(app("one")), Secret::new(app("uno")));
        let options = RedisOptions::new()
            .credentials(secret.provide())
            .sentinel_credentials(watching.provide());
        let builder = LockClient::builder().redis(options);
        let locks = builder.connect(&set.url_with("", "")).await.unwrap();
        // The Sentinels refuse first, and are needed to connect to the primary again.
        let refuse = async || {
            rotate(set.sentinels(), "due").await;
            secret.set(Ok(app("two")));
            rotate(set.nodes(), "two").await;
        };
        outlive(&locks, refuse, async || watching.set(Ok(app("due")))).await;
        let refuse = async || rotate(set.nodes(), "three").await;
        outlive(&locks, refuse, async || secret.set(Ok(app("three")))).await;
        // Failovers are still announced.
        let held = locks.exclusive("held").acquire().await.unwrap();
        set.failover().await;
        lock_tests::place::eventually("the new primary serves", async || {
            locks.exclusive("k").no_wait().acquire().await.is_ok()
        })
        .await;
        drop(held);
    })
    .await;
}
