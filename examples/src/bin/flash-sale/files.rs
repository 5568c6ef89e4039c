//! The limit of open files, and so of connections, of this process.

use anyhow::bail;

/// Files other than connections to customers: standard streams, pipes to children, and those of
/// the runtime.
const OTHERS: u64 = 200;

/// Raises the limit as far as possible without privileges, and returns it. Children inherit it.
pub(crate) fn raise() -> u64 {
    rlimit::increase_nofile_limit(u64::MAX).unwrap_or(256)
}

/// Ensures that this process can have this many connections.
///
/// # Errors
/// If the system does not allow that many. The message describes the remedy.
pub(crate) fn make_room_for(connections: u64) -> anyhow::Result<()> {
    let (limit, need) = (raise(), connections + OTHERS);
    if need > limit {
        bail!(
            "{connections} connections at once need {need} open files, and this process may have {limit}; \
             raise the limit with `ulimit -n {need}` (as root, or in limits.conf), or use `--concurrency {}`",
            limit.saturating_sub(OTHERS).max(1)
        );
    }
    Ok(())
}
