//! The quarantine of a server of a quorum: it does not vote until every lease that it may have
//! forgotten is over (rule 30 of docs/PROTOCOL.md).
//!
//! The uptime reveals a server that was restarted, even with an old copy of its data. A marker,
//! which is deleted with the data, reveals a server whose data is gone. Neither is enough alone.

use std::time::Duration;

use super::super::error::unavailable;
use crate::{shell::time::Instant, store::StoreError};

/// The resolution of the uptime, which is in whole seconds. The first of them may be a short one.
const COARSE: Duration = Duration::from_secs(1);

/// The identity of a server on one connection, and the end of its quarantine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenure {
    /// The server votes from this instant on.
    votes_from: Instant,
    /// The marker of the server's data. An acquire is refused if the server has another one.
    pub(crate) marker: String,
    /// The `run_id` of the server, which is new after every restart.
    pub(crate) run_id: Option<String>,
}

impl Tenure {
    /// The tenure of a server that, at `replied` at the latest, had been up for `uptime`, and had
    /// had its data for `with_data`.
    pub(crate) fn new(
        longest_lease: Duration,
        uptime: Duration,
        with_data: Duration,
        marker: String,
        replied: Instant,
    ) -> Self {
        let after_start = (longest_lease + COARSE).saturating_sub(uptime);
        let after_loss = longest_lease.saturating_sub(with_data);
        Self {
            votes_from: replied + after_start.max(after_loss),
            marker,
            run_id: None,
        }
    }

    /// Whether both are the same run of the server, with the same data.
    pub(crate) fn is_of_the_same(&self, other: &Self) -> bool {
        (&self.run_id, &self.marker) == (&other.run_id, &other.marker)
    }

    /// Votes no earlier than `before`, which is of the same server and data.
    pub(crate) fn continues(&mut self, before: &Self) {
        self.not_before(before.votes_from);
    }

    /// Delays the vote until `votes_from` at the earliest.
    pub(crate) fn not_before(&mut self, votes_from: Instant) {
        self.votes_from = self.votes_from.max(votes_from);
    }

    /// The remaining time of the quarantine; `None` if the server votes.
    pub(crate) fn keeps_away(&self, now: Instant) -> Option<Duration> {
        let left = self.votes_from.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// # Errors
    /// `Unavailable` as long as the server may have forgotten a lock.
    pub(crate) fn check(&self, now: Instant) -> Result<(), StoreError> {
        let Some(left) = self.keeps_away(now) else {
            return Ok(());
        };
        let message = format!(
            "it was restarted, or has new data, and may have forgotten a lock: it votes in {left:.0?}"
        );
        Err(unavailable(message).with_unsent(true))
    }
}

/// The error for a connection that is older than a change of the server.
pub(crate) fn has_changed() -> StoreError {
    unavailable("another connection has found it restarted, or with other data").with_unsent(true)
}

/// The error for data that was deleted while the connection was up.
pub(crate) fn lost_its_data() -> StoreError {
    unavailable("its data was deleted, including its record of locks")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);
    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn server_votes_once_all_forgotten_leases_have_expired() {
        let now = Instant::now();
        let tenure = |uptime, with_data| Tenure::new(LEASE, uptime, with_data, String::new(), now);
        let keeps_away = |uptime, with_data| tenure(uptime, with_data).keeps_away(now);
        let second = Duration::from_secs(1);
        assert_eq!(keeps_away(LONG, LONG), None);
        // Restarted from an old snapshot that contains the marker.
        assert_eq!(keeps_away(second, LONG), Some(LEASE));
        // The data was deleted while the server was running.
        assert_eq!(keeps_away(LONG, second), Some(LEASE - second));
        assert!(tenure(LONG, Duration::ZERO).check(now + LEASE).is_ok());
        let error = tenure(LONG, Duration::ZERO).check(now).unwrap_err();
        assert!(error.is_unsent() && error.to_string().contains("votes in 30s"));
    }
}
