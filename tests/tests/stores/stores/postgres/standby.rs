//! A primary and its standby, and URLs with both.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{
    PostgresServer, chain,
    place::{LONG, eventually, in_time},
};

use super::{once, server};

/// A URL of both servers, for the one that is no standby.
fn url_of(servers: [&PostgresServer; 2]) -> String {
    let [one, other] = servers.map(PostgresServer::port);
    format!(
        "postgres://postgres@127.0.0.1:{one},127.0.0.1:{other}/postgres\
         ?target_session_attrs=read-write"
    )
}

async fn standby_of(primary: &PostgresServer) -> PostgresServer {
    let standby = PostgresServer::builder().standby_of(primary).start().await;
    let admin = primary.connect().await;
    let streaming = "select count(*) from pg_stat_replication where state = 'streaming'";
    eventually("it follows", async || {
        super::number(&admin, streaming).await == 1
    })
    .await;
    standby
}

#[tokio::test]
async fn a_standby_is_refused_and_named() {
    in_time(async {
        let primary = server().await;
        once(
            LockClient::connect(&primary.url())
                .await
                .unwrap()
                .exclusive("a"),
        )
        .await
        .unwrap();
        let standby = standby_of(&primary).await;
        let error = LockClient::connect(&standby.url()).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::ReadOnly);
        let message = chain(&error);
        let address = format!("127.0.0.1:{}", standby.port());
        for word in [&address, "is a standby", "target_session_attrs=read-write"] {
            assert!(message.contains(word), "{message}");
        }
        for url in [url_of([&standby, &primary]), url_of([&primary, &standby])] {
            let locks = LockClient::connect(&url).await.unwrap();
            once(locks.exclusive("a")).await.unwrap();
        }
    })
    .await;
}

/// With a synchronous standby nothing is lost: the holder keeps its lock, and waiters their places.
#[tokio::test]
async fn locks_survive_the_failover_to_a_synchronous_standby() {
    in_time(async {
        let primary = server().await;
        let standby = standby_of(&primary).await;
        let admin = primary.connect().await;
        admin
            .batch_execute("alter system set synchronous_standby_names = 'standby'")
            .await
            .unwrap();
        admin
            .batch_execute("select pg_reload_conf()")
            .await
            .unwrap();
        let synchronous = "select count(*) from pg_stat_replication where sync_state = 'sync'";
        eventually("it is synchronous", async || {
            super::number(&admin, synchronous).await == 1
        })
        .await;

        let url = url_of([&primary, &standby]);
        let connect = async || LockClient::connect(&url).await.unwrap();
        let (one, other, third) = (connect().await, connect().await, connect().await);
        let failover = async || {
            primary.kill();
            standby.promote().await;
            let request = third.exclusive("outlives").wait(LONG / 10);
            let error = request.acquire().await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::WaitTimeout, "{error:#}");
        };
        super::outlive(&one, &other, failover).await;
    })
    .await;
}

/// What the guide says of asynchronous replication: a grant may be lost, its holder notices, and
/// tokens increase.
#[tokio::test]
async fn a_standby_that_lacks_a_grant_gives_the_lock_to_another_client() {
    in_time(async {
        let primary = server().await;
        let url = primary.url();
        once(LockClient::connect(&url).await.unwrap().exclusive("a"))
            .await
            .unwrap();
        let standby = standby_of(&primary).await;
        let url = url_of([&primary, &standby]);
        let (one, other) = (
            LockClient::connect(&url).await.unwrap(),
            LockClient::connect(&url).await.unwrap(),
        );
        let admin = standby.connect().await;
        for statement in [
            "alter system set primary_conninfo = ''",
            "select pg_reload_conf()",
        ] {
            admin.batch_execute(statement).await.unwrap();
        }
        let admin = primary.connect().await;
        let following = "select count(*) from pg_stat_replication";
        eventually("it receives nothing any more", async || {
            super::number(&admin, following).await == 0
        })
        .await;
        let lease = Duration::from_secs(3);
        let guard = one.exclusive("a").lease(lease).acquire().await.unwrap();
        let fence = guard.fence();
        primary.kill();
        standby.promote().await;
        let next = other.exclusive("a").wait(LONG).acquire().await.unwrap();
        assert!(next.fence() > fence);
        guard.lost().await;
        next.release().await.unwrap();
    })
    .await;
}
