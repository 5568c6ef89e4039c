//! What a request is told that is not served: [`Refusal`], and [`OnReject`] for those who want to say it in their own way.

use std::{borrow::Cow, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};
use lock_runtime::{
    LockError, LockErrorKind,
    web::{self, Answer, GrpcCode, Problem},
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::{
    key::KeyError,
    policy::Policy,
    protocol::{Caller, Wire},
};

/// Makes the response of a request that is refused.
///
/// Closures do:
///
/// ```
/// # use lock_tower::{LockLayer, Refusal, runtime::LockClient};
/// # use bytes::Bytes;
/// # fn layer(locks: LockClient) -> Result<LockLayer<lock_tower::KeyTemplate, impl Sized>, lock_tower::TemplateError> {
/// let layer = LockLayer::new(locks, "order:{header.idempotency-key}")?.on_reject(|refusal: &Refusal<'_>| {
///     let mut response = refusal.to_response();
///     *response.body_mut() = Bytes::from(format!("not now: {}\n", refusal.detail()));
///     response.headers_mut().remove("content-type");
///     response
/// });
/// # Ok(layer) }
/// ```
pub trait OnReject {
    /// The response to `refusal`.
    fn reject(&self, refusal: &Refusal<'_>) -> Response<Bytes>;
}

impl<F: Fn(&Refusal<'_>) -> Response<Bytes>> OnReject for F {
    fn reject(&self, refusal: &Refusal<'_>) -> Response<Bytes> {
        self(refusal)
    }
}

/// Refuses with [`Refusal::to_response`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct StandardReject {}

impl OnReject for StandardReject {
    fn reject(&self, refusal: &Refusal<'_>) -> Response<Bytes> {
        refusal.to_response()
    }
}

/// Why a request is refused.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// It does not say which lock it needs.
    Key(KeyError),
    /// The lock was not to be had, or was lost.
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

/// A request that is refused, and what to say about it. The reason itself is for the log: it names the lock and the store.
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
            Reason::Lock(error) => error.retry_after(),
        };
        // A caller whose own deadline has passed is past trying again.
        if refusal.grpc_code() != GrpcCode::DeadlineExceeded {
            refusal.retry_after = refusal
                .answer()
                .retry_after(policy.longest_retry_after(), holder);
        }
        refusal
    }

    /// Why.
    pub fn reason(&self) -> &'a Reason {
        self.reason
    }

    /// What the caller understands.
    pub fn wire(&self) -> Wire {
        self.caller.wire
    }

    /// The row of the table of refusals.
    pub fn answer(&self) -> Answer {
        match self.reason {
            Reason::Key(error) => error.answer(),
            Reason::Lock(error) => error.answer(),
        }
    }

    /// The policy under which the request was to be served.
    pub fn policy(&self) -> &'a Policy {
        self.policy
    }

    /// The HTTP status, whatever the caller understands.
    pub fn status(&self) -> StatusCode {
        self.policy.status_of(self.answer())
    }

    /// A stable text for programs, such as `wait_timeout`.
    pub fn code(&self) -> &'static str {
        match self.reason {
            Reason::Key(error) => error.code(),
            Reason::Lock(error) => error.code(),
        }
    }

    /// A sentence for people, fit for the caller.
    pub fn detail(&self) -> Cow<'static, str> {
        match self.reason {
            Reason::Key(error) if error.answer() == Answer::BadRequest => {
                Cow::Owned(error.to_string())
            }
            Reason::Key(_) => Cow::Borrowed(web::OURS),
            Reason::Lock(error) => Cow::Borrowed(web::detail(error.kind())),
        }
    }

    /// When to try again, where the caller may; `None` also where its own deadline has passed.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// The standard response: a problem document, or a trailers-only status for gRPC.
    pub fn to_response(&self) -> Response<Bytes> {
        match self.caller.wire {
            Wire::Http => {
                let problem = Problem::new(self.answer(), self.code(), self.detail());
                problem
                    .status(self.status())
                    .retry_after(self.retry_after)
                    .into_response()
            }
            Wire::Grpc => trailers_only(self.trailers()),
        }
    }

    /// What a gRPC stream ends with that had begun.
    pub(crate) fn trailers(&self) -> HeaderMap {
        grpc_status(self.grpc_code(), &self.detail(), self.retry_after)
    }

    /// The gRPC status, whatever the caller understands.
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
            _ => self.answer().grpc_code(),
        }
    }

    pub(crate) fn trace(&self) {
        match self.reason {
            Reason::Key(error) => self.answer().trace(self.code(), error),
            Reason::Lock(error) => self.answer().trace(self.code(), error),
        }
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

/// `grpc-status`, `grpc-message`, and the details of who may try again.
fn grpc_status(code: GrpcCode, message: &str, retry_after: Option<Duration>) -> HeaderMap {
    /// What `grpc-message` must not have as it stands, beside what is not ASCII.
    const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');
    let mut headers = HeaderMap::new();
    headers.insert(
        HeaderName::from_static("grpc-status"),
        i32::from(code).into(),
    );
    if let Some(after) = retry_after {
        // Binary values go without padding, as gRPC has it.
        let details = STANDARD_NO_PAD.encode(web::retry_info(code, message, after));
        if let Ok(details) = HeaderValue::try_from(details) {
            headers.insert(HeaderName::from_static("grpc-status-details-bin"), details);
        }
    }
    let message = utf8_percent_encode(message, ESCAPED).to_string();
    // What is percent-encoded is visible ASCII, which every header takes, as is base64.
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
            http2: true,
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
