//! 100,000 leases of 30 s, held and renewed: what they cost our process and the server.

use std::time::{Duration, Instant};

use lock_runtime::{LockClient, LockGuard};
use lock_tests::redis_server::RedisServer;
use rustix::time::{ClockId, clock_gettime};

use crate::report::{Report, Row};

const LEASES: usize = 100_000;
const LEASE: Duration = Duration::from_secs(30);
/// Three renewals of every lease.
const WATCHED: Duration = Duration::from_secs(30);

pub(crate) async fn measure(report: &mut Report) {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.expect("our own server answers");
    // What the client and its connection take before the first lease is not the leases'.
    let warm = hold(&locks, "warm", 1_000).await;
    drop(warm);
    tokio::time::sleep(Duration::from_secs(1)).await;

    eprintln!("held, acquiring {LEASES} leases");
    let before = resident_bytes();
    let guards = hold(&locks, "held", LEASES).await;
    // Over the first renewal of each, so that what renewal needs is counted too.
    tokio::time::sleep(LEASE / 2).await;
    let bytes = resident_bytes().saturating_sub(before);

    eprintln!("held, watching for {WATCHED:?}");
    let start = Instant::now();
    let (ours, theirs) = (own_cpu(), server_cpu(&server).await);
    tokio::time::sleep(WATCHED).await;
    let share = |spent: Duration| Some(100.0 * spent.as_secs_f64() / start.elapsed().as_secs_f64());
    let (ours, theirs) = (share(own_cpu() - ours), share(server_cpu(&server).await.saturating_sub(theirs)));
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0, "{lost} of {LEASES} leases were lost");

    let bytes_per_lease = Some(bytes as f64 / LEASES as f64);
    report.add(Row { core_percent: ours, bytes_per_lease, ..Row::new("held", "lock-runtime", LEASES) });
    report.add(Row { core_percent: theirs, ..Row::new("held", "redis-server", LEASES) });
    server.kill();
}

async fn hold(locks: &LockClient, name: &str, count: usize) -> Vec<LockGuard> {
    let mut guards = Vec::with_capacity(count);
    for start in (0..count).step_by(1_000) {
        let batch =
            (start..count.min(start + 1_000)).map(|i| locks.exclusive(format!("{name}:{i}")).lease(LEASE).acquire());
        for guard in futures_util::future::join_all(batch).await {
            guards.push(guard.expect("nobody else wants this key"));
        }
    }
    guards
}

/// Resident, so it counts at least what is on the heap.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the bench runs on Linux");
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.expect("Linux tells the resident size") * 1024
}

fn own_cpu() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

async fn server_cpu(server: &RedisServer) -> Duration {
    let info: String = server.query(&["INFO", "cpu"]).await;
    let seconds =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok()).unwrap_or(0.0);
    Duration::from_secs_f64(seconds("used_cpu_user:") + seconds("used_cpu_sys:"))
}
