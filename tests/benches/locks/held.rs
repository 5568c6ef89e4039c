//! 100,000 leases of 30 s, held and renewed: their cost in this process and in the server.

use std::time::{Duration, Instant};

use lock_runtime::{LockClient, LockGuard};
use lock_tests::redis_server::RedisServer;
use tokio::time::sleep;

use crate::{
    cpu::{Server, cpu_of_all},
    heap,
    report::Row,
    subject::{LEASE, connect},
};

const LEASES: usize = 100_000;
/// Time in which every lease is renewed once.
const RENEWED: Duration = Duration::from_secs(12);
/// Time for two renewals of every lease.
const WATCHED: Duration = Duration::from_secs(20);

pub(crate) async fn measure() -> Vec<Row> {
    let bytes_per_lease = bytes_per_lease().await;
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url())
        .await
        .expect("our own server answers");

    let mut rows = watch("held", &locks, LEASES, ("redis-server", &server)).await;
    rows[0].bytes_per_lease = Some(bytes_per_lease);
    server.kill();
    rows
}

/// Acquires `leases` leases, and measures the share of a core that this process and a server need
/// to hold them.
pub(crate) async fn watch(
    scenario: &'static str,
    locks: &LockClient,
    leases: usize,
    (name, server): (&'static str, &impl Server),
) -> Vec<Row> {
    eprintln!("{scenario}, acquiring {leases} leases");
    let guards = hold(locks, "held", leases).await;
    sleep(RENEWED).await;

    eprintln!("{scenario}, watching for {WATCHED:?}");
    let spent = || cpu_of_all(&[server.pid()]).into_iter();
    let (start, before) = (Instant::now(), spent());
    sleep(WATCHED).await;
    let (after, took) = (spent(), start.elapsed());
    expect_all_held(&guards);

    let spent = ["lock-runtime", name].into_iter().zip(before.zip(after));
    let row = |(subject, (before, after)): (_, (Duration, Duration))| Row {
        core_percent: Some(100.0 * after.saturating_sub(before).as_secs_f64() / took.as_secs_f64()),
        ..Row::new(scenario, subject, leases)
    };
    spent.map(row).collect()
}

/// Heap use of a lease, with the state for its renewal.
async fn bytes_per_lease() -> f64 {
    eprintln!("held, bytes per lease");
    let prepare = async || {
        let server = RedisServer::start().await;
        let locks = connect(&server.url(), 1).await.remove(0);
        // The memory of the client and its connection before the first lease does not count.
        drop(hold(&locks, "warm", 1_000).await);
        sleep(Duration::from_secs(1)).await;
        (server, locks, Vec::with_capacity(LEASES))
    };
    let grow = async |(_, locks, guards): &mut (RedisServer, LockClient, Vec<_>)| {
        guards.append(&mut hold(locks, "held", LEASES).await);
        sleep(RENEWED).await;
        expect_all_held(guards);
    };
    heap::growth(prepare, grow).await / LEASES as f64
}

async fn hold(locks: &LockClient, name: &str, count: usize) -> Vec<LockGuard> {
    let mut guards = Vec::with_capacity(count);
    for start in (0..count).step_by(1_000) {
        let batch = (start..count.min(start + 1_000)).map(|i| {
            locks
                .exclusive(format!("{name}:{i}"))
                .lease(LEASE)
                .acquire()
        });
        for guard in futures_util::future::join_all(batch).await {
            guards.push(guard.expect("no other task uses this key"));
        }
    }
    guards
}

fn expect_all_held(guards: &[LockGuard]) {
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0, "{lost} of {} leases were lost", guards.len());
}
