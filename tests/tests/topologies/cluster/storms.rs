//! Storms on a cluster. A failover loses the data that the replica did not have, so two holders may
//! overlap: fencing tokens keep them apart. The migration of a slot loses nothing.
//!
//! The length of a failover depends on the nodes: `RedisCluster::NODE_TIMEOUT` until they detect
//! the failure, and an election. No service of the affected keys is promised meanwhile. It is
//! promised again once all nodes have the new primary in their view of the cluster.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{RedisCluster, RedisServer};
use tokio::time::sleep;

use super::{Place, key_of_each, lock_name, place_on};
use crate::topologies::storm::{Faults, Report, Storm};

const LEASE: Duration = Duration::from_secs(1);
/// The time in addition to a lease within which the cluster serves all waiters again.
const BACK: Duration = Duration::from_secs(2);

/// A cluster, two locks in one slot of its first primary, and one lock of another primary.
struct Struck {
    cluster: RedisCluster,
    place: Place,
    here: [String; 2],
    there: String,
}

impl Struck {
    async fn start() -> Self {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let [here, there, _] = key_of_each(&cluster, &place).await;
        Self {
            cluster,
            place,
            here: [here.clone(), format!("{here}2")],
            there,
        }
    }

    /// Runs a storm of eight processes with four tasks each.
    async fn storm(&self, faults: impl AsyncFn(&Faults)) -> Report {
        let mut clients: Vec<LockClient> = Vec::new();
        for _ in 0..8 {
            clients.push(self.place.client().await);
        }
        let keys = self.here.iter().chain([&self.there]).cloned();
        let report = Storm::of(clients)
            .named(keys)
            .lease(LEASE)
            .run(faults)
            .await;
        report.assert_fenced();
        report.assert_service_within(LEASE + BACK);
        report
    }

    /// The name of the first lock in the store.
    fn name(&self) -> String {
        lock_name(&self.place, &self.here[0])
    }

    async fn owner(&self) -> &RedisServer {
        self.cluster.owner_of(&self.name()).await
    }

    async fn taken_over_from(&self, old: &RedisServer) {
        self.cluster.new_owner_of(&self.name(), old).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_dies_and_comes_back_empty_is_fenced() {
    let struck = Struck::start().await;
    let storm = struck.storm(async |faults| {
        let old = struck.owner().await;
        sleep(LEASE).await;
        faults.outage_of(&struck.here, "a primary is killed");
        old.kill();
        struck.taken_over_from(old).await;
        faults.begin("a replica is in its place");
        sleep(LEASE).await;
        faults.begin("it comes back empty");
        old.restart_empty().await;
        struck.cluster.settled().await;
        sleep(LEASE).await;
    });
    storm.await;
}

/// The primary restarts faster than the other nodes notice. Its replica loses all data with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_forgets_everything_is_fenced() {
    let struck = Struck::start().await;
    let storm = struck.storm(async |faults| {
        sleep(LEASE).await;
        faults.outage_of(&struck.here, "a primary is killed, and comes back empty");
        struck.owner().await.restart_empty().await;
        // For two seconds the node checks whether it has been replaced, and serves no client.
        struck.cluster.settled().await;
        faults.begin("the cluster is well");
        sleep(LEASE).await;
    });
    storm.await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_hangs_until_it_is_replaced_is_fenced() {
    let struck = Struck::start().await;
    let storm = struck.storm(async |faults| {
        let old = struck.owner().await;
        sleep(LEASE).await;
        faults.outage_of(&struck.here, "a primary stops");
        old.stop();
        struck.taken_over_from(old).await;
        faults.begin("a replica is in its place");
        sleep(LEASE).await;
        // For a moment the old primary still acts as the owner of its slots.
        faults.begin("it goes on");
        old.resume();
        struck.cluster.settled().await;
        sleep(LEASE).await;
    });
    storm.await;
}

/// The primary blocks its clients until the replica has all data, and then gives way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_failovers_give_no_lock_to_two() {
    let struck = Struck::start().await;
    let storm = struck.storm(async |faults| {
        // Each primary once: a node that has just been promoted does not give way at once.
        for key in [&struck.here[0], &struck.there] {
            sleep(LEASE).await;
            let owner = struck
                .cluster
                .owner_of(&lock_name(&struck.place, key))
                .await;
            faults.begin("a replica takes over");
            struck.cluster.failover(owner).await;
            faults.begin("all nodes know it");
        }
        sleep(LEASE).await;
    });
    storm.await.assert_exclusive();
}

/// At any time, each key of a lock is at one node. While they are at different nodes, no lock is
/// granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_gives_no_lock_to_two() {
    let struck = Struck::start().await;
    let storm = struck.storm(async |faults| {
        let masters = struck.cluster.masters().await;
        for target in [1, 2, 0].map(|index| masters[index]) {
            sleep(LEASE).await;
            faults.outage_of(&struck.here, "their slot begins to move");
            let migration = struck.cluster.begin_migration(&struck.name(), target).await;
            sleep(LEASE / 5).await;
            for key in migration.keys().await {
                migration.move_key(&key).await;
                sleep(LEASE / 20).await;
            }
            migration.finish().await;
            faults.begin("it has moved");
        }
        sleep(LEASE).await;
    });
    storm.await.assert_exclusive();
}
