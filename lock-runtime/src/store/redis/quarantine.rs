//! When a server that is one of several may vote: not before every lease is over that it may have forgotten (PROTOCOL 30).
//!
//! A server that was restarted, even with its data of a while ago, tells so by its uptime. One whose data were deleted tells
//! so by a marker that is gone with them. Either alone is not enough.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::{StoreError, StoreErrorKind};

/// The uptime is told in whole seconds, of which the first may be a short one.
const COARSE: Duration = Duration::from_secs(1);

/// What a server is like on one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenure {
    /// It votes from then on.
    votes_from: Instant,
    /// What the marker of its data says. An acquire is refused where it says something else.
    pub(crate) marker: String,
    /// What the server calls its present life.
    pub(crate) run_id: Option<String>,
}

impl Tenure {
    /// A server that was asked at `asked` has been up for `uptime`, and has had its data for `with_data`.
    pub(crate) fn new(
        longest_lease: Duration,
        uptime: Duration,
        with_data: Duration,
        marker: String,
        asked: Instant,
    ) -> Self {
        let after_start = (longest_lease + COARSE).saturating_sub(uptime);
        let after_loss = longest_lease.saturating_sub(with_data);
        Self {
            votes_from: asked + after_start.max(after_loss),
            marker,
            run_id: None,
        }
    }

    pub(crate) fn with_run_id(self, run_id: Option<String>) -> Self {
        Self { run_id, ..self }
    }

    /// Is it the same life of the server, with the same data?
    pub(super) fn is_of_the_same(&self, other: &Self) -> bool {
        (&self.run_id, &self.marker) == (&other.run_id, &other.marker)
    }

    /// It votes from then on at the earliest.
    pub(super) fn not_before(self, votes_from: Instant) -> Self {
        Self {
            votes_from: self.votes_from.max(votes_from),
            ..self
        }
    }

    /// How long it does not vote yet.
    pub(crate) fn keeps_away(&self, now: Instant) -> Option<Duration> {
        self.votes_from
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// # Errors
    /// `Unavailable` as long as it may have forgotten a lock.
    pub(crate) fn check(&self, now: Instant) -> Result<(), StoreError> {
        match self.keeps_away(now) {
            None => Ok(()),
            Some(left) => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                format!("it was restarted, or has new data, and may have forgotten a lock: it votes in {left:.0?}"),
            )
            .with_unsent(true)),
        }
    }
}

/// The data were deleted under a connection that stands.
pub(crate) fn lost_its_data() -> StoreError {
    StoreError::new(
        StoreErrorKind::Unavailable,
        "its data were deleted, and with them what it knew of locks",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);
    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn a_server_votes_once_every_lease_is_over_that_it_may_have_forgotten() {
        let now = Instant::now();
        let tenure = |uptime, with_data| Tenure::new(LEASE, uptime, with_data, String::new(), now);
        assert_eq!(tenure(LONG, LONG).keeps_away(now), None);
        // Restarted from an old snapshot, the marker is there.
        assert_eq!(
            tenure(Duration::from_secs(1), LONG).keeps_away(now),
            Some(LEASE)
        );
        // Its data were deleted while it ran.
        assert_eq!(
            tenure(LONG, Duration::from_secs(1)).keeps_away(now),
            Some(LEASE - Duration::from_secs(1))
        );
        assert!(tenure(LONG, Duration::ZERO).check(now + LEASE).is_ok());
        let error = tenure(LONG, Duration::ZERO).check(now).unwrap_err();
        assert!(
            error.is_unsent() && error.to_string().contains("votes in 30s"),
            "{error}"
        );
    }
}
