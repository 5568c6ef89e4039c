//! An estimate of the server's time. The server checks deadlines by its own clock, so they are
//! sent in that time.

use crate::shell::time::Instant;
use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

/// The difference between the server's clock and this process's monotonic one.
///
/// Each observation bounds it from both sides: the server read its clock after the request was
/// sent and before the reply arrived. The estimate moves only when it is out of bounds, to the
/// nearer bound. It thus settles within the shortest round trip, follows a slow drift, and is
/// right again with the first reply after a jump.
#[derive(Debug)]
pub(crate) struct ServerClock {
    base: Instant,
    /// The server's time at `base`, in microseconds since 1970.
    at_base: AtomicI64,
}

impl ServerClock {
    /// Creates the clock from a first observation: the server's time was `micros` at some instant
    /// before `received`.
    pub(crate) fn new(micros: u64, received: Instant) -> Self {
        // The lower bound: if a deadline is too early the server refuses the request, if it is too
        // late the server may grant a lock that no client waits for any more.
        let (base, at_base) = (received, AtomicI64::new(micros as i64));
        Self { base, at_base }
    }

    /// Records that the server's time was `micros` at some instant between `sent` and `received`.
    pub(crate) fn observe(&self, micros: u64, sent: Instant, received: Instant) {
        let lower = (micros as i64).saturating_sub(self.since_base(received));
        let upper = (micros as i64).saturating_sub(self.since_base(sent));
        // Relaxed, because no other memory depends on this number.
        self.at_base.fetch_max(lower, Ordering::Relaxed);
        self.at_base.fetch_min(upper, Ordering::Relaxed);
    }

    /// The server's time at `instant`, in microseconds since 1970.
    pub(crate) fn server_micros(&self, instant: Instant) -> u64 {
        let at_base = self.at_base.load(Ordering::Relaxed);
        at_base.saturating_add(self.since_base(instant)).max(0) as u64
    }

    fn since_base(&self, instant: Instant) -> i64 {
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX / 4);
        match instant.checked_duration_since(self.base) {
            Some(after) => micros(after),
            None => -micros(self.base - instant),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: u64 = 1_800_000_000_000_000;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn a_reply_within_the_bounds_changes_nothing() {
        let base = Instant::now();
        let clock = ServerClock::new(NOON, base);
        clock.observe(NOON + 1_050_000, base + ms(1_000), base + ms(1_100));
        assert_eq!(clock.server_micros(base + ms(2_000)), NOON + 2_000_000);
    }

    #[test]
    fn a_jump_is_followed_with_the_first_reply() {
        let base = Instant::now();
        let clock = ServerClock::new(NOON, base);
        for jump in [3_600_000_000, -7_200_000_000_i64] {
            let server = NOON.wrapping_add_signed(jump);
            clock.observe(server, base + ms(1_000), base + ms(1_010));
            let estimate = clock.server_micros(base + ms(1_010));
            assert!((server..=server + 10_000).contains(&estimate), "{estimate}");
        }
    }

    #[test]
    fn an_instant_before_the_first_reply_has_its_time_too() {
        let base = Instant::now() + ms(10);
        let micros = ServerClock::new(NOON, base).server_micros(base - ms(10));
        assert_eq!(micros, NOON - 10_000);
    }
}
