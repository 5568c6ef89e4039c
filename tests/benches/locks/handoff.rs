//! Clients with a connection of their own hand one key to each other: acquire, release at once,
//! again. The limit is one client that sends one script after the other, each of which gives the
//! lock back and takes it up again.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;
use rslock::LockManager;

use crate::{
    contest::{Contest, LIMIT},
    raw::{self, Raw},
    report::Row,
    subject::{Ours, Rslock, connect},
    turns::{contend, together},
};

const CLIENTS: [usize; 4] = [2, 8, 32, 128];

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = raw::client(&server.url());
    let raw = Raw::connect(&client).await;
    let mut rows = Vec::new();
    for clients in CLIENTS {
        let ours = connect(&server.url(), clients).await;
        let peers: Vec<_> = (0..clients).map(|_| Rslock::manager(&client)).collect();
        rows.extend(on_one_key("handoff", slice, &server, &raw, &ours, &peers).await);
        join_all(ours.iter().map(LockClient::shutdown)).await;
    }
    rows
}

/// Each of `ours`, and then each of `peers`, wants the same key.
pub(crate) async fn on_one_key(
    scenario: &'static str,
    slice: Duration,
    server: &RedisServer,
    raw: &Raw,
    ours: &[LockClient],
    peers: &[LockManager],
) -> Vec<Row> {
    let clients = ours.len();
    let contest = Contest::new(scenario, clients, slice)
        .servers([server])
        .subject("lock-runtime", |round, slice| {
            let subject = move |locks| Ours::new(locks, format!("bench:{clients}:{round}"));
            together(slice, ours.iter().map(subject), contend)
        })
        .subject(LIMIT, |round, slice| {
            raw::hand_off(raw, format!("raw:{clients}:{round}"), slice)
        })
        .subject("rslock", |round, slice| {
            let subject = move |manager| Rslock::new(manager, format!("rslock:{clients}:{round}"));
            together(slice, peers.iter().map(subject), contend)
        });
    contest.run().await
}
