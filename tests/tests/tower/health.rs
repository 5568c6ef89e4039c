//! Health: one verdict, the state of each server, and a remedy for each finding, within about a
//! second whatever the servers do.

mod env;
mod readiness;
mod several;

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{
    LockClient, RedisOptions,
    health::{Health, ServerRole, Severity, Verdict},
    store::redis::RedisStore,
};
use lock_tests::{
    RedisServer,
    access::{allow, rules},
    place::LONG,
    unique,
};
use tokio::time::{Instant, sleep};

/// The second that is promised, and extra time for a slow machine.
const PROMISED: Duration = Duration::from_secs(3);

/// The health, which is known in time.
async fn health(locks: &LockClient) -> Health {
    let since = Instant::now();
    let health = locks.health().await;
    assert!(since.elapsed() < PROMISED, "{:?}", since.elapsed());
    health
}

fn codes(health: &Health) -> Vec<&'static str> {
    health
        .findings()
        .iter()
        .map(|finding| finding.code)
        .collect()
}

/// Waits until the health is as expected.
async fn until(locks: &LockClient, is_so: impl Fn(&Health) -> bool) -> Health {
    let deadline = Instant::now() + LONG;
    loop {
        let health = health(locks).await;
        if is_so(&health) {
            return health;
        }
        assert!(Instant::now() < deadline, "{health}");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn becomes(locks: &LockClient, verdict: Verdict) -> Health {
    until(locks, |health| health.verdict() == verdict).await
}

#[tokio::test]
async fn a_store_in_this_process_is_healthy() {
    let locks = LockClient::in_memory();
    let health = health(&locks).await;
    assert_eq!(
        (health.verdict(), health.servers().len()),
        (Verdict::Healthy, 1)
    );
    assert_eq!(health.servers()[0].role, Some(ServerRole::Memory));
    locks.shutdown().await;
    assert_eq!(locks.health().await.verdict(), Verdict::Unavailable);
}

#[test]
fn outside_a_runtime_there_is_a_verdict_too() {
    let health = futures_util::FutureExt::now_or_never(LockClient::in_memory().health());
    let health = health.unwrap();
    assert_eq!(health.verdict(), Verdict::Unavailable);
    assert_eq!(codes(&health), ["no_runtime"]);
}

#[tokio::test]
async fn a_server_that_is_well_has_no_finding_and_no_new_key() {
    let server = RedisServer::builder().password("hunter2").start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let health = health(&locks).await;
    assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
    assert!(health.findings().is_empty(), "{health}");
    let [found] = health.servers() else {
        panic!("{health}")
    };
    assert_eq!(found.name, server.addr().to_string());
    assert!(found.reachable && found.grants_locks);
    assert_eq!(found.role, Some(ServerRole::Primary));
    assert!(found.version.as_ref().unwrap().contains(' '));
    assert!(found.round_trip.unwrap() < PROMISED);
    assert!(found.clock_difference.unwrap().abs() < 1.0, "one machine");
    assert_eq!((found.replicas, found.quarantine_left), (Some(0), None));
    assert_eq!(found.eviction_policy.as_deref(), Some("noeviction"));
    assert_eq!(found.missing_rights, Some(vec![]));
    assert!(!format!("{health} {health:?}").contains("hunter2"));
    assert!(server.keys("*").await.is_empty());
}

#[tokio::test]
async fn settings_that_put_locks_at_risk_are_found() {
    for (options, verdict, code, remedy) in [
        (
            ["--maxmemory-policy", "volatile-lru"],
            Verdict::Degraded,
            "eviction",
            "noeviction",
        ),
        (
            ["--min-replicas-to-write", "1"],
            Verdict::Unavailable,
            "writes_refused",
            "replicas",
        ),
        (
            ["--maxmemory", "1kb"],
            Verdict::Unavailable,
            "writes_refused",
            "maxmemory",
        ),
    ] {
        let server = RedisServer::builder().args(options).start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let health = health(&locks).await;
        assert_eq!(health.verdict(), verdict, "{health}");
        let finding = &health.findings()[0];
        assert_eq!(finding.code, code, "{health}");
        assert!(finding.remedy.contains(remedy), "{health}");
        assert_eq!(finding.server.as_deref(), Some(&*health.servers()[0].name));
        let refused = locks.exclusive("k").no_wait().acquire().await.is_err();
        assert_eq!(
            refused,
            verdict == Verdict::Unavailable,
            "the verdict is right"
        );
    }
}

#[tokio::test]
async fn a_primary_that_becomes_a_replica_is_noticed_and_so_is_its_return() {
    let (server, other) = tokio::join!(RedisServer::start(), RedisServer::start());
    let locks = LockClient::connect(&server.url()).await.unwrap();
    assert_eq!(health(&locks).await.verdict(), Verdict::Healthy);
    let port = other.port().to_string();
    server.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    // Whether the connection is the old one or a new one that was refused.
    for _ in 0..2 {
        let health = health(&locks).await;
        assert_eq!(health.verdict(), Verdict::Unavailable, "{health}");
        assert_eq!(codes(&health), ["read_only"], "{health}");
        assert_eq!(health.servers()[0].role, Some(ServerRole::Replica));
        assert!(health.servers()[0].reachable);
    }
    server.command(&["REPLICAOF", "NO", "ONE"]).await;
    assert_eq!(health(&locks).await.verdict(), Verdict::Healthy);
}

#[tokio::test]
async fn missing_rights_are_named_and_none_is_denied_in_the_log() {
    let server = RedisServer::builder().user("ann", "pw", "").start().await;
    let line = RedisStore::acl_line("lock");
    allow(&server, "ann", &rules(&line)).await;
    let locks = LockClient::connect(&server.url_as("ann", "pw"))
        .await
        .unwrap();
    let all = health(&locks).await;
    assert_eq!(all.verdict(), Verdict::Healthy, "{all}");
    for (rule, verdict, code, missing) in [
        ("-hset", Verdict::Unavailable, "missing_rights", "+hset"),
        (
            "-evalsha",
            Verdict::Unavailable,
            "missing_rights",
            "+evalsha",
        ),
        ("-publish", Verdict::Degraded, "no_messages", "+publish"),
    ] {
        allow(&server, "ann", &[rule]).await;
        let health = health(&locks).await;
        assert_eq!(health.verdict(), verdict, "{rule}: {health}");
        let finding = &health.findings()[0];
        assert_eq!(finding.code, code, "{rule}: {health}");
        assert!(
            finding.remedy.starts_with("ACL SETUSER <user> "),
            "{health}"
        );
        assert!(finding.remedy.contains(missing), "{health}");
        let found = health.servers()[0].missing_rights.as_ref().unwrap();
        assert!(found.iter().any(|right| right == missing), "{found:?}");
        allow(&server, "ann", &rules(&line)).await;
    }
    let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
    assert!(log.is_empty(), "{log:?}");
    // Without these the question is refused, or the server ends the connection.
    for (rule, verdict, code) in [
        ("resetchannels", Verdict::Degraded, "no_messages"),
        ("-eval", Verdict::Unavailable, "missing_rights"),
        ("-info", Verdict::Degraded, "no_info"),
        ("resetkeys", Verdict::Unavailable, "missing_rights"),
    ] {
        allow(&server, "ann", &[rule]).await;
        let health = health(&locks).await;
        assert_eq!(
            (health.verdict(), health.findings()[0].code),
            (verdict, code),
            "{health}"
        );
        allow(&server, "ann", &rules(&line)).await;
    }
    assert_eq!(health(&locks).await.verdict(), Verdict::Healthy);
}

#[tokio::test]
async fn a_refused_question_keeps_the_connection() {
    let server = RedisServer::builder().user("ann", "pw", "").start().await;
    allow(&server, "ann", &rules(&RedisStore::acl_line("lock"))).await;
    let locks = LockClient::connect(&server.url_as("ann", "pw"))
        .await
        .unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    allow(&server, "ann", &["-eval", "-info"]).await;
    let accepted = async || {
        let stats: String = server.query(&["INFO", "stats"]).await;
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    let before = accepted().await;
    for _ in 0..5 {
        health(&locks).await;
    }
    // The question itself is asked on a connection of its own.
    assert_eq!(accepted().await, before + 1);
    allow(&server, "ann", &["+eval"]).await;
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_server_that_hangs_or_is_gone_is_unavailable_until_it_is_back() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    server.stop();
    let hanging = health(&locks).await;
    server.resume();
    assert_eq!(hanging.verdict(), Verdict::Unavailable, "{hanging}");
    assert_eq!(codes(&hanging), ["unavailable"], "{hanging}");
    assert!(!hanging.servers()[0].reachable);
    becomes(&locks, Verdict::Healthy).await;
    assert!(!guard.is_lost());
    server.kill();
    for _ in 0..2 {
        let gone = health(&locks).await;
        assert_eq!(gone.verdict(), Verdict::Unavailable, "{gone}");
        assert_eq!(gone.findings()[0].severity, Severity::Critical);
        assert!(gone.to_string().contains("no answer"), "{gone}");
    }
    server.restart_empty().await;
    becomes(&locks, Verdict::Healthy).await;
}

#[tokio::test]
async fn required_replicas_that_are_gone_are_missed() {
    let server = RedisServer::start().await;
    let replica = RedisServer::builder().replica_of(&server).start().await;
    let options = RedisOptions::new().min_replicas(NonZeroU32::MIN, Duration::from_millis(100));
    let builder = LockClient::builder().namespace(unique("ns")).redis(options);
    let locks = builder.connect(&server.url()).await.unwrap();
    let well = becomes(&locks, Verdict::Healthy).await;
    assert_eq!(well.servers()[0].replicas, Some(1));
    replica.kill();
    let health = becomes(&locks, Verdict::Unavailable).await;
    assert_eq!(codes(&health), ["too_few_replicas"], "{health}");
    assert!(health.findings()[0].message.contains("needs 1"), "{health}");
    tokio::time::timeout(LONG, replica.restart_empty())
        .await
        .unwrap();
    becomes(&locks, Verdict::Healthy).await;
}
