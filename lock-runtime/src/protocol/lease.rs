//! The lease of a held lock: its validity, its renewal and its loss. It performs no I/O; the time
//! and the replies are its input.

use std::time::Duration;

use crate::{error::Loss, spec::call_timeout, time::Instant};

/// The number of leases after which a holder that keeps renewing without a `max_hold`
/// causes one warning.
const WARN_AFTER_LEASES: u32 = 10;
/// The longest time by which a renewal may be sent early. A longer one needs fewer wake-ups. With a
/// shorter one, the renewals of many leases reach a server in smaller bursts, between which it can
/// serve other requests.
pub(crate) const LONGEST_SLACK: Duration = Duration::from_millis(30);
/// The time after which a loss counts as one that the driver has not noticed.
const UNNOTICED: Duration = Duration::from_millis(50);
/// The longest TTL taken into account. A lease is a day at most, so a longer one makes
/// no difference.
const LONGEST_TTL: Duration = Duration::from_secs(10 * 24 * 60 * 60);

/// The part of a lease that is deducted for clock drift: 1 % and 2 ms, as in [Redlock].
///
/// [Redlock]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
pub(crate) fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// The holder's view of a lease.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    length: Duration,
    since: Instant,
    /// The send time of the request from which `valid_until` is derived.
    as_of: Instant,
    valid_until: Instant,
    renewal: Renewal,
    /// The end of `max_hold`, if it is set.
    ends_at: Option<Instant>,
    warn_at: Option<Instant>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Renewal {
    Off,
    At(Instant),
    InFlight,
}

/// An action that is due for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Send a renewal. No other renewal is due until [`Lease::renewed`] or
    /// [`Lease::renewal_failed`]; a loss may be.
    Renew,
    /// Warn that the lock has been held for a long time.
    Warn,
    /// Report the loss.
    Lost(Loss),
}

impl Lease {
    /// A lease granted for `ttl` by the reply to a request sent at `sent` (rule 2). `jitter`
    /// in 0..1 spreads the renewals.
    pub(crate) fn granted(
        length: Duration,
        renew: bool,
        sent: Instant,
        ttl: Duration,
        jitter: f64,
    ) -> Self {
        let mut lease = Self {
            length,
            since: sent,
            as_of: sent,
            valid_until: sent,
            renewal: if renew {
                Renewal::At(sent)
            } else {
                Renewal::Off
            },
            ends_at: None,
            warn_at: None,
        };
        lease.renewed(sent, ttl, jitter);
        lease
    }

    /// Sets the start of the hold, from which `max_hold` counts.
    pub(crate) fn held_since(mut self, since: Instant, max_hold: Option<Duration>) -> Self {
        let warn = self.renewal != Renewal::Off && max_hold.is_none();
        self.since = since;
        self.ends_at = max_hold.map(|max_hold| since + max_hold);
        self.warn_at = warn.then(|| since + self.length * WARN_AFTER_LEASES);
        self
    }

    /// The same lease for the next holder. The outcome of a renewal in flight goes to
    /// the previous one.
    pub(crate) fn passed_on(mut self, now: Instant) -> Self {
        if self.renewal == Renewal::InFlight {
            self.renewal = Renewal::At(now);
        }
        (self.ends_at, self.warn_at) = (None, None);
        self
    }

    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// Returns the time until which the lease is certain to be valid, apart from `max_hold`.
    pub(crate) fn valid_until(&self) -> Instant {
        self.valid_until
    }

    /// Returns the end of `max_hold`, if it is set.
    pub(crate) fn ends_at(&self) -> Option<Instant> {
        self.ends_at
    }

    /// The requested length, which every renewal requests again.
    pub(crate) fn length(&self) -> Duration {
        self.length
    }

    /// Returns the remaining validity of the lease.
    pub(crate) fn validity(&self, now: Instant) -> Duration {
        let ends_at = self.ends_at.unwrap_or(self.valid_until);
        ends_at.min(self.valid_until).saturating_duration_since(now)
    }

    /// Returns the kind of loss if the lease is lost at `now`.
    pub(crate) fn loss(&self, now: Instant) -> Option<Loss> {
        if self.ends_at.is_some_and(|at| at <= now) {
            return Some(Loss::MaxHold);
        }
        (self.valid_until <= now).then_some(Loss::Expired)
    }

    /// Returns the time of the next action of [`due`](Self::due).
    pub(crate) fn next_due(&self) -> Instant {
        let renew_at = match self.renewal {
            Renewal::At(at) => Some(at),
            Renewal::Off | Renewal::InFlight => None,
        };
        let planned = [renew_at, self.ends_at, self.warn_at].into_iter();
        planned.flatten().fold(self.valid_until, Instant::min)
    }

    /// Returns when the lease is late: half of the time that the latest reply has left is over
    /// without a renewal, or the driver has not noticed a loss.
    pub(crate) fn late_at(&self) -> Instant {
        let half = self.as_of + self.valid_until.saturating_duration_since(self.as_of) / 2;
        let lost_at = self
            .ends_at
            .unwrap_or(self.valid_until)
            .min(self.valid_until);
        let unnoticed = lost_at + UNNOTICED;
        match self.renewal {
            Renewal::Off => unnoticed,
            Renewal::At(_) | Renewal::InFlight => half.min(unnoticed),
        }
    }

    /// Begins a renewal in place of the driver. Returns whether the driver had begun none in time,
    /// or `None` if the lease is not renewed.
    pub(crate) fn take_over(&mut self, now: Instant) -> Option<bool> {
        let is_driver_late = match self.renewal {
            Renewal::Off => return None,
            Renewal::At(at) => at + call_timeout(self.length) <= now,
            Renewal::InFlight => false,
        };
        self.renewal = Renewal::InFlight;
        Some(is_driver_late)
    }

    /// Returns the action that is due at `now`. A renewal may be due a little early, to
    /// share a round trip.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Due> {
        let slack = (self.length / 1000).min(LONGEST_SLACK);
        if let Some(loss) = self.loss(now) {
            return Some(Due::Lost(loss));
        }
        if matches!(self.renewal, Renewal::At(at) if at <= now + slack) {
            self.renewal = Renewal::InFlight;
            return Some(Due::Renew);
        }
        if self.warn_at.is_some_and(|at| at <= now) {
            self.warn_at = None;
            return Some(Due::Warn);
        }
        None
    }

    /// Records the TTL from the reply to a renewal sent at `sent`.
    pub(crate) fn renewed(&mut self, sent: Instant, ttl: Duration, jitter: f64) {
        if self.renewal != Renewal::Off {
            // A grant that is discovered late has little time left and is renewed sooner.
            let third = ttl.min(self.length) / 3;
            self.renewal = Renewal::At(sent + third.mul_f64(1.0 - 0.1 * jitter));
        }
        self.reported(sent, ttl);
    }

    /// Records the TTL from the reply to a query or an extension sent at `sent`. It
    /// postpones no renewal.
    pub(crate) fn reported(&mut self, sent: Instant, ttl: Duration) {
        // The reply to a later request has already arrived.
        if sent < self.as_of {
            return;
        }
        // A custom store may return any TTL, and the range of `Instant` is limited.
        let ttl = ttl.min(LONGEST_TTL);
        self.as_of = sent;
        self.valid_until = sent + ttl.saturating_sub(drift(ttl));
        self.hurry(sent + ttl / 3);
    }

    /// Records a failed renewal. It is retried as long as validity is left.
    pub(crate) fn renewal_failed(&mut self, now: Instant) {
        if self.renewal == Renewal::InFlight {
            let pause = (self.length / 30).clamp(Duration::from_millis(5), Duration::from_secs(1));
            self.renewal = Renewal::At(now + pause);
        }
    }

    /// Schedules a renewal by `at`, unless renewal is off or in flight.
    pub(crate) fn hurry(&mut self, at: Instant) {
        if let Renewal::At(planned) = &mut self.renewal {
            *planned = at.min(*planned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn granted(max_hold: Option<Duration>) -> (Lease, Instant) {
        let t0 = Instant::now();
        let lease = Lease::granted(LEASE, true, t0, LEASE, 0.0);
        (lease.held_since(t0, max_hold), t0)
    }

    #[test]
    fn validity_counts_from_the_sending_and_leaves_room_for_drift() {
        let (lease, t0) = granted(None);
        assert_eq!(lease.validity(t0), LEASE - Duration::from_millis(302));
        assert_eq!(lease.validity(t0 + LEASE), Duration::ZERO);
    }

    #[test]
    fn renew_is_retried_until_the_validity_ends() {
        let (mut lease, t0) = granted(None);
        let mut tries = 0;
        let lost = loop {
            let now = lease.next_due();
            match lease.due(now) {
                Some(Due::Renew) => {
                    tries += 1;
                    lease.renewal_failed(now + Duration::from_millis(500));
                }
                Some(Due::Lost(loss)) => break (loss, now),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(lost, (Loss::Expired, t0 + LEASE - drift(LEASE)));
        assert!(tries > 10, "{tries} tries");
    }

    #[test]
    fn nothing_is_renewed_twice_at_a_time() {
        let (mut lease, t0) = granted(None);
        let now = t0 + LEASE / 3;
        assert_eq!(lease.due(now), Some(Due::Renew));
        assert_eq!(lease.due(now), None);
        lease.hurry(now);
        assert_eq!(lease.due(now), None);
    }

    #[test]
    fn questions_put_no_renewal_off() {
        let (mut lease, t0) = granted(None);
        let renew_at = lease.next_due();
        for second in 1..10 {
            let passed = Duration::from_secs(second);
            lease.reported(t0 + passed, LEASE - passed);
            assert_eq!(lease.next_due(), renew_at);
        }
        assert_eq!(lease.due(renew_at), Some(Due::Renew));
        lease.reported(renew_at, LEASE * 2 / 3);
        // The renewal is still in flight.
        assert_eq!(lease.due(renew_at + LEASE / 3), None);
        // Another program has shortened the lease at the store.
        let (mut lease, t0) = granted(None);
        lease.reported(t0, LEASE / 10);
        assert_eq!(lease.next_due(), t0 + LEASE / 30);
    }

    #[test]
    fn max_hold_ends_a_lease_that_is_renewed() {
        let (mut lease, t0) = granted(Some(LEASE * 2));
        lease.renewed(t0 + LEASE, LEASE * 4, 0.0);
        assert_eq!(lease.validity(t0 + LEASE), LEASE);
        assert_eq!(lease.due(t0 + LEASE * 2), Some(Due::Lost(Loss::MaxHold)));
    }

    #[test]
    fn a_lock_held_for_ten_leases_is_warned_of_once() {
        let (mut lease, t0) = granted(None);
        let now = t0 + LEASE * 10;
        lease.renewed(now, LEASE, 0.0);
        assert_eq!(lease.due(now), Some(Due::Warn));
        assert_eq!(lease.due(now), None);
    }

    proptest! {
        /// Replies in any order: validity never exceeds the TTL in the reply to the
        /// latest request.
        #[test]
        fn an_overtaken_reply_changes_nothing(replies in proptest::collection::vec((0u64..60_000, 1u64..90_000), 1..8)) {
            let (mut lease, t0) = granted(None);
            let mut newest = (0, 30_000);
            for (sent, ttl) in replies {
                lease.renewed(t0 + Duration::from_millis(sent), Duration::from_millis(ttl), 0.5);
                if sent >= newest.0 {
                    newest = (sent, ttl);
                }
            }
            prop_assert!(lease.validity(t0) <= Duration::from_millis(newest.0 + newest.1));
        }
    }
}
