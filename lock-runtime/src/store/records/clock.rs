//! The clock of the database, as far as its replies tell.

use std::sync::Mutex;

use super::Timestamp;
use crate::{sync::lock, time::Instant};

/// The time of the latest reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    sent: Instant,
    received: Instant,
    now: Timestamp,
}

impl Reading {
    /// Returns a time that the clock has reached, unless it was set back.
    pub(super) fn reached(&self, at: Instant) -> Timestamp {
        self.now.later(at.saturating_duration_since(self.received))
    }

    /// Returns a time that the clock has not passed, unless it was set forward.
    pub(super) fn not_passed(&self, at: Instant) -> Timestamp {
        self.now.later(at.saturating_duration_since(self.sent))
    }
}

#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<Option<Reading>>);

impl Clock {
    pub(super) fn reading(&self) -> Option<Reading> {
        *lock(&self.0)
    }

    /// Records the time in a reply to a call that was sent at `sent`.
    pub(super) fn read(&self, now: Timestamp, sent: Instant) {
        let received = Instant::now();
        *lock(&self.0) = Some(Reading {
            sent,
            received,
            now,
        });
    }
}
