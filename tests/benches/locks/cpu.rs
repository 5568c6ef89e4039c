//! CPU time of this process and of the servers: unlike a rate, it says something on a busy machine.

use std::time::Duration;

/// CPU time of this process and of `servers` so far.
pub(crate) fn cpu_of_all(servers: &[u32]) -> Vec<Duration> {
    let pids = [std::process::id()]
        .into_iter()
        .chain(servers.iter().copied());
    pids.map(cpu).collect()
}

/// CPU time of a process so far, in user and in kernel mode.
pub(crate) fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .expect("the bench runs on Linux, and so does the server");
    // The second field is a name in parentheses, which may contain spaces; the times are the fields
    // 14 and 15.
    let (_, fields) = stat.rsplit_once(')').expect("the name is in parentheses");
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
