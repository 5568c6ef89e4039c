//! Records of a task's events.

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};

/// An event of a request, with its time. All times and durations are nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct Record {
    /// Time, by the clock of the plan.
    pub at: u64,
    /// The number of the request in its process.
    pub request: u64,
    /// The event.
    pub event: Event,
}

/// An event of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub enum Event {
    /// The lock is about to be requested.
    Asked(Ask),
    /// The guard was returned, with a fencing token for each key.
    Granted {
        /// In the order of the keys.
        fences: Vec<u64>,
        /// Value of `validity`, read after the time of the record.
        validity: u64,
    },
    /// The guard is still valid, for longer than was recorded before.
    Held {
        /// As in `Granted`.
        validity: u64,
    },
    /// The guard is no longer valid.
    Lost {
        /// The code of the loss.
        code: String,
        /// Time when it was last seen valid.
        valid_at: u64,
    },
    /// A guard entered the lock again.
    Entered {
        /// Its fencing token.
        fence: u64,
    },
    /// The last guard is about to be released, dropped or downgraded.
    Leaving,
    /// A release was answered.
    Released {
        /// `released`, or the code of the error.
        code: String,
    },
    /// The request ended without a guard.
    Refused {
        /// The code of the error, or [`DROPPED`](Event::DROPPED).
        code: String,
    },
    /// The lease was extended, according to the reply.
    Extended {
        /// The lease that was asked for.
        asked: u64,
        /// The time of the call, up to the reading of `validity`.
        took: u64,
        /// As in `Granted`.
        validity: u64,
    },
    /// An operator is about to revoke the holders of a lock.
    Revoking {
        /// The key.
        key: String,
        /// Whether it is that of permits.
        permits: bool,
    },
    /// The holders were revoked, according to the reply.
    Revoked,
    /// The process did not run.
    Stalled {
        /// Start of the pause; the time of the record is its end.
        since: u64,
    },
}

impl Event {
    /// The code of a request whose future was dropped.
    pub const DROPPED: &str = "dropped";
}

/// A request for locks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct Ask {
    /// The mode.
    pub kind: Kind,
    /// The keys, in their order.
    pub keys: Vec<String>,
    /// The longest wait; `None` for a request that does not wait.
    pub wait: Option<u64>,
    /// Time that the store keeps the lock without a renewal.
    pub lease: u64,
    /// Time that the store keeps the lock at least.
    pub min_hold: u64,
}

/// Mode of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub enum Kind {
    /// One holder.
    Exclusive,
    /// One of the readers.
    Shared,
    /// A reader that was the writer until now.
    Downgraded,
    /// A permit, of [`PERMITS`](super::PERMITS).
    Permit,
}
