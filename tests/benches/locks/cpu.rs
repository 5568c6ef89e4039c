//! CPU time of this process and of the servers: unlike a rate, it says something on a busy machine.

use std::time::Duration;

use lock_tests::{EtcdCluster, PostgresServer, RedisServer};

/// A server whose CPU time is measured.
pub(crate) trait Server {
    fn pid(&self) -> u32;
}

impl Server for RedisServer {
    fn pid(&self) -> u32 {
        self.pid()
    }
}

impl Server for PostgresServer {
    fn pid(&self) -> u32 {
        self.pid()
    }
}

/// Of one member.
impl Server for EtcdCluster {
    fn pid(&self) -> u32 {
        self.pid(0)
    }
}

/// CPU time of this process and of `servers` so far.
pub(crate) fn cpu_of_all(servers: &[u32]) -> Vec<Duration> {
    let trees = servers.iter().map(|&pid| cpu_of_tree(pid));
    // The servers are below this process.
    [cpu(std::process::id(), OWN)]
        .into_iter()
        .chain(trees)
        .collect()
}

/// The number of times that are added up: those in user and in kernel mode, of the process alone or
/// also of its children that have ended.
const OWN: usize = 2;
const WITH_ENDED: usize = 4;

/// CPU time of a server with its child processes, such as the backends of PostgreSQL.
fn cpu_of_tree(pid: u32) -> Duration {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    // A child that ends after this is counted by its parent or not at all, never twice.
    let own = cpu(pid, WITH_ENDED);
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().filter_map(|it| it.parse().ok());
    children.map(cpu_of_tree).sum::<Duration>() + own
}

/// Sum of the first `times` of a process. Zero for one that has ended.
fn cpu(pid: u32, times: usize) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field is a name in parentheses, which may contain spaces; the times begin with the
    // field 14.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(times)
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
