//! The list of the locks of a store.

use std::{collections::BTreeMap, num::NonZeroU32, time::Duration};

use futures_util::{StreamExt as _, TryStreamExt as _};
use lock_runtime::{
    LockClient, LockErrorKind, LockGuard, LockKind, Mode,
    operator::{ListedLock, LockList},
    store::redis::RedisStore,
};
use lock_tests::{
    Proxy, RedisCluster, RedisServer,
    place::{LONG, Place, begun, cluster_url, eventually, in_time, on_every_store, redlock_url},
    shared_server, unique,
};
use tokio::time::{sleep, timeout};

on_every_store! {
    a_list_has_the_locks_of_a_prefix_with_their_holders_and_waiters,
    each_of_many_locks_is_listed_once,
    pages_have_each_lock_once_in_order,
    a_prefix_is_no_pattern,
    ; with permits:
    permits_are_listed_beside_locks_of_the_same_name,
}

async fn all(list: LockList) -> Vec<ListedLock> {
    let mut all: Vec<_> = list.try_collect().await.unwrap();
    all.sort_by(|one, other| one.key.cmp(&other.key));
    all
}

fn names(locks: &[ListedLock]) -> Vec<&str> {
    locks.iter().map(|lock| lock.key.as_str()).collect()
}

async fn held(locks: &LockClient, count: usize) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for number in 0..count {
        guards.push(
            locks
                .exclusive(format!("k:{number}"))
                .acquire()
                .await
                .unwrap(),
        );
    }
    guards
}

async fn a_list_has_the_locks_of_a_prefix_with_their_holders_and_waiters(place: Place) {
    let locks = place
        .client_of(LockClient::builder().identity("orders"))
        .await;
    let others = place.client().await;
    assert!(all(others.list("")).await.is_empty());
    let writer = locks.exclusive("order:1").acquire().await.unwrap();
    let readers = [
        locks.shared("order:2").acquire().await.unwrap(),
        others.shared("order:2").acquire().await.unwrap(),
    ];
    let other = locks.exclusive("item:1").acquire().await.unwrap();
    let waiting = begun(locks.exclusive("order:1").wait(LONG).acquire()).await;
    eventually("it waits", async || {
        !locks.inspect("order:1").await.unwrap().waiters.is_empty()
    })
    .await;

    let found = all(locks.list("order:")).await;
    assert_eq!(names(&found), ["order:1", "order:2"]);
    assert_eq!(found[0].kind, LockKind::Lock);
    let state = &found[0].state;
    assert_eq!(state.holders[0].mode, Mode::Exclusive);
    assert_eq!(state.holders[0].client.name(), Some("orders"));
    assert!(state.holders[0].ttl.is_some_and(|ttl| !ttl.is_zero()));
    assert_eq!(state.fence, Some(writer.fence()));
    assert_eq!(state.waiters.len(), 1);
    assert_eq!(state.waiters[0].client.name(), Some("orders"));
    assert_eq!(
        state.holders[0].id,
        locks.inspect("order:1").await.unwrap().holders[0].id
    );
    assert_eq!(found[1].state.holders.len(), 2);
    assert_eq!(
        names(&all(others.list("")).await),
        ["item:1", "order:1", "order:2"]
    );

    for guard in readers {
        guard.release().await.unwrap();
    }
    other.release().await.unwrap();
    writer.release().await.unwrap();
    waiting.await.unwrap().release().await.unwrap();
    assert!(all(others.list("")).await.is_empty());
}

async fn each_of_many_locks_is_listed_once(place: Place) {
    let locks = place.client().await;
    let guards = held(&locks, 300).await;
    let mut expected: Vec<_> = guards.iter().map(|guard| guard.key().to_string()).collect();
    expected.sort();
    assert_eq!(names(&all(locks.list("k:")).await), expected);
    let some = all(locks.list("k:29")).await;
    assert_eq!(some.len(), 11, "{:?}", names(&some));
}

async fn pages_have_each_lock_once_in_order(place: Place) {
    let locks = place.client().await;
    let guards = held(&locks, 250).await;
    let other = locks.exclusive("other").acquire().await.unwrap();
    let mut expected: Vec<_> = guards.iter().map(|guard| guard.key().to_string()).collect();
    expected.sort();

    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = locks.list_page("k:").after(after).timeout(LONG).await;
        assert!(page.is_complete && page.errors.is_empty(), "{page:?}");
        assert_eq!((page.total, page.offset), (250, found.len()));
        assert_eq!(page.locks.len(), 100.min(250 - found.len()));
        let keys = page.locks.iter().map(|lock| lock.key.to_string());
        found.extend(keys);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(found, expected);
    let nothing = locks.list_page("none:").timeout(LONG).await;
    assert_eq!((nothing.locks.len(), nothing.total), (0, 0));
    other.release().await.unwrap();
}

async fn a_prefix_is_no_pattern(place: Place) {
    let locks = place.client().await;
    let keys = ["a*c", "abc", "a?c", "a[b]c", "a\\c", "a^c", "ä:c"];
    let mut guards = Vec::new();
    for key in keys {
        guards.push(locks.exclusive(key).acquire().await.unwrap());
    }
    for key in keys {
        let found = all(locks.list(key)).await;
        assert_eq!(names(&found), [key]);
        let beginning: String = key.chars().take(2).collect();
        let found = all(locks.list(&*beginning)).await;
        assert!(names(&found).contains(&key), "{beginning}");
    }
    assert!(all(locks.list("*")).await.is_empty());
    assert_eq!(all(locks.list("a")).await.len(), 6);
}

async fn permits_are_listed_beside_locks_of_the_same_name(place: Place) {
    let locks = place.client().await;
    let two = NonZeroU32::new(2).unwrap();
    let _lock = locks.exclusive("a").acquire().await.unwrap();
    let _permits = [
        locks.permits("a", two).acquire().await.unwrap(),
        locks.permits("a", two).acquire().await.unwrap(),
    ];
    let _other = locks.permits("b", two).acquire().await.unwrap();
    let found = all(locks.list("a")).await;
    let counts = found
        .iter()
        .map(|lock| (lock.kind as u8, lock.state.holders.len()));
    let counts: BTreeMap<_, _> = counts.collect();
    let expected = [(LockKind::Lock as u8, 1), (LockKind::Permits as u8, 2)];
    assert_eq!(counts, BTreeMap::from(expected));
    assert_eq!(all(locks.list("")).await.len(), 3);
}

#[tokio::test]
async fn other_data_and_other_namespaces_are_not_in_the_list() {
    in_time(async {
        let (server, place) = (shared_server().await, Place::redis().await);
        let locks = place.client().await;
        let ns = place.namespace();
        let _guard = locks.exclusive("{t}a").acquire().await.unwrap();
        let _plain = locks.exclusive("b").acquire().await.unwrap();
        let longer = Place::Redis {
            url: server.url(),
            namespace: format!("{ns}x"),
        };
        let _other = longer
            .client()
            .await
            .exclusive("c")
            .acquire()
            .await
            .unwrap();
        server.command(&["RPUSH", &format!("{ns}:list"), "x"]).await;
        server
            .command(&["HSET", &format!("{ns}:hash"), "x", "y"])
            .await;
        server
            .command(&["SET", &format!("{ns}:foreign"), "x", "PX", "60000"])
            .await;
        server
            .command(&["SET", &format!("{ns}:in\u{7}valid"), "x"])
            .await;
        server
            .command(&["ZADD", &format!("{ns}:permits:set"), "1", "x"])
            .await;
        assert_eq!(names(&all(locks.list("")).await), ["b", "foreign", "{t}a"]);
    })
    .await;
}

async fn calls_of(server: &RedisServer, command: &str) -> u64 {
    let stats: String = server.query(&["INFO", "commandstats"]).await;
    let line = stats
        .lines()
        .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

/// A page is a thousand keys of the server.
#[tokio::test]
async fn a_list_that_is_not_read_makes_no_calls() {
    in_time(async {
        let server = RedisServer::start().await;
        let place = Place::at(server.url());
        let locks = place.client().await;
        let _guards = held(&locks, 3000).await;
        let mut list = locks.list("");
        list.next().await.unwrap().unwrap();
        sleep(Duration::from_millis(100)).await;
        let before = (
            calls_of(&server, "scan").await,
            calls_of(&server, "evalsha").await,
        );
        assert!(before.0 <= 2, "{before:?}");
        // Only the last names are looked up.
        sleep(Duration::from_millis(300)).await;
        assert_eq!(calls_of(&server, "scan").await, before.0);
        assert_eq!(list.count().await, 2999);
        assert!(calls_of(&server, "scan").await > 2);
    })
    .await;
}

#[tokio::test]
async fn a_user_without_the_right_to_scan_learns_of_it() {
    in_time(async {
        let line = RedisStore::acl_line("lock");
        let rules = line.split_once("> ").expect("a line with rules").1;
        let server = RedisServer::builder()
            .user("app", "secret", rules)
            .start()
            .await;
        let locks = LockClient::connect(&server.url_as("app", "secret"))
            .await
            .unwrap();
        let _guard = locks.exclusive("a").acquire().await.unwrap();
        let mut list = locks.list("");
        let error = list.next().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Forbidden, "{error:#}");
        assert!(
            format!("{error:#}").to_lowercase().contains("scan"),
            "{error:#}"
        );
        assert!(list.next().await.is_none());
        server.command(&["ACL", "SETUSER", "app", "+scan"]).await;
        assert_eq!(names(&all(locks.list("")).await), ["a"]);
    })
    .await;
}

#[tokio::test]
async fn a_list_ends_with_an_error_when_the_server_falls_silent() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let place = Place::at(proxy.url());
        let locks = place.client().await;
        let _guards = held(&locks, 3000).await;
        let mut list = locks.list("");
        list.next().await.unwrap().unwrap();
        proxy.black_hole();
        let rest = timeout(LONG, list.collect::<Vec<_>>())
            .await
            .expect("the list hangs");
        let last = rest.last().unwrap().as_ref().unwrap_err();
        assert_eq!(last.kind(), LockErrorKind::Unavailable, "{last}");
    })
    .await;
}

/// The locks that are held all the time are all in the list, although their slots move from node
/// to node meanwhile.
#[tokio::test]
async fn a_list_while_slots_move_is_complete() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = Place::at(cluster_url(&cluster));
        let locks = place.client().await;
        let guards = held(&locks, 400).await;
        let masters = cluster.masters().await;
        let mut lists = Vec::new();
        let moving = async {
            for (number, guard) in guards.iter().take(24).enumerate() {
                let name = format!("{}:{}", place.namespace(), guard.key());
                let from = cluster.owner_of(&name).await;
                let others: Vec<_> = masters
                    .iter()
                    .filter(|it| it.port() != from.port())
                    .collect();
                let migration = cluster.begin_migration(&name, others[number % 2]).await;
                for key in [name.clone(), format!("{{{name}}}:f")] {
                    migration.move_key(&key).await;
                    sleep(Duration::from_millis(5)).await;
                }
                migration.finish().await;
            }
        };
        let mut moving = Box::pin(moving);
        let mut is_over = false;
        while !is_over {
            let listing = locks.list("k:").map(|lock| lock.unwrap().key.to_string());
            let mut listing = Box::pin(listing.collect::<Vec<_>>());
            let list = loop {
                tokio::select! {
                    list = &mut listing => break list,
                    () = &mut moving, if !is_over => is_over = true,
                }
            };
            lists.push(list);
        }
        let mut expected: Vec<_> = guards.iter().map(|guard| guard.key().to_string()).collect();
        expected.sort();
        assert!(lists.len() > 1);
        for mut list in lists {
            list.sort();
            assert_eq!(list, expected);
        }
    })
    .await;
}

#[tokio::test]
async fn a_dead_node_is_reported_and_the_locks_of_the_others_are_listed() {
    others_are_listed_without(RedisServer::kill).await;
}

#[tokio::test]
async fn a_node_that_hangs_is_reported_and_the_locks_of_the_others_are_listed() {
    others_are_listed_without(RedisServer::stop).await;
}

async fn others_are_listed_without(end: fn(&RedisServer)) {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = Place::at(cluster_url(&cluster));
        let locks = place.client().await;
        let guards = held(&locks, 60).await;
        let mut there = Vec::new();
        let dead = cluster.masters().await[1];
        for guard in &guards {
            let name = format!("{}:{}", place.namespace(), guard.key());
            if cluster.owner_of(&name).await.port() != dead.port() {
                there.push(guard.key().to_string());
            }
        }
        for replica in cluster.replicas_of(dead).await {
            replica.kill();
        }
        end(dead);
        let (mut found, mut errors) = (Vec::new(), Vec::new());
        let mut list = locks.list("");
        while let Some(lock) = list.next().await {
            match lock {
                Ok(lock) => found.push(lock.key.to_string()),
                Err(error) => errors.push(format!("{error:#}")),
            }
        }
        found.sort();
        there.sort();
        assert_eq!(found, there, "{errors:?}");
        let port = dead.port().to_string();
        assert!(
            errors.iter().any(|error| error.contains(&port)),
            "{errors:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn a_majority_lists_without_a_dead_server_and_not_without_a_majority() {
    in_time(async {
        let servers = RedisServer::builder().start_all(3).await;
        let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
        let namespace = unique("ns");
        let builder = LockClient::builder().namespace(&namespace);
        let longest = Duration::from_secs(2);
        let options = lock_runtime::RedisOptions::new().longest_lease(longest);
        let locks = builder
            .redis(options)
            .connect(&redlock_url(&urls))
            .await
            .unwrap();
        let wait = Duration::from_secs(20);
        let mut guards = Vec::new();
        for number in 0..30 {
            let request = locks.exclusive(format!("k:{number}")).wait(wait);
            guards.push(request.acquire().await.unwrap());
        }
        let mut expected: Vec<_> = guards.iter().map(|guard| guard.key().to_string()).collect();
        expected.sort();
        assert_eq!(names(&all(locks.list("")).await), expected);
        // A server that was in quarantine votes for the locks when they are renewed.
        let pattern = format!("{namespace}:k:*");
        for server in &servers[1..] {
            eventually("the server has voted for all", async || {
                server.keys(&pattern).await.len() == expected.len()
            })
            .await;
        }
        servers[0].kill();
        let found = all(locks.list("")).await;
        // A lock without the vote of one of the other servers may have been lost.
        for guard in &guards {
            let is_listed = names(&found).contains(&guard.key().as_str());
            assert!(
                is_listed || guard.verify().await.is_err(),
                "{}",
                guard.key()
            );
        }
        assert!(found.len() > 25, "{:?}", names(&found));
        servers[2].kill();
        let last = locks.list("").collect::<Vec<_>>().await.pop().unwrap();
        assert_eq!(last.unwrap_err().kind(), LockErrorKind::Unavailable);
    })
    .await;
}

/// An empty list would say that nothing is held.
#[tokio::test]
async fn a_cluster_that_was_never_found_has_no_list() {
    in_time(async {
        let server = RedisServer::start().await;
        server.kill();
        let url = server.url().replace("redis://", "redis+cluster://");
        let locks = LockClient::connect_lazy(&url).unwrap();
        let mut list = locks.list("");
        let error = list.next().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error:#}");
        assert!(list.next().await.is_none());
    })
    .await;
}

/// After a restart the keys have another order, and what was behind the place of the list may be
/// before it.
#[tokio::test]
async fn a_list_begins_again_on_another_connection() {
    in_time(async {
        let server = RedisServer::start().await;
        let place = Place::at(server.url());
        let locks = place.client().await;
        let _guard = locks.exclusive("a").acquire().await.unwrap();
        let fill = "for i = 1, 3500 do redis.call('SET', 'k' .. i, i) end";
        server.command(&["EVAL", fill, "0"]).await;
        let store = place.store().await;
        let pages = async |restart: bool| {
            let (mut pages, mut cursor) = (0, None);
            loop {
                let page = store.list("", cursor.take()).await.unwrap();
                pages += 1;
                if restart && pages == 3 {
                    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
                    server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
                    sleep(Duration::from_millis(300)).await;
                }
                match page.next {
                    Some(next) => cursor = Some(next),
                    None => return pages,
                }
            }
        };
        let undisturbed = pages(false).await;
        assert!(undisturbed > 3, "{undisturbed}");
        assert!(pages(true).await > undisturbed);
    })
    .await;
}
