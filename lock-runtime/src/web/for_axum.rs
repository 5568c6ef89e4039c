//! Integration with axum: responses and extractors.

use std::{convert::Infallible, error::Error, fmt};

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::request::Parts;

use super::{ErrorClass, Problem};
use crate::{
    __rt::{FromLockError, Returned},
    error::LockError,
    guard::HeldLock,
};

/// Responds as in the [table](crate::web). The error itself is emitted as an event.
impl IntoResponse for LockError {
    fn into_response(self) -> Response {
        self.class().trace_of(self.name(), self.code(), &self);
        Problem::from(&self).into_response()
    }
}

/// For locked handlers that return a `Response`.
#[diagnostic::do_not_recommend]
impl FromLockError for Response {
    fn from_lock_error(error: LockError) -> Self {
        error.into_response()
    }
}

impl Returned<'_, Response> {
    /// Returns whether the handler responds with an error.
    pub fn is_failure(&self) -> bool {
        let status = self.0.status();
        status.is_client_error() || status.is_server_error()
    }
}

/// The rejection of a handler that takes a [`HeldLock`] when no layer of `lock-tower` holds one.
/// Responds with 500.
///
/// Put the layer on the route, or take `Option<HeldLock>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLocked(());

impl fmt::Display for NotLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the handler takes a `HeldLock`, and no `LockLayer` holds one for the request; put the layer on the \
             route, or take `Option<HeldLock>`",
        )
    }
}

impl Error for NotLocked {}

impl IntoResponse for NotLocked {
    fn into_response(self) -> Response {
        let (class, code) = (ErrorClass::Internal, "not_locked");
        class.trace(code, &self);
        Problem::new(class, code, ErrorClass::INTERNAL_DETAIL).into_response()
    }
}

/// Extracts the lock that the innermost `LockLayer` of `lock-tower` holds for the request.
impl<S: Sync> FromRequestParts<S> for HeldLock {
    type Rejection = NotLocked;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, NotLocked> {
        parts.extensions.get::<Self>().cloned().ok_or(NotLocked(()))
    }
}

/// Extracts `None` if no lock is held for the request.
impl<S: Sync> OptionalFromRequestParts<S> for HeldLock {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}
