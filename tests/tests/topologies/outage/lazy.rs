//! `connect_lazy`: a client that is created while the store is away.

use lock_runtime::{LockClient, LockErrorKind, RedisOptions};
use lock_tests::{
    Lateness, RedisCluster, RedisServer, SentinelSet,
    place::{LONG, begun, in_time},
};
use tokio::time::Instant;

use super::{Duration, SOON, once, until_refused_at_once, until_served};

/// A server that was killed, and the client that was created meanwhile.
async fn away() -> (RedisServer, LockClient) {
    let server = RedisServer::start().await;
    server.kill();
    let locks = LockClient::connect_lazy(&server.url()).unwrap();
    (server, locks)
}

#[tokio::test]
async fn every_form_of_url_is_checked_at_once() {
    let memory = LockClient::connect_lazy("memory:").unwrap();
    once(&memory, "k").await.unwrap();
    for url in [
        "memory:orders",
        "http://127.0.0.1",
        "redis://",
        "redis+sentinel://127.0.0.1",
        "redis+cluster://127.0.0.1/3",
        "redlock:redis://127.0.0.1,redis://127.0.0.2",
        "redlock:redis://127.0.0.1,redis://127.0.0.1,redis://127.0.0.2",
        "redlock:redis://a?protocol=resp2,redis://b,redis://c",
    ] {
        let error = LockClient::connect_lazy(url).unwrap_err();
        let kind = error.kind();
        let is_early = matches!(kind, LockErrorKind::InvalidUrl | LockErrorKind::InvalidSpec);
        assert!(is_early, "{url}: {error}");
    }
    let builder = LockClient::builder;
    let (second, day) = (Duration::from_secs(1), lock_runtime::LockSpec::MAX_LEASE);
    for (builder, url) in [
        (builder().namespace("a:b"), "redis://127.0.0.1:1"),
        (
            builder().unavailable_after(second / 20),
            "redis://127.0.0.1:1",
        ),
        (builder().unavailable_after(day + second), "memory:"),
        (
            builder()
                .redis(RedisOptions::new().min_replicas(std::num::NonZeroU32::MIN, second / 20)),
            "redis+cluster://127.0.0.1:1",
        ),
    ] {
        let error = builder.connect_lazy(url).unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    }
}

#[test]
fn a_runtime_is_needed_at_once() {
    for url in [
        "redis://127.0.0.1:1",
        "redis+sentinel://127.0.0.1:1/mymaster",
        "redis+cluster://127.0.0.1:1",
        "redlock:redis://127.0.0.1:1,redis://127.0.0.1:2,redis://127.0.0.1:3",
    ] {
        let error = LockClient::connect_lazy(url).unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::NoRuntime, "{url}");
    }
}

#[tokio::test]
async fn the_first_use_is_refused_and_a_later_one_is_served() {
    in_time(async {
        let (server, locks) = away().await;
        let error = once(&locks, "k").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        let error = until_refused_at_once(&locks, "k").await;
        let message = format!("{error:#}");
        for word in [
            "has not answered for",
            "without a call",
            "is Redis running there",
        ] {
            assert!(message.contains(word), "{message}");
        }
        let begin = Instant::now();
        let wait = Duration::from_millis(700);
        let waited = locks.exclusive("k").wait(wait).acquire().await;
        assert_eq!(waited.unwrap_err().kind(), LockErrorKind::Unavailable);
        assert!(begin.elapsed() >= wait);

        let waiting = begun(locks.exclusive("waited").wait(LONG).acquire()).await;
        let waiting = tokio::spawn(waiting);
        server.restart_empty().await;
        until_served(&locks, "k").await;
        waiting.await.unwrap().unwrap().release().await.unwrap();

        // Push messages: the waiter learns of the release before its next poll.
        let other = LockClient::connect(&server.url()).await.unwrap();
        let held = other.exclusive("handed").acquire().await.unwrap();
        let waiting = tokio::spawn(begun(locks.exclusive("handed").wait(LONG).acquire()).await);
        while other.inspect("handed").await.unwrap().waiters.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let late = Lateness::start();
        held.release().await.unwrap();
        let released = Instant::now();
        drop(waiting.await.unwrap().unwrap());
        let longest = late.allows(Duration::from_millis(500));
        assert!(released.elapsed() < longest, "no message");
    })
    .await;
}

#[tokio::test]
async fn a_permanent_error_is_that_of_every_use_until_it_is_remedied() {
    in_time(async {
        let server = RedisServer::builder()
            .user("ann", "old", "~* &* +@all")
            .start()
            .await;
        let locks = LockClient::connect_lazy(&server.url_as("ann", "new")).unwrap();
        for wait in [None, Some(LONG)] {
            let request = locks.exclusive("k");
            let request = match wait {
                Some(wait) => request.wait(wait),
                None => request.no_wait(),
            };
            let error = request.acquire().await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Unauthenticated, "{error:#}");
        }
        server.command(&["ACL", "SETUSER", "ann", ">new"]).await;
        until_served(&locks, "k").await;

        server.command(&["SET", "f:later:format", "99"]).await;
        let later = LockClient::builder().namespace("later");
        let later = later.connect_lazy(&server.url()).unwrap();
        let error = once(&later, "k").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat);
    })
    .await;
}

#[tokio::test]
async fn a_primary_is_found_later() {
    in_time(async {
        let sentinels = SentinelSet::start().await;
        let hosts: Vec<_> = sentinels
            .sentinels()
            .iter()
            .map(|it| it.addr().to_string())
            .collect();
        let url = format!(
            "redis+sentinel://{}/{}?min_replicas=1",
            hosts.join(","),
            SentinelSet::SERVICE
        );
        let master = sentinels.master().await;
        master.stop();
        let locks = LockClient::connect_lazy(&url).unwrap();
        let error = once(&locks, "k").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        master.resume();
        until_served(&locks, "k").await;
    })
    .await;
}

#[tokio::test]
async fn a_cluster_is_found_later() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        cluster.nodes().iter().for_each(RedisServer::stop);
        let hosts: Vec<_> = cluster
            .nodes()
            .iter()
            .map(|it| it.addr().to_string())
            .collect();
        let locks = LockClient::connect_lazy(&format!("redis+cluster://{}", hosts.join(",")));
        let locks = locks.unwrap();
        let error = once(&locks, "k").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        cluster.nodes().iter().for_each(RedisServer::resume);
        until_served(&locks, "k").await;
    })
    .await;
}

#[tokio::test]
async fn a_cluster_of_another_format_is_refused_by_every_use() {
    in_time(async {
        let cluster = lock_tests::shared_cluster().await;
        let namespace = lock_tests::unique("later");
        let name = format!("f:{namespace}:format");
        cluster
            .owner_of(&name)
            .await
            .command(&["SET", &name, "99"])
            .await;
        let locks = LockClient::builder().namespace(namespace);
        let url = format!("redis+cluster://{}", cluster.nodes()[0].addr());
        let locks = locks.connect_lazy(&url).unwrap();
        for key in ["a", "b", "c", "d"] {
            let error = once(&locks, key).await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat, "{error:#}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_majority_is_found_later_and_quarantine_applies() {
    in_time(async {
        let servers = RedisServer::builder().start_all(3).await;
        servers.iter().for_each(RedisServer::kill);
        let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
        let short = RedisOptions::new().longest_lease(Duration::from_secs(2));
        let locks = LockClient::builder().redis(short);
        let locks = locks
            .connect_lazy(&format!("redlock:{}", urls.join(",")))
            .unwrap();
        let error = once(&locks, "k").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        for server in &servers {
            server.restart_empty().await;
        }
        let back = Instant::now();
        let served = until_served(&locks, "k").await;
        assert!(
            served > Duration::from_secs(1),
            "they may have forgotten a lock: {served:?}"
        );
        assert!(back.elapsed() < SOON);
    })
    .await;
}

/// A server with two addresses would have two votes. It has the one of the name that came first.
#[tokio::test]
async fn one_server_under_two_names_has_one_vote() {
    in_time(async {
        for first in 1..=2 {
            let servers = RedisServer::builder().start_all(2).await;
            let (one, port) = (servers[0].url(), servers[1].port());
            let names = ["127.0.0.1", "localhost"].map(|it| format!("redis://{it}:{port}"));
            let client = |names: [&str; 2]| {
                let short = RedisOptions::new().longest_lease(Duration::from_secs(1));
                let url = format!("redlock:{one},{}", names.join(","));
                LockClient::builder().redis(short).connect_lazy(&url)
            };
            let away = "redis://127.0.0.1:1";
            let earlier = match first {
                1 => client([&names[0], away]),
                _ => client([away, &names[1]]),
            };
            until_served(&earlier.unwrap(), "k").await;
            for _ in 0..5 {
                let locks = client([&names[0], &names[1]]).unwrap();
                until_served(&locks, "k").await;
            }
            let locks = client([&names[0], &names[1]]).unwrap();
            until_served(&locks, "k").await;
            servers[0].kill();
            let error = until_refused_at_once(&locks, "k").await;
            assert!(format!("{error:#}").contains("two votes"), "{error:#}");
        }
    })
    .await;
}
