//! [`OnceBody`], and the bodies of requests that have been read.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};

use crate::protocol::body::BoxError;

/// Trait for the body of a request that is made of bytes that have been read. It is implemented for
/// the bodies of axum and tonic (features `axum-08` and `tonic-014`) and of http-body-util.
pub trait FromBytes {
    /// Returns a body of these bytes.
    fn from_bytes(bytes: Bytes) -> Self;
}

impl FromBytes for Full<Bytes> {
    fn from_bytes(bytes: Bytes) -> Self {
        Self::new(bytes)
    }
}

impl<E> FromBytes for UnsyncBoxBody<Bytes, E> {
    fn from_bytes(bytes: Bytes) -> Self {
        Self::new(Full::new(bytes).map_err(|never| match never {}))
    }
}

#[cfg(feature = "axum-08")]
impl FromBytes for axum::body::Body {
    fn from_bytes(bytes: Bytes) -> Self {
        bytes.into()
    }
}

#[cfg(feature = "tonic-014")]
impl FromBytes for tonic::body::Body {
    fn from_bytes(bytes: Bytes) -> Self {
        Self::new(Full::new(bytes))
    }
}

/// The body of a response: that of the inner service, of a stored response or of a refusal.
pub struct OnceBody(UnsyncBoxBody<Bytes, BoxError>);

impl OnceBody {
    pub(super) fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self(UnsyncBoxBody::new(body.map_err(Into::into)))
    }

    pub(super) fn of(bytes: Bytes) -> Self {
        Self::new(Full::new(bytes))
    }
}

/// An empty body.
impl Default for OnceBody {
    fn default() -> Self {
        Self::of(Bytes::new())
    }
}

impl Body for OnceBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl fmt::Debug for OnceBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnceBody").finish_non_exhaustive()
    }
}
