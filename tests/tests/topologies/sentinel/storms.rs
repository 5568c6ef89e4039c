//! Storms on a primary that Sentinels name. A failover may lose grants that the replicas did not
//! have, so two holders may overlap: fencing tokens keep them apart. If each grant waits for all
//! replicas, no reported grant is lost.
//!
//! The length of a failover depends on the Sentinels: `SentinelSet::DOWN_AFTER` until they detect
//! the failure, an election, and another election after twice the failover time-out if the first
//! one fails. No service is promised meanwhile. It is promised again once the set has a primary
//! with as many replicas as required.

use lock_runtime::{LockClient, RedisOptions};
use lock_tests::{RedisServer, SentinelSet, place::eventually};
use tokio::time::sleep;

use super::{Duration, builder, copied, namespace, replicas::count, url_of};
use crate::topologies::storm::{Faults, Report, Storm};

const LEASE: Duration = Duration::from_secs(1);
/// The time in addition to a lease within which the set serves all waiters again.
const BACK: Duration = Duration::from_secs(2);
/// The time for which a grant waits for its replicas.
const REPLICATED: Duration = Duration::from_millis(200);

/// Runs a storm of eight processes with four tasks each. Their grants wait for `replicas` replicas.
async fn storm(set: &SentinelSet, replicas: u32, faults: impl AsyncFn(&Faults)) -> Report {
    let namespace = namespace();
    let mut clients: Vec<LockClient> = Vec::new();
    for _ in 0..8 {
        let builder = builder(&namespace);
        let builder = if replicas == 0 {
            builder
        } else {
            builder.redis(RedisOptions::new().min_replicas(count(replicas), REPLICATED))
        };
        clients.push(builder.connect(&url_of(set.sentinels())).await.unwrap());
    }
    copied(set).await;
    let report = Storm::of(clients).lease(LEASE).run(faults).await;
    report.assert_fenced();
    report.assert_service_within(LEASE + BACK);
    report
}

/// Waits until another primary is named, whether or not the other nodes follow it.
async fn replaced(set: &SentinelSet, old: &RedisServer) {
    eventually("another primary is named", async || {
        set.master().await.port() != old.port()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_dies_and_comes_back_empty_is_fenced() {
    let set = SentinelSet::start().await;
    storm(&set, 0, async |faults| {
        let old = set.settled().await;
        sleep(LEASE).await;
        faults.outage("the primary is killed");
        old.kill();
        replaced(&set, old).await;
        faults.begin("another is in its place");
        sleep(LEASE).await;
        faults.begin("it comes back empty");
        old.restart_empty().await;
        set.settled().await;
        sleep(LEASE).await;
    })
    .await;
}

/// The primary restarts faster than the Sentinels notice. Its replicas lose all data with it,
/// including grants that all of them had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_forgets_everything_is_fenced() {
    let set = SentinelSet::start().await;
    storm(&set, 0, async |faults| {
        sleep(LEASE).await;
        for _ in 0..2 {
            let primary = set.settled().await;
            faults.outage("the primary is killed, and comes back empty");
            primary.restart_empty().await;
            set.settled().await;
            faults.begin("all follow it");
            sleep(LEASE).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_hangs_until_it_is_replaced_is_fenced() {
    let set = SentinelSet::start().await;
    storm(&set, 0, hangs_until_it_is_replaced(&set)).await;
}

/// One replica has each grant, and the other one may be promoted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_hangs_with_one_replica_asked_is_fenced() {
    let set = SentinelSet::start().await;
    storm(&set, 1, hangs_until_it_is_replaced(&set)).await;
}

fn hangs_until_it_is_replaced(set: &SentinelSet) -> impl AsyncFn(&Faults) {
    async move |faults: &Faults| {
        let old = set.settled().await;
        sleep(LEASE).await;
        faults.outage("the primary stops");
        old.stop();
        set.new_master(old).await;
        faults.begin("another is in its place");
        sleep(LEASE).await;
        // For a moment the old primary still acts as the primary.
        faults.begin("it goes on");
        old.resume();
        set.settled().await;
        sleep(LEASE).await;
    }
}

/// The old primary does not have to agree, so there are two primaries for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_failovers_are_fenced() {
    let set = SentinelSet::start().await;
    storm(&set, 0, planned_failovers(&set)).await;
}

/// The new primary has every reported grant. The old primary reports none from then on: the new one
/// would have to replicate the grant, and does not follow it. A release by the old primary does not
/// reach the new one, where the lock expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_on_all_replicas_excludes_across_planned_failovers() {
    let set = SentinelSet::start().await;
    storm(&set, 2, planned_failovers(&set))
        .await
        .assert_exclusive();
}

fn planned_failovers(set: &SentinelSet) -> impl AsyncFn(&Faults) {
    async move |faults: &Faults| {
        sleep(LEASE).await;
        for _ in 0..2 {
            faults.outage("a replica is made the primary");
            set.failover().await;
            faults.begin("all follow it");
            sleep(LEASE).await;
        }
    }
}

/// Either replica may be promoted, and both have every grant. A grant needs two replicas, so there
/// is no service until the old primary has become one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_on_all_replicas_excludes_after_the_primary_died() {
    let set = SentinelSet::start().await;
    let report = storm(&set, 2, async |faults| {
        let old = set.settled().await;
        sleep(LEASE).await;
        faults.outage("the primary is killed");
        old.kill();
        set.new_master(old).await;
        sleep(LEASE).await;
        old.restart_empty().await;
        set.settled().await;
        faults.begin("it has come back empty, as a replica");
        sleep(LEASE).await;
    });
    report.await.assert_exclusive();
}

/// The primary does not change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_that_stop_give_no_lock_to_two() {
    let set = SentinelSet::start().await;
    let report = storm(&set, 1, async |faults| {
        let replicas = set.replicas().await;
        sleep(LEASE).await;
        faults.begin("one replica stops");
        replicas[0].stop();
        sleep(LEASE).await;
        faults.outage("both have stopped");
        replicas[1].stop();
        sleep(LEASE * 3 / 2).await;
        replicas.iter().for_each(|replica| replica.resume());
        set.settled().await;
        faults.begin("they have gone on");
        sleep(LEASE).await;
    });
    report.await.assert_exclusive();
}
