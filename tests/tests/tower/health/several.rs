//! The health of stores with several servers, some of which are dead.

use lock_runtime::{
    LockClient,
    health::{ServerRole, Verdict},
};
use lock_tests::{
    RedisCluster, RedisServer, SentinelSet,
    place::{cluster_url, redlock_url},
    unique,
};

use super::{Duration, RedisOptions, becomes, codes, health, until};

/// The longest lease, so that a quarantine is short.
const LEASE: Duration = Duration::from_secs(2);

#[tokio::test]
async fn half_a_cluster_is_degraded_and_names_the_slots_that_are_out() {
    let cluster = RedisCluster::start().await;
    let locks = LockClient::connect(&cluster_url(&cluster)).await.unwrap();
    let well = health(&locks).await;
    assert_eq!(
        (well.verdict(), well.servers().len()),
        (Verdict::Healthy, 3),
        "{well}"
    );
    assert!(well.findings().is_empty(), "{well}");
    // Without its replica no other node takes its slots over. The last one by name is not the
    // first of the report for that reason alone.
    let slots = ["0-5460", "5461-10921", "10922-16383"];
    let masters = cluster.masters().await.into_iter().zip(slots);
    let last = masters.max_by_key(|(master, _)| master.addr().to_string());
    let (master, slots) = last.expect("three");
    for replica in cluster.replicas_of(master).await {
        replica.kill();
    }
    master.kill();
    let half = health(&locks).await;
    assert_eq!(half.verdict(), Verdict::Degraded, "{half}");
    let out = half
        .findings()
        .iter()
        .find(|finding| finding.code == "slots_out");
    let out = out.unwrap_or_else(|| panic!("{half}"));
    assert_eq!(out.server.as_deref(), Some(&*master.addr().to_string()));
    assert!(out.message.contains(slots), "{half}");
    assert_eq!(
        half.servers()
            .iter()
            .filter(|server| server.grants_locks)
            .count(),
        2
    );
    // The others refuse writes as well once the cluster requires all slots.
    for node in cluster.nodes().iter().filter(|node| node.is_running()) {
        node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "yes"])
            .await;
    }
    let down = becomes(&locks, Verdict::Unavailable).await;
    assert!(codes(&down).contains(&"writes_refused"), "{down}");
    assert!(
        down.to_string().contains("cluster-require-full-coverage"),
        "{down}"
    );
    // The others refuse because of the node that does not answer.
    let first = down.findings()[0].server.as_deref();
    assert_eq!(first, Some(&*master.addr().to_string()), "{down}");
}

#[tokio::test]
async fn slots_that_no_node_serves_are_found() {
    let cluster = RedisCluster::start().await;
    let locks = LockClient::connect(&cluster_url(&cluster)).await.unwrap();
    for node in cluster.nodes() {
        // Only the owner serves it, and the others learn of it too late for this test.
        let _ = node.try_command(&["CLUSTER", "DELSLOTS", "7"]).await;
    }
    until(&locks, |health| {
        let mut findings = health.findings().iter();
        findings.any(|finding| finding.code == "slots_uncovered" && finding.message.contains(" 7:"))
    })
    .await;
}

#[tokio::test]
async fn sentinels_that_are_down_or_disagree_are_found() {
    let set = SentinelSet::start().await;
    let locks = LockClient::connect(&set.url_with("", "")).await.unwrap();
    let well = health(&locks).await;
    assert_eq!(well.verdict(), Verdict::Healthy, "{well}");
    let roles: Vec<_> = well
        .servers()
        .iter()
        .map(|server| server.role.unwrap())
        .collect();
    let sentinel = ServerRole::Sentinel;
    assert_eq!(roles, [ServerRole::Primary, sentinel, sentinel, sentinel]);
    assert_eq!(well.servers()[0].name, set.nodes()[0].addr().to_string());
    set.sentinels()[0].kill();
    let one = health(&locks).await;
    assert_eq!(
        (one.verdict(), &*codes(&one)),
        (Verdict::Degraded, &["sentinel_down"][..]),
        "{one}"
    );
    set.sentinels()[1].kill();
    let two = health(&locks).await;
    assert_eq!(two.verdict(), Verdict::Degraded, "{two}");
    assert!(codes(&two).contains(&"no_sentinel_majority"), "{two}");
    let guard = locks.exclusive(unique("k")).acquire().await.unwrap();
    guard.release().await.unwrap();
    set.nodes()[0].kill();
    assert_eq!(health(&locks).await.verdict(), Verdict::Unavailable);
}

#[tokio::test]
async fn a_majority_decides_on_several_servers() {
    let servers = RedisServer::builder().start_all(3).await;
    let locks = LockClient::builder()
        .namespace(unique("ns"))
        .redis(RedisOptions::new().longest_lease(LEASE))
        .connect(&redlock_url(servers.iter().map(RedisServer::url)))
        .await
        .unwrap();
    let new = health(&locks).await;
    assert_eq!(new.verdict(), Verdict::Unavailable, "{new}");
    assert!(codes(&new).contains(&"quarantined"), "{new}");
    assert!(new.servers()[0].quarantine_left.unwrap() <= LEASE + Duration::from_secs(1));
    let well = becomes(&locks, Verdict::Healthy).await;
    assert!(
        well.findings().is_empty() && well.servers().len() == 3,
        "{well}"
    );
    // One of three has come back without its data.
    servers[0].restart_empty().await;
    let one = health(&locks).await;
    assert_eq!(
        (one.verdict(), &*codes(&one)),
        (Verdict::Degraded, &["quarantined", "minority_out"][..]),
        "{one}"
    );
    assert!(
        one.findings()[1].message.contains("0 more may fail"),
        "{one}"
    );
    becomes(&locks, Verdict::Healthy).await;
    servers[0].stop();
    servers[1].kill();
    let two = health(&locks).await;
    assert_eq!(two.verdict(), Verdict::Unavailable, "{two}");
    assert!(codes(&two).contains(&"no_majority"), "{two}");
    let reachable: Vec<_> = two
        .servers()
        .iter()
        .map(|server| server.reachable)
        .collect();
    assert_eq!(reachable, [false, false, true]);
    servers[0].resume();
    assert_eq!(becomes(&locks, Verdict::Degraded).await.servers().len(), 3);
}

#[tokio::test]
async fn a_cluster_that_was_never_found_is_not_to_be_created() {
    let server = RedisServer::start().await;
    server.kill();
    let url = server.url().replace("redis://", "redis+cluster://");
    let locks = LockClient::connect_lazy(&url).unwrap();
    let health = health(&locks).await;
    assert_eq!(health.verdict(), Verdict::Unavailable, "{health}");
    assert_eq!(codes(&health), ["unavailable"], "{health}");
    let port = server.port().to_string();
    assert!(health.servers()[0].name.contains(&port), "{health}");
}

/// A client without requests learns of the failover by its question.
#[tokio::test]
async fn after_a_planned_failover_nothing_is_found() {
    let cluster = RedisCluster::start().await;
    let locks = LockClient::connect(&cluster_url(&cluster)).await.unwrap();
    assert_eq!(health(&locks).await.verdict(), Verdict::Healthy);
    let [master, ..] = cluster.masters().await[..] else {
        panic!("three")
    };
    let new = cluster.failover(master).await;
    let after = health(&locks).await;
    assert!(after.findings().is_empty(), "{after}");
    let address = new.addr().to_string();
    assert!(
        after.servers().iter().any(|server| server.name == address),
        "{after}"
    );
}
