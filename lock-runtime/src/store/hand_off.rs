//! The hand-off of a lock on several servers.

use std::sync::Arc;

use super::message::NextHolder;
use crate::{guard::fence::FencingToken, shell::time::Instant};

/// The first waiter behind a grant from a wait queue. On several servers, the holder can hand the
/// lock off to it at all of them when it releases the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heir {
    /// The acquisition and its lease, as its client requested them.
    pub request: NextHolder,
    /// The channel on which every server notifies the client of the heir. A store whose servers
    /// need no such name leaves it out.
    pub channel: Option<Arc<str>>,
}

impl Heir {
    /// Creates a waiter whose client is notified on `channel`.
    pub fn new(request: NextHolder, channel: Option<Arc<str>>) -> Self {
        Self { request, channel }
    }
}

/// A hand-off of a lock on several servers, as part of its release.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HandOff {
    /// The acquisition that is next according to the coordinator.
    pub heir: Heir,
    /// The proposed fencing token of its grant.
    pub proposal: FencingToken,
    /// A server that executes the release later grants nothing to the heir.
    pub deadline: Instant,
    /// The server is the coordinator. It hands the lock off to the first waiter of its own queue,
    /// and reports in the event whether this is the heir.
    pub is_coordinator: bool,
}

impl HandOff {
    /// Creates a hand-off to `heir` at a server that is not the coordinator.
    pub fn new(heir: Heir, proposal: FencingToken, deadline: Instant) -> Self {
        Self {
            heir,
            proposal,
            deadline,
            is_coordinator: false,
        }
    }

    /// Sets whether the server is the coordinator.
    #[must_use]
    pub fn at_coordinator(self, is_coordinator: bool) -> Self {
        Self {
            is_coordinator,
            ..self
        }
    }
}
