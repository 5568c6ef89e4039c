//! Push messages are hints: a waiter that misses one finds its grant by a poll, and broken
//! connections are restored.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{
    FencedResource, Proxy, RedisServer,
    place::{Stopwatch, begun, in_time, no_key_left},
    shared_server,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{LONG, Place, SOON, TOLD, in_line, nothing_left};

/// The fastest of several hand-offs from one process to another. On a busy machine a single one may
/// be slow for any reason.
pub(crate) async fn fastest_hand_off(from: &LockClient, to: &LockClient) -> Duration {
    let mut fastest = LONG;
    for _ in 0..5 {
        let guard = from.exclusive("told").acquire().await.unwrap();
        let acquire = tokio::spawn(to.exclusive("told").wait(LONG).acquire());
        in_line(from, "told", 1).await;
        let released = Stopwatch::start();
        guard.release().await.unwrap();
        let guard = acquire.await.unwrap().unwrap();
        fastest = fastest.min(released.elapsed());
        guard.release().await.unwrap();
    }
    fastest
}

#[tokio::test]
async fn a_waiter_without_a_message_is_served_within_a_poll() {
    in_time(async {
        let place = Place::redis().await;
        let proxy = Proxy::to(shared_server().await).await;
        let resource = FencedResource::new();
        let locks = place.client().await;
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let mut tasks = JoinSet::new();
        let mut clients = Vec::new();
        proxy.drop_messages();
        for number in 0..4 {
            let client = LockClient::builder()
                .namespace(place.namespace())
                .connect(&proxy.url())
                .await
                .unwrap();
            // Two of the processes have two waiters.
            for _ in 0..=number % 2 {
                tasks.spawn(begun(client.exclusive("a").strict_order().wait(LONG).acquire()).await);
            }
            clients.push(client);
            in_line(&locks, "a", number + 1).await;
        }
        resource.increment(guard.fence()).await.unwrap();
        let mut guard = Some(guard);
        for served in 1..=6 {
            let released = Instant::now();
            guard.take().unwrap().release().await.unwrap();
            let next = tasks.join_next().await.unwrap().unwrap().unwrap();
            assert!(
                released.elapsed() < Duration::from_secs(2),
                "{served}: {:?}",
                released.elapsed()
            );
            resource.increment(next.fence()).await.unwrap();
            guard = Some(next);
        }
        guard.take().unwrap().release().await.unwrap();
        assert!(
            proxy.dropped_messages() >= 4,
            "{}",
            proxy.dropped_messages()
        );
        let report = resource.report();
        assert!(report.is_clean() && report.value == 7, "{report}");
        proxy.let_through().await;
        let fastest = fastest_hand_off(&locks, &clients[0]).await;
        assert!(fastest < TOLD, "{fastest:?}");
        nothing_left(&place, &["a", "told"]).await;
    })
    .await;
}

/// A client that reconnects polls before the regular poll is due.
#[tokio::test]
async fn acquire_finds_its_grant_after_a_reconnect() {
    in_time(async {
        let place = Place::redis().await;
        let proxy = Proxy::to(shared_server().await).await;
        let locks = place.client().await;
        let client = LockClient::builder()
            .namespace(place.namespace())
            .connect(&proxy.url())
            .await
            .unwrap();
        let mut fastest = LONG;
        for attempt in 0..4 {
            let key = attempt.to_string();
            let guard = locks.exclusive(&key).acquire().await.unwrap();
            let acquire = tokio::spawn(client.exclusive(&key).wait(LONG).acquire());
            in_line(&locks, &key, 1).await;
            proxy.refuse().await;
            proxy.cut();
            let released = Instant::now();
            guard.release().await.unwrap();
            proxy.let_through().await;
            let guard = acquire.await.unwrap().unwrap();
            fastest = fastest.min(released.elapsed());
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }
        assert!(fastest < TOLD, "{fastest:?}");
        nothing_left(&place, &["0"]).await;
    })
    .await;
}

/// A hundred waiters in four processes, whose connections `kill` ends three times, once just before
/// the first release.
async fn a_hundred_wait_while(server: &RedisServer, url: &str, kill: impl AsyncFn()) {
    let connect = async |url: &str| LockClient::connect(url).await.unwrap();
    let (locks, resource) = (connect(&server.url()).await, FencedResource::new());
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let mut tasks = JoinSet::new();
    let mut clients = Vec::new();
    for number in 0..4 {
        let client = connect(url).await;
        for _ in 0..25 {
            tasks.spawn(begun(client.exclusive("a").wait(LONG * 2).acquire()).await);
        }
        clients.push(client);
        in_line(&locks, "a", number + 1).await;
    }
    kill().await;
    sleep(Duration::from_millis(300)).await;
    kill().await;
    resource.increment(guard.fence()).await.unwrap();
    // The connection of `locks` may be closed, too. The release then continues in the background.
    let _ = guard.release().await;
    let released = Instant::now();
    let mut served = 0;
    while let Some(guard) = tasks.join_next().await {
        let guard = guard.unwrap().unwrap();
        resource.increment(guard.fence()).await.unwrap();
        served += 1;
        if served == 50 {
            kill().await;
        }
        let _ = guard.release().await;
    }
    assert_eq!(served, 100);
    assert!(released.elapsed() < SOON, "{:?}", released.elapsed());
    let report = resource.report();
    assert!(report.is_clean() && report.value == 101, "{report}");
    for client in &clients {
        let fastest = fastest_hand_off(&locks, client).await;
        assert!(fastest < TOLD, "no push message came: {fastest:?}");
    }
    no_key_left(server, "lock").await;
}

#[tokio::test]
async fn a_hundred_waiters_outlive_their_connections() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let cut = async || {
            proxy.refuse().await;
            proxy.cut();
            // Longer than the time-out of a call to the store.
            sleep(Duration::from_millis(600)).await;
            proxy.let_through().await;
        };
        a_hundred_wait_while(&server, &proxy.url(), cut).await;
    })
    .await;
}

#[tokio::test]
async fn a_hundred_waiters_outlive_a_server_that_kills_connections() {
    in_time(async {
        let server = RedisServer::start().await;
        let kill = async || {
            for kind in ["pubsub", "normal"] {
                server
                    .command(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"])
                    .await;
            }
        };
        a_hundred_wait_while(&server, &server.url(), kill).await;
    })
    .await;
}
