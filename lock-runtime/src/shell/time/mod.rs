//! The time of this process: that of Tokio's clock, and the time for which the machine was
//! suspended. The store's time goes on meanwhile, so every promise about it counts both.
//!
//! Timers of Tokio do not count suspended time, and are late by it.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "clippy.toml forbids them elsewhere"
)]

#[cfg(unix)]
mod suspension;
#[cfg(test)]
mod tests;

use std::{
    future::Future,
    ops::{Add, AddAssign, Sub, SubAssign},
    time::Duration,
};

use tokio::time::{Sleep, Timeout};

#[cfg(unix)]
pub use self::suspension::{suspended, uptime};

/// An instant of the time by which a process judges its locks. It goes on while the machine is
/// suspended, where the system has such a clock ([`guide::limits`](crate::guide::limits#time)
/// names the others), and follows a clock of Tokio that a test has paused.
///
/// Instants of one process can be compared. Another process has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(tokio::time::Instant);

impl Instant {
    /// Returns the current time. It never goes back.
    pub fn now() -> Self {
        // In this order, as the readings may be apart: see `suspended_at`.
        #[cfg(unix)]
        let uptime = uptime();
        let now = tokio::time::Instant::now();
        #[cfg(unix)]
        let now = now + suspension::suspended_at(uptime, now.into_std());
        Self(now)
    }

    /// Returns the time that has passed since this instant.
    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }

    /// Returns the time since `earlier`; zero if this instant is the earlier one.
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_duration_since(earlier.0)
    }

    /// Returns the time since `earlier`; `None` if this instant is the earlier one.
    pub fn checked_duration_since(self, earlier: Self) -> Option<Duration> {
        self.0.checked_duration_since(earlier.0)
    }

    /// Returns the instant `duration` later; `None` if it is too late to be represented.
    pub fn checked_add(self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    /// Returns the instant `duration` earlier; `None` if it is too early to be represented.
    pub fn checked_sub(self, duration: Duration) -> Option<Self> {
        self.0.checked_sub(duration).map(Self)
    }

    /// Returns this instant for a timer of Tokio, which is right until the next suspension.
    pub fn for_timer(self) -> tokio::time::Instant {
        self.0 - suspended()
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0 + duration)
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        self.0 += duration;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0 - duration)
    }
}

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, duration: Duration) {
        self.0 -= duration;
    }
}

/// Zero if the right one is later.
impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}

/// Waits until `at`; longer by the time for which the machine is suspended meanwhile.
pub fn sleep_until(at: Instant) -> Sleep {
    tokio::time::sleep_until(at.for_timer())
}

/// Limits `future` to the time until `at`, as [`sleep_until`] does.
pub fn timeout_at<F: Future>(at: Instant, future: F) -> Timeout<F> {
    tokio::time::timeout_at(at.for_timer(), future)
}

/// Returns the time for which the machine was suspended: zero, because the clock of `std` counts
/// it, or the system has no clock that does.
#[cfg(not(unix))]
pub fn suspended() -> Duration {
    Duration::ZERO
}
