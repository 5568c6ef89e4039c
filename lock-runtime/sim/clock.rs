//! Clocks that drift apart.

use std::time::Duration;

use tokio::time::Instant;

const MILLION: u128 = 1_000_000;

/// A clock that runs fast. It is right at the start of the run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
    /// In millionths.
    fast: u32,
}

impl Clock {
    pub(super) fn new(start: Instant, fast: u32) -> Self {
        Self { start, fast }
    }

    /// The time that the clock shows at `now`.
    pub(super) fn at(self, now: Instant) -> Instant {
        self.start
            + scaled(
                now - self.start,
                MILLION + u128::from(self.fast),
                MILLION,
                0,
            )
    }

    /// The true time at which the clock shows `local`.
    pub(super) fn when(self, local: Instant) -> Instant {
        let rate = MILLION + u128::from(self.fast);
        self.start
            + scaled(
                local.saturating_duration_since(self.start),
                MILLION,
                rate,
                rate - 1,
            )
    }

    /// The microseconds that the clock has counted.
    pub(super) fn micros(self, now: Instant) -> u64 {
        (self.at(now) - self.start).as_micros() as u64
    }
}

fn scaled(time: Duration, by: u128, of: u128, round: u128) -> Duration {
    Duration::from_nanos(((time.as_nanos() * by + round) / of) as u64)
}
