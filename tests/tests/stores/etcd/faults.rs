//! Faults of members: killed, stopped, without a majority, full, compacted, restored.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{EtcdCluster, place::begun, unique};
use tokio::time::{Instant, sleep, timeout};

use super::{client, client_of, held_after_an_outage, once, until_served};

/// The election time-out of the cluster, and a second.
const SOON: Duration = Duration::from_millis(1500);

async fn three() -> EtcdCluster {
    EtcdCluster::builder().members(3).start().await
}

#[tokio::test]
async fn a_lock_outlives_its_leader() {
    let cluster = three().await;
    let locks = client(&cluster).await;
    let held = locks
        .exclusive("held")
        // A third of it may have passed when the leader dies.
        .lease(SOON * 4)
        .acquire()
        .await
        .unwrap();
    let mut waiting = begun(
        locks
            .exclusive("held")
            .wait(Duration::from_secs(30))
            .acquire(),
    )
    .await;
    for _ in 0..3 {
        let leader = cluster.leader().await;
        let (_, before) = until_served(&locks, "k").await;
        cluster.kill(leader);
        let (time, after) = until_served(&locks, "k").await;
        assert!(time < SOON * 2, "{time:?}");
        assert!(before < after);
        cluster.restart(leader).await;
    }
    assert!(!held.is_lost());
    assert!(
        timeout(Duration::from_millis(10), &mut waiting)
            .await
            .is_err()
    );
    let first = held.fence();
    held.release().await.unwrap();
    assert!(first < waiting.await.unwrap().fence());
}

#[tokio::test]
async fn another_member_serves_while_one_is_stopped() {
    let cluster = three().await;
    let locks = client(&cluster).await;
    for member in 0..3 {
        until_served(&locks, "k").await;
        cluster.stop(member);
        let (time, _) = until_served(&locks, "k").await;
        cluster.resume(member);
        assert!(time < SOON * 2, "{time:?}");
    }
}

#[tokio::test]
async fn a_leader_that_is_cut_off_grants_nothing_and_the_others_serve() {
    let cluster = EtcdCluster::builder().members(3).linked().start().await;
    let namespace = unique("ns");
    let leader = cluster.leader().await;
    let host = |member| format!("127.0.0.1:{}", cluster.port(member));
    let connect = async |members: &[usize]| {
        let hosts: Vec<_> = members.iter().map(|member| host(*member)).collect();
        let url = format!("etcd://{}", hosts.join(","));
        let builder = LockClient::builder().namespace(namespace.as_str());
        builder.connect(&url).await.unwrap()
    };
    // One reaches the leader alone, one the leader first.
    let near = connect(&[leader]).await;
    let both = connect(&[leader, (leader + 1) % 3, (leader + 2) % 3]).await;
    let lease = Duration::from_secs(3);
    let held = near.exclusive("held").lease(lease).acquire();
    let held = held.await.unwrap();
    let (_, before) = until_served(&both, "k").await;
    cluster.cut_off(leader).await;
    let since = Instant::now();
    let (time, after) = until_served(&both, "k").await;
    assert!(time < SOON * 2, "{time:?}");
    assert!(before < after);
    let error = once(&near, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error:#}");
    held.lost().await;
    let lost = since.elapsed();
    assert!(lost < lease + Duration::from_millis(200), "{lost:?}");
    let (_, next) = until_served(&both, "held").await;
    assert!(held.fence() < next && since.elapsed() >= lost);
    cluster.join();
    let (time, last) = until_served(&near, "k").await;
    assert!(time < SOON * 2, "{time:?}");
    assert!(after < last);
}

#[tokio::test]
async fn without_a_majority_nothing_is_granted_and_a_holder_loses_its_lock_in_time() {
    let cluster = three().await;
    let locks = client(&cluster).await;
    let lease = Duration::from_secs(2);
    let held = locks
        .exclusive("held")
        .lease(lease)
        .acquire()
        .await
        .unwrap();
    let (_, before) = until_served(&locks, "k").await;
    let since = Instant::now();
    cluster.kill(0);
    cluster.kill(1);
    let error = once(&locks, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error:#}");
    held.lost().await;
    assert!(
        since.elapsed() < lease + Duration::from_millis(200),
        "{:?}",
        since.elapsed()
    );
    cluster.begin_restart(0);
    cluster.restart(1).await;
    let (time, after) = until_served(&locks, "k").await;
    assert!(time < SOON * 2, "{time:?}");
    assert!(before < after);
    // The lease of the lost lock is over, or will be soon.
    let (time, _) = until_served(&locks, "held").await;
    assert!(time < SOON, "{time:?}");
}

#[tokio::test]
async fn a_lock_that_is_released_in_an_outage_is_free_soon_after_it() {
    let cluster = three().await;
    let namespace = unique("ns");
    let clients = [
        client_of(&cluster, &namespace).await,
        client_of(&cluster, &namespace).await,
    ];
    let begin = || [0, 1].into_iter().for_each(|server| cluster.kill(server));
    let end = async || {
        cluster.begin_restart(0);
        cluster.restart(1).await;
    };
    let time = held_after_an_outage(clients, begin, end).await;
    assert!(time < SOON, "{time:?}");
}

#[tokio::test]
async fn a_full_member_says_what_to_do_and_serves_after_it() {
    let cluster = EtcdCluster::builder()
        .flag("--quota-backend-bytes=3000000")
        .start()
        .await;
    let locks = client(&cluster).await;
    let held = locks
        .exclusive("held")
        .lease(Duration::from_secs(60))
        .acquire()
        .await
        .unwrap();
    let filler = "x".repeat(100_000);
    while cluster.try_ctl(&["put", "filler", &filler]).await.is_ok() {}
    let error = once(&locks, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Full, "{error:#}");
    assert!(
        lock_tests::chain(&error).contains("defragment"),
        "{error:#}"
    );
    let refused = LockClient::builder()
        .namespace(unique("ns"))
        .connect(&cluster.url())
        .await;
    assert_eq!(refused.unwrap_err().kind(), LockErrorKind::Full);

    let status = cluster
        .ctl(&["endpoint", "status", "--write-out=json"])
        .await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let revision = status[0]["Status"]["header"]["revision"].to_string();
    cluster.ctl(&["compact", &revision]).await;
    cluster.ctl(&["defrag"]).await;
    cluster.ctl(&["alarm", "disarm"]).await;
    until_served(&locks, "k").await;
    assert!(!held.is_lost());
    held.release().await.unwrap();
}

#[tokio::test]
async fn messages_arrive_beside_compactions() {
    let cluster = EtcdCluster::start().await;
    let namespace = unique("ns");
    let clients = [
        client_of(&cluster, &namespace).await,
        client_of(&cluster, &namespace).await,
    ];
    let begun = Instant::now();
    for round in 0..100 {
        let [holder, waiter] = [&clients[round % 2], &clients[(round + 1) % 2]];
        let held = holder
            .exclusive("k")
            .wait(Duration::from_secs(10))
            .acquire()
            .await
            .unwrap();
        let waiting = waiter.exclusive("k").wait(Duration::from_secs(10));
        let mut waiting = lock_tests::place::begun(waiting.acquire()).await;
        let _ = timeout(Duration::from_millis(5), &mut waiting).await;
        let revision = cluster.ctl(&["get", "k", "--write-out=json"]).await;
        let revision: serde_json::Value = serde_json::from_str(&revision).unwrap();
        let revision = revision["header"]["revision"].to_string();
        // Another one may have compacted it.
        let _ = cluster.try_ctl(&["compact", &revision]).await;
        held.release().await.unwrap();
        waiting.await.unwrap().release().await.unwrap();
    }
    // Polls alone would take seconds for each hand-off.
    assert!(
        begun.elapsed() < Duration::from_secs(50),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn fencing_tokens_go_on_after_a_snapshot_is_restored() {
    let cluster = EtcdCluster::start().await;
    let namespace = unique("ns");
    let locks = client_of(&cluster, &namespace).await;
    once(&locks, "k").await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("snapshot");
    cluster.save(&file).await;
    let held = locks
        .exclusive("held")
        .lease(Duration::from_secs(2))
        .acquire()
        .await
        .unwrap();
    sleep(Duration::from_millis(1500)).await;
    let before = once(&locks, "k").await.unwrap();
    cluster.restore(&file).await;
    // A client that knows the clock sets it, also one that only acquires.
    let (time, after) = until_served(&locks, "k").await;
    assert!(time < Duration::from_secs(5), "{time:?}");
    assert!(before < after);
    held.lost().await;
    let other = client_of(&cluster, &namespace).await;
    let (_, last) = until_served(&other, "k").await;
    assert!(after < last);

    // With no such client, the operator removes the clock.
    locks.shutdown().await;
    other.shutdown().await;
    drop((locks, other));
    cluster.restore(&file).await;
    cluster.ctl(&["del", &format!("{namespace}/c")]).await;
    let new = client_of(&cluster, &namespace).await;
    assert!(last < once(&new, "k").await.unwrap());
    once(&new, "held").await.unwrap();
}

#[tokio::test]
async fn a_lock_whose_record_an_operator_removes_is_lost() {
    let cluster = EtcdCluster::start().await;
    let locks = client(&cluster).await;
    let lease = Duration::from_secs(2);
    let held = locks.exclusive("k").lease(lease).acquire().await.unwrap();
    let leases = cluster.ctl(&["lease", "list"]).await;
    for lease in leases.lines().skip(1) {
        cluster.ctl(&["lease", "revoke", lease]).await;
    }
    let begun = Instant::now();
    held.lost().await;
    assert!(begun.elapsed() < lease, "{:?}", begun.elapsed());
    assert!(held.fence() < once(&locks, "k").await.unwrap());
}
