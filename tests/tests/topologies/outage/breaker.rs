//! Requests that are refused at once while a server does not answer, and served when it is back.

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{
    Captured, Lateness, Proxy, RedisCluster, RedisServer,
    place::{LONG, begun, in_time},
};
use tokio::time::{Instant, sleep};

use super::{Duration, SOON, once, until_refused_at_once, until_served};

/// The setting of these tests.
const AFTER: Duration = Duration::from_millis(400);

async fn connect(url: &str) -> LockClient {
    let builder = LockClient::builder().unavailable_after(AFTER);
    builder.connect(url).await.unwrap()
}

#[tokio::test]
async fn waiting_requests_are_refused_once_the_breaker_is_open() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = connect(&server.url()).await;
        once(&locks, "k").await.unwrap();
        for silently in [false, true] {
            let held = locks.exclusive("held").acquire().await.unwrap();
            match silently {
                true => server.stop(),
                false => server.kill(),
            }
            let down = Instant::now();
            let mut waiting = Vec::new();
            // Several behind each other, and some alone.
            for number in 0..60 {
                let key = format!("k{}", number % 3);
                waiting.push(tokio::spawn(
                    begun(locks.exclusive(key).wait(LONG).acquire()).await,
                ));
            }
            for request in waiting {
                let error = request.await.unwrap().unwrap_err();
                assert_eq!(error.kind(), LockErrorKind::Unavailable);
                assert!(format!("{error:#}").contains("without a call"), "{error:#}");
            }
            assert!(down.elapsed() >= AFTER);
            assert!(down.elapsed() < AFTER + SOON, "{:?}", down.elapsed());
            // The next ones do not wait at all, whatever their kind.
            for _ in 0..5 {
                let (begin, late) = (Instant::now(), Lateness::start());
                locks
                    .exclusive("new")
                    .wait(LONG)
                    .acquire()
                    .await
                    .unwrap_err();
                locks.shared("new").wait(LONG).acquire().await.unwrap_err();
                locks
                    .all(["a", "b"])
                    .wait(LONG)
                    .acquire()
                    .await
                    .unwrap_err();
                let longest = late.allows(Duration::from_millis(100));
                assert!(begin.elapsed() < longest, "{:?}", begin.elapsed());
            }
            assert!(!held.is_lost(), "a held lock lasts as long as its lease");
            match silently {
                true => server.resume(),
                false => server.restart_empty().await,
            }
            until_served(&locks, "k").await;
            drop(held);
        }
    })
    .await;
}

#[tokio::test]
async fn a_held_lock_is_renewed_and_released_through_an_outage() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(4);
        let request = || locks.exclusive("kept").lease(lease).acquire();
        let kept = request().await.unwrap();
        let dropped = locks.exclusive("dropped").acquire().await.unwrap();
        server.stop();
        drop(dropped);
        until_refused_at_once(&locks, "k").await;
        sleep(Duration::from_millis(1500)).await;
        server.resume();
        until_served(&locks, "dropped").await;
        // Longer than the lease without a renewal.
        sleep(lease).await;
        assert!(!kept.is_lost());
        kept.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn without_the_setting_only_requests_that_do_not_wait_are_refused() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        server.kill();
        until_refused_at_once(&locks, "k").await;
        assert!(locks.exclusive("k").try_acquire().await.is_err());
        let waiting = tokio::spawn(begun(locks.exclusive("k").wait(LONG).acquire()).await);
        sleep(AFTER * 3).await;
        assert!(!waiting.is_finished(), "it rides out the outage");
        server.restart_empty().await;
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn one_lost_reply_refuses_nothing() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let locks = connect(&proxy.url()).await;
        for _ in 0..5 {
            once(&locks, "k").await.unwrap();
            proxy.drop_next_reply();
            // The lock may be held under the token of the lost reply.
            let _ = once(&locks, "lost").await;
            once(&locks, "other").await.unwrap();
            proxy.cut();
            once(&locks, "k").await.unwrap();
        }
    })
    .await;
}

/// A server that comes and goes: no waiter is forgotten, and no request hangs.
#[tokio::test]
async fn a_breaker_that_flaps_forgets_no_waiter() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let locks = connect(&proxy.url()).await;
        let workers: Vec<_> = (0..8)
            .map(|number| {
                let locks = locks.clone();
                tokio::spawn(async move {
                    let (mut served, mut longest) = (0, Duration::ZERO);
                    let begin = Instant::now();
                    while begin.elapsed() < Duration::from_secs(6) {
                        let asked = Instant::now();
                        let request = locks.exclusive(format!("k{}", number % 2));
                        match request.wait(LONG).acquire().await {
                            Ok(guard) => {
                                served += 1;
                                sleep(Duration::from_millis(5)).await;
                                let _ = guard.release().await;
                            }
                            Err(error) => assert_eq!(error.kind(), LockErrorKind::Unavailable),
                        }
                        longest = longest.max(asked.elapsed());
                        sleep(Duration::from_millis(2)).await;
                    }
                    (served, longest)
                })
            })
            .collect();
        for _ in 0..3 {
            sleep(Duration::from_secs(1)).await;
            proxy.refuse().await;
            proxy.cut();
            sleep(Duration::from_secs(1)).await;
            proxy.let_through().await;
        }
        for worker in workers {
            let (served, longest) = worker.await.unwrap();
            assert!(served > 10, "{served}");
            assert!(longest < SOON, "{longest:?}");
        }
        until_served(&locks, "k0").await;
    })
    .await;
}

#[tokio::test]
async fn a_dead_node_of_a_cluster_refuses_its_own_keys_only() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let hosts: Vec<_> = cluster
            .nodes()
            .iter()
            .map(|it| it.addr().to_string())
            .collect();
        let locks = connect(&format!("redis+cluster://{}", hosts.join(","))).await;
        let masters = cluster.masters().await;
        let mut keys = Vec::new();
        for master in &masters {
            let mut number = 0;
            loop {
                let key = format!("k{number}");
                if cluster.owner_of(&format!("lock:{key}")).await.port() == master.port() {
                    keys.push(key);
                    break;
                }
                number += 1;
            }
        }
        for key in &keys {
            once(&locks, key).await.unwrap();
        }
        // Its replica does not take over.
        let replica = cluster
            .nodes()
            .iter()
            .position(|it| it.port() == masters[0].port());
        cluster.nodes()[replica.unwrap() + 3].kill();
        masters[0].stop();
        let error = until_refused_at_once(&locks, &keys[0]).await;
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        let begin = Instant::now();
        let error = locks
            .exclusive(&*keys[0])
            .wait(LONG)
            .acquire()
            .await
            .unwrap_err();
        assert!(format!("{error:#}").contains("without a call"), "{error:#}");
        assert!(begin.elapsed() < SOON);
        masters[0].resume();
        until_served(&locks, &keys[0]).await;
        for key in &keys[1..] {
            once(&locks, key).await.unwrap();
        }
    })
    .await;
}

/// No call of the client finds the failover.
#[tokio::test]
async fn an_idle_client_finds_the_node_in_place_of_a_dead_one() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let cluster = RedisCluster::start().await;
        let hosts: Vec<_> = cluster
            .nodes()
            .iter()
            .map(|it| it.addr().to_string())
            .collect();
        let locks = connect(&format!("redis+cluster://{}", hosts.join(","))).await;
        once(&locks, "k").await.unwrap();
        let owner = cluster.owner_of("lock:k").await;
        owner.kill();
        cluster.new_owner_of("lock:k", owner).await;
        traces
            .wait_for(|event| event.message == "the slot map has changed")
            .await;
        // The first change may be that the slot has no owner.
        sleep(Duration::from_secs(1)).await;
        once(&locks, "k").await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_majority_that_is_impossible_refuses_at_once() {
    in_time(async {
        let servers = RedisServer::builder().start_all(3).await;
        let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
        let lease = Duration::from_secs(1);
        let options = lock_runtime::RedisOptions::new().longest_lease(lease);
        let builder = LockClient::builder()
            .redis(options)
            .unavailable_after(AFTER);
        let url = format!("redlock:{}", urls.join(","));
        let locks = builder.connect(&url).await.unwrap();
        until_served(&locks, "k").await;
        servers[0].stop();
        sleep(AFTER * 2).await;
        for _ in 0..20 {
            let guard = locks.exclusive("k").wait(LONG).acquire().await.unwrap();
            guard.release().await.unwrap();
        }
        servers[1].stop();
        let waiting = tokio::spawn(begun(locks.exclusive("k").wait(LONG).acquire()).await);
        let error = waiting.await.unwrap().unwrap_err();
        assert!(format!("{error:#}").contains("without a call"), "{error:#}");
        until_refused_at_once(&locks, "k").await;
        let (begin, late) = (Instant::now(), Lateness::start());
        locks
            .exclusive("other")
            .wait(LONG)
            .acquire()
            .await
            .unwrap_err();
        let longest = late.allows(Duration::from_millis(200));
        assert!(begin.elapsed() < longest, "{:?}", begin.elapsed());
        servers[..2].iter().for_each(RedisServer::resume);
        until_served(&locks, "k").await;
    })
    .await;
}
