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

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(1);

    fn key(number: usize) -> LockKey {
        LockKey::new(number.to_string()).unwrap()
    }

    /// Locks that were contended at this time.
    fn noted(numbers: std::ops::Range<usize>, now: Instant) -> Contended {
        let mut contended = Contended::default();
        numbers.for_each(|number| contended.note(&key(number), ROUND_TRIP, now));
        contended
    }

    #[test]
    fn a_lock_is_contended_for_100_ms_and_ten_round_trips() {
        let now = Instant::now();
        let contended = noted(0..1, now);
        let end = now + Duration::from_millis(110);
        assert!(contended.is(&key(0), end - Duration::from_nanos(1)));
        assert!(!contended.is(&key(0), end) && !contended.is(&key(1), now));
    }

    /// With one more, it is better to ask all servers at once.
    #[test]
    fn at_most_256_locks_are_remembered() {
        let now = Instant::now();
        let mut contended = noted(0..MANY, now);
        assert!((0..MANY).all(|number| contended.is(&key(number), now)));
        contended.note(&key(MANY), ROUND_TRIP, now);
        assert!((0..MANY).all(|number| !contended.is(&key(number), now)));
        assert!(contended.is(&key(MANY), now));
    }

    #[test]
    fn locks_that_are_no_longer_contended_make_room_for_others() {
        let now = Instant::now();
        let mut contended = noted(1..MANY, now);
        contended.note(&key(0), ROUND_TRIP, now + ROUND_TRIP);
        let end = now + LATELY + ROUND_TRIP * ROUND_TRIPS;
        contended.note(&key(MANY), ROUND_TRIP, end);
        assert!(contended.is(&key(0), end) && contended.is(&key(MANY), end));
        assert_eq!(contended.0.len(), 2);
    }
}
