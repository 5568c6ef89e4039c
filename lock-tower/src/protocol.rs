//! [`Protocol`]: how a service that is locked takes part in what its callers speak. [`Http`] answers refusals with a
//! response, [`Plain`] with an error.

use std::{any::type_name, error::Error, fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, Version, header::CONTENT_TYPE};
use http_body::Body;
use lock_runtime::{HeldLock, LockError, LockGuard};

use crate::{
    body::LockBody,
    key::KeyError,
    policy::Policy,
    reject::{OnReject, Reason, Refusal, StandardReject},
    watch::Watch,
};

/// How a service with these requests, responses and errors is answered for. Sealed: [`Http`] and [`Plain`] are all there are.
pub trait Protocol<Req, Res, Err>: sealed::Sealed {
    /// What the locked service answers.
    type Response;
    /// How the locked service fails.
    type Error;

    /// Who asks.
    #[doc(hidden)]
    fn caller(&self, req: &Req) -> Caller;
    /// How long the caller will wait for an answer, if it says.
    #[doc(hidden)]
    fn patience(&self, req: &Req) -> Option<Duration>;
    /// Lets the inner service see the lock.
    #[doc(hidden)]
    fn enter(req: &mut Req, held: HeldLock);
    /// Does the lock go out with this response, to be released when it has been sent?
    #[doc(hidden)]
    fn keeps(&self, response: &Res, policy: &Policy) -> bool;
    /// Lets the inner service see no lock, not that of a layer further out either.
    #[doc(hidden)]
    fn leave(req: &mut Req);
    /// What the inner service has answered; with the lock, if the response keeps it.
    #[doc(hidden)]
    fn served(
        &self,
        result: Result<Res, Err>,
        guard: Option<(LockGuard, Watch)>,
        caller: Caller,
    ) -> Result<Self::Response, Self::Error>;
    /// What is answered in its place.
    #[doc(hidden)]
    fn refused(
        &self,
        reason: Reason,
        caller: Caller,
        policy: &Policy,
    ) -> Result<Self::Response, Self::Error>;
}

mod sealed {
    pub trait Sealed {}
    impl<R> Sealed for super::Http<R> {}
    impl Sealed for super::Plain {}
}

/// What a caller over HTTP understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wire {
    /// Status codes and bodies.
    Http,
    /// gRPC: its request has the content type `application/grpc`, and statuses are in trailers.
    Grpc,
}

/// Who is told of a refusal.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub(crate) wire: Wire,
    /// Trailers reach it.
    pub(crate) http2: bool,
    /// The wait for the lock was cut short, because the caller would have been gone.
    pub(crate) hurried: bool,
}

/// `application/grpc`, `application/grpc+proto`, but not `application/grpc-web`, which has no trailers of its own.
fn is_grpc(headers: &HeaderMap) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.as_bytes().split_at_checked(GRPC.len()));
    content_type.is_some_and(|(start, rest)| {
        start.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}

/// An answer is on its way so long, at most, before the caller's deadline. Without it the timers of server and client,
/// which have the same deadline and were set earlier, would always come first.
const WAY_BACK: Duration = Duration::from_millis(50);

/// The [`grpc-timeout`](https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests) of a request: at most
/// eight digits and a unit. What is not one says nothing.
fn grpc_timeout(value: &HeaderValue) -> Option<Duration> {
    let (number, unit) = value
        .to_str()
        .ok()?
        .split_at_checked(value.len().checked_sub(1)?)?;
    if number.is_empty() || number.len() > 8 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = number.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Refuses with a response that `R` makes. The inner error stays as it is, so axum's `Infallible` does too, and no
/// `HandleErrorLayer` is needed. The inner service finds a [`HeldLock`] in the request's extensions.
#[derive(Clone)]
pub struct Http<R = StandardReject> {
    on_reject: R,
}

/// How long a lock is held for a request over HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hold {
    /// Until the inner service has answered; the release is awaited before the *head* of the response goes out. A body
    /// that is streamed is sent without the lock.
    #[default]
    Response,
    /// Until the last frame of the body, trailers included, or until the body is dropped. The last frame goes out when
    /// the lock is free. When the lock is lost before, the body ends with an error, and a gRPC stream with trailers that
    /// say so.
    ///
    /// A response that switches protocols (101, WebSockets) has no body, and its lock ends with its head.
    ///
    /// A client that stops reading keeps the lock: set [`max_hold`](crate::LockLayer::max_hold) with it. A server asks
    /// for no frame while the client takes none, and so notices a loss, too, with the next one. Over HTTP/1.0, whose
    /// bodies end with their connection, a client cannot tell an error from the end.
    Body,
}

impl Default for Http {
    fn default() -> Self {
        Self::new(StandardReject::default())
    }
}

impl<R> Http<R> {
    pub(crate) fn new(on_reject: R) -> Self {
        Self { on_reject }
    }
}

impl<R> fmt::Debug for Http<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http")
            .field("on_reject", &format_args!("{}", type_name::<R>()))
            .finish()
    }
}

impl<ReqBody, ResBody: Body, Err, R: OnReject> Protocol<Request<ReqBody>, Response<ResBody>, Err>
    for Http<R>
{
    type Response = Response<LockBody<ResBody>>;
    type Error = Err;

    fn caller(&self, req: &Request<ReqBody>) -> Caller {
        let wire = if is_grpc(req.headers()) {
            Wire::Grpc
        } else {
            Wire::Http
        };
        Caller {
            wire,
            http2: req.version() == Version::HTTP_2,
            hurried: false,
        }
    }

    fn patience(&self, req: &Request<ReqBody>) -> Option<Duration> {
        let deadline = req
            .headers()
            .get("grpc-timeout")
            .filter(|_| is_grpc(req.headers()))
            .and_then(grpc_timeout);
        deadline.map(|deadline| deadline - (deadline / 10).min(WAY_BACK))
    }

    fn enter(req: &mut Request<ReqBody>, held: HeldLock) {
        req.extensions_mut().insert(held);
    }

    fn leave(req: &mut Request<ReqBody>) {
        req.extensions_mut().remove::<HeldLock>();
    }

    fn keeps(&self, response: &Response<ResBody>, policy: &Policy) -> bool {
        policy.is_held_for_the_body() && !response.body().is_end_stream()
    }

    fn served(
        &self,
        result: Result<Response<ResBody>, Err>,
        guard: Option<(LockGuard, Watch)>,
        caller: Caller,
    ) -> Result<Self::Response, Err> {
        result.map(|response| {
            // Whoever has asked as gRPC does, and is answered otherwise, would take trailers for a clean end.
            let is_grpc = caller.http2 && caller.wire == Wire::Grpc && is_grpc(response.headers());
            let wire = if is_grpc { Wire::Grpc } else { Wire::Http };
            response.map(|body| match guard {
                Some((guard, watch)) => LockBody::held(body, guard, watch, wire),
                None => LockBody::served(body),
            })
        })
    }

    fn refused(
        &self,
        reason: Reason,
        caller: Caller,
        policy: &Policy,
    ) -> Result<Self::Response, Err> {
        let refusal = Refusal::new(&reason, caller, policy);
        refusal.trace();
        Ok(self
            .on_reject
            .reject(&refusal)
            .map(|body: Bytes| LockBody::refused(body)))
    }
}

/// Refuses with an error: [`ServiceError`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Plain {}

impl<Req, Res, Err> Protocol<Req, Res, Err> for Plain {
    type Response = Res;
    type Error = ServiceError<Err>;

    fn caller(&self, _req: &Req) -> Caller {
        Caller {
            wire: Wire::Http,
            http2: false,
            hurried: false,
        }
    }

    fn patience(&self, _req: &Req) -> Option<Duration> {
        None
    }

    fn enter(_req: &mut Req, _held: HeldLock) {}

    fn leave(_req: &mut Req) {}

    fn keeps(&self, _response: &Res, _policy: &Policy) -> bool {
        false
    }

    fn served(
        &self,
        result: Result<Res, Err>,
        _guard: Option<(LockGuard, Watch)>,
        _caller: Caller,
    ) -> Result<Res, ServiceError<Err>> {
        result.map_err(ServiceError::Inner)
    }

    fn refused(
        &self,
        reason: Reason,
        _caller: Caller,
        _policy: &Policy,
    ) -> Result<Res, ServiceError<Err>> {
        Err(match reason {
            Reason::Key(error) => ServiceError::Key(error),
            Reason::Lock(error) => ServiceError::Lock(error),
        })
    }
}

/// How a service under a [`Plain`] lock fails.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ServiceError<E> {
    /// The request does not say which lock it needs.
    Key(KeyError),
    /// The lock was not to be had, or was lost.
    Lock(LockError),
    /// The inner service failed.
    Inner(E),
}

impl<E: fmt::Display> fmt::Display for ServiceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(error) => error.fmt(f),
            Self::Lock(error) => error.fmt(f),
            Self::Inner(error) => error.fmt(f),
        }
    }
}

impl<E: Error + 'static> Error for ServiceError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Key(error) => error.source(),
            Self::Lock(error) => error.source(),
            Self::Inner(error) => error.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grpc_timeout_is_digits_and_a_unit() {
        for (text, timeout) in [
            ("1S", Some(Duration::from_secs(1))),
            ("2M", Some(Duration::from_secs(120))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3_600))),
            ("0m", Some(Duration::ZERO)),
            ("100u", Some(Duration::from_micros(100))),
            ("7n", Some(Duration::from_nanos(7))),
            ("", None),
            ("S", None),
            ("1", None),
            ("1s", None),
            ("+1S", None),
            ("-1S", None),
            ("1.5S", None),
            ("100000000S", None),
            ("1\u{e9}", None),
        ] {
            let value = HeaderValue::from_bytes(text.as_bytes()).unwrap();
            assert_eq!(grpc_timeout(&value), timeout, "{text}");
        }
    }
}
