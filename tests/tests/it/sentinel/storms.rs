//! Storms over a primary that Sentinels name. A failover may forget what the replicas did not have, and then two meet: tokens
//! keep them apart. With as many replicas asked as there are, what was told is not forgotten.
//!
//! How long a failover takes is the Sentinels' affair: `SentinelSet::DOWN_AFTER` until they notice, an election, and another one
//! after twice the failover's time-out if that was in vain. No service is promised meanwhile; it is from the moment at which
//! the set has a primary, and as many replicas of it as are asked for.

use lock_runtime::{LockClient, RedisOptions};
use lock_tests::{RedisServer, SentinelSet};
use tokio::time::sleep;

use super::{Duration, builder, copied, namespace, replicas::count, url_of};
use crate::{
    place::eventually,
    topologies::storm::{Faults, Report, Storm},
};

const LEASE: Duration = Duration::from_secs(1);
/// When a set serves again, a lease has to run out, and those who wait have to notice.
const BACK: Duration = Duration::from_secs(2);
/// How long a grant waits for its replicas.
const REPLICATED: Duration = Duration::from_millis(200);

/// Eight processes with four tasks each, whose grants are on so many replicas when they are told.
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

/// From now on somebody else is the primary, whoever follows it.
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

/// Faster than the Sentinels notice: its replicas forget everything with it, also what all of them had.
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

/// One replica has each grant, and the other one may take over.
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
        // For a moment it believes that it is the primary still.
        faults.begin("it goes on");
        old.resume();
        set.settled().await;
        sleep(LEASE).await;
    }
}

/// The old primary is not asked, and for a moment there are two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_failovers_are_fenced() {
    let set = SentinelSet::start().await;
    storm(&set, 0, planned_failovers(&set)).await;
}

/// The new primary has every grant that was told, and none is told any more by the old one: it would have to be on the new one,
/// which does not follow it. What is given back there is not given back at the new one, and runs out.
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

/// Either replica may take over, and has everything. Two are asked for, so there is no service until the old primary is one.
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

/// The primary stays where it is.
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
