//! Error responses over HTTP and gRPC: the mapping from error kinds to status codes.
//!
//! The layer of `lock-tower` responds as in this table, and so does a handler that returns a
//! [`LockError`].
//!
//! | kind | HTTP | gRPC |
//! |---|---|---|
//! | `Contended`, `WaitTimeout` | 409 + `Retry-After` | `ABORTED` + `RetryInfo` (see below) |
//! | `Blocked` | the same | the same |
//! | `Overloaded` | 503 + `Retry-After` | `RESOURCE_EXHAUSTED` + `RetryInfo` |
//! | `Unavailable`, `ReadOnly`, `Full`, `ShuttingDown` | 503 | `UNAVAILABLE` |
//! | `Lost` | 500, no `Retry-After`: effects may exist | `ABORTED`, no `RetryInfo` |
//! | `InvalidKey` | 400: the name is built from parts of the request | `INVALID_ARGUMENT` |
//! | any other | 500 | `INTERNAL` |
//!
//! If the wait was ended by the caller's own deadline, the gRPC code is `DEADLINE_EXCEEDED`,
//! without `RetryInfo`.
//!
//! The body is a problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)). It is the
//! same for every error of a kind and contains no token, no owner, no name of a lock and no
//! address of a store. These details are in the event that is emitted with the response.

use std::{fmt, time::Duration};

use crate::{
    error::{ErrorClass, LockError, LockErrorKind},
    observe::log,
};

/// The gRPC [status codes](https://grpc.io/docs/guides/status-codes/) of the table, with their
/// numbers.
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

impl ErrorClass {
    /// The default of `Retry-After` and `RetryInfo`.
    pub const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);
    /// The [`public_detail`] of an internal error.
    pub const INTERNAL_DETAIL: &str =
        "An internal error occurred while locking the resource; see the log of the server.";

    /// Returns the HTTP status code.
    pub const fn http_status(self) -> u16 {
        self.statuses().0
    }

    /// Returns the gRPC status code.
    pub const fn grpc_code(self) -> GrpcCode {
        self.statuses().1
    }

    const fn statuses(self) -> (u16, GrpcCode) {
        match self {
            Self::BadRequest => (400, GrpcCode::InvalidArgument),
            Self::Busy => (409, GrpcCode::Aborted),
            Self::Lost => (500, GrpcCode::Aborted),
            Self::Internal => (500, GrpcCode::Internal),
            Self::Overloaded => (503, GrpcCode::ResourceExhausted),
            Self::Unavailable => (503, GrpcCode::Unavailable),
        }
    }

    /// Returns the time after which the caller may retry: `configured`, or the rest of the
    /// `holder`'s lease if that is shorter.
    ///
    /// Returns `None` if the table does not invite a retry.
    pub fn retry_after(self, configured: Duration, holder: Option<Duration>) -> Option<Duration> {
        matches!(self, Self::Busy | Self::Overloaded)
            .then(|| holder.map_or(configured, |left| left.min(configured)))
    }

    /// Emits an event with the details that the response omits.
    ///
    /// The level is debug for everyday refusals and mistakes of the caller, warn for conditions
    /// that operators should know about, and error for problems that have to be fixed.
    ///
    /// Of the events at level warn and error, the first of a `code` is emitted at once, then one
    /// for ten seconds, with the number of those left out before it as `left_out`.
    #[doc(hidden)]
    pub fn trace(self, code: &'static str, error: &dyn fmt::Display) {
        self.trace_of(None, code, error);
    }

    /// Same as [`trace`](Self::trace) for a request under the policy, or to the function, of this
    /// name.
    #[doc(hidden)]
    pub fn trace_of(self, name: Option<&str>, code: &'static str, error: &dyn fmt::Display) {
        // `{error:#}` includes the cause.
        let is_usual = matches!(self, Self::Busy | Self::BadRequest);
        // An operator has to end that session.
        if is_usual && code != LockErrorKind::Blocked.code() {
            tracing::debug!(
                code,
                name,
                error = format_args!("{error:#}"),
                "request refused"
            );
            return;
        }
        log::summarise("request refused", code, name, |left_out| {
            let error = format!("{error:#}");
            match self {
                Self::Internal => {
                    tracing::error!(code, name, left_out, %error, "request refused")
                }
                _ => tracing::warn!(code, name, left_out, %error, "request refused"),
            }
        });
    }
}

/// Returns a stable sentence for the caller. The message of a [`LockError`] contains the key
/// and the store, and is for logs.
pub const fn public_detail(kind: LockErrorKind) -> &'static str {
    match kind {
        LockErrorKind::Contended | LockErrorKind::Blocked => "The resource is in use.",
        LockErrorKind::Running => "The work under this key is being done.",
        LockErrorKind::Done => "The work under this key is done.",
        LockErrorKind::WaitTimeout => {
            "The resource was in use for as long as the request could wait."
        }
        LockErrorKind::Overloaded => "Too many requests wait.",
        LockErrorKind::Unavailable | LockErrorKind::ReadOnly | LockErrorKind::Full => {
            "Locks are not available at the moment."
        }
        LockErrorKind::ShuttingDown => "The server is shutting down.",
        LockErrorKind::Lost(_) => {
            "The lock on the resource was lost while the request was served; the request may have had effects."
        }
        LockErrorKind::InvalidKey => {
            "A part of the request that names the resource is empty, too long or contains invalid characters."
        }
        _ => ErrorClass::INTERNAL_DETAIL,
    }
}

#[cfg(feature = "http")]
pub use {problem::Problem, retry_info::retry_info};

#[cfg(feature = "http")]
mod problem;
#[cfg(feature = "http")]
mod retry_info;

impl LockError {
    /// Returns the class of the error in responses over the network.
    pub fn class(&self) -> ErrorClass {
        self.kind().into()
    }
}

#[cfg(feature = "axum-08")]
pub use {for_axum::NotLocked, readiness::readiness};

#[cfg(feature = "axum-08")]
mod for_axum;
#[cfg(feature = "tonic-014")]
mod for_tonic;
#[cfg(feature = "axum-08")]
mod readiness;

#[cfg(all(test, feature = "http"))]
mod tests {
    use super::*;
    use http::{Response, header::RETRY_AFTER};

    #[test]
    fn retry_after_is_in_whole_seconds_rounded_up() {
        let second = Duration::from_secs(1);
        for (configured, holder, expected) in [
            (second, None, "1"),
            (second, Some(second * 20), "1"),
            (second * 5, Some(Duration::from_millis(1_200)), "2"),
            (Duration::from_millis(2_001), None, "3"),
            (second * 5, Some(Duration::from_millis(1)), "1"),
        ] {
            let after = ErrorClass::Busy.retry_after(configured, holder);
            let response: Response<String> = Problem::new(ErrorClass::Busy, "contended", "")
                .retry_after(after)
                .into_response();
            assert_eq!(response.headers()[RETRY_AFTER], expected);
        }
        assert_eq!(ErrorClass::Lost.retry_after(second, None), None);
    }

    #[test]
    fn a_problem_document_is_json_whatever_the_detail_says() {
        let detail = "say \"x\"\n\u{1}\\";
        let response: Response<String> =
            Problem::new(ErrorClass::BadRequest, "bad_request", detail).into_response();
        let document: serde_json::Value = serde_json::from_str(response.body()).unwrap();
        assert_eq!(document["detail"], detail);
        assert_eq!(document["status"], 400);
        assert_eq!(document["title"], "Bad Request");
    }

    #[test]
    fn a_problem_does_not_show_the_address_of_the_store() {
        let error = LockError::new(LockErrorKind::Unavailable, "no answer from 10.1.2.3:6379");
        let response: Response<String> = Problem::from(&error).into_response();
        assert_eq!(response.status(), 503);
        assert!(!response.headers().contains_key(RETRY_AFTER));
        assert!(!response.body().contains("10.1.2.3"), "{}", response.body());
    }
}
