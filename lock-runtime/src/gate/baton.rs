//! A local hand-off: a lock on its way from one holder in this process to the next, without a
//! call to the store. No I/O; the time is an input.

use std::time::Duration;

use tokio::time::Instant;

use crate::{fence::FencingToken, lease::Lease, store::Hold};

/// How many times in a row a lock is handed off locally before other processes get their turn.
pub(crate) const PASSES: u32 = 32;
/// The longest time for which a lock is handed off locally.
pub(crate) const PASSING: Duration = Duration::from_millis(50);

/// The limits of local hand-offs: their number, as each needs a fencing token of the block
/// that was reserved with the grant, and the time for which other processes can be kept
/// waiting (PROTOCOL 19).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) left: u32,
    pub(crate) until: Instant,
    /// When the request that reserved the fencing tokens was sent. A store that may have lost
    /// data since then may have granted larger ones.
    as_of: Instant,
}

impl Budget {
    /// The limits for a grant with this number of reserved fencing tokens, in reply to a request
    /// sent at `as_of`.
    pub(crate) fn new(reserved: u32, as_of: Instant, now: Instant) -> Self {
        Self {
            left: reserved.min(PASSES),
            until: now + PASSING,
            as_of,
        }
    }

    /// Returns whether the tokens were reserved after the store may have lost data, at `lost`.
    pub(crate) fn is_after(&self, lost: Option<Instant>) -> bool {
        lost.is_none_or(|lost| lost < self.as_of)
    }
}

/// A held lock for the next holder in this process, with a fencing token of its own.
#[derive(Debug)]
pub(crate) struct Baton {
    pub(crate) hold: Hold,
    pub(crate) fence: FencingToken,
    pub(crate) lease: Lease,
    pub(crate) budget: Budget,
}

impl Baton {
    /// The hand-off of a leaving holder's lock, or `None` if it must not be handed off
    /// now (PROTOCOL 20).
    pub(crate) fn new(
        hold: Hold,
        fence: FencingToken,
        lease: Lease,
        budget: Budget,
        now: Instant,
    ) -> Option<Self> {
        let enough = lease.length().min(crate::store::HANDOFF_LEASE) / 2;
        if budget.left == 0 || budget.until <= now || lease.validity(now) < enough {
            return None;
        }
        let budget = Budget {
            left: budget.left - 1,
            ..budget
        };
        Some(Self {
            hold,
            fence: fence.later(1),
            lease,
            budget,
        })
    }
}
