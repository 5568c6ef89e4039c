//! The clock of the database, as far as its replies tell.

use std::{sync::Mutex, time::Duration};

use super::super::Timestamp;
use crate::shell::{sync::lock, time::Instant};

/// The present time by the clock of the database, within two bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Now {
    /// A time that the clock has reached, unless it was set back. A lease that is over by then is
    /// over, and a grant that begins then does not end late.
    pub(crate) reached: Timestamp,
    /// A time that the clock has not passed, unless it was set forward. A reservation that begins
    /// then does not end early.
    pub(crate) latest: Timestamp,
    /// The time by which the clock may have been ahead of the time in the latest reply.
    pub(crate) unsure: Duration,
}

/// The time of the latest reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    sent: Instant,
    received: Instant,
    now: Timestamp,
    latest: Timestamp,
}

impl Reading {
    /// Returns the time at `at`, between two bounds that are as far apart as the call took. The
    /// clock may be 1 % faster than that of this machine.
    pub(crate) fn at(&self, at: Instant) -> Now {
        let longest = at.saturating_duration_since(self.sent);
        Now {
            reached: self.now.later(at.saturating_duration_since(self.received)),
            latest: self.latest.later(longest + longest / 100),
            unsure: self.latest.since(self.now),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Clock(Mutex<Option<Reading>>);

impl Clock {
    pub(crate) fn reading(&self) -> Option<Reading> {
        *lock(&self.0)
    }

    /// Makes operations read the time before they go on.
    pub(crate) fn forget(&self) {
        *lock(&self.0) = None;
    }

    /// Records the time in a reply to a call that was sent at `sent`, a lower and an upper bound,
    /// unless the reply to a later call has arrived before.
    pub(crate) fn read(&self, now: Timestamp, latest: Timestamp, sent: Instant) {
        let received = Instant::exactly_now();
        let mut reading = lock(&self.0);
        if reading.is_none_or(|reading| reading.sent <= sent) {
            *reading = Some(Reading {
                sent,
                received,
                now,
                latest: latest.max(now),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_clock_is_between_two_bounds_as_far_apart_as_a_call_took() {
        let millis = Duration::from_millis;
        let micros = |millis: u64| Timestamp::from_micros(millis * 1000);
        let clock = Clock::default();
        let sent = Instant::now();
        tokio::time::advance(millis(150)).await;
        clock.read(micros(1000), micros(1000), sent);
        // The reply to an earlier call is late.
        clock.read(micros(900), micros(900), sent - millis(1));
        let reading = clock.reading().unwrap();
        tokio::time::advance(millis(50)).await;
        let now = reading.at(Instant::now());
        assert_eq!((now.reached, now.latest), (micros(1050), micros(1202)));
        assert_eq!(now.unsure, Duration::ZERO);
        // A clock that is known less precisely.
        clock.read(micros(1000), micros(1100), Instant::now());
        let now = clock.reading().unwrap().at(Instant::now());
        assert_eq!((now.reached, now.latest), (micros(1000), micros(1100)));
        assert_eq!(now.unsure, millis(100));
        // Of two calls that were sent at once, the later reply is the better one.
        clock.read(micros(1010), micros(1110), Instant::now());
        let now = clock.reading().unwrap().at(Instant::now());
        assert_eq!(now.reached, micros(1010));
        clock.forget();
        assert!(clock.reading().is_none());
    }
}
