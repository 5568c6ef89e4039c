//! The lease of a held lock: its validity, its renewal and its loss. It performs no I/O; the time
//! and the replies are its input.

use std::time::Duration;

use crate::{error::Loss, request::spec::call_timeout, shell::time::Instant};

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
    #[cfg(test)]
    if NO_DRIFT.get() {
        return Duration::ZERO;
    }
    lease / 100 + Duration::from_millis(2)
}

#[cfg(test)]
thread_local! {
    /// A simulator leaves no room for drift.
    pub(crate) static NO_DRIFT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The time until which a store keeps a lease at least, as replies in any order show it (rule 41).
#[derive(Clone, Copy, Debug)]
struct Validity {
    until: Instant,
    /// When the reply arrived that gave `until`. A request that was sent later was executed later.
    known_at: Instant,
    /// The arrival of the latest reply that showed a lease which had been shortened. Requests that
    /// were sent earlier may have been executed before.
    shortened_at: Option<Instant>,
}

impl Validity {
    /// The validity of a grant: every request about it is sent later.
    fn granted(sent: Instant, until: Instant) -> Self {
        Self {
            until,
            known_at: sent,
            shortened_at: None,
        }
    }

    /// Returns whether the request sent at `sent` may have been executed before the one that gave
    /// `until`.
    fn is_overtaken(&self, sent: Instant) -> bool {
        sent < self.known_at
    }

    /// Applies the reply to a request sent at `sent`, which arrives at `now`. Returns whether it
    /// counts.
    fn replied(&mut self, sent: Instant, ttl: Duration, now: Instant) -> bool {
        let until = sent + ttl.saturating_sub(drift(ttl));
        if self.shortened_at.is_some_and(|at| sent < at) {
            return false;
        }
        let is_later = !self.is_overtaken(sent);
        if is_later && now + ttl < self.until {
            self.shortened_at = Some(now);
        }
        // The store may have executed requests that were in flight together in any order.
        if is_later || until > self.until {
            (self.until, self.known_at) = (until, now);
        }
        true
    }
}

/// The time by which a lease may seem to be too long for another reason than a clock that was set
/// back: a store may know its own clock only to a round trip.
const SET_BACK: Duration = Duration::from_secs(1);

/// Corrects a lease that the store keeps for too long, as its clock was set back (rule 39).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Correction {
    /// The store keeps the lock for longer than was ever requested.
    is_due: bool,
    /// The shortest time to which a renewal may have shortened the lease, or may do so later.
    to: Option<Duration>,
}

impl Correction {
    /// Returns how much of a TTL counts, where `longest` is the longest lease that was requested.
    pub(crate) fn counted(&mut self, ttl: Duration, longest: Duration) -> Duration {
        self.is_due = ttl > longest + SET_BACK;
        ttl.min(self.to.unwrap_or(longest))
    }

    /// Returns the longest time for which the next renewal lets the store keep the lock.
    pub(crate) fn at_most(&mut self, longest: Duration) -> Option<Duration> {
        self.is_due.then(|| {
            self.to.get_or_insert(longest);
            longest
        })
    }

    /// Returns whether a renewal may still shorten the lease.
    pub(crate) fn was_sent(&self) -> bool {
        self.to.is_some()
    }
}

/// The holder's view of a lease.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    length: Duration,
    since: Instant,
    validity: Validity,
    renewal: NextRenewal,
    /// The end of `max_hold`, if it is set.
    ends_at: Option<Instant>,
    warn_at: Option<Instant>,
}

/// The time of the next renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NextRenewal {
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
            validity: Validity::granted(sent, sent),
            renewal: if renew {
                NextRenewal::At(sent)
            } else {
                NextRenewal::Off
            },
            ends_at: None,
            warn_at: None,
        };
        lease.renewed(sent, ttl, jitter, sent);
        lease
    }

    /// Sets the start of the hold, from which `max_hold` counts.
    pub(crate) fn held_since(mut self, since: Instant, max_hold: Option<Duration>) -> Self {
        let warn = self.renewal != NextRenewal::Off && max_hold.is_none();
        self.since = since;
        self.ends_at = max_hold.map(|max_hold| since + max_hold);
        self.warn_at = warn.then(|| since + self.length * WARN_AFTER_LEASES);
        self
    }

    /// The same lease for the next holder. The outcome of a renewal in flight goes to
    /// the previous one.
    pub(crate) fn passed_on(mut self, now: Instant) -> Self {
        if self.renewal == NextRenewal::InFlight {
            self.renewal = NextRenewal::At(now);
        }
        (self.ends_at, self.warn_at) = (None, None);
        self
    }

    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// Returns the time until which the lease is certain to be valid, apart from `max_hold`.
    pub(crate) fn valid_until(&self) -> Instant {
        self.validity.until
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
        let valid_until = self.valid_until();
        let ends_at = self.ends_at.unwrap_or(valid_until);
        ends_at.min(valid_until).saturating_duration_since(now)
    }

    /// Returns the kind of loss if the lease is lost at `now`.
    pub(crate) fn loss(&self, now: Instant) -> Option<Loss> {
        if self.ends_at.is_some_and(|at| at <= now) {
            return Some(Loss::MaxHold);
        }
        (self.valid_until() <= now).then_some(Loss::Expired)
    }

    /// Returns the time of the next action of [`due`](Self::due).
    pub(crate) fn next_due(&self) -> Instant {
        let renew_at = match self.renewal {
            NextRenewal::At(at) => Some(at),
            NextRenewal::Off | NextRenewal::InFlight => None,
        };
        let planned = [renew_at, self.ends_at, self.warn_at].into_iter();
        planned.flatten().fold(self.valid_until(), Instant::min)
    }

    /// Returns when the lease is late: half of the time that the latest reply has left is over
    /// without a renewal, or the driver has not noticed a loss.
    pub(crate) fn late_at(&self) -> Instant {
        let Validity {
            until, known_at, ..
        } = self.validity;
        let half = known_at + until.saturating_duration_since(known_at) / 2;
        // A lock that was idle may begin with less than half of its lease.
        let half = half.max(self.since + call_timeout(self.length));
        let lost_at = self.ends_at.unwrap_or(until).min(until);
        let unnoticed = lost_at + UNNOTICED;
        match self.renewal {
            NextRenewal::Off => unnoticed,
            NextRenewal::At(_) | NextRenewal::InFlight => half.min(unnoticed),
        }
    }

    /// Begins a renewal in place of the driver. Returns whether the driver had begun none in time,
    /// or `None` if the lease is not renewed.
    pub(crate) fn take_over(&mut self, now: Instant) -> Option<bool> {
        let is_driver_late = match self.renewal {
            NextRenewal::Off => return None,
            NextRenewal::At(at) => at.max(self.since) + call_timeout(self.length) <= now,
            NextRenewal::InFlight => false,
        };
        self.renewal = NextRenewal::InFlight;
        Some(is_driver_late)
    }

    /// Returns the action that is due at `now`. A renewal may be due a little early, to
    /// share a round trip.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Due> {
        let slack = (self.length / 1000).min(LONGEST_SLACK);
        if let Some(loss) = self.loss(now) {
            return Some(Due::Lost(loss));
        }
        if matches!(self.renewal, NextRenewal::At(at) if at <= now + slack) {
            self.renewal = NextRenewal::InFlight;
            return Some(Due::Renew);
        }
        if self.warn_at.is_some_and(|at| at <= now) {
            self.warn_at = None;
            return Some(Due::Warn);
        }
        None
    }

    /// Records the TTL from the reply to a renewal sent at `sent`, which arrives at `now`.
    pub(crate) fn renewed(&mut self, sent: Instant, ttl: Duration, jitter: f64, now: Instant) {
        if self.renewal != NextRenewal::Off {
            // A grant that is discovered late has little time left and is renewed sooner.
            let third = ttl.min(self.length) / 3;
            self.renewal = NextRenewal::At(sent + third.mul_f64(1.0 - 0.1 * jitter));
        }
        self.reported(sent, ttl, now);
    }

    /// Records the TTL from the reply to a query or an extension sent at `sent`. It postpones no
    /// renewal. Returns whether it counts: not if the lease was shortened meanwhile.
    pub(crate) fn reported(&mut self, sent: Instant, ttl: Duration, now: Instant) -> bool {
        // A custom store may return any TTL, and the range of `Instant` is limited.
        let ttl = ttl.min(LONGEST_TTL);
        let counts = self.validity.replied(sent, ttl, now);
        // If requests were in flight together, the reply to this renewal decides.
        self.hurry(sent + ttl / 3);
        counts
    }

    /// Returns whether another reply has arrived since this time.
    pub(crate) fn is_overtaken(&self, sent: Instant) -> bool {
        self.validity.is_overtaken(sent)
    }

    /// Records a failed renewal. It is retried as long as validity is left.
    pub(crate) fn renewal_failed(&mut self, now: Instant) {
        if self.renewal == NextRenewal::InFlight {
            let pause = (self.length / 30).clamp(Duration::from_millis(5), Duration::from_secs(1));
            self.renewal = NextRenewal::At(now + pause);
        }
    }

    /// Schedules a renewal by `at`, unless renewal is off or in flight.
    pub(crate) fn hurry(&mut self, at: Instant) {
        if let NextRenewal::At(planned) = &mut self.renewal {
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

    // Rule 39 of docs/PROTOCOL.md.
    #[test]
    fn a_lease_that_the_store_keeps_for_too_long_is_corrected() {
        let mut correction = Correction::default();
        let (counted, moment) = (LEASE + SET_BACK, Duration::from_millis(1));
        assert_eq!(correction.counted(counted, LEASE), LEASE);
        assert_eq!(correction.at_most(LEASE), None, "a round trip late");
        assert!(!correction.was_sent());
        assert_eq!(correction.counted(counted + moment, LEASE), LEASE);
        assert_eq!(correction.at_most(LEASE), Some(LEASE));
        assert!(correction.was_sent());
        // A delayed renewal of the correction may still shorten a longer lease.
        assert_eq!(correction.counted(2 * LEASE, 2 * LEASE), LEASE);
        assert_eq!(correction.at_most(2 * LEASE), None);
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
            lease.reported(t0 + passed, LEASE - passed, t0 + passed);
            assert_eq!(lease.next_due(), renew_at);
        }
        assert_eq!(lease.due(renew_at), Some(Due::Renew));
        lease.reported(renew_at, LEASE * 2 / 3, renew_at);
        // The renewal is still in flight.
        assert_eq!(lease.due(renew_at + LEASE / 3), None);
        // Another program has shortened the lease at the store.
        let (mut lease, t0) = granted(None);
        lease.reported(t0, LEASE / 10, t0);
        assert_eq!(lease.next_due(), t0 + LEASE / 30);
    }

    #[test]
    fn max_hold_ends_a_lease_that_is_renewed() {
        let (mut lease, t0) = granted(Some(LEASE * 2));
        lease.renewed(t0 + LEASE, LEASE * 4, 0.0, t0 + LEASE);
        assert_eq!(lease.validity(t0 + LEASE), LEASE);
        assert_eq!(lease.due(t0 + LEASE * 2), Some(Due::Lost(Loss::MaxHold)));
    }

    #[test]
    fn a_lock_held_for_ten_leases_is_warned_of_once() {
        let (mut lease, t0) = granted(None);
        let now = t0 + LEASE * 10;
        lease.renewed(now, LEASE, 0.0, now);
        assert_eq!(lease.due(now), Some(Due::Warn));
        assert_eq!(lease.due(now), None);
    }

    #[test]
    fn a_hold_that_is_limited_is_not_warned_of() {
        let (mut lease, t0) = granted(Some(LEASE * 20));
        let now = t0 + LEASE * 10;
        lease.renewed(now, LEASE, 0.0, now);
        assert_eq!(lease.due(now), None);
        // It ends by itself.
        let lease = Lease::granted(LEASE, false, t0, LEASE, 0.0).held_since(t0, None);
        assert_eq!(lease.warn_at, None);
    }

    #[test]
    fn a_renewal_is_due_after_a_third_of_the_lease_or_up_to_a_tenth_earlier() {
        let t0 = Instant::now();
        for (ttl, jitter, millis) in [
            (LEASE, 0.0, 10_000),
            (LEASE, 0.5, 9_500),
            (LEASE, 1.0, 9_000),
            // Less is left of a grant that was discovered late, and more of an extended lease.
            (LEASE / 10, 1.0, 900),
            (LEASE * 10, 1.0, 9_000),
        ] {
            let lease = Lease::granted(LEASE, true, t0, ttl, jitter);
            let due = t0 + Duration::from_millis(millis);
            assert_eq!(lease.next_due(), due, "{ttl:?} {jitter}");
        }
    }

    #[test]
    fn a_renewal_is_at_most_a_thousandth_of_the_lease_early() {
        let (t0, moment) = (Instant::now(), Duration::from_micros(1));
        for (length, slack) in [(300, 300_u64), (3_000, 3_000), (300_000, 30_000)] {
            let length = Duration::from_millis(length);
            let mut lease = Lease::granted(length, true, t0, length, 0.0);
            let early = lease.next_due() - Duration::from_micros(slack);
            assert_eq!(lease.due(early - moment), None);
            assert_eq!(lease.due(early), Some(Due::Renew));
        }
    }

    #[test]
    fn a_failed_renewal_is_repeated_after_a_thirtieth_of_the_lease() {
        let t0 = Instant::now();
        for (length, pause) in [(100, 5), (3_000, 100), (300_000, 1_000)] {
            let [length, pause] = [length, pause].map(Duration::from_millis);
            let mut lease = Lease::granted(length, true, t0, length, 0.0);
            let now = lease.next_due();
            assert_eq!(lease.due(now), Some(Due::Renew));
            lease.renewal_failed(now);
            assert_eq!(lease.next_due(), now + pause);
        }
    }

    #[test]
    fn a_lease_is_late_after_half_of_it_or_once_its_loss_goes_unnoticed() {
        let (t0, valid_for) = (Instant::now(), LEASE - drift(LEASE));
        for (renew, max_hold, late) in [
            (true, None, valid_for / 2),
            (false, None, valid_for + UNNOTICED),
            (false, Some(LEASE / 2), LEASE / 2 + UNNOTICED),
            (true, Some(LEASE / 10), LEASE / 10 + UNNOTICED),
        ] {
            let lease = Lease::granted(LEASE, renew, t0, LEASE, 0.0).held_since(t0, max_hold);
            assert_eq!(lease.late_at(), t0 + late, "{renew} {max_hold:?}");
        }
    }

    /// The driver is late if it has not begun a renewal by the time at which it should have ended.
    #[test]
    fn a_renewal_that_the_keeper_begins_shows_whether_the_driver_is_late() {
        let (lease, t0) = granted(None);
        let late = lease.next_due() + call_timeout(LEASE);
        for (now, is_late) in [(late - Duration::from_millis(1), false), (late, true)] {
            let mut lease = lease.clone();
            assert_eq!(lease.take_over(now), Some(is_late));
            // From then on it is in flight.
            assert_eq!(lease.due(now), None);
            assert_eq!(lease.take_over(late), Some(false));
        }
        let mut unrenewed = Lease::granted(LEASE, false, t0, LEASE, 0.0);
        assert_eq!(unrenewed.take_over(late), None);
    }

    /// The outcome of a renewal in flight goes to the previous holder.
    #[test]
    fn the_next_holder_renews_at_once_if_a_renewal_was_in_flight() {
        let (mut lease, t0) = granted(None);
        let now = t0 + LEASE / 6;
        assert_eq!(lease.clone().passed_on(now).next_due(), t0 + LEASE / 3);
        assert_eq!(lease.due(t0 + LEASE / 3), Some(Due::Renew));
        let now = t0 + LEASE / 2;
        assert_eq!(lease.passed_on(now).due(now), Some(Due::Renew));
    }

    /// At the very instants at which one request is answered and the next one is sent.
    #[test]
    fn a_request_is_executed_after_those_that_were_answered_when_it_was_sent() {
        let second = Duration::from_secs(1);
        let short = LEASE / 10;
        let (mut lease, t0) = granted(None);
        let until = lease.valid_until();
        // The store has stated this end, and no earlier one.
        assert!(lease.reported(t0 + second, until - (t0 + second), t0 + second));
        assert!(lease.reported(t0, LEASE, t0 + second * 2));
        assert_eq!(lease.valid_until(), until);
        // Another program has shortened the lease.
        let known_at = t0 + second * 2;
        assert!(lease.reported(known_at, short, known_at + second));
        assert_eq!(lease.valid_until(), known_at + short - drift(short));
        let shortened_at = known_at + second;
        assert!(!lease.reported(known_at, LEASE, shortened_at));
        assert!(lease.reported(shortened_at, LEASE, shortened_at));
        assert_eq!(lease.valid_until(), shortened_at + LEASE - drift(LEASE));
    }

    /// A call of a holder, which the store executes at any time after it was sent, or never.
    #[derive(Clone, Debug)]
    struct Call {
        at: u64,
        lease: u64,
        at_most: Option<Duration>,
        longest: Duration,
    }

    proptest! {
        /// The clock of the store is set back, and calls are executed in any order: the holder
        /// never counts on the lock for longer than the store keeps it (rule 39).
        #[test]
        fn a_corrected_lease_is_never_relied_on_for_too_long(
            steps in proptest::collection::vec((0u8..5, 1u64..60, any::<proptest::sample::Index>()), 1..60)
        ) {
            const SECOND: Duration = Duration::from_secs(1);
            let (mut correction, mut longest) = (Correction::default(), 10 * SECOND);
            let (mut now, mut valid_until, mut kept_until) = (0, 10, 10);
            let mut calls: Vec<Call> = Vec::new();
            for (step, number, index) in steps {
                match step {
                    0 => now += number / 6,
                    1 => kept_until += 10 * number,
                    2 | 3 => {
                        // A renewal, or an extension.
                        let lease = if step == 2 { 10 } else { number };
                        longest = longest.max(Duration::from_secs(lease));
                        let at_most = correction.at_most(longest);
                        calls.push(Call { at: now, lease, at_most, longest });
                    }
                    _ if calls.is_empty() => {}
                    _ => {
                        // The same call may be executed again later.
                        let call = calls[index.index(calls.len())].clone();
                        prop_assert!(call.longest <= longest);
                        if kept_until <= now {
                            return Ok(());
                        }
                        let most = call.at_most.map_or(u64::MAX, |most| now + most.as_secs());
                        kept_until = kept_until.max(now + call.lease).min(most);
                        let ttl = Duration::from_secs(kept_until - now);
                        let counted = correction.counted(ttl, longest).as_secs();
                        valid_until = valid_until.max(call.at + counted);
                    }
                }
                prop_assert!(valid_until <= kept_until, "{valid_until} after {kept_until}");
            }
        }
    }

    /// A renewal at a store: when it is sent, executed and answered, in milliseconds, and the
    /// lease that it requests.
    #[derive(Clone, Copy, Debug)]
    struct Sent {
        sent: u64,
        executed: u64,
        answered: u64,
        lease: u64,
    }

    /// Renewals in flight together, by increasing time of execution.
    fn renewals() -> impl Strategy<Value = Vec<Sent>> {
        let one = (0u64..20_000, 0u64..3_000, 0u64..3_000, 0u64..90_000);
        let one = one.prop_map(|(sent, there, back, lease)| Sent {
            sent,
            executed: sent + there,
            answered: sent + there + back,
            lease,
        });
        proptest::collection::vec(one, 1..8).prop_map(|mut renewals| {
            renewals.sort_by_key(|it| it.executed);
            renewals
        })
    }

    /// The end of the lease that the store states in its reply to each renewal.
    fn replies(renewals: Vec<Sent>) -> Vec<(Sent, u64)> {
        let mut end = 30_000;
        let reply = |it: Sent| {
            end = end.max(it.executed + it.lease);
            (it, end)
        };
        renewals.into_iter().map(reply).collect()
    }

    proptest! {
        /// Replies in any order: each of them counts, and validity never exceeds the lease at the
        /// store.
        #[test]
        fn validity_is_the_latest_end_that_the_store_has_stated(renewals in renewals()) {
            let millis = Duration::from_millis;
            let (mut lease, t0) = granted(None);
            let mut replies = replies(renewals);
            let ends: Vec<_> = replies.iter().map(|(it, end)| (it.executed, *end)).collect();
            replies.sort_by_key(|(it, _)| it.answered);
            for (it, end) in replies {
                let ttl = millis(end - it.executed);
                let (sent, now) = (t0 + millis(it.sent), t0 + millis(it.answered));
                prop_assert!(lease.reported(sent, ttl, now));
                prop_assert!(lease.valid_until() >= sent + ttl.saturating_sub(drift(ttl)));
                let executed = ends.iter().filter(|(at, _)| *at <= it.answered);
                let end_by_now = executed.map(|(_, end)| *end).max().unwrap_or_default();
                prop_assert!(lease.valid_until() <= t0 + millis(end_by_now));
            }
        }

        /// Another program shortens the lease. A request that is sent when no other one is in
        /// flight shows it. Replies to earlier requests do not count from then on.
        #[test]
        fn a_lease_that_was_shortened_is_as_short_as_the_latest_request_shows(
            renewals in renewals(),
            left in 1u64..1_000,
            late in 0u64..90_000,
        ) {
            let millis = Duration::from_millis;
            let (mut lease, t0) = granted(None);
            let mut replies = replies(renewals);
            replies.sort_by_key(|(it, _)| it.answered);
            let last = replies.iter().map(|(it, _)| it.answered).max().unwrap_or_default();
            for (it, end) in replies {
                let ttl = millis(end - it.executed);
                lease.reported(t0 + millis(it.sent), ttl, t0 + millis(it.answered));
            }
            let now = t0 + millis(last + 1);
            let is_shorter = now + millis(left) < lease.valid_until();
            lease.reported(now, millis(left), now);
            prop_assert!(lease.valid_until() <= now + millis(left));
            if is_shorter {
                prop_assert!(!lease.reported(now - millis(1), millis(late), now));
                prop_assert!(lease.valid_until() <= now + millis(left));
            }
        }
    }
}
