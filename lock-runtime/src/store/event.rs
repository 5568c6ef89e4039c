//! What a store tells unasked.

use std::{
    fmt,
    sync::{Mutex, Weak},
    time::Duration,
};

use super::message::{Grant, Hold, Token};
use crate::{key::LockKey, spec::Family, sync::lock};

/// Something a store tells unasked. **A hint, never the truth**: every event may be lost, doubled or late.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreEvent {
    /// A request that stood in line holds its lock now, for a short time (PROTOCOL 4).
    Granted {
        /// The acquisition.
        hold: Hold,
        /// Its grant.
        grant: Grant,
    },
    /// A lock that requests wait for may be free after `ttl`, before they poll again ([`LONGEST_POLL`](super::LONGEST_POLL)): it was
    /// released and is reserved until then (`min_hold`), or the holders that are left end then. The end itself is no event.
    Kept {
        /// The lock's name.
        key: LockKey,
        /// What kind of lock it is.
        family: Family,
        /// The time after which the waiters poll.
        ttl: Duration,
    },
    /// A lock was revoked.
    Revoked {
        /// The acquisition that held it.
        token: Token,
    },
    /// The store may have lost data: the connection to it broke and is being made again, or another server has taken its place.
    /// What was pushed meanwhile is lost. Clients renew their leases early, and stop handing locks off within the process under fencing
    /// tokens that were reserved before.
    Disconnected,
}

/// Who is told of a store's events.
pub trait Listener: Send + Sync {
    /// Takes note of `event`, and returns at once. It is called from within the store: by the task that reads from the server, or
    /// by another caller's operation; never while the store has anything locked.
    fn tell(&self, event: &StoreEvent);
}

/// The listeners of a store, for those who write one. A listener that was dropped is forgotten.
#[derive(Default)]
pub struct Listeners(Mutex<Vec<Weak<dyn Listener>>>);

impl Listeners {
    /// Tells `listener` of every event from now on.
    pub fn add(&self, listener: Weak<dyn Listener>) {
        let mut listeners = lock(&self.0);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }

    /// Tells everybody.
    pub fn tell(&self, event: &StoreEvent) {
        // Upgraded first: a listener may be dropped by its own call, and may call back.
        let listeners: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        listeners.iter().for_each(|listener| listener.tell(event));
    }
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Listeners")
            .field(&lock(&self.0).len())
            .finish()
    }
}
