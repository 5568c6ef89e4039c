//! Acquire and release on a cluster of three masters, every task its own key; the limit is the same
//! two scripts sent raw, each to the node that keeps the key, by a connection for each node.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::RedisCluster;

use crate::{
    contest::{Contest, LIMIT},
    raw::{self, Raw, RawLock},
    report::Row,
    subject::Ours,
    turns::each,
};

const TASKS: usize = 256;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let cluster = RedisCluster::start().await;
    let locks = LockClient::builder()
        .connect_cluster(cluster.urls())
        .await
        .expect("our own cluster answers");
    let nodes = join_all(
        cluster
            .nodes()
            .iter()
            .map(async |node| Raw::connect(&raw::client(&node.url())).await),
    )
    .await;
    let mut raw = Vec::with_capacity(TASKS);
    for task in 0..TASKS {
        let key = format!("raw:{task}");
        let owner = cluster.owner_of(&format!("lock:{key}")).await.port();
        let node = cluster
            .nodes()
            .iter()
            .position(|node| node.port() == owner)
            .expect("a node of the cluster");
        raw.push((nodes[node].clone(), key));
    }
    let contest = Contest::new("cluster", TASKS, slice)
        .servers(&cluster.nodes()[..3])
        .subject("lock-runtime", |_, slice| {
            each(slice, TASKS, |task| {
                Ours::new(&locks, format!("bench:{task}"))
            })
        })
        .subject(LIMIT, |_, slice| {
            each(slice, TASKS, |task| {
                RawLock::new(&raw[task].0, &raw[task].1)
            })
        });
    let rows = contest.run().await;
    locks.shutdown().await;
    rows
}
