//! Discovery of the primary with Sentinels that are stopped, dead or outdated, or servers that are
//! no Sentinels.

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{
    Proxy, RedisServer, SentinelSet, chain, place::in_time, shared_sentinels, shared_server,
};
use tokio::time::Instant;

use super::{
    Duration, assert_says, client,
    fake::{self, Fake, View},
    namespace, url_of, url_with,
};

/// The time limit for the reply of one Sentinel.
const PATIENCE: Duration = Duration::from_millis(500);

/// Checks that the client keeps its locks at the given node.
async fn locks_at(locks: &LockClient, namespace: &str, node: &RedisServer) {
    let guard = locks.exclusive("found").acquire().await.unwrap();
    assert_eq!(
        node.query::<i64>(&["EXISTS", &format!("{namespace}:found")])
            .await,
        1
    );
    guard.release().await.unwrap();
}

/// The shortest time that connecting takes.
async fn fastest(set: &SentinelSet) -> Duration {
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        let since = Instant::now();
        client(set, "fast").await;
        fastest = fastest.min(since.elapsed());
    }
    fastest
}

#[tokio::test]
async fn the_primary_is_found_by_a_url() {
    in_time(async {
        let set = shared_sentinels().await;
        let ns = namespace();
        let locks = client(set, &ns).await;
        locks_at(&locks, &ns, set.master().await).await;
        assert!(
            format!("{locks:?}").contains(&set.sentinels()[2].addr().to_string()),
            "{locks:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn connect_refuses_a_database_that_the_primary_does_not_have() {
    in_time(async {
        let set = shared_sentinels().await;
        let error = LockClient::connect(&url_with(set.sentinels(), "", "/1000"))
            .await
            .unwrap_err();
        assert_says(
            &error,
            LockErrorKind::InvalidUrl,
            &["no database of that number", "/0"],
        );
    })
    .await;
}

#[tokio::test]
async fn a_stopped_or_dead_sentinel_delays_nothing() {
    in_time(async {
        let set = SentinelSet::start().await;
        let [first, second, third] = set.sentinels();
        first.stop();
        let took = fastest(&set).await;
        assert!(took < PATIENCE / 2, "{took:?}");
        // Without a majority, the only reply counts after the time limit of the others.
        second.stop();
        locks_at(&client(&set, "one").await, "one", &set.nodes()[0]).await;
        first.kill();
        second.kill();
        let took = fastest(&set).await;
        assert!(
            took < PATIENCE / 2,
            "a Sentinel that refuses is not waited for: {took:?}"
        );
        third.kill();
        let since = Instant::now();
        let error = LockClient::connect(&url_with(set.sentinels(), ":hunter2@", ""))
            .await
            .unwrap_err();
        assert!(since.elapsed() < Duration::from_secs(3));
        let addresses: Vec<_> = set
            .sentinels()
            .iter()
            .map(|sentinel| format!("{}: ", sentinel.addr()))
            .collect();
        let words: Vec<_> = addresses
            .iter()
            .map(String::as_str)
            .chain(["\"locks\"", "refused"])
            .collect();
        assert_says(&error, LockErrorKind::Unavailable, &words);
        assert!(!chain(&error).contains("hunter2"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn the_error_names_a_silent_sentinel_if_none_answers() {
    in_time(async {
        let proxy = Proxy::to(shared_server().await).await;
        proxy.black_hole();
        let url = format!("redis+sentinel://{}/mymaster", proxy.addr());
        let since = Instant::now();
        let error = LockClient::connect(&url).await.unwrap_err();
        assert!(since.elapsed() < Duration::from_secs(3));
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &[&proxy.addr().to_string(), "no answer within 500.0ms"],
        );
    })
    .await;
}

#[tokio::test]
async fn a_name_that_no_sentinel_knows_is_refused_by_name() {
    in_time(async {
        let set = shared_sentinels().await;
        let url = url_of(set.sentinels()).replace(&format!("/{}", SentinelSet::SERVICE), "/other");
        let error = LockClient::connect(&url).await.unwrap_err();
        let address = set.sentinels()[1].addr().to_string();
        assert_says(
            &error,
            LockErrorKind::Unavailable,
            &["\"other\"", &address, "no such primary"],
        );
    })
    .await;
}

#[tokio::test]
async fn connect_reports_a_sentinel_and_a_server_that_are_mixed_up() {
    in_time(async {
        let server = shared_server().await;
        let url = format!("redis+sentinel://{}/mymaster", server.addr());
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_says(
            &error,
            LockErrorKind::WrongServer,
            &[&server.addr().to_string(), "no Sentinel", "26379"],
        );
        let sentinel = &shared_sentinels().await.sentinels()[0];
        let error = LockClient::connect(&sentinel.url()).await.unwrap_err();
        assert_says(
            &error,
            LockErrorKind::WrongServer,
            &["a Sentinel", "redis+sentinel://"],
        );
    })
    .await;
}

#[tokio::test]
async fn a_sentinel_that_is_behind_is_outvoted() {
    in_time(async {
        let (old, new) = (RedisServer::start().await, RedisServer::start().await);
        // The old server is a primary, too: only the epoch distinguishes the two.
        let sentinels = Fake::three(&View::of(new.addr(), 6)).await;
        sentinels[0].believe(&View::of(old.addr(), 5));
        for _ in 0..10 {
            locks_at(
                &LockClient::connect(&fake::url_of(&sentinels))
                    .await
                    .unwrap(),
                "lock",
                &new,
            )
            .await;
        }
        assert_eq!(old.keys("*").await, [""; 0]);
    })
    .await;
}

#[tokio::test]
async fn connect_finds_the_new_primary_during_a_failover() {
    in_time(async {
        let (old, new) = (RedisServer::start().await, RedisServer::start().await);
        // It has promoted the new primary, and monitors the old one until the other replicas
        // follow.
        let watched = View::of(old.addr(), 6).primary;
        let sentinels = [Fake::start(View {
            watched,
            ..View::of(new.addr(), 6)
        })
        .await];
        locks_at(
            &LockClient::connect(&fake::url_of(&sentinels))
                .await
                .unwrap(),
            "lock",
            &new,
        )
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_primary_may_be_named_by_its_host_name() {
    in_time(async {
        let server = RedisServer::start().await;
        let mut view = View::of(server.addr(), 1);
        view.primary.0 = "localhost".into();
        let sentinels = [Fake::start(view).await];
        locks_at(
            &LockClient::connect(&fake::url_of(&sentinels))
                .await
                .unwrap(),
            "lock",
            &server,
        )
        .await;
    })
    .await;
}

#[tokio::test]
async fn connect_queries_sentinels_again_after_a_wrong_primary() {
    in_time(async {
        let primary = RedisServer::start().await;
        let replica = RedisServer::builder().replica_of(&primary).start().await;
        let sentinels = Fake::three(&View::of(replica.addr(), 5)).await;
        let error = LockClient::connect(&fake::url_of(&sentinels))
            .await
            .unwrap_err();
        assert_says(&error, LockErrorKind::ReadOnly, &["read-only replica"]);
        let url = fake::url_of(&sentinels);
        let connecting = tokio::spawn(async move { LockClient::connect(&url).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        sentinels
            .iter()
            .for_each(|sentinel| sentinel.believe(&View::of(primary.addr(), 6)));
        locks_at(&connecting.await.unwrap().unwrap(), "lock", &primary).await;
    })
    .await;
}

#[tokio::test]
async fn a_wrong_url_is_refused_with_a_right_one() {
    for (url, words) in [
        (
            "redis+sentinel://:hunter2@10.0.0.1:26379",
            [
                "name of the primary",
                "redis+sentinel://user:password@host1:26379",
            ],
        ),
        (
            "redis+sentinel://:hunter2@/mymaster",
            ["a host is missing", "/mymaster/0"],
        ),
        (
            "redis+sentinel://:hunter2@a/mymaster/-1",
            ["negative", "/mymaster/0"],
        ),
        (
            "redis+sentinel://:hunter2@a/mymaster?password=hunter2",
            ["sentinel_password", "/mymaster/0"],
        ),
        (
            "sentinel://:hunter2@a/mymaster",
            ["redis+sentinel://", "redis://"],
        ),
    ] {
        let error = LockClient::connect(url).await.unwrap_err();
        assert_says(&error, LockErrorKind::InvalidUrl, &words);
        assert!(!chain(&error).contains("hunter2"), "{error}");
    }
}
