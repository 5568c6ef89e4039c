//! The storm of lock-conformance, with a clock that the processes of a test share.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

pub use lock_conformance::storm::*;

/// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of a machine.
pub fn nanos() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::try_from(now).expect("the monotonic clock is not negative");
    u64::try_from(now.as_nanos()).expect("584 years after the start of the machine")
}
