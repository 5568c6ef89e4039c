//! The locks that were contended recently. For these it is better to ask the coordinator first.

use std::{collections::HashMap, time::Duration};

use foldhash::fast::RandomState;

use crate::{request::key::LockKey, shell::time::Instant};

/// The time for which a lock counts as contended, from the last request that was not granted at
/// once. It is longer by a number of round trips: with slow servers, a request alone takes as long.
const LATELY: Duration = Duration::from_millis(100);
const ROUND_TRIPS: u32 = 10;
/// The number of locks to remember before old entries are removed.
const MANY: usize = 256;

#[derive(Clone, Debug, Default)]
pub(in crate::protocol::majority) struct Contended(HashMap<LockKey, Instant, RandomState>);

impl Contended {
    /// Records that a request was not granted this lock at once.
    pub(in crate::protocol::majority) fn note(
        &mut self,
        key: &LockKey,
        round_trip: Duration,
        now: Instant,
    ) {
        let Self(keys) = self;
        if keys.len() >= MANY {
            keys.retain(|_, until| *until > now);
            // With this many contended locks, asking all servers at once is good enough.
            if keys.len() >= MANY {
                keys.clear();
            }
        }
        keys.insert(key.clone(), now + LATELY + round_trip * ROUND_TRIPS);
    }

    pub(in crate::protocol::majority) fn is(&self, key: &LockKey, now: Instant) -> bool {
        self.0.get(key).is_some_and(|until| *until > now)
    }
}
