//! Discovery of the node that keeps a lock, from any given node and wherever the lock moves.

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{
    RedisCluster, RedisServer, chain,
    place::{cluster_url_of, in_time},
    shared_cluster, shared_server,
};

use super::{LONG, Place, key_at, key_of_each, lock_name, place_on, use_lock};

#[tokio::test]
async fn acquire_uses_all_primaries_over_one_connection_each() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let locks = place.client().await;
        let mut guards = Vec::new();
        for number in 0..60 {
            guards.push(
                locks
                    .exclusive(format!("k{number}"))
                    .acquire()
                    .await
                    .unwrap(),
            );
        }
        let mut found = 0;
        for master in cluster.masters().await {
            let here = master.keys(&format!("{}:*", place.namespace())).await.len();
            assert!(here > 5, "{here} of 60");
            found += here;
            let clients: String = master.query(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
            // The subscriptions are to revocations and to messages about locks that are wanted.
            assert_eq!(
                clients
                    .lines()
                    .filter(|line| line.contains(" sub=2 psub=0 ssub=0 "))
                    .count(),
                1,
                "{clients}"
            );
        }
        assert_eq!(found, 60);
        for replica in &cluster.nodes()[3..] {
            let clients: String = replica.query(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
            assert!(clients.is_empty(), "no client uses a replica: {clients}");
        }
        for guard in guards {
            guard.release().await.unwrap();
        }
        locks.shutdown().await;
    })
    .await;
}

#[tokio::test]
async fn a_lock_outlives_a_failover() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let old = cluster.masters().await[0];
        let key = key_at(&cluster, &place, old).await;
        let guard = locks.exclusive(key.as_str()).acquire().await.unwrap();
        let new = cluster.failover(old).await;
        guard.verify().await.expect("the new primary has it");
        assert_eq!(
            new.query::<i64>(&["EXISTS", &lock_name(&place, &key)])
                .await,
            1
        );
        // The next request of this client still goes to the old primary.
        assert!(
            others
                .exclusive(key.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        guard.release().await.unwrap();
        use_lock(&others, &key).await;
    })
    .await;
}

#[tokio::test]
async fn a_lock_outlives_the_move_of_its_slot() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, from).await;
        let guard = locks.exclusive(key.as_str()).acquire().await.unwrap();
        cluster
            .begin_migration(&lock_name(&place, &key), to)
            .await
            .finish()
            .await;
        guard.verify().await.expect("the other primary has it");
        assert!(
            others
                .exclusive(key.as_str())
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        assert_eq!(
            to.query::<i64>(&["EXISTS", &lock_name(&place, &key)]).await,
            1
        );
        guard.release().await.unwrap();
        for _ in 0..3 {
            use_lock(&others, &key).await;
        }
    })
    .await;
}

#[tokio::test]
async fn connect_finds_a_cluster_by_any_node_and_skips_dead_ones() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let keys = key_of_each(&cluster, &place).await;
        for node in cluster.nodes() {
            let url = node.url();
            let builder = LockClient::builder().namespace(place.namespace());
            let locks = builder.connect(&cluster_url_of([&url])).await.unwrap();
            for key in &keys {
                use_lock(&locks, key).await;
            }
        }
        let [dead, stopped, ..] = cluster.nodes();
        dead.kill();
        stopped.stop();
        let third = &cluster.nodes()[2];
        let key = key_at(&cluster, &place, third).await;
        use_lock(&place.client().await, &key).await;
        stopped.resume();
    })
    .await;
}

#[tokio::test]
async fn nodes_are_found_by_whatever_they_call_themselves() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let keys = key_of_each(&cluster, &place).await;
        let set = async |name: &str, value: &str| {
            for node in cluster.nodes() {
                node.command(&["CONFIG", "SET", name, value]).await;
            }
        };
        let all_work = async || {
            let locks = place.client().await;
            for key in &keys {
                use_lock(&locks, key).await;
            }
        };
        // By a host name that no node has yet, by one that all nodes have, and by none.
        set("cluster-preferred-endpoint-type", "hostname").await;
        all_work().await;
        set("cluster-announce-hostname", "localhost").await;
        all_work().await;
        set("cluster-preferred-endpoint-type", "unknown-endpoint").await;
        all_work().await;
        // A redirection names no host either.
        let locks = place.client().await;
        for key in &keys {
            use_lock(&locks, key).await;
        }
        let old = cluster.masters().await[0];
        cluster.failover(old).await;
        for key in &keys {
            use_lock(&locks, key).await;
        }
    })
    .await;
}

#[tokio::test]
async fn connect_reports_a_server_that_is_no_node_and_a_lone_node() {
    in_time(async {
        let server = shared_server().await;
        let error = LockClient::builder()
            .connect(&cluster_url_of([server.url()]))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::WrongServer, "{error}");
        assert!(chain(&error).contains("redis://host:port"), "{error}");

        let cluster = shared_cluster().await;
        let [first, second, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let place = Place::at(first.url());
        let locks = place.client().await;
        let elsewhere = key_at(cluster, &place, second).await;
        let error = locks
            .exclusive(elsewhere.as_str())
            .no_wait()
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert!(
            chain(&error).contains("redis+cluster://host:port"),
            "{error}"
        );
    })
    .await;
}

#[tokio::test]
async fn a_cluster_without_an_answer_is_unavailable() {
    in_time(async {
        let server = RedisServer::start().await;
        let url = format!("redis+cluster://user:hunter2@{}", server.addr());
        server.kill();
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert!(
            chain(&error).contains(&server.addr().to_string()),
            "{error}"
        );
        assert!(!chain(&error).contains("hunter2"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_cluster_without_slots_is_refused_with_the_remedy() {
    in_time(async {
        let node = RedisServer::builder()
            .arg("--cluster-enabled", "yes")
            .start()
            .await;
        let error = LockClient::builder()
            .connect(&cluster_url_of([node.url()]))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert!(chain(&error).contains("--cluster create"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_primary_that_is_replaced_while_the_client_is_idle_is_found() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let locks = place.client().await;
        let old = cluster.masters().await[0];
        let key = key_at(&cluster, &place, old).await;
        use_lock(&locks, &key).await;
        old.kill();
        cluster.new_owner_of(&lock_name(&place, &key), old).await;
        locks
            .exclusive(key.as_str())
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
