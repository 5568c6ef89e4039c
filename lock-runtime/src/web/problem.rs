//! Problem documents (RFC 9457).

use std::{borrow::Cow, time::Duration};

use http::{
    HeaderValue, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};

use super::{ErrorClass, public_detail};
use crate::error::LockError;

/// A problem document: an error as an HTTP response.
#[derive(Clone, Debug)]
pub struct Problem<'a> {
    status: StatusCode,
    code: &'static str,
    detail: Cow<'a, str>,
    retry_after: Option<Duration>,
}

impl<'a> Problem<'a> {
    /// Creates a document with a stable `code` for programs and a `detail` for people.
    pub fn new(class: ErrorClass, code: &'static str, detail: impl Into<Cow<'a, str>>) -> Self {
        Self {
            status: class.into(),
            code,
            detail: detail.into(),
            retry_after: None,
        }
    }

    /// Sets a status other than that of the table.
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Sets the `Retry-After` header, in whole seconds, rounded up.
    #[must_use]
    pub fn retry_after(mut self, after: Option<Duration>) -> Self {
        self.retry_after = after;
        self
    }

    /// Converts the document into a response.
    pub fn into_response<B: From<String>>(self) -> Response<B> {
        let status = self.status;
        // The title of a problem without its own type is the phrase of the status (RFC 9457,
        // 4.2.1).
        let document = serde_json::json!({
            "type": "about:blank",
            "title": status.canonical_reason().unwrap_or("Request Refused"),
            "status": status.as_u16(),
            "detail": self.detail,
            "code": self.code,
        });
        let mut response = Response::new(B::from(document.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        let json = HeaderValue::from_static("application/problem+json");
        headers.insert(CONTENT_TYPE, json);
        if let Some(after) = self.retry_after {
            let rest = u64::from(after.subsec_nanos() > 0);
            headers.insert(RETRY_AFTER, after.as_secs().saturating_add(rest).into());
        }
        response
    }
}

impl From<&LockError> for Problem<'static> {
    fn from(error: &LockError) -> Self {
        let class = ErrorClass::from(error.kind());
        let after = class.retry_after(ErrorClass::DEFAULT_RETRY_AFTER, error.free_in());
        Self::new(class, error.code(), public_detail(error.kind())).retry_after(after)
    }
}

impl From<ErrorClass> for StatusCode {
    fn from(class: ErrorClass) -> Self {
        // All statuses of the table are valid.
        Self::from_u16(class.http_status()).unwrap_or(Self::INTERNAL_SERVER_ERROR)
    }
}
