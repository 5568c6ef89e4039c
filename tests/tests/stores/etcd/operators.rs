//! Health, lists and revocations, as operators see them.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use lock_runtime::{
    EtcdOptions, LockErrorKind, Loss,
    health::{Health, ServerRole, Verdict},
    store::{
        Records as _,
        etcd::EtcdRecords,
        records::{Change, Record, RecordName, Swap, Swapped, Timestamp, Version},
    },
};
use lock_tests::{EtcdCluster, place::eventually, shared_etcd, unique};

use super::{client, once};

#[tokio::test]
async fn each_member_has_a_role_and_one_that_is_down_is_named() {
    let cluster = EtcdCluster::builder().members(3).start().await;
    let locks = client(&cluster).await;
    once(&locks, "k").await.unwrap();
    let leader = cluster.leader().await;
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
    for (index, server) in health.servers().iter().enumerate() {
        assert!(
            server.name.ends_with(&cluster.port(index).to_string()),
            "{health}"
        );
        let expected = if index == leader {
            ServerRole::Leader
        } else {
            ServerRole::Follower
        };
        assert_eq!(server.role, Some(expected), "{health}");
    }

    let down = (leader + 1) % 3;
    cluster.kill(down);
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Degraded, "{health}");
    let name = &health.servers()[down].name;
    let named = health
        .findings()
        .iter()
        .any(|it| it.server.as_ref() == Some(name));
    assert!(named, "{health}");

    cluster.kill((leader + 2) % 3);
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Unavailable, "{health}");
    let says = |health: &Health| health.findings().iter().any(|it| it.code == "no_leader");
    eventually("the member knows no leader", || async {
        says(&locks.health().await)
    })
    .await;
}

/// More than the 4 MiB to which gRPC limits a message by default.
#[tokio::test]
async fn many_large_records_are_read_and_listed() {
    let options = EtcdOptions::new();
    let (url, namespace) = (shared_etcd().await.url(), unique("ns"));
    let records = EtcdRecords::connect(&url, &namespace, options).await;
    let records = records.unwrap();
    let names: Vec<_> = (0..110)
        .map(|it| RecordName::new(format!("{it:03}")))
        .collect();
    let now = records.read(&[]).await.unwrap().now;
    let needed_until = Timestamp::from_micros(now.micros() + 60_000_000);
    for name in &names {
        let record = Record::new(Version::from_number(1).unwrap(), vec![7; 40 << 10]);
        let change = Change::new(name.clone(), None, record, needed_until);
        let swap = Swap::new(vec![change], Timestamp::default());
        assert_eq!(records.swap(&swap).await.unwrap().outcome, Swapped::Done);
    }
    let read = records.read(&names).await.unwrap().records;
    assert_eq!(read.iter().flatten().count(), names.len());
    assert_eq!(records.list("", None).await.unwrap().len(), names.len());
}

#[tokio::test]
async fn locks_are_listed_and_revoked() {
    let cluster = EtcdCluster::start().await;
    let locks = client(&cluster).await;
    let mut guards = Vec::new();
    for number in 0..20 {
        let key = format!("job:{number}");
        guards.push(locks.exclusive(&*key).acquire().await.unwrap());
    }
    let listed: Vec<_> = locks.list("job:").try_collect().await.unwrap();
    assert_eq!(listed.len(), 20);
    let revoked = guards.swap_remove(7);
    locks.revoke("job:7").await.unwrap();
    assert_eq!(
        revoked.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
    once(&locks, "job:7").await.unwrap();
}

/// Records go with an etcd lease, which most of them share for two days.
#[tokio::test]
async fn a_result_is_kept_for_longer_than_other_records() {
    let cluster = EtcdCluster::start().await;
    let locks = client(&cluster).await;
    let week = Duration::from_secs(7 * 24 * 3600);
    let once = locks.once("week").keep(week);
    let ran = once.run_bytes(async |_| Ok::<_, LockErrorKind>(b"done".to_vec()));
    assert!(!ran.await.unwrap().unwrap().is_replay);
    super::once(&locks, "short").await.unwrap();

    // Of the record of each lock: an id in hexadecimal digits, and the seconds that are left.
    let ids = cluster.ctl(&["lease", "list"]).await;
    let mut left = Vec::new();
    for id in ids.lines().skip(1) {
        let shown = cluster.ctl(&["lease", "timetolive", "--keys", id]).await;
        let seconds = shown.split("remaining(").nth(1).unwrap();
        let seconds: u64 = seconds.split('s').next().unwrap().parse().unwrap();
        left.push((shown.contains("week"), Duration::from_secs(seconds)));
    }
    let of_result = left.iter().find(|(is_result, _)| *is_result).unwrap();
    assert!(of_result.1 > week, "{left:?}");
    let others = left.iter().filter(|(is_result, _)| !is_result);
    assert!(others.clone().count() > 0, "{left:?}");
    assert!(others.into_iter().all(|(_, left)| *left < week), "{left:?}");
}
