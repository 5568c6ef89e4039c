//! The outage of one server: since when it has not answered, and which calls are refused until it
//! answers again (a circuit breaker). Decides only; the connection to the server probes it.

use std::{
    fmt,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreErrorKind},
};

/// The pause between two probes of a server that does not answer, at first: short against the half
/// second within which requests are served again after a failover.
const PAUSE: Duration = Duration::from_millis(200);
/// The same if the server refuses a password that is being replaced: a new one takes a second or
/// more to arrive, and each refusal is work and a line of the log for the server.
const LOGIN_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause: in a long outage, or if another attempt cannot succeed by itself, as the
/// server has never accepted the password, for example.
const LONG_PAUSE: Duration = Duration::from_secs(2);
/// The time in which each call makes an attempt: a failover is over by then, and so are short
/// leases.
const AT_FIRST: Duration = Duration::from_secs(4);
/// The part of an outage that a pause may prolong it by. So the pauses double as the outage does,
/// and the clients of a large fleet do not keep the server from coming back.
const SHARE: u32 = 8;

/// The handling of a call during an outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InOutage {
    /// It is tried, whether the circuit breaker is open or not: a renewal, or a call that ends a
    /// hold.
    Try,
    /// It waits for the connection, and is refused while the circuit breaker is open.
    Wait,
    /// It is refused once an attempt to connect has failed: a request that does not wait.
    Refuse,
}

/// The outage of one server.
#[derive(Debug)]
pub(crate) struct Outage {
    /// The only part that is read while the server answers.
    lasts: AtomicBool,
    state: Mutex<OutageState>,
}

#[derive(Debug)]
struct OutageState {
    /// The time without an answer after which the circuit breaker opens.
    unavailable_after: Option<Duration>,
    /// Since when the server has not answered.
    since: Instant,
    /// A connection was established before.
    stood: bool,
    /// The error of the latest attempt to connect, once one has failed, and when it did.
    failed: Option<(StoreError, Instant)>,
    /// The number of the latest attempt that has established a connection.
    established: u64,
}

/// The end of an outage.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Restored {
    /// This is the first connection.
    First,
    /// The server answers again after this time.
    After(Duration),
}

impl Outage {
    /// The state of a server to which the first connection is being established.
    pub(crate) fn new(unavailable_after: Option<Duration>, now: Instant) -> Self {
        Self {
            lasts: AtomicBool::new(true),
            state: Mutex::new(OutageState {
                unavailable_after,
                since: now,
                stood: false,
                failed: None,
                established: 0,
            }),
        }
    }

    /// Records that the connection of this attempt is over, and that the server has not answered
    /// since `since`. Returns whether an outage begins. An attempt that was given up may end after
    /// a later one has established a connection, and says nothing about it.
    pub(crate) fn begin(&self, attempt: u64, since: Instant) -> bool {
        let mut state = lock(&self.state);
        if attempt < state.established || self.lasts.load(Ordering::Relaxed) {
            return false;
        }
        state.since = since;
        self.lasts.store(true, Ordering::Release);
        true
    }

    /// Records that an attempt to connect has failed. Returns whether the cause is new.
    pub(crate) fn failed(&self, attempt: u64, error: &StoreError, now: Instant) -> bool {
        let mut state = lock(&self.state);
        if attempt < state.established {
            return false;
        }
        let before = state.failed.replace((error.clone(), now));
        before.is_none_or(|(before, _)| before.kind() != error.kind())
    }

    /// The error of the latest attempt, which a call shares in place of another attempt. `None` if
    /// the call has to make one: half a [share](SHARE) of the outage after the one before. So the
    /// attempts of a busy client become rare as well. A permanent cause is left to each call.
    pub(crate) fn shared_error(&self, now: Instant) -> Option<StoreError> {
        if !self.lasts() {
            return None;
        }
        let mut state = lock(&self.state);
        let window = match state.share(now) / 2 {
            short if short < AT_FIRST / SHARE / 2 => return None,
            window => window,
        };
        let (error, at) = state.failed.as_mut()?;
        if now < *at + window && error.is_transient() {
            return Some(error.clone().with_unsent(true));
        }
        // The others share its error until the next one is due.
        *at = now;
        None
    }

    /// Records the connection that an attempt has established; `None` if no outage lasted.
    pub(crate) fn end(&self, attempt: u64, now: Instant) -> Option<Restored> {
        let mut state = lock(&self.state);
        if attempt < state.established {
            return None;
        }
        state.established = attempt;
        let stood = std::mem::replace(&mut state.stood, true);
        let (silent, failed) = (
            now.saturating_duration_since(state.since),
            state.failed.take(),
        );
        if !self.lasts.swap(false, Ordering::AcqRel) {
            return None;
        }
        let was_open = state.unavailable_after.is_some_and(|after| silent >= after);
        Some(match stood || failed.is_some() || was_open {
            true => Restored::After(silent),
            false => Restored::First,
        })
    }

    /// Sets the time without an answer after which the circuit breaker opens.
    #[cfg(feature = "records")]
    pub(crate) fn set_unavailable_after(&self, unavailable_after: Option<Duration>) {
        lock(&self.state).unavailable_after = unavailable_after;
    }

    /// The silence after which a server seems not to answer, of `longest` at most.
    #[cfg(feature = "records")]
    pub(crate) fn patience(&self, longest: Duration) -> Duration {
        let after = lock(&self.state).unavailable_after;
        after.map_or(longest, |after| after.min(longest))
    }

    /// The error of the latest attempt to connect, while the outage lasts.
    #[cfg(any(test, feature = "redis"))]
    pub(crate) fn error(&self) -> Option<StoreError> {
        let failed = &lock(&self.state).failed;
        failed.as_ref().map(|(error, _)| error.clone())
    }

    /// Returns whether the server does not answer.
    pub(crate) fn lasts(&self) -> bool {
        self.lasts.load(Ordering::Relaxed)
    }

    /// When the circuit breaker opens; `None` if no outage lasts, or if it is not set.
    pub(crate) fn opens_at(&self) -> Option<Instant> {
        if !self.lasts() {
            return None;
        }
        let state = lock(&self.state);
        Some(state.since + state.unavailable_after?)
    }

    /// Admits a call to the `server`, or refuses it without sending it.
    pub(crate) fn admits(
        &self,
        in_outage: InOutage,
        server: &dyn fmt::Display,
    ) -> Result<(), StoreError> {
        if !self.lasts() || in_outage == InOutage::Try {
            return Ok(());
        }
        self.refuses(in_outage, server, Instant::now())
            .map_or(Ok(()), Err)
    }

    #[cold]
    fn refuses(
        &self,
        in_outage: InOutage,
        server: &dyn fmt::Display,
        now: Instant,
    ) -> Option<StoreError> {
        let state = lock(&self.state);
        let silent = now.saturating_duration_since(state.since);
        let is_open = state.unavailable_after.is_some_and(|after| silent >= after);
        let is_known = in_outage == InOutage::Refuse && state.failed.is_some();
        if !is_open && !is_known {
            return None;
        }
        let (kind, last) = match &state.failed {
            // The server answers, and each call finds out whether it still refuses the client.
            Some((error, _)) if !error.is_transient() => return None,
            Some((error, _)) => (error.kind(), format!("; last error: {error}")),
            None => (StoreErrorKind::Unavailable, String::new()),
        };
        let (kind, has_not) = match kind {
            StoreErrorKind::Unauthenticated => (kind, "accepted the client"),
            _ if is_open => (StoreErrorKind::Unavailable, "answered"),
            _ => (kind, "answered"),
        };
        let message =
            format!("{server} has not {has_not} for {silent:.1?}; refused without a call{last}");
        Some(
            StoreError::new(kind, message)
                .with_unsent(true)
                .passing(true)
                .ending_waits(is_open),
        )
    }

    /// The pause before the next probe: an eighth of the outage, between a shortest and a longest
    /// one. `jitter` in 0..1 spreads the probes of all clients, and halves it at most.
    pub(crate) fn pause(&self, jitter: f64, now: Instant) -> Duration {
        let state = lock(&self.state);
        let shortest = match &state.failed {
            Some((error, _)) if !error.is_transient() => LONG_PAUSE,
            Some((error, _)) if error.kind() == StoreErrorKind::Unauthenticated => LOGIN_PAUSE,
            _ => PAUSE,
        };
        let pause = state.share(now).max(shortest);
        pause.mul_f64(0.5 + 0.5 * jitter)
    }
}

impl OutageState {
    fn share(&self, now: Instant) -> Duration {
        (now.saturating_duration_since(self.since) / SHARE).min(LONG_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(1);
    const MS: Duration = Duration::from_millis(1);

    fn refused() -> StoreError {
        StoreError::new(StoreErrorKind::Unavailable, "connection refused")
    }

    #[test]
    fn only_requests_that_do_not_wait_are_refused_before_the_breaker_opens() {
        let now = Instant::now();
        let outage = Outage::new(Some(AFTER), now);
        let refuses = |in_outage, at| outage.refuses(in_outage, &"a", at).is_some();
        // The first attempt has not failed yet.
        assert!(!refuses(InOutage::Refuse, now) && !refuses(InOutage::Wait, now));
        assert!(outage.failed(0, &refused(), now) && !outage.failed(0, &refused(), now));
        assert!(refuses(InOutage::Refuse, now) && !refuses(InOutage::Wait, now));
        assert!(!refuses(InOutage::Wait, now + AFTER - MS));
        assert!(refuses(InOutage::Wait, now + AFTER));
        assert_eq!(outage.opens_at(), Some(now + AFTER));
        let error = outage.refuses(InOutage::Wait, &"a", now + AFTER).unwrap();
        assert!(error.is_unsent() && error.ends_waits());
        assert_eq!(
            error.to_string(),
            "a has not answered for 1.0s; refused without a call; last error: connection refused"
        );
        assert!(outage.admits(InOutage::Try, &"a").is_ok());
    }

    #[test]
    fn an_outage_counts_from_the_last_answer_to_the_next_connection() {
        let now = Instant::now();
        let outage = Outage::new(Some(AFTER), now);
        assert_eq!(outage.end(0, now), Some(Restored::First));
        assert_eq!(outage.end(0, now), None);
        let late = Outage::new(Some(AFTER), now);
        assert_eq!(late.end(0, now + AFTER), Some(Restored::After(AFTER)));
        assert!(!outage.lasts() && outage.opens_at().is_none());
        assert!(outage.begin(0, now + AFTER) && !outage.begin(0, now + 2 * AFTER));
        assert!(outage.lasts());
        // A silence counts even before an attempt has failed.
        let silent = outage
            .refuses(InOutage::Wait, &"a", now + 2 * AFTER)
            .unwrap();
        assert_eq!(
            silent.to_string(),
            "a has not answered for 1.0s; refused without a call"
        );
        outage.failed(0, &refused(), now);
        assert_eq!(
            outage.end(0, now + 3 * AFTER),
            Some(Restored::After(2 * AFTER))
        );
        // The error of an earlier outage does not count.
        assert!(outage.begin(0, now + 4 * AFTER));
        assert!(
            outage
                .refuses(InOutage::Refuse, &"a", now + 4 * AFTER)
                .is_none()
        );
    }

    #[test]
    fn the_end_of_an_attempt_that_was_replaced_is_no_outage() {
        let now = Instant::now();
        let outage = Outage::new(Some(AFTER), now);
        assert_eq!(outage.end(2, now), Some(Restored::First));
        assert!(!outage.begin(1, now) && !outage.failed(1, &refused(), now));
        assert!(!outage.lasts());
        assert!(outage.begin(2, now));
        assert_eq!(outage.end(1, now), None);
        assert!(outage.lasts());
        assert!(outage.failed(3, &refused(), now) && outage.error().is_some());
        assert!(outage.end(4, now).is_some() && outage.error().is_none());
    }

    #[test]
    fn a_server_that_refuses_the_client_is_asked_each_time() {
        let now = Instant::now();
        let outage = Outage::new(None, now);
        let wrong = StoreError::new(StoreErrorKind::Unauthenticated, "wrong password");
        outage.failed(0, &wrong, now);
        assert!(outage.admits(InOutage::Refuse, &"a").is_ok());
        assert!(outage.pause(0.0, now) > PAUSE);
        outage.failed(0, &refused(), now);
        assert!(outage.admits(InOutage::Refuse, &"a").is_err());
        assert_eq!(outage.pause(1.0, now), PAUSE);
    }

    #[test]
    fn the_probes_of_a_long_outage_become_rare() {
        let now = Instant::now();
        let outage = Outage::new(Some(AFTER), now);
        outage.failed(0, &refused(), now);
        let pause = |jitter, seconds| outage.pause(jitter, now + Duration::from_secs(seconds));
        assert_eq!((pause(1.0, 0), pause(0.0, 1)), (PAUSE, PAUSE / 2));
        assert_eq!(pause(1.0, 8), Duration::from_secs(1));
        assert_eq!((pause(1.0, 16), pause(1.0, 3600)), (LONG_PAUSE, LONG_PAUSE));
        assert_eq!(pause(0.0, 3600), LONG_PAUSE / 2);
        // The next outage begins anew.
        let later = now + Duration::from_secs(3600);
        outage.end(0, later);
        outage.begin(0, later);
        assert_eq!(outage.pause(1.0, later), PAUSE);
    }

    #[test]
    fn the_calls_of_a_busy_client_become_rare_too() {
        let now = Instant::now();
        let outage = Outage::new(None, now);
        let tried = |failed, at| {
            outage.failed(0, &refused(), now + failed);
            outage.shared_error(now + at).is_none()
        };
        let seconds = Duration::from_secs;
        // At first each call makes an attempt, later one a second.
        assert!(tried(MS, 2 * MS) && tried(seconds(3), seconds(3) + MS));
        assert!(!tried(seconds(8), seconds(8) + 400 * MS));
        assert!(tried(seconds(8), seconds(8) + 600 * MS));
        assert!(!tried(seconds(3600), seconds(3600) + 990 * MS));
        assert!(tried(seconds(3600), seconds(3601)));
        // One call makes the attempt for all.
        assert!(!tried(seconds(3602), seconds(3602)));
        let shared = |millis| {
            outage
                .shared_error(now + seconds(3603) + millis * MS)
                .is_some()
        };
        assert_eq!(
            [shared(0), shared(10), shared(999), shared(1000)],
            [false, true, true, false]
        );
        let wrong = StoreError::new(StoreErrorKind::Unauthenticated, "wrong password");
        outage.failed(0, &wrong, now + seconds(3600));
        assert!(outage.shared_error(now + seconds(3600)).is_none());
    }

    #[test]
    fn a_password_that_is_being_replaced_is_waited_for_within_an_outage() {
        let now = Instant::now();
        let outage = Outage::new(Some(AFTER), now);
        let wrong = StoreError::new(StoreErrorKind::Unauthenticated, "wrong password");
        outage.failed(0, &wrong.passing(true), now);
        let refuses = |in_outage, at| outage.refuses(in_outage, &"a", at);
        assert!(refuses(InOutage::Wait, now).is_none());
        for (in_outage, at) in [(InOutage::Refuse, now), (InOutage::Wait, now + AFTER)] {
            let error = refuses(in_outage, at).unwrap();
            assert_eq!(error.kind(), StoreErrorKind::Unauthenticated);
            assert!(error.is_transient());
            assert_eq!(error.ends_waits(), at > now);
            let text = error.to_string();
            assert!(
                text.starts_with("a has not accepted the client for"),
                "{text}"
            );
        }
        assert_eq!(outage.pause(1.0, now), LOGIN_PAUSE);
    }
}
