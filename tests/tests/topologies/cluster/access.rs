//! A cluster with users, and one that speaks TLS.

use std::time::Duration;

use lock_runtime::{
    LockClient, LockErrorKind, RedisOptions,
    store::{StoreErrorKind, redis::RedisStore},
};
use lock_tests::{
    Captured, Lateness, RedisCluster,
    access::{file_of, rules},
    chain,
    place::{cluster_url_of, eventually, in_time},
};
use tokio::time::Instant;

use super::{
    HOUR, LONG, Place, key_at, key_of_each, lock_name, no_slot_has_a_subscriber, place_on, use_lock,
};
use crate::environment::{access::everything, tls::of_a_process};

const PASSWORD: &str = "hunter2";

/// Gives ann these rules on every node, and no others.
async fn allow(cluster: &RedisCluster, rules: &[&str]) {
    for node in cluster.nodes() {
        let command: Vec<_> = ["ACL", "SETUSER", "ann", "reset", "on", ">hunter2"]
            .iter()
            .chain(rules)
            .copied()
            .collect();
        node.command(&command).await;
    }
}

async fn denials(cluster: &RedisCluster) -> Vec<redis::Value> {
    let mut denials = Vec::new();
    for node in cluster.nodes() {
        denials.extend(node.query::<Vec<redis::Value>>(&["ACL", "LOG"]).await);
    }
    denials
}

/// The cluster as ann sees it.
fn place_of_ann(cluster: &RedisCluster) -> Place {
    let Place::Redis { url, .. } = place_on(cluster) else {
        unreachable!()
    };
    let url = url.replacen("://", &format!("://ann:{PASSWORD}@"), 1);
    Place::Redis {
        url,
        namespace: "lock".to_owned(),
    }
}

#[tokio::test]
async fn a_user_of_the_documented_line_can_do_everything() {
    in_time(async {
        let cluster = RedisCluster::builder()
            .user("ann", PASSWORD, "")
            .start()
            .await;
        let line = RedisStore::cluster_acl_line("lock");
        allow(&cluster, &rules(&line)).await;
        let place = place_of_ann(&cluster);
        let Place::Redis { url, .. } = &place else {
            unreachable!()
        };
        let store = RedisStore::connect(url, "lock").await.unwrap();
        let errors = everything(&store).await;
        assert!(errors.is_empty(), "{errors:?}");
        let (locks, others) = (place.client().await, place.client().await);
        let keys = key_of_each(&cluster, &place).await;
        let guard = locks.all(keys.clone()).no_wait().acquire().await.unwrap();
        let waiting: Vec<_> = keys
            .iter()
            .map(|key| tokio::spawn(others.exclusive(key.as_str()).wait(LONG).acquire()))
            .collect();
        for key in &keys {
            eventually("it waits", async || {
                !locks
                    .inspect(key.as_str())
                    .await
                    .unwrap()
                    .waiters
                    .is_empty()
            })
            .await;
        }
        eventually("it is listened to", async || {
            super::channels(&cluster).await.len() == 3
        })
        .await;
        guard.release().await.unwrap();
        for waiting in waiting {
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
        no_slot_has_a_subscriber(&cluster).await;
        // A lock on its way, too.
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, from).await;
        let guard = locks
            .exclusive(key.as_str())
            .lease(HOUR)
            .acquire()
            .await
            .unwrap();
        let migration = cluster.begin_migration(&lock_name(&place, &key), to).await;
        migration.move_key(&lock_name(&place, &key)).await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        migration.finish().await;
        let denied = denials(&cluster).await;
        assert!(
            denied.is_empty(),
            "nothing was denied behind our back: {denied:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn connect_names_missing_cluster_rights_or_does_without_them() {
    in_time(async {
        let cluster = RedisCluster::builder()
            .user("ann", PASSWORD, "")
            .start()
            .await;
        let line = RedisStore::cluster_acl_line("lock");
        let rules = rules(&line);
        let without = |missing: &str| {
            rules
                .iter()
                .copied()
                .filter(|rule| *rule != missing)
                .collect::<Vec<_>>()
        };
        let place = place_of_ann(&cluster);
        let Place::Redis { url, .. } = &place else {
            unreachable!()
        };

        allow(&cluster, &without("+cluster|slots")).await;
        let error = RedisStore::connect(url, "lock").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Forbidden, "{error}");
        assert!(chain(&error).contains(&line), "{error}");

        for missing in ["+eval", "+get"] {
            allow(&cluster, &without(missing)).await;
            for node in cluster.masters().await {
                node.command(&["SCRIPT", "FLUSH"]).await;
            }
            let store = RedisStore::connect(url, "lock").await.unwrap();
            let errors = everything(&store).await;
            assert!(!errors.is_empty());
            for error in errors {
                assert_eq!(
                    error.kind(),
                    StoreErrorKind::Forbidden,
                    "without {missing}: {error}"
                );
                assert!(chain(&error).contains(&line), "without {missing}: {error}");
            }
        }

        for missing in ["+ssubscribe", "+spublish", "&lock:*"] {
            allow(&cluster, &without(missing)).await;
            let traces = Captured::new();
            let _guard = traces.set_default();
            let (locks, others) = (place.client().await, place.client().await);
            let guard = locks.exclusive("k").acquire().await.unwrap();
            let waiting = tokio::spawn(others.exclusive("k").wait(LONG).acquire());
            eventually("it waits", async || {
                !locks.inspect("k").await.unwrap().waiters.is_empty()
            })
            .await;
            if missing != "+spublish" {
                let said = async || {
                    traces
                        .events()
                        .iter()
                        .any(|event| event.message.contains("waiters only poll"))
                };
                eventually("it is said", said).await;
            }
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            if missing == "+ssubscribe" {
                // The first polls of the next waiter follow soon.
                let guard = locks.exclusive("k").acquire().await.unwrap();
                let waiting = tokio::spawn(others.exclusive("k").wait(LONG).acquire());
                eventually("it waits", async || {
                    !locks.inspect("k").await.unwrap().waiters.is_empty()
                })
                .await;
                let late = Lateness::start();
                guard.release().await.unwrap();
                let released = Instant::now();
                waiting.await.unwrap().unwrap().release().await.unwrap();
                let longest = late.allows(Duration::from_millis(500));
                assert!(released.elapsed() < longest, "{:?}", released.elapsed());
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_cluster_is_reached_over_tls() {
    in_time(async {
        let cluster = RedisCluster::builder()
            .tls()
            .password("s3cret")
            .start()
            .await;
        let trusted = file_of(cluster.ca_pem());
        let nodes: Vec<_> = cluster
            .nodes()
            .iter()
            .map(|node| format!("127.0.0.1:{}", node.tls_port()))
            .collect();
        // The worker takes one lock, so the node that keeps it is mostly not the one that is named.
        for node in &nodes {
            let url = format!("rediss+cluster://:s3cret@{node}");
            assert_eq!(
                of_a_process(Some(trusted.path()), &[&url]).await,
                "released"
            );
        }
        let plain = Place::at(format!(
            "redis+cluster://:s3cret@{}",
            cluster.nodes()[0].addr()
        ));
        let locks = plain.client().await;
        for key in ["a", "b", "c", "d"] {
            use_lock(&locks, key).await;
        }
    })
    .await;
}

/// By a certificate that the builder was given, where the process trusts none.
#[tokio::test]
async fn connect_reaches_a_cluster_over_tls_with_the_documented_acl() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let line = RedisStore::cluster_acl_line("lock");
        let cluster = RedisCluster::builder().tls().password("s3cret").user(
            "ann",
            PASSWORD,
            &rules(&line).join(" "),
        );
        let cluster = cluster.start().await;
        let trusting =
            LockClient::builder().redis(RedisOptions::new().root_certificate(cluster.ca_pem()));
        let seed = &cluster.tls_urls_as("ann", PASSWORD)[5];
        let url = cluster_url_of([seed]);
        let locks = trusting.clone().connect(&url).await.unwrap();
        let others = trusting.connect(&url).await.unwrap();
        let place = Place::Redis {
            url: String::new(),
            namespace: "lock".to_owned(),
        };
        let keys = key_of_each(&cluster, &place).await;
        let guard = locks.all(keys.clone()).no_wait().acquire().await.unwrap();
        let waiting: Vec<_> = keys
            .iter()
            .map(|key| tokio::spawn(others.exclusive(key.as_str()).wait(LONG).acquire()))
            .collect();
        for key in &keys {
            eventually("it waits", async || {
                !locks
                    .inspect(key.as_str())
                    .await
                    .unwrap()
                    .waiters
                    .is_empty()
            })
            .await;
        }
        guard.release().await.unwrap();
        for waiting in waiting {
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
        // To where it was not: by ASK, by MOVED, and to a replica that takes over.
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let guard = locks
            .exclusive(keys[0].as_str())
            .lease(HOUR)
            .acquire()
            .await
            .unwrap();
        let migration = cluster
            .begin_migration(&lock_name(&place, &keys[0]), to)
            .await;
        assert_eq!(migration.from().port(), from.port());
        migration.move_key(&lock_name(&place, &keys[0])).await;
        guard.verify().await.unwrap();
        migration.finish().await;
        cluster.failover(to).await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        for node in cluster.nodes() {
            let clients: String = node.query(&["CLIENT", "LIST"]).await;
            let port = format!(" laddr=127.0.0.1:{} ", node.tls_port());
            let plain = clients
                .lines()
                .find(|line| line.contains(" user=ann ") && !line.contains(&port));
            assert_eq!(plain, None, "{clients}");
        }
        let denied = denials(&cluster).await;
        assert!(
            denied.is_empty(),
            "nothing was denied behind our back: {denied:?}"
        );

        let error = LockClient::builder()
            .connect(&cluster_url_of([seed]))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        let text = chain(&error);
        assert!(
            text.contains("certificate") && text.contains("root_certificate"),
            "{text}"
        );
        assert!(!text.contains(PASSWORD), "{text}");
    })
    .await;
}
