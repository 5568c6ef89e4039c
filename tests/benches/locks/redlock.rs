//! Five servers with agreement by majority: one key for each task; one key for all clients; and one
//! server down.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lock_runtime::{LockClient, RedisOptions};
use lock_tests::{place::redlock_url, redis_server::RedisServer};

use crate::{
    contest::Contest,
    raw::{self, MARKER, Raw, RawMajority, SCRIPTS},
    report::Row,
    subject::{Ours, Rslock, Subject},
    turns::{Watch, contend, together},
    wire::Wires,
};

/// Lease of all locks, and the time for which new servers do not vote.
const LEASE: Duration = Duration::from_secs(5);
const SERVERS: usize = 5;
const TASKS: [usize; 2] = [1, 64];
const CLIENTS: usize = 32;
/// Number of tasks while one server is down.
const ASKING: usize = 16;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let servers = RedisServer::builder().start_all(SERVERS).await;
    let locks = connect(&servers).await;
    let clients: Vec<_> = servers
        .iter()
        .map(|server| raw::client(&server.url()))
        .collect();
    let raw = join_all(servers.iter().zip(&clients).map(async |(server, client)| {
        (
            Raw::connect(client).await,
            server.query::<String>(&["GET", MARKER]).await,
        )
    }));
    let raw = raw.await;
    let lines = servers.iter().zip(&raw);
    let lines = lines.map(|(server, (raw, _))| (server.addr(), &raw.connection));
    let wires = Wires::connect(lines).await;
    let manager = Rslock::manager_of(&clients);
    let mut rows = Vec::new();
    for tasks in TASKS {
        let ours = |task| Ours::new(&locks, format!("bench:{task}")).lease(LEASE);
        let contest = Contest::new("redlock", tasks, slice)
            .servers(&servers)
            .each("lock-runtime", ours)
            .each(SCRIPTS, |task| {
                RawMajority::new(&raw, &format!("raw:{task}"))
            })
            .each("rslock", |task| {
                Rslock::new(&manager, format!("rslock:{task}"))
            });
        rows.extend(
            wires
                .compete(contest, |task| (0..SERVERS, format!("wire:{task}")))
                .run()
                .await,
        );
    }
    locks.shutdown().await;

    let ours = join_all((0..CLIENTS).map(|_| connect(&servers))).await;
    let peers: Vec<_> = (0..CLIENTS).map(|_| Rslock::manager_of(&clients)).collect();
    let contest = Contest::new("redlock-hot", CLIENTS, slice)
        .servers(&servers)
        .subject("lock-runtime", |round, slice| {
            let subject = move |locks| Ours::new(locks, format!("hot:{round}")).lease(LEASE);
            together(slice, ours.iter().map(subject), contend)
        })
        .subject("rslock", |round, slice| {
            let subject = move |manager| Rslock::new(manager, format!("rslock-hot:{round}"));
            together(slice, peers.iter().map(subject), contend)
        });
    rows.extend(contest.run().await);
    join_all(ours.iter().map(LockClient::shutdown)).await;
    rows.extend(one_away(slice).await);
    rows
}

/// Times the acquire alone.
async fn one_away(slice: Duration) -> Vec<Row> {
    let fleet = async || {
        let servers = RedisServer::builder().start_all(SERVERS).await;
        (connect(&servers).await, servers)
    };
    let [healthy, dead, stopped] = [fleet().await, fleet().await, fleet().await];
    dead.1[0].kill();
    stopped.1[0].stop();
    let measure = |locks: &LockClient, slice| {
        let subjects =
            (0..ASKING).map(|task| Ours::new(locks, format!("away:{task}")).lease(LEASE));
        together(slice, subjects.collect::<Vec<_>>(), ask)
    };
    let contest = Contest::new("redlock-away", ASKING, slice)
        .subject("healthy", |_, slice| measure(&healthy.0, slice))
        .subject("one dead", |_, slice| measure(&dead.0, slice))
        .subject("one stopped", |_, slice| measure(&stopped.0, slice));
    let rows = contest.run().await;
    join_all([&healthy.0, &dead.0, &stopped.0].map(LockClient::shutdown)).await;
    rows
}

async fn ask(subject: impl Subject, watch: Watch) -> u64 {
    let mut turns = 0;
    while watch.is_running() {
        let before = Instant::now();
        let guard = subject.acquire().await;
        watch.record(before.elapsed(), 1);
        subject.release(guard).await;
        turns += 1;
    }
    turns
}

/// A client of servers that vote.
async fn connect(servers: &[RedisServer]) -> LockClient {
    let builder = LockClient::builder().redis(RedisOptions::new().longest_lease(LEASE));
    let locks = builder
        .connect(&redlock_url(servers.iter().map(RedisServer::url)))
        .await
        .expect("our own servers answer");
    let first = Ours::new(&locks, "vote".into()).lease(LEASE);
    first.release(first.acquire().await).await;
    locks
}
