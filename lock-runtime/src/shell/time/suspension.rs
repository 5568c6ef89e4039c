//! The time for which the machine was suspended since this process first looked: the difference
//! between the clock of the system that counts it, and the one of `std`.
//!
//! The two cannot be read at once. A delay between the readings makes a suspension shorter than it
//! was, and never longer: a lock that is judged too early is as good as one that was judged
//! before the delay, but a quarantine must not end early.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

use super::Instant;

/// Delays between readings that are no suspension, in nanoseconds.
const APART: u64 = 1_000_000;

/// The time between two looks at both clocks, in nanoseconds without suspended time. The reading of
/// a clock is dear beside a lock in this process. A lock that is judged by a look this old is as
/// good as one that was judged at that look, before the suspension. The beginning of a quarantine,
/// and the readings of a server's clock, look in any case ([`Instant::exactly_now`]).
const PAUSE: u64 = 100_000;

#[cfg(any(target_os = "linux", target_os = "android"))]
const UPTIME: ClockId = ClockId::Boottime;
/// Counts suspension on Apple's systems, where that of `std` is another one.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const UPTIME: ClockId = ClockId::Monotonic;

static CLOCKS: LazyLock<Clocks> = LazyLock::new(Clocks::new);

/// Returns the time of the system's clock that counts suspension, where it has one. It is the same
/// in all processes of the system.
pub fn uptime() -> Duration {
    Duration::from_nanos(uptime_nanos())
}

fn uptime_nanos() -> u64 {
    let time = clock_gettime(UPTIME);
    (time.tv_sec as u64).saturating_mul(1_000_000_000) + time.tv_nsec as u64
}

/// Returns for how long the machine was suspended since this process first asked. It never
/// decreases.
pub fn suspended() -> Duration {
    Duration::from_nanos(CLOCKS.look())
}

/// The same in nanoseconds, as of the latest look, which is at most [`PAUSE`] before `awake`: the
/// time of Tokio's clock, which a test may have paused.
#[inline]
pub(super) fn suspended_at(awake: Instant) -> u64 {
    /// A time before the latest look.
    static LOOKED: AtomicU64 = AtomicU64::new(0);
    let awake = awake.0.get();
    if !is_due(LOOKED.load(Ordering::Acquire), awake) {
        return CLOCKS.seen();
    }
    let seen = CLOCKS.look();
    // After the look, so that another thread that reads this time also reads the suspension.
    LOOKED.store(awake, Ordering::Release);
    seen
}

/// Returns whether a look at `looked` is too old. A time that is earlier is that of another clock,
/// which a test has paused.
pub(super) fn is_due(looked: u64, awake: u64) -> bool {
    awake.wrapping_sub(looked) >= PAUSE
}

/// Both clocks.
#[derive(Debug)]
struct Clocks {
    /// The difference between them at the first look, in nanoseconds. That of `std` was read first,
    /// for the same reason for which it is read last from then on.
    difference: u64,
    /// The longest suspension that was seen, in nanoseconds.
    suspended: AtomicU64,
}

impl Clocks {
    fn new() -> Self {
        let read = || {
            let awake = Instant::awake_at(std::time::Instant::now());
            let uptime = uptime_nanos();
            let later = Instant::awake_at(std::time::Instant::now());
            (later - awake, difference(uptime, awake))
        };
        // The readings with the shortest delay.
        let (_, difference) = read().min(read()).min(read());
        Self {
            difference,
            suspended: AtomicU64::new(0),
        }
    }

    fn look(&self) -> u64 {
        let uptime = uptime_nanos();
        let ahead = self.ahead(uptime, Instant::awake_at(std::time::Instant::now()));
        if ahead > self.seen().saturating_add(APART) {
            // Relaxed, because no other memory depends on this number.
            self.suspended.fetch_max(ahead, Ordering::Relaxed);
        }
        self.seen()
    }

    fn ahead(&self, uptime: u64, awake: Instant) -> u64 {
        let ahead = difference(uptime, awake).wrapping_sub(self.difference);
        // Negative if the second clock was read late, or is ahead.
        u64::try_from(ahead.cast_signed()).unwrap_or(0)
    }

    fn seen(&self) -> u64 {
        let seen = self.suspended.load(Ordering::Relaxed);
        #[cfg(test)]
        let seen = seen + u64::try_from(injected::INJECTED.get().as_nanos()).unwrap_or(u64::MAX);
        seen
    }
}

/// Wraps around, as the clocks have no common beginning.
fn difference(uptime: u64, awake: Instant) -> u64 {
    uptime.wrapping_sub(awake.0.get())
}

/// Suspensions of the tests of one thread.
#[cfg(test)]
pub(crate) mod injected {
    use std::{cell::Cell, time::Duration};

    thread_local! {
        pub(super) static INJECTED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// Suspends the machine for the tests of this thread.
    pub(crate) fn suspend(duration: Duration) {
        INJECTED.set(INJECTED.get() + duration);
    }
}
