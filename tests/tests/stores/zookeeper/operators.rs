//! Health, lists, revocations and old nodes, as operators see them.

use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use lock_runtime::{
    LockErrorKind, LockGuard, Loss,
    health::{Health, ServerRole, Verdict},
    store::{
        Records as _,
        records::{Change, Record, RecordName, Swap, Swapped, Timestamp, Version},
        zookeeper::ZooKeeperRecords,
    },
};
use lock_tests::{ZooKeeperEnsemble, place::eventually, shared_zookeeper, unique};

use super::client;
use crate::etcd::once;

#[tokio::test]
async fn each_server_has_a_role_and_one_that_is_down_is_named() {
    let ensemble = ZooKeeperEnsemble::builder().servers(3).start().await;
    let locks = client(&ensemble).await;
    once(&locks, "k").await.unwrap();
    let leader = ensemble.leader().await;
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
    for (index, server) in health.servers().iter().enumerate() {
        let port = ensemble.port(index).to_string();
        assert!(server.name.ends_with(&port), "{health}");
        let expected = match index == leader {
            true => ServerRole::Leader,
            false => ServerRole::Follower,
        };
        assert_eq!(server.role, Some(expected), "{health}");
        let version = server.version.as_deref().unwrap_or_default();
        assert!(version.starts_with("ZooKeeper 3"), "{health}");
    }

    let down = (leader + 1) % 3;
    ensemble.kill(down);
    let is_named = |health: &Health| {
        let name = &health.servers()[down].name;
        health
            .findings()
            .iter()
            .any(|it| it.server.as_ref() == Some(name))
    };
    eventually("the other two serve", async || {
        let health = locks.health().await;
        health.verdict() == Verdict::Degraded && is_named(&health)
    })
    .await;

    ensemble.kill((leader + 2) % 3);
    eventually("one of three serves nothing", async || {
        let health = locks.health().await;
        let says = health.findings().iter().any(|it| it.code == "no_leader");
        health.verdict() == Verdict::Unavailable && says
    })
    .await;
}

#[tokio::test]
async fn locks_are_listed_and_revoked() {
    let locks = client(shared_zookeeper().await).await;
    let mut guards = Vec::new();
    for number in 0..20 {
        let key = format!("job:{number}/.. a");
        guards.push(locks.exclusive(&*key).acquire().await.unwrap());
    }
    let listed: Vec<_> = locks.list("job:").try_collect().await.unwrap();
    assert_eq!(listed.len(), 20);
    let revoked = guards.swap_remove(7);
    locks.revoke("job:7/.. a").await.unwrap();
    let lost = revoked.lost().await;
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Revoked));
    once(&locks, "job:7/.. a").await.unwrap();
}

#[tokio::test]
async fn a_thousand_locks_are_held_beyond_their_leases_and_listed() {
    const LOCKS: usize = 1_000;
    let locks = client(shared_zookeeper().await).await;
    let acquire = async |number: usize| {
        let request = locks.exclusive(format!("many:{number}"));
        let lasting = request.lease(Duration::from_secs(3));
        lasting.wait(Duration::from_secs(10)).acquire().await
    };
    let held = (0..LOCKS).map(acquire);
    let held: Vec<_> = stream::iter(held).buffered(64).try_collect().await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let listed: Vec<_> = locks.list("many:").try_collect().await.unwrap();
    assert_eq!(listed.len(), LOCKS);
    assert!(!held.iter().any(LockGuard::is_lost));
    let released = held.into_iter().map(LockGuard::release);
    let released: Vec<_> = stream::iter(released).buffered(64).collect().await;
    assert!(released.iter().all(Result::is_ok));
    once(&locks, "many:7").await.unwrap();
    let left: Vec<_> = locks.list("many:").try_collect().await.unwrap();
    assert!(left.is_empty(), "{left:?}");
}

/// A removed record keeps its node for two hours, so that the version of the node does not begin
/// again.
#[tokio::test]
async fn records_are_removed_when_they_are_needed_no_more() {
    let (ensemble, namespace) = (shared_zookeeper().await, unique("ns"));
    let connect = ZooKeeperRecords::connect(&ensemble.url(), &namespace).await;
    let records = connect.unwrap();
    let (old, new) = (RecordName::new("old"), RecordName::new("new"));
    let names = [old.clone(), new.clone()];
    let now = records.read(&[]).await.unwrap().now.micros();
    let swap = |name: &RecordName, known: Option<u64>, version, needed_until| {
        let record = Record::new(Version::from_number(version).unwrap(), b"body".to_vec());
        let known = known.map(|known| Version::from_number(known).unwrap());
        let until = Timestamp::from_micros(needed_until);
        let change = Change::new(name.clone(), known, record, until);
        Swap::new(vec![change], Timestamp::default())
    };
    for (name, needed_until) in [(&old, now), (&new, now + 60_000_000)] {
        let swap = swap(name, None, 1, needed_until);
        assert_eq!(records.swap(&swap).await.unwrap().outcome, Swapped::Done);
    }
    let late = ZooKeeperRecords::connect(&ensemble.url(), &namespace).await;
    let late = late.unwrap();
    assert!(late.read(&names).await.unwrap().records[0].is_some());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(records.remove_old().await.unwrap(), 1);
    let present = records.read(&names).await.unwrap().records;
    assert!(present[0].is_none() && present[1].is_some());
    let listed = records.list("", None).await.unwrap();
    assert_eq!(listed.len(), 1);

    // A client that has seen the old record, and nothing since, does not change the new one.
    let again = swap(&old, None, 2, now + 60_000_000);
    assert_eq!(records.swap(&again).await.unwrap().outcome, Swapped::Done);
    let stale = late.swap(&swap(&old, Some(1), 3, now)).await.unwrap();
    assert!(matches!(stale.outcome, Swapped::Conflict(_)), "{stale:?}");
    let present = records.read(&names).await.unwrap().records;
    assert_eq!(present[0].as_ref().unwrap().version.number(), 2);
}
