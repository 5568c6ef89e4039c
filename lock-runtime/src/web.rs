//! What a caller over the network is told: the one table from kinds of errors to HTTP statuses and gRPC codes. The layer of
//! lock-tower answers from it, and so does a handler that returns a [`LockError`].
//!
//! | kind | HTTP | gRPC |
//! |---|---|---|
//! | `Contended`, `WaitTimeout` | 409 + `Retry-After` | `ABORTED` + `RetryInfo`; `DEADLINE_EXCEEDED` if it was the caller's own deadline |
//! | `Overloaded` | 503 + `Retry-After` | `RESOURCE_EXHAUSTED` + `RetryInfo` |
//! | `Unavailable`, `ReadOnly`, `ShuttingDown` | 503 | `UNAVAILABLE` |
//! | `Lost` | 500, no `Retry-After`: effects may exist | `ABORTED`, no `RetryInfo` |
//! | `InvalidKey` | 400: the name is made of parts of the request | `INVALID_ARGUMENT` |
//! | anything else | 500 | `INTERNAL` |
//!
//! The body is an [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457) problem document. It says the same for every error of
//! a kind: no token, no owner, no name of a lock, no address of a store. Those are in the event that goes with it.

use std::{fmt, time::Duration};

use crate::error::{LockError, LockErrorKind};

/// `Retry-After` and `RetryInfo` where nothing else is configured.
pub const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// A row of the table: what an error means to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Answer {
    /// Somebody else holds the lock: try again.
    Busy,
    /// More wait already than can be served: try again.
    Overloaded,
    /// Locks are not to be had at the moment.
    Unavailable,
    /// The lock was lost while the request was served. It may have had effects, so nobody is invited to try again.
    Lost,
    /// A part of the request that names the lock is missing or not valid.
    BadRequest,
    /// A mistake on our side.
    Internal,
}

/// The gRPC status codes of the table, with their [numbers](https://grpc.io/docs/guides/status-codes/).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "named and described by gRPC")]
pub enum GrpcCode {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    ResourceExhausted = 8,
    Aborted = 10,
    Internal = 13,
    Unavailable = 14,
}

impl From<GrpcCode> for i32 {
    fn from(code: GrpcCode) -> i32 {
        code as i32
    }
}

impl From<LockErrorKind> for Answer {
    fn from(kind: LockErrorKind) -> Self {
        match kind {
            LockErrorKind::Contended | LockErrorKind::WaitTimeout => Self::Busy,
            LockErrorKind::Overloaded => Self::Overloaded,
            // A read-only server is one that is failing over.
            LockErrorKind::Unavailable | LockErrorKind::ReadOnly | LockErrorKind::ShuttingDown => {
                Self::Unavailable
            }
            LockErrorKind::Lost(_) => Self::Lost,
            LockErrorKind::InvalidKey => Self::BadRequest,
            LockErrorKind::WouldDeadlock
            | LockErrorKind::ReleaseUnknown
            | LockErrorKind::ModeMismatch
            | LockErrorKind::ForeignKey
            | LockErrorKind::InvalidSpec
            | LockErrorKind::NoClient
            | LockErrorKind::NoRuntime
            | LockErrorKind::InvalidUrl
            | LockErrorKind::Unauthenticated
            | LockErrorKind::Forbidden
            | LockErrorKind::NotRedis
            | LockErrorKind::IncompatibleFormat => Self::Internal,
        }
    }
}

impl Answer {
    /// The HTTP status code.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Busy => 409,
            Self::Lost | Self::Internal => 500,
            Self::Overloaded | Self::Unavailable => 503,
        }
    }

    /// The gRPC status code.
    pub const fn grpc_code(self) -> GrpcCode {
        match self {
            Self::BadRequest => GrpcCode::InvalidArgument,
            Self::Busy | Self::Lost => GrpcCode::Aborted,
            Self::Overloaded => GrpcCode::ResourceExhausted,
            Self::Unavailable => GrpcCode::Unavailable,
            Self::Internal => GrpcCode::Internal,
        }
    }

    /// When the caller may try again: after `configured` or what is left of the `holder`'s lease, whichever is shorter.
    /// `None` where the table invites nobody to.
    pub fn retry_after(self, configured: Duration, holder: Option<Duration>) -> Option<Duration> {
        matches!(self, Self::Busy | Self::Overloaded)
            .then(|| holder.map_or(configured, |left| left.min(configured)))
    }

    /// Says in an event what the caller is not told: at debug what is everyday or the caller's own mistake, at warn what
    /// operators should know, at error what somebody has to mend.
    pub fn trace(self, code: &'static str, error: &dyn fmt::Display) {
        match self {
            Self::Busy | Self::BadRequest => tracing::debug!(code, %error, "request refused"),
            Self::Overloaded | Self::Unavailable | Self::Lost => {
                tracing::warn!(code, %error, "request refused")
            }
            Self::Internal => tracing::error!(code, %error, "request refused"),
        }
    }
}

/// A stable sentence for the caller. What [`LockError`] displays names the key and the store, and is for logs.
pub const fn detail(kind: LockErrorKind) -> &'static str {
    match kind {
        LockErrorKind::Contended => "The resource is in use.",
        LockErrorKind::WaitTimeout => {
            "The resource was in use for as long as the request could wait."
        }
        LockErrorKind::Overloaded => "Too many requests wait for the resource.",
        LockErrorKind::Unavailable | LockErrorKind::ReadOnly => {
            "Locks are not available at the moment."
        }
        LockErrorKind::ShuttingDown => "The server is shutting down.",
        LockErrorKind::Lost(_) => {
            "The lock on the resource was lost on the way; the request may have had effects."
        }
        LockErrorKind::InvalidKey => {
            "A part of the request that names the resource is empty, too long or has characters that it must not have."
        }
        _ => OURS,
    }
}

/// What the caller is told about a mistake on our side.
pub const OURS: &str = "The server made a mistake in locking the resource; its log says which.";

#[cfg(feature = "http")]
pub use {problem::Problem, retry_info::retry_info};

#[cfg(feature = "http")]
mod problem;
#[cfg(feature = "http")]
mod retry_info;

impl LockError {
    /// What the error means to a caller over the network.
    pub fn answer(&self) -> Answer {
        self.kind().into()
    }
}

#[cfg(feature = "axum")]
pub use for_axum::NotLocked;

#[cfg(feature = "axum")]
mod for_axum;
#[cfg(feature = "tonic")]
mod for_tonic;

#[cfg(all(test, feature = "http"))]
mod tests {
    use super::*;
    use http::{Response, header::RETRY_AFTER};

    #[test]
    fn a_wait_is_told_in_whole_seconds_rounded_up_and_never_longer_than_the_holders_lease() {
        let second = Duration::from_secs(1);
        for (configured, holder, told) in [
            (second, None, "1"),
            (second, Some(second * 20), "1"),
            (second * 5, Some(Duration::from_millis(1_200)), "2"),
            (Duration::from_millis(2_001), None, "3"),
            (second * 5, Some(Duration::from_millis(1)), "1"),
        ] {
            let after = Answer::Busy.retry_after(configured, holder);
            let response: Response<String> = Problem::new(Answer::Busy, "contended", "")
                .retry_after(after)
                .into_response();
            assert_eq!(response.headers()[RETRY_AFTER], told);
        }
        assert_eq!(Answer::Lost.retry_after(second, None), None);
    }

    #[test]
    fn a_problem_document_is_json_whatever_the_detail_says() {
        let detail = "say \"x\"\n\u{1}\\";
        let response: Response<String> =
            Problem::new(Answer::BadRequest, "bad_request", detail).into_response();
        let document: serde_json::Value = serde_json::from_str(response.body()).unwrap();
        assert_eq!(document["detail"], detail);
        assert_eq!(
            (&document["status"], &document["title"]),
            (&400.into(), &"Bad Request".into())
        );
    }

    #[test]
    fn an_error_of_the_store_is_told_without_the_store() {
        let error = LockError::new(LockErrorKind::Unavailable, "no answer from 10.1.2.3:6379");
        let response: Response<String> = Problem::from(&error).into_response();
        assert_eq!(response.status(), 503);
        assert!(!response.headers().contains_key(RETRY_AFTER));
        assert!(!response.body().contains("10.1.2.3"), "{}", response.body());
    }
}
