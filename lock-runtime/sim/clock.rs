//! Clocks that drift apart.

use crate::shell::time::Instant;
use std::time::Duration;

const MILLION: u128 = 1_000_000;

/// A clock that runs fast. It is right at the start of the run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
    /// The time that it shows after a million units of true time.
    rate: u128,
}

impl Clock {
    /// A clock that is this many millionths too fast.
    pub(super) fn new(start: Instant, fast: u32) -> Self {
        let rate = MILLION + u128::from(fast);
        Self { start, rate }
    }

    /// The time that the clock shows at `now`.
    pub(super) fn at(self, now: Instant) -> Instant {
        let passed = (now - self.start).as_nanos() * self.rate / MILLION;
        self.start + Duration::from_nanos(passed as u64)
    }

    /// The true time at which the clock shows `local`.
    pub(super) fn when(self, local: Instant) -> Instant {
        let passed = local.saturating_duration_since(self.start).as_nanos() * MILLION;
        self.start + Duration::from_nanos(passed.div_ceil(self.rate) as u64)
    }

    /// The microseconds that the clock has counted.
    pub(super) fn micros(self, now: Instant) -> u64 {
        (self.at(now) - self.start).as_micros() as u64
    }
}
