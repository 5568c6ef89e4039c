//! Failures of calls.

use std::time::Duration;

use deadpool::managed::{PoolError, TimeoutType};
use tokio_postgres::{Error, error::SqlState};

use super::error::{CONFLICT, GUARDED, UNBLOCK, failed};
use crate::store::{StoreError, StoreErrorKind, error::Shows};

/// The longest time for which a call waits for a connection, and for its reply.
pub(crate) const CALL: Duration = Duration::from_secs(10);

/// The reason why a call has failed.
pub(crate) enum Failure {
    /// There was no connection, so the call was not sent.
    NotSent(Unconnected),
    Refused(Error),
    TimedOut,
    /// The call was made, and its reply has no row.
    NoReply(StoreError),
}

impl Failure {
    pub(crate) fn into_store_error(self) -> StoreError {
        match self {
            Self::NotSent(unconnected) => unconnected.error,
            Self::Refused(error) => failed(&error),
            Self::TimedOut => StoreError::timed_out(CALL),
            Self::NoReply(error) => error,
        }
    }

    /// Other calls wait for the same records, which another session has locked.
    pub(crate) fn blocked() -> StoreError {
        let message = format!("other calls wait for the row; {UNBLOCK}");
        let error = StoreError::new(StoreErrorKind::Blocked, message);
        error.with_unsent(true).showing(Shows::Nothing)
    }

    fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Refused(error) => error.code(),
            _ => None,
        }
    }

    /// Returns whether a grant has to wait for a transaction of the user.
    pub(crate) fn is_guarded(&self) -> bool {
        self.code().map(SqlState::code) == Some(GUARDED)
    }

    /// Returns whether the server has undone the call because of another one, so that it can be
    /// repeated.
    pub(crate) fn is_conflict(&self) -> bool {
        self.code().is_some_and(|code| {
            *code == SqlState::T_R_SERIALIZATION_FAILURE
                || *code == SqlState::T_R_DEADLOCK_DETECTED
                || code.code() == CONFLICT
        })
    }

    /// Returns whether the server has undone all changes of the call because of one of them.
    pub(crate) fn is_undone(&self) -> bool {
        self.is_locked() || self.is_guarded() || self.is_conflict()
    }

    /// Returns whether another transaction has locked a record for too long.
    pub(crate) fn is_locked(&self) -> bool {
        self.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
    }

    /// Returns whether the connection must not be used again: a reply is still to come, or a
    /// prepared statement is gone or has other columns by now.
    pub(crate) fn spoils_connection(&self) -> bool {
        let lost = [
            SqlState::INVALID_SQL_STATEMENT_NAME,
            SqlState::FEATURE_NOT_SUPPORTED,
        ];
        matches!(self, Self::TimedOut) || self.code().is_some_and(|code| lost.contains(code))
    }

    /// Returns whether the server does not reply.
    pub(crate) fn is_outage(&self) -> bool {
        match self {
            Self::NotSent(unconnected) => unconnected.is_outage,
            Self::Refused(error) => error.is_closed() || error.code().is_none_or(ends_connections),
            Self::TimedOut => true,
            Self::NoReply(_) => false,
        }
    }
}

/// The reason why there is no connection.
pub(crate) struct Unconnected {
    error: StoreError,
    is_outage: bool,
    /// The server has no connection left for this one.
    pub(crate) is_full: bool,
}

impl Unconnected {
    pub(crate) fn new(error: StoreError) -> Self {
        Self {
            is_outage: error.kind() == StoreErrorKind::Unavailable,
            error: error.with_unsent(true),
            is_full: false,
        }
    }

    /// The server did not answer, or refused the connection.
    pub(crate) fn refused(error: &Error) -> Self {
        let is_full = error.code() == Some(&SqlState::TOO_MANY_CONNECTIONS);
        Self {
            // Other connections may work.
            is_outage: !is_full,
            is_full,
            ..Self::new(failed(error))
        }
    }

    /// The same; if the server has accepted the client before, its password is being replaced.
    pub(crate) fn of_a_client(self, was_accepted: bool) -> Self {
        let is_refused = self.error.kind() == StoreErrorKind::Unauthenticated;
        let error = self.error.passing(is_refused && was_accepted);
        Self { error, ..self }
    }

    /// The calls in progress, which have time limits of their own, left no connection.
    pub(crate) fn all_in_use() -> Self {
        let message = format!("no connection within {CALL:?}: all are in use");
        Self {
            is_outage: false,
            ..Self::new(
                StoreError::new(StoreErrorKind::Unavailable, message).showing(Shows::Nothing),
            )
        }
    }

    /// No call was made, as its caller has ended.
    pub(crate) fn unwanted() -> Self {
        Self {
            is_outage: false,
            ..Self::new(StoreError::late().showing(Shows::Nothing))
        }
    }
}

impl From<PoolError<Self>> for Unconnected {
    fn from(error: PoolError<Self>) -> Self {
        match error {
            PoolError::Backend(error) => error,
            PoolError::Timeout(TimeoutType::Wait) => Self::all_in_use(),
            PoolError::Timeout(_) => Self::new(StoreError::timed_out(CALL)),
            PoolError::Closed | PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_) => {
                let message = "the pool of connections is closed";
                Self::new(StoreError::new(StoreErrorKind::Unavailable, message))
            }
        }
    }
}

/// Returns whether the server ends its connections, as it stops or recovers from a crash.
pub(crate) fn ends_connections(code: &SqlState) -> bool {
    [
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
    ]
    .contains(code)
}
