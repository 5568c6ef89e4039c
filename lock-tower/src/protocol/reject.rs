//! Responses to refused requests: [`Refusal`], and [`OnReject`] to customize them.

use std::{borrow::Cow, fmt, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};
use lock_runtime::{
    ErrorClass, LockError, LockErrorKind,
    web::{self, GrpcCode, Problem},
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::wire::{Caller, Wire};
use crate::{key::KeyError, policy::Policy};

/// Trait for making the response to a refused request.
///
/// Closures implement it:
///
/// ```
/// # use lock_tower::{LockLayer, Refusal, runtime::LockClient};
/// # use bytes::Bytes;
/// # use lock_tower::{KeyTemplate, TemplateError};
/// # fn layer(locks: LockClient) -> Result<LockLayer<KeyTemplate, impl Sized>, TemplateError> {
/// let layer = LockLayer::new(locks, "order:{header.idempotency-key}")?;
/// let layer = layer.on_reject(|refusal: &Refusal<'_>| {
///     let mut response = refusal.to_response();
///     *response.body_mut() = Bytes::from(format!("not now: {}\n", refusal.detail()));
///     response.headers_mut().remove("content-type");
///     response
/// });
/// # Ok(layer) }
/// ```
pub trait OnReject {
    /// Returns the response to `refusal`.
    fn reject(&self, refusal: &Refusal<'_>) -> Response<Bytes>;
}

impl<F: Fn(&Refusal<'_>) -> Response<Bytes>> OnReject for F {
    fn reject(&self, refusal: &Refusal<'_>) -> Response<Bytes> {
        self(refusal)
    }
}

/// The default [`OnReject`], which responds with [`Refusal::to_response`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct StandardReject {}

impl OnReject for StandardReject {
    fn reject(&self, refusal: &Refusal<'_>) -> Response<Bytes> {
        refusal.to_response()
    }
}

/// The reason for a refusal.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// The key of the lock cannot be extracted from the request.
    Key(KeyError),
    /// The lock was not acquired, or was lost.
    Lock(LockError),
}

impl From<KeyError> for Reason {
    fn from(error: KeyError) -> Self {
        match error {
            KeyError::Lock(error) => Self::Lock(error),
            error => Self::Key(error),
        }
    }
}

impl From<LockError> for Reason {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

/// A refused request, and the contents of its response. The [`reason`](Self::reason) itself is
/// for logs only: it names the lock and the store.
#[derive(Clone, Debug)]
pub struct Refusal<'a> {
    reason: &'a Reason,
    caller: Caller,
    policy: &'a Policy,
    retry_after: Option<Duration>,
}

impl<'a> Refusal<'a> {
    pub(crate) fn new(reason: &'a Reason, caller: Caller, policy: &'a Policy) -> Self {
        let mut refusal = Self {
            reason,
            caller,
            policy,
            retry_after: None,
        };
        let holder = match reason {
            Reason::Key(_) => None,
            Reason::Lock(error) => error.free_in(),
        };
        // After the deadline of the caller, a retry is useless.
        if refusal.grpc_code() != GrpcCode::DeadlineExceeded {
            refusal.retry_after = refusal
                .class()
                .retry_after(policy.longest_retry_after(), holder);
        }
        refusal
    }

    /// Returns the reason. It names the lock and the store, so do not send it to the caller.
    pub fn reason(&self) -> &'a Reason {
        self.reason
    }

    /// Returns the kind of response that the caller expects.
    pub fn wire(&self) -> Wire {
        self.caller.wire
    }

    /// Returns the class of the reason: a row of the table of refusals.
    pub fn class(&self) -> ErrorClass {
        match self.reason {
            Reason::Key(error) => error.class(),
            Reason::Lock(error) => error.class(),
        }
    }

    /// Returns the policy of the request.
    pub fn policy(&self) -> &'a Policy {
        self.policy
    }

    /// Returns the HTTP status, also for a gRPC caller.
    pub fn status(&self) -> StatusCode {
        self.policy.status_of(self.class())
    }

    /// Returns a stable code for programs, such as `wait_timeout`.
    pub fn code(&self) -> &'static str {
        match self.reason {
            Reason::Key(error) => error.code(),
            Reason::Lock(error) => error.code(),
        }
    }

    /// Returns a human-readable sentence that is safe to send to the caller.
    pub fn detail(&self) -> Cow<'static, str> {
        match self.reason {
            Reason::Key(error) if error.class() == ErrorClass::BadRequest => {
                Cow::Owned(error.to_string())
            }
            Reason::Key(_) => Cow::Borrowed(ErrorClass::INTERNAL_DETAIL),
            Reason::Lock(error) => Cow::Borrowed(web::public_detail(error.kind())),
        }
    }

    /// Returns the delay before a retry. `None` if the caller should not retry, or if its own
    /// deadline has passed.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Returns the standard response: a problem document, or a trailers-only gRPC status.
    pub fn to_response(&self) -> Response<Bytes> {
        match self.caller.wire {
            Wire::Http => {
                let problem = Problem::new(self.class(), self.code(), self.detail());
                problem
                    .status(self.status())
                    .retry_after(self.retry_after)
                    .into_response()
            }
            Wire::Grpc => trailers_only(self.trailers()),
        }
    }

    /// Returns the trailers that end a gRPC stream that has already begun.
    pub(crate) fn trailers(&self) -> HeaderMap {
        grpc_status(self.grpc_code(), &self.detail(), self.retry_after)
    }

    /// Returns the gRPC status, also for a caller that does not speak gRPC.
    pub fn grpc_code(&self) -> GrpcCode {
        match self.reason {
            Reason::Lock(error)
                if self.caller.hurried
                    && matches!(
                        error.kind(),
                        LockErrorKind::WaitTimeout | LockErrorKind::Unavailable
                    ) =>
            {
                GrpcCode::DeadlineExceeded
            }
            _ => self.class().grpc_code(),
        }
    }

    pub(crate) fn trace(&self) {
        let error: &dyn fmt::Display = match self.reason {
            Reason::Key(error) => error,
            Reason::Lock(error) => error,
        };
        let name = Some(self.policy.name());
        self.class().trace_of(name, self.code(), error);
    }
}

/// A gRPC response without a body, its status in the headers: see "Trailers-Only" in the
/// [protocol](https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#responses).
fn trailers_only(trailers: HeaderMap) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    *response.headers_mut() = trailers;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// A gRPC response without a body that refuses a request for good.
#[cfg(feature = "once")]
pub(crate) fn refused_in_grpc(code: GrpcCode, detail: &str) -> Response<Bytes> {
    trailers_only(grpc_status(code, detail, None))
}

/// Builds `grpc-status`, `grpc-message` and, if the caller may retry, the status details.
fn grpc_status(code: GrpcCode, message: &str, retry_after: Option<Duration>) -> HeaderMap {
    /// Characters that `grpc-message` must escape, in addition to those outside of ASCII.
    const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');
    let mut headers = HeaderMap::new();
    headers.insert(
        HeaderName::from_static("grpc-status"),
        i32::from(code).into(),
    );
    if let Some(after) = retry_after {
        // gRPC encodes binary values without padding.
        let details = STANDARD_NO_PAD.encode(web::retry_info(code, message, after));
        if let Ok(details) = HeaderValue::try_from(details) {
            headers.insert(HeaderName::from_static("grpc-status-details-bin"), details);
        }
    }
    let message = utf8_percent_encode(message, ESCAPED).to_string();
    // Percent-encoded text and base64 are visible ASCII, which is valid in all headers.
    if let Ok(message) = HeaderValue::try_from(message) {
        headers.insert(HeaderName::from_static("grpc-message"), message);
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grpc_message_is_percent_encoded() {
        let reason = Reason::Key(KeyError::bad_request("100 % \u{e9}t\u{e9}\n"));
        let caller = Caller {
            wire: Wire::Grpc,
            hurried: false,
        };
        let policy = Policy::new("test");
        let response = Refusal::new(&reason, caller, &policy).to_response();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["grpc-status"], "3");
        assert_eq!(
            response.headers()["grpc-message"],
            "100 %25 %C3%A9t%C3%A9%0A"
        );
    }
}
