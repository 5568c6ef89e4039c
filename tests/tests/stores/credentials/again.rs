//! Connections that authenticate again before their credentials end.

use std::{collections::BTreeSet, time::Duration};

use lock_runtime::{Credentials, LockClient, RedisOptions};
use lock_tests::{
    RedisCluster, RedisServer,
    place::{LONG, begun, cluster_url_of, eventually, in_time},
};

use super::{ALL, Load, Secret};

fn credentials(user: &str) -> Credentials {
    Credentials::new(user, "pw").valid_for(Duration::from_millis(300))
}

/// The connections of a user.
async fn connections(servers: &[RedisServer], user: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for server in servers {
        let clients: String = server.query(&["CLIENT", "LIST"]).await;
        let of_the_user = clients
            .lines()
            .filter(|client| client.contains(&format!(" user={user} ")));
        let ids = of_the_user.filter_map(|client| client.split(' ').next());
        found.extend(ids.map(|id| format!("{} {id}", server.port())));
    }
    found
}

/// Asserts that each of these connections gets the credentials of another user, and that no call
/// fails meanwhile.
async fn get_other_credentials(
    locks: &LockClient,
    servers: &[RedisServer],
    secret: &Secret,
    count: usize,
) {
    eventually("all are connected", async || {
        connections(servers, "first").await.len() == count
    })
    .await;
    let before = connections(servers, "first").await;
    let load = Load::begin(locks);
    secret.set(Ok(credentials("second")));
    eventually("all have authenticated again", async || {
        for user in ["first", "second"] {
            // Any request would fail that needs another connection.
            let key = format!("as-{user}");
            let guard = locks.exclusive(key).no_wait().acquire().await.unwrap();
            guard.release().await.unwrap();
        }
        connections(servers, "first").await.is_empty()
    })
    .await;
    load.end().await;
    assert_eq!(connections(servers, "second").await, before, "the same");
}

#[tokio::test]
async fn the_connections_to_a_server() {
    in_time(async {
        let replicated = RedisServer::builder()
            .user("first", "pw", ALL)
            .user("second", "pw", ALL)
            .start()
            .await;
        let _replica = RedisServer::builder().replica_of(&replicated).start().await;
        let secret = Secret::new(credentials("first"));
        let options = RedisOptions::new()
            .credentials(secret.provide())
            .min_replicas(std::num::NonZeroU32::MIN, Duration::from_millis(400));
        let builder = LockClient::builder().redis(options);
        let locks = builder.connect(&replicated.url()).await.unwrap();
        let servers = [replicated];
        // One of them waits for the replica.
        get_other_credentials(&locks, &servers, &secret, 2).await;
        // They keep the earlier ones until others are accepted.
        secret.set(Ok(Credentials::new("second", "wrong")));
        let asked = secret.asked();
        eventually("it is asked", async || secret.asked() > asked + 1).await;
        let guard = locks.exclusive("k").no_wait().acquire().await.unwrap();
        guard.release().await.unwrap();
        secret.set(Ok(credentials("first")));
        eventually("all are new again", async || {
            connections(&servers, "first").await.len() == 2
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn the_subscriptions_at_the_nodes_of_a_cluster() {
    in_time(async {
        let cluster = RedisCluster::builder()
            .user("first", "pw", ALL)
            .user("second", "pw", ALL)
            .start()
            .await;
        let secret = Secret::new(credentials("first"));
        let options = RedisOptions::new().credentials(secret.provide());
        let builder = LockClient::builder().redis(options);
        let urls = cluster.nodes().iter().map(RedisServer::url);
        let locks = builder.connect(&cluster_url_of(urls)).await.unwrap();
        let url = format!("redis+cluster://{}", cluster.nodes()[0].addr());
        let other = LockClient::connect(&url).await.unwrap();
        let held = other.exclusive("k").acquire().await.unwrap();
        let waiting = tokio::spawn(begun(locks.exclusive("k").wait(LONG).acquire()).await);
        let subscribers = async || {
            let mut subscribers = BTreeSet::new();
            for node in cluster.nodes() {
                let clients: String = node.query(&["CLIENT", "LIST"]).await;
                subscribers.extend(clients.lines().filter_map(|client| {
                    let user = client.split(' ').find(|word| word.starts_with("user="))?;
                    client.contains(" ssub=1 ").then(|| user.to_owned())
                }));
            }
            subscribers
        };
        let of = |user: &str| BTreeSet::from([format!("user={user}")]);
        eventually("it listens", async || subscribers().await == of("first")).await;
        secret.set(Ok(credentials("second")));
        eventually("the same", async || subscribers().await == of("second")).await;
        held.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}
