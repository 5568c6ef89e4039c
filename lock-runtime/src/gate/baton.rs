//! A lock on its way from one holder in this process to the next, without the store. Decides only; it is told the time.

use std::time::Duration;

use tokio::time::Instant;

use crate::{fence::FencingToken, lease::Lease, store::Hold};

/// So many times in a row a lock is passed on, then other processes get their turn.
pub(crate) const PASSES: u32 = 32;
/// For so long at most.
pub(crate) const PASSING: Duration = Duration::from_millis(50);

/// How far a lock may still be passed on: so many times, each with a fencing token of the block that was reserved with the
/// grant, and not for longer than other processes can be asked to wait (PROTOCOL 19).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) left: u32,
    pub(crate) until: Instant,
    /// When the request was sent whose reply reserved the fencing tokens. If the store may have lost data since, it may have granted
    /// larger ones.
    as_of: Instant,
}

impl Budget {
    /// The budget of a grant with `spare` reserved fencing tokens, in reply to a request sent at `as_of`.
    pub(crate) fn new(spare: u32, as_of: Instant, now: Instant) -> Self {
        Self {
            left: spare.min(PASSES),
            until: now + PASSING,
            as_of,
        }
    }

    /// Whether the tokens were reserved after the store may have lost data, at `lost`.
    pub(crate) fn is_after(&self, lost: Option<Instant>) -> bool {
        lost.is_none_or(|lost| lost < self.as_of)
    }
}

/// A held lock that somebody else in this process goes on with, under a fencing token of its own.
#[derive(Debug)]
pub(crate) struct Baton {
    pub(crate) hold: Hold,
    pub(crate) fence: FencingToken,
    pub(crate) lease: Lease,
    pub(crate) budget: Budget,
}

impl Baton {
    /// The lock of a holder that leaves, if it may be passed on now (PROTOCOL 20).
    pub(crate) fn new(
        hold: Hold,
        fence: FencingToken,
        lease: Lease,
        budget: Budget,
        now: Instant,
    ) -> Option<Self> {
        let enough = lease.length().min(crate::store::HANDED_OVER) / 2;
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
