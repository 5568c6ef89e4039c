//! How many files, and so connections, this process may have open.

use anyhow::bail;

/// What a process needs besides its connections to customers: standard streams, pipes to its children, the runtime's own.
const OTHERS: u64 = 200;

/// Raises the limit as far as it goes without privileges, and tells how far that is. Children inherit it.
pub(crate) fn raise() -> u64 {
    rlimit::increase_nofile_limit(u64::MAX).unwrap_or(256)
}

/// Makes room for so many connections.
///
/// # Errors
/// If the system does not allow as many, with the remedy.
pub(crate) fn make_room_for(connections: u64) -> anyhow::Result<()> {
    let (limit, need) = (raise(), connections + OTHERS);
    if need > limit {
        bail!(
            "{connections} connections at once need {need} open files, and this process may have {limit}; \
             raise the limit with `ulimit -n {need}` (as root, or in limits.conf), or ask for `--concurrency {}`",
            limit.saturating_sub(OTHERS).max(1)
        );
    }
    Ok(())
}
