//! Failures shorter than the lease are no loss: renewal continues across them.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{Proxy, RedisServer, place::in_time, proxy::DropReply};
use tokio::time::sleep;

use super::{LEASE, hold};

#[tokio::test]
async fn a_pause_of_the_server_shorter_than_the_lease_is_survived() {
    in_time(async {
        let server = RedisServer::start().await;
        let lease = Duration::from_secs(5);
        let (_locks, guard) = hold(&server.url(), lease).await;
        server.stop();
        sleep(Duration::from_secs(1)).await;
        server.resume();
        sleep(lease).await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn cut_connections_are_survived() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let (_locks, guard) = hold(&proxy.url(), LEASE * 2).await;
        for _ in 0..8 {
            proxy.cut();
            sleep(LEASE / 2).await;
        }
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        assert!(server.keys("lock:*").await.is_empty());
    })
    .await;
}

#[tokio::test]
async fn lost_replies_to_renewals_are_survived() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let locks = LockClient::connect(&proxy.url()).await.unwrap();
        let mut guards = Vec::new();
        for key in ["a", "b"] {
            guards.push(
                locks
                    .exclusive(key)
                    .lease(LEASE * 2)
                    .acquire()
                    .await
                    .unwrap(),
            );
            guards.push(
                locks
                    .shared(format!("{key} read"))
                    .lease(LEASE * 2)
                    .acquire()
                    .await
                    .unwrap(),
            );
        }
        for dropped in 1..=3 {
            proxy.drop_reply(DropReply::next().to("EVALSHA"));
            proxy.wait_for_dropped_replies(dropped).await;
        }
        sleep(LEASE * 2).await;
        for guard in guards {
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }
    })
    .await;
}
