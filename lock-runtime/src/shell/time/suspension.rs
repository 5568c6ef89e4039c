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
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};

/// Delays between readings that are no suspension.
const APART: Duration = Duration::from_millis(1);

#[cfg(any(target_os = "linux", target_os = "android"))]
const UPTIME: ClockId = ClockId::Boottime;
/// Counts suspension on Apple's systems, where that of `std` is another one.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const UPTIME: ClockId = ClockId::Monotonic;

static CLOCKS: LazyLock<Clocks> = LazyLock::new(Clocks::new);

/// Returns the time of the system's clock that counts suspension, where it has one. It is the same
/// in all processes of the system.
pub fn uptime() -> Duration {
    let time = clock_gettime(UPTIME);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns for how long the machine was suspended since this process first asked. It never
/// decreases.
pub fn suspended() -> Duration {
    CLOCKS.look()
}

/// The same as of `uptime`, and `monotonic` which was read thereafter. The second one may be
/// that of a clock that a test has paused.
pub(super) fn suspended_at(uptime: Duration, monotonic: Instant) -> Duration {
    let seen = CLOCKS.seen();
    match CLOCKS.ahead(uptime, monotonic) > seen + APART {
        true => CLOCKS.look(),
        false => seen,
    }
}

/// Both clocks.
#[derive(Debug)]
struct Clocks {
    /// Their times at the first look. The second one was read later, for the same reason for which
    /// it is read first from then on.
    monotonic: Instant,
    uptime: Duration,
    /// The longest suspension that was seen, in nanoseconds.
    suspended: AtomicU64,
}

impl Clocks {
    fn new() -> Self {
        let read = || {
            let monotonic = Instant::now();
            let uptime = uptime();
            (monotonic.elapsed(), monotonic, uptime)
        };
        // The readings with the shortest delay.
        let (_, monotonic, uptime) = read().min(read()).min(read());
        Self {
            monotonic,
            uptime,
            suspended: AtomicU64::new(0),
        }
    }

    fn look(&self) -> Duration {
        let uptime = uptime();
        let ahead = self.ahead(uptime, Instant::now());
        if ahead > self.seen() + APART {
            let nanos = u64::try_from(ahead.as_nanos()).unwrap_or(u64::MAX);
            // Relaxed, because no other memory depends on this number.
            self.suspended.fetch_max(nanos, Ordering::Relaxed);
        }
        self.seen()
    }

    fn ahead(&self, uptime: Duration, monotonic: Instant) -> Duration {
        let awake = monotonic.saturating_duration_since(self.monotonic);
        uptime.saturating_sub(self.uptime).saturating_sub(awake)
    }

    fn seen(&self) -> Duration {
        let seen = Duration::from_nanos(self.suspended.load(Ordering::Relaxed));
        #[cfg(test)]
        let seen = seen + injected::INJECTED.get();
        seen
    }
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
