//! A local hand-off: a lock on its way from one holder in this process to the next, without a
//! call to the store.

use std::time::Duration;

use super::super::held::lease::Lease;
use crate::{
    guard::fence::FencingToken,
    shell::time::Instant,
    store::{Grant, Hold, RETAINED, Waiter},
};

/// How many times in a row a lock is handed off locally before other processes get their turn.
pub(crate) const MAX_HANDOFFS: u32 = 32;
/// The longest time for which a lock is handed off locally.
const MAX_HANDOFF_TIME: Duration = Duration::from_millis(50);

/// The longest time for which a lock that is retained is used without a call to the store. A waiter
/// whose message was lost polls as often.
const MAX_RETAINED_TIME: Duration = Waiter::POLL_INTERVAL;

/// The limits of local hand-offs: their number, as each needs a fencing token of the block
/// that was reserved with the grant, and the time for which other processes can be kept
/// waiting (rule 19 of docs/PROTOCOL.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(in crate::protocol) left: u32,
    pub(in crate::protocol) until: Instant,
    /// When the request that reserved the fencing tokens was sent. A store that may have lost
    /// data since then may have granted larger ones.
    as_of: Instant,
}

impl Budget {
    /// The limits for a grant with this number of reserved fencing tokens, in reply to a request
    /// sent at `as_of`.
    pub(in crate::protocol) fn new(reserved: u32, as_of: Instant, now: Instant) -> Self {
        Self {
            left: reserved.min(MAX_HANDOFFS),
            until: now + MAX_HANDOFF_TIME,
            as_of,
        }
    }

    /// The limits for a lock that may be retained: other clients have the lock released, so they
    /// are larger.
    pub(in crate::protocol) fn of_retained(reserved: u32, as_of: Instant, now: Instant) -> Self {
        Self {
            left: reserved.min(RETAINED),
            until: now + MAX_RETAINED_TIME,
            as_of,
        }
    }

    /// Returns whether the tokens were reserved after the store may have lost data.
    pub(in crate::protocol) fn is_after(&self, data_lost_at: Option<Instant>) -> bool {
        data_lost_at.is_none_or(|at| at < self.as_of)
    }
}

/// A held lock for the next holder in this process, with a fencing token of its own.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Handoff {
    pub(in crate::protocol) hold: Hold,
    pub(in crate::protocol) fence: FencingToken,
    pub(in crate::protocol) lease: Lease,
    pub(in crate::protocol) budget: Budget,
}

impl Handoff {
    /// The hand-off of a leaving holder's lock, or `None` if it must not be handed off
    /// now (rule 20).
    pub(in crate::protocol) fn new(
        hold: Hold,
        fence: FencingToken,
        lease: Lease,
        mut budget: Budget,
        now: Instant,
    ) -> Option<Self> {
        let enough = lease.length().min(Grant::HANDOFF_LEASE) / 2;
        if budget.left == 0 || budget.until <= now || lease.validity(now) < enough {
            return None;
        }
        budget.left -= 1;
        Some(Self {
            hold,
            fence: FencingToken::next(Some(fence), 0)?,
            lease,
            budget,
        })
    }
}
