//! Events that a store sends without a request.

use std::{
    fmt,
    sync::{Mutex, Weak},
    time::Duration,
};

use super::message::{Grant, Hold, Token};
use crate::{request::key::LockKey, request::spec::LockKind, shell::sync::lock};

/// An event that a store sends without a request. **A hint, never the truth**: every event
/// may be lost, duplicated or late.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreEvent {
    /// A queued request holds its lock now, for a short time until a renewal confirms the grant
    /// ([`Grant::HANDOFF_LEASE`](super::Grant::HANDOFF_LEASE)).
    #[non_exhaustive]
    Granted {
        /// The acquisition.
        hold: Hold,
        /// Its grant.
        grant: Grant,
    },
    /// A lock with waiters may be free after `ttl`, before they poll again
    /// ([`Waiter::POLL_INTERVAL`](super::Waiter::POLL_INTERVAL)).
    ///
    /// The lock was released and is reserved until then (`min_hold`), or the leases of the
    /// remaining holders end then. The end itself is not an event.
    FreeIn {
        /// The name of the lock.
        key: LockKey,
        /// The kind of the lock.
        kind: LockKind,
        /// The time after which the waiters poll.
        ttl: Duration,
    },
    /// A lock was revoked.
    Revoked {
        /// The acquisition that held it.
        token: Token,
    },
    /// Another client waits for a lock whose holder may retain it.
    Wanted {
        /// The lock.
        key: LockKey,
        /// The acquisition that holds it.
        token: Token,
    },
    /// The store may have lost data: the connection to it broke and is being re-established, or
    /// another server has taken its place.
    ///
    /// Events that were sent in the meantime are lost. Clients renew their leases early, and stop
    /// local hand-offs under fencing tokens that were reserved before.
    Disconnected,
    /// The store answers again after an outage. Requests that could not reach it are repeated soon.
    Reconnected,
}

impl StoreEvent {
    /// Creates the event that a queued request of one store was granted its lock.
    pub fn granted(hold: Hold, grant: Grant) -> Self {
        Self::Granted { hold, grant }
    }

    /// Returns the event that a message announces at `micros` (microseconds since 1970) of the
    /// store's clock. Other programs may be able to send messages, and a fencing token that is far
    /// ahead of the clock would be the last one of its resource: a grant with such a token, or any
    /// grant if the client `confirms` them, only makes the waiter poll.
    #[cfg(any(feature = "redis", feature = "records"))]
    pub(crate) fn announced(self, micros: u64, confirms: bool) -> Self {
        // A server of a majority grants up to the skew of a proposal ahead of its clock, which is
        // known to a round trip.
        const SKEW: u64 = super::MAX_PROPOSAL_SKEW.as_micros() as u64 + 1_000_000;
        match self {
            Self::Granted { hold, grant }
                if confirms || grant.fence.number() > micros.saturating_add(SKEW) =>
            {
                Self::FreeIn {
                    kind: hold.mode.kind(),
                    key: hold.key,
                    ttl: Duration::ZERO,
                }
            }
            event => event,
        }
    }
}

/// A receiver of the events of a store.
pub trait Listener: Send + Sync {
    /// Handles `event` and returns at once.
    ///
    /// The store calls it from the task that reads from the server, or within the operation of
    /// another caller, but never while it holds a mutex.
    fn on_event(&self, event: &StoreEvent);
}

/// The listeners of a store, for implementations of [`Store`](super::Store). Dropped listeners
/// are removed.
#[derive(Default)]
pub struct Listeners(Mutex<Vec<Weak<dyn Listener>>>);

impl Listeners {
    /// Adds `listener`, which receives all further events.
    pub fn add(&self, listener: Weak<dyn Listener>) {
        let mut listeners = lock(&self.0);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }

    /// Sends `event` to all listeners.
    pub fn notify(&self, event: &StoreEvent) {
        // Upgraded first, because the call may drop the listener or call back.
        let listeners: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for listener in &listeners {
            listener.on_event(event);
        }
    }
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = lock(&self.0).len();
        f.debug_tuple("Listeners").field(&number).finish()
    }
}

#[cfg(all(test, any(feature = "redis", feature = "records")))]
mod tests {
    use super::*;
    use crate::{guard::fence::FencingToken, request::spec::Mode, store::MAX_PROPOSAL_SKEW};

    #[test]
    fn a_message_grants_nothing_ahead_of_the_clock_or_to_a_client_that_confirms() {
        const NOON: u64 = 1_800_000_000_000_000;
        let skew = MAX_PROPOSAL_SKEW.as_micros() as u64 + 1_000_000;
        for (fence, confirms, is_grant) in [
            (1, false, true),
            (NOON + skew, false, true),
            (NOON + skew + 1, false, false),
            (i64::MAX as u64, false, false),
            (NOON, true, false),
        ] {
            let key = LockKey::new("a").unwrap();
            let hold = Hold::new(key.clone(), Mode::Exclusive, Token::random());
            let grant = Grant::new(FencingToken::new(fence).unwrap(), Duration::from_secs(3));
            let event = StoreEvent::granted(hold, grant);
            match event.announced(NOON, confirms) {
                StoreEvent::Granted { grant: kept, .. } => assert!(is_grant && kept == grant),
                StoreEvent::FreeIn { key: of, ttl, .. } => {
                    assert!(!is_grant && of == key && ttl.is_zero());
                }
                event => panic!("{event:?}"),
            }
        }
    }
}
