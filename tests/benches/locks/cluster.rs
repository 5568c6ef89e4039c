//! Acquire and release on a cluster of three masters, every task its own key; the other subjects
//! send their commands to the node that keeps the key, by a connection for each node.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::{RedisCluster, place::cluster_url_of};

use crate::{
    contest::Contest,
    raw::{self, Raw, RawLock, SCRIPTS},
    report::Row,
    subject::Ours,
    wire::Wires,
};

const TASKS: usize = 256;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let cluster = RedisCluster::start().await;
    let locks = LockClient::builder()
        .connect(&cluster_url_of(cluster.urls()))
        .await
        .expect("our own cluster answers");
    let servers = cluster.nodes();
    let raw = join_all(
        servers
            .iter()
            .map(async |node| Raw::connect(&raw::client(&node.url())).await),
    )
    .await;
    let lines = servers.iter().zip(&raw);
    let wires = Wires::connect(lines.map(|(node, raw)| (node.addr(), &raw.connection))).await;
    let mut nodes = Vec::with_capacity(TASKS);
    for task in 0..TASKS {
        // Bare locks use the name of the task's lock, so that they are on the same node.
        let key = format!("lock:raw:{task}");
        let owner = cluster.owner_of(&key).await.port();
        let node = cluster
            .nodes()
            .iter()
            .position(|node| node.port() == owner)
            .expect("a node of the cluster");
        nodes.push(node);
    }
    let contest = Contest::new("cluster", TASKS, slice)
        .servers(&cluster.nodes()[..3])
        .each("lock-runtime", |task| {
            Ours::new(&locks, format!("bench:{task}"))
        })
        .each(SCRIPTS, |task| {
            RawLock::new(&raw[nodes[task]], &format!("raw:{task}"))
        });
    let rows = wires
        .compete(contest, |task| {
            (nodes[task]..nodes[task] + 1, format!("lock:raw:{task}"))
        })
        .run()
        .await;
    locks.shutdown().await;
    rows
}
