//! The requests of operators: inspection and revocation.

#[cfg(feature = "serde")]
mod fields;

use std::time::Duration;

use super::identity::{HolderId, Identity};
use crate::{guard::fence::FencingToken, request::spec::Mode};

/// The locks that [`Store::revoke`](super::Store::revoke) takes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RevokeScope {
    /// Only locks with a lease.
    Leased,
    /// Also locks that were set without an expiry.
    AlsoEndless,
    /// Only this holder, with or without an expiry, and only if it still holds the lock.
    Holder(HolderId),
}

/// The reply to [`Store::revoke`](super::Store::revoke).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RevokeReply {
    /// The lock was taken away.
    Revoked,
    /// The lock was not held.
    NotHeld,
    /// The lock is held, but not by the given holder any more. It was left untouched.
    Changed,
    /// The key has no expiry, so it may not be a lock. It was left untouched.
    Endless,
    /// Foreign data is stored under the key of the lock. It was left untouched.
    ForeignKey,
}

/// The state of a lock at one moment, as the store sees it.
///
/// With the feature `serde` it is serialized, with times in ms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Inspection {
    /// The holders, in order of expiry. Empty if the lock is free.
    pub holders: Vec<Holder>,
    /// The entries of the store's wait queue, in order. All waiters of a process with the same
    /// mode and lease share one entry.
    pub waiters: Vec<Waiter>,
    /// The latest fencing token of the key, or the last of those that are reserved for its
    /// holder. `None` if there is none: the key was not granted for a day (or
    /// [`keep_fences_for`](crate::LockClientBuilder::keep_fences_for)), or, in memory, is not
    /// held.
    pub fence: Option<FencingToken>,
    /// Sessions of the database that keep the lock from other clients until their transactions end:
    /// one that has called `guard`, or has locked the record; if it did so in a savepoint that was
    /// released, all that may have. Only PostgreSQL has them, and only
    /// [`LockClient::inspect`](crate::LockClient::inspect) asks for them.
    pub blocked_by: Vec<String>,
}

/// A holder of a lock, as the store sees it, without its token.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Holder {
    /// The identifier of the holder, with which
    /// [`Revoke::holder`](crate::operator::Revoke::holder) takes the lock away from it alone.
    pub id: HolderId,
    /// The mode in which it holds the lock.
    #[cfg_attr(feature = "serde", serde(flatten, serialize_with = "fields::mode"))]
    pub mode: Mode,
    /// The remaining lease. `None` if it has no expiry.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "ttl_ms",
            serialize_with = "crate::observe::fields::known_millis"
        )
    )]
    pub ttl: Option<Duration>,
    /// The client that holds the lock.
    #[cfg_attr(feature = "serde", serde(flatten, serialize_with = "fields::client"))]
    pub client: Identity,
    /// The time since the client acquired the lock, by the clock of the store, or, with a majority,
    /// by that of the client. Hand-offs within the client do not count. `None` for foreign holders,
    /// and for a writer after a day or the life of fencing tokens. In Redis it is `None` for
    /// readers and permits in the first five minutes, of clients without a name, and after the
    /// first 256 of a client.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "held_for_ms",
            serialize_with = "crate::observe::fields::known_millis"
        )
    )]
    pub held_for: Option<Duration>,
    /// Whether the holder has released the lock, which stays reserved for this `ttl` (`min_hold`,
    /// or the time for which the result of its work is kept).
    pub is_reservation: bool,
    /// Whether the lock is done, and keeps the result of the holder's work for this `ttl`.
    pub is_done: bool,
}

impl Holder {
    /// Creates a holder with the remaining lease `ttl`.
    #[doc(hidden)]
    pub fn new(id: HolderId, mode: Mode, ttl: Option<Duration>, client: Identity) -> Self {
        Self {
            id,
            mode,
            ttl,
            client,
            held_for: None,
            is_reservation: false,
            is_done: false,
        }
    }

    /// Sets the time since the lock was acquired.
    #[doc(hidden)]
    #[must_use]
    pub fn held_for(self, held_for: Option<Duration>) -> Self {
        Self { held_for, ..self }
    }

    /// Sets whether the holder has released the lock.
    #[doc(hidden)]
    #[must_use]
    pub fn reservation(self, is_reservation: bool) -> Self {
        Self {
            is_reservation,
            ..self
        }
    }

    /// Sets whether the lock is done.
    #[doc(hidden)]
    #[must_use]
    pub fn done(self, is_done: bool) -> Self {
        Self { is_done, ..self }
    }
}

/// An entry in the wait queue of a lock, as the store sees it, without its token.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Waiter {
    /// The requested mode.
    #[cfg_attr(feature = "serde", serde(flatten, serialize_with = "fields::mode"))]
    pub mode: Mode,
    /// The requested lease.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "lease_ms", serialize_with = "crate::observe::fields::millis")
    )]
    pub lease: Duration,
    /// The time since its last call. The entry is skipped after
    /// [`STALE_AFTER`](Self::STALE_AFTER) and removed after [`TTL`](Self::TTL).
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "silent_ms",
            serialize_with = "crate::observe::fields::millis"
        )
    )]
    pub silent: Duration,
    /// The client that waits.
    #[cfg_attr(feature = "serde", serde(flatten, serialize_with = "fields::client"))]
    pub client: Identity,
    /// The time since the process entered the queue, by the clock of the store. `None` for clients
    /// of earlier versions, for an entry with over a thousand others behind it, and where the queue
    /// has been compacted since.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "waited_ms",
            serialize_with = "crate::observe::fields::known_millis"
        )
    )]
    pub waited: Option<Duration>,
}

impl Waiter {
    /// The time after which the queue entry of a silent waiter is skipped.
    pub const STALE_AFTER: Duration = Duration::from_secs(3);
    /// The time after which the queue entry of a silent waiter is removed.
    pub const TTL: Duration = Duration::from_secs(10);
    /// The longest pause between two polls of a waiter. If a store knows that a lock may be free
    /// before its waiters poll again, it sends them
    /// [`StoreEvent::FreeIn`](super::StoreEvent::FreeIn).
    pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

    /// Creates an entry whose waiter called last `silent` ago.
    #[doc(hidden)]
    pub fn new(mode: Mode, lease: Duration, silent: Duration, client: Identity) -> Self {
        Self {
            mode,
            lease,
            silent,
            client,
            waited: None,
        }
    }

    /// Sets the time since the process entered the queue.
    #[doc(hidden)]
    #[must_use]
    pub fn waited(self, waited: Option<Duration>) -> Self {
        Self { waited, ..self }
    }
}
