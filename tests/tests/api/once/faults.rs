//! Servers that restart, are out of memory, or refuse a long result while work is done once.

use std::{io, time::Duration};

use lock_runtime::{LockClient, LockErrorKind, Once, OnceEntry};
use lock_tests::{
    EtcdCluster, PostgresServer, Proxy, RedisServer, chain,
    place::{LONG, Place, eventually, in_time},
    proxy::DropReply,
    unique,
};
use tokio::time::sleep;

/// Long enough for a restart on a busy machine.
const LEASE: Duration = Duration::from_secs(20);

async fn ran(locks: &LockClient, key: &str, value: &[u8]) -> Once<Vec<u8>> {
    let once = locks.once(key).wait(LONG);
    let ran = once.run_bytes(async |_| Ok::<_, io::Error>(value.to_vec()));
    ran.await.unwrap().unwrap()
}

/// A server that restarts with its data, after the body or while the result is recorded, keeps it.
async fn is_recorded_across_a_restart(place: Place, restart: impl AsyncFn()) {
    let [locks, other] = [place.client().await, place.client().await];
    for is_midway in [false, true] {
        let key = unique("job");
        let begun = locks.once(&*key).lease(LEASE).begin().await;
        let OnceEntry::Vacant(guard) = begun.unwrap() else {
            panic!("it is free");
        };
        let fence = guard.held().fence();
        let completed = if is_midway {
            let (completed, ()) = tokio::join!(guard.complete(b"1"), restart());
            completed
        } else {
            restart().await;
            guard.complete(b"1").await
        };
        completed.unwrap();
        let done = ran(&other, &key, b"2").await;
        let is_first = done.is_replay && (&*done.value, done.fence) == (b"1", fence);
        assert!(is_first, "{is_midway}: {done:?}");
    }
}

#[tokio::test]
async fn a_result_is_recorded_across_a_restart() {
    let server = RedisServer::start().await;
    let restart = async || server.restart_from(&server.save_snapshot().await).await;
    let place = Place::at(server.url());
    in_time(is_recorded_across_a_restart(place, restart)).await;
}

#[tokio::test]
async fn a_result_is_recorded_across_a_restart_of_postgres() {
    let server = PostgresServer::start().await;
    let (url, namespace) = (server.url(), unique("ns"));
    let place = Place::Postgres { url, namespace };
    in_time(is_recorded_across_a_restart(place, async || {
        server.restart().await;
    }))
    .await;
}

#[tokio::test]
async fn a_result_is_recorded_across_a_restart_of_etcd() {
    let server = EtcdCluster::start().await;
    let (url, namespace) = (server.url(), unique("ns"));
    let place = Place::Etcd { url, namespace };
    in_time(is_recorded_across_a_restart(place, async || {
        server.restart(0).await;
    }))
    .await;
}

/// A server that restarts without its data has lost the lock: the result is refused, and the next
/// request does the work.
#[tokio::test]
async fn a_result_is_refused_by_a_server_that_has_lost_its_data() {
    let server = RedisServer::start().await;
    let place = Place::at(server.url());
    let [locks, other] = [place.client().await, place.client().await];
    let OnceEntry::Vacant(guard) = locks.once("job").lease(LEASE).begin().await.unwrap() else {
        panic!("it is free");
    };
    server.restart_empty().await;
    let next = in_time(ran(&other, "job", b"2")).await;
    assert!(!next.is_replay, "{next:?}");
    let refused = in_time(guard.complete(b"1")).await.unwrap_err();
    assert!(
        matches!(refused.kind(), LockErrorKind::Lost(_)),
        "{refused}"
    );
    let done = other.once("job").stored().await.unwrap().unwrap();
    assert_eq!((&*done.value, done.fence), (&b"2"[..], next.fence));
}

/// The reply of the record is lost on the wire, with the connection or without its end.
#[tokio::test]
async fn a_record_whose_reply_is_lost_on_the_wire_is_known() {
    let server = RedisServer::start().await;
    let proxy = Proxy::to(&server).await;
    let locks = LockClient::connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    for is_silent in [false, true] {
        let key = unique("job");
        let OnceEntry::Vacant(guard) = locks.once(&*key).begin().await.unwrap() else {
            panic!("it is free");
        };
        let lost = DropReply::next().to("EVALSHA");
        proxy.drop_reply(if is_silent { lost.silently() } else { lost });
        let dropped = proxy.dropped_replies();
        let (completed, ()) = in_time(async {
            tokio::join!(guard.complete(b"1"), async {
                proxy.wait_for_dropped_replies(dropped + 1).await;
                proxy.let_through().await;
            })
        })
        .await;
        completed.unwrap();
        let done = ran(&other, &key, b"2").await;
        assert!(done.is_replay && done.value == b"1", "{done:?}");
    }
}

/// Makes the server refuse every write that needs memory, or none.
async fn full(server: &RedisServer, full: bool) {
    let most = if full { "1" } else { "0" };
    server.command(&["CONFIG", "SET", "maxmemory", most]).await;
}

/// The key stays running until its lease ends, and the caller learns the cause.
#[tokio::test]
async fn a_server_out_of_memory_records_nothing() {
    let server = RedisServer::start().await;
    let place = Place::at(server.url());
    let [locks, other] = [place.client().await, place.client().await];
    let lease = Duration::from_secs(3);
    let OnceEntry::Vacant(guard) = locks.once("job").lease(lease).begin().await.unwrap() else {
        panic!("it is free");
    };
    full(&server, true).await;
    let completing = tokio::spawn(async move { guard.complete(b"1").await });
    // The request is repeated until the lease has ended, and the holder stays the same.
    let seen = async || other.inspect("job").await.unwrap();
    while !completing.is_finished() {
        let holders = seen().await.holders;
        assert!(holders.iter().all(|it| !it.is_reservation), "{holders:?}");
        sleep(Duration::from_millis(50)).await;
    }
    let refused = completing.await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::ReleaseUnknown, "{refused}");
    let text = chain(&refused);
    assert!(text.contains("maxmemory"), "{text}");
    eventually("it is free", || async { seen().await.holders.is_empty() }).await;
    full(&server, false).await;
    let next = ran(&other, "job", b"2").await;
    assert!(!next.is_replay, "{next:?}");
    // The repetition of the record does not reach the next one.
    sleep(Duration::from_millis(300)).await;
    let done = other.once("job").stored().await.unwrap().unwrap();
    assert_eq!(done.value, b"2");
}

#[tokio::test]
async fn a_result_is_recorded_once_the_server_has_memory_again() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let OnceEntry::Vacant(guard) = locks.once("job").lease(LEASE).begin().await.unwrap() else {
        panic!("it is free");
    };
    full(&server, true).await;
    let freed = async {
        sleep(Duration::from_millis(300)).await;
        full(&server, false).await;
    };
    let (completed, ()) = tokio::join!(guard.complete(b"1"), freed);
    completed.unwrap();
    assert_eq!(ran(&locks, "job", b"2").await.value, b"1");
}

/// Records a result that the store refuses as too long.
async fn refuses_a_long_result(place: Place, bytes: usize) {
    let [locks, other] = [place.client().await, place.client().await];
    let (key, text) = loop {
        let key = unique("job");
        let once = locks.once(&*key).lease(LEASE).max_bytes(usize::MAX);
        let refused = once.run_bytes(async |_| Ok::<_, io::Error>(vec![b'x'; bytes]));
        let refused = refused.await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::ReleaseUnknown, "{refused}");
        // On a busy machine the call may take too long.
        match chain(&refused) {
            text if text.contains("no answer within") => {}
            text => break (key, text),
        }
    };
    assert!(text.contains("was not recorded"), "{text}");
    // It is free at once, and not at the end of the lease.
    let begun = other.once(&*key).wait(LEASE / 2).begin().await.unwrap();
    assert!(matches!(begun, OnceEntry::Vacant(_)), "{begun:?}");
}

#[tokio::test]
async fn a_result_that_etcd_refuses_leaves_the_key_free() {
    // By the limit of a request, and by that of a message.
    for bytes in [1_700_000, 2_200_000] {
        let place = Place::etcd().await;
        in_time(refuses_a_long_result(place, bytes)).await;
    }
}

#[tokio::test]
async fn a_result_that_zookeeper_refuses_leaves_the_key_free() {
    let place = Place::zookeeper().await;
    in_time(refuses_a_long_result(place, 1_200_000)).await;
}
