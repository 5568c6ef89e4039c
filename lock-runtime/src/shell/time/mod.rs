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
    num::NonZeroU64,
    ops::{Add, AddAssign, Sub, SubAssign},
    sync::LazyLock,
    time::Duration,
};

use tokio::time::{Sleep, Timeout};

#[cfg(unix)]
pub use self::suspension::{suspended, uptime};

/// The first look at the time.
static FIRST: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
/// Its number, which leaves 146 years before it and 438 after it.
const FIRST_NANOS: NonZeroU64 = NonZeroU64::new(1 << 62).expect("it is not zero");

/// An instant of the time by which a process judges its locks. It goes on while the machine is
/// suspended, where the system has such a clock ([`guide::limits`](crate::guide::limits#time)
/// names the others), and follows a clock of Tokio that a test has paused.
///
/// Instants of one process can be compared. Another process has its own.
// Nanoseconds, as arithmetic with the instants of `std` takes as long as the reading of a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(NonZeroU64);

impl Instant {
    /// Returns the current time. It never goes back.
    pub fn now() -> Self {
        let awake = Self::awake_at(tokio::time::Instant::now().into_std());
        #[cfg(unix)]
        let awake = Self((awake.0).saturating_add(suspension::suspended_at(awake)));
        awake
    }

    /// Same as [`now`](Self::now), which may not have seen a suspension of a moment ago: for times
    /// that make another one too long if they are too early.
    #[cfg(any(feature = "redis", feature = "records"))]
    pub(crate) fn exactly_now() -> Self {
        suspended();
        Self::now()
    }

    /// Returns the instant without suspended time.
    #[inline]
    fn awake_at(now: std::time::Instant) -> Self {
        let first = *FIRST;
        match now.checked_duration_since(first) {
            Some(later) => Self(FIRST_NANOS) + later,
            None => Self(FIRST_NANOS) - first.saturating_duration_since(now),
        }
    }

    /// Returns the time that has passed since this instant.
    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }

    /// Returns the time since `earlier`; zero if this instant is the earlier one.
    #[inline]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    /// Returns the time since `earlier`; `None` if this instant is the earlier one.
    pub fn checked_duration_since(self, earlier: Self) -> Option<Duration> {
        let nanos = self.0.get().checked_sub(earlier.0.get());
        nanos.map(Duration::from_nanos)
    }

    /// Returns the instant `duration` later; `None` if it is too late to be represented.
    pub fn checked_add(self, duration: Duration) -> Option<Self> {
        self.0.checked_add(nanos(duration)?).map(Self)
    }

    /// Returns the instant `duration` earlier; `None` if it is too early to be represented.
    #[inline]
    pub fn checked_sub(self, duration: Duration) -> Option<Self> {
        let earlier = self.0.get().checked_sub(nanos(duration)?)?;
        NonZeroU64::new(earlier).map(Self)
    }

    /// Returns this instant for a timer of Tokio, which is right until the next suspension.
    pub fn for_timer(self) -> tokio::time::Instant {
        let first = tokio::time::Instant::from_std(*FIRST);
        let awake = self - suspended();
        match awake.checked_duration_since(Self(FIRST_NANOS)) {
            Some(later) => first + later,
            None => first - (Self(FIRST_NANOS) - awake),
        }
    }
}

#[inline]
fn nanos(duration: Duration) -> Option<u64> {
    let seconds = duration.as_secs().checked_mul(1_000_000_000)?;
    seconds.checked_add(duration.subsec_nanos().into())
}

/// The last instant that can be represented if the sum is later.
impl Add<Duration> for Instant {
    type Output = Self;

    #[inline]
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration).unwrap_or(u64::MAX)))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

/// The first instant that can be represented if the difference is earlier.
impl Sub<Duration> for Instant {
    type Output = Self;

    #[inline]
    fn sub(self, duration: Duration) -> Self {
        self.checked_sub(duration).unwrap_or(Self(NonZeroU64::MIN))
    }
}

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, duration: Duration) {
        *self = *self - duration;
    }
}

/// Zero if the right one is later.
impl Sub for Instant {
    type Output = Duration;

    #[inline]
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
