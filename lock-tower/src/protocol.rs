//! [`Protocol`]: how a [`Lock`](crate::Lock) takes part in the protocol of the inner service.
//! [`Http`] refuses requests with a response, [`Plain`] with an error.

use std::{any::type_name, error::Error, fmt, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header::CONTENT_TYPE,
};
use http_body::Body;
use lock_runtime::{HeldLock, LockError, LockGuard};

use crate::{
    body::LockBody,
    key::{self, KeyError},
    policy::Policy,
    reject::{OnReject, Reason, Refusal, StandardReject},
    watch::Watch,
};

/// Trait for the protocols of services with these requests, responses and errors. It is sealed:
/// the implementations are [`Http`] and [`Plain`].
pub trait Protocol<Req, Res, Err>: sealed::Sealed {
    /// The response type of the [`Lock`](crate::Lock) middleware.
    type Response;
    /// The error type of the [`Lock`](crate::Lock) middleware.
    type Error;

    /// Returns the properties of the caller that matter to refusals.
    #[doc(hidden)]
    fn caller(&self, req: &Req) -> Caller;
    /// Returns how long the caller waits for the response, if the request contains it.
    #[doc(hidden)]
    fn patience(&self, req: &Req, caller: Caller) -> Option<Duration>;
    /// Returns the route of the request, for the name of a layer without one.
    #[doc(hidden)]
    fn route(req: &Req) -> Option<&str>;
    /// Makes the lock visible to the inner service.
    #[doc(hidden)]
    fn enter(req: &mut Req, held: HeldLock);
    /// Returns whether the inner service has failed, or has responded with an error. Its own error
    /// is worth more to the caller than the loss of the lock.
    #[doc(hidden)]
    fn is_failure(result: &Result<Res, Err>) -> bool;
    /// Returns whether the response is that of a route: neither 404 nor 405.
    #[doc(hidden)]
    fn has_route(result: &Result<Res, Err>) -> bool;
    /// Returns whether the lock is held until the body of this response has been sent.
    #[doc(hidden)]
    fn keeps(&self, response: &Res, policy: &Policy) -> bool;
    /// Hides all locks from the inner service, including that of an outer layer.
    #[doc(hidden)]
    fn leave(req: &mut Req);
    /// Converts the result of the inner service. `guard` is set if the response keeps the lock.
    #[doc(hidden)]
    fn served(
        &self,
        result: Result<Res, Err>,
        guard: Option<(LockGuard, Watch)>,
        caller: Caller,
    ) -> Result<Self::Response, Self::Error>;
    /// Converts a refusal.
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

/// The kind of response that a caller over HTTP expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wire {
    /// Status codes and response bodies.
    Http,
    /// gRPC: statuses are sent in trailers. The request is a `POST` over HTTP/2 with the content
    /// type `application/grpc`, and its route that of a gRPC method: `/package.Service/Method`.
    Grpc,
}

/// The properties of a caller that matter to refusals.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub(crate) wire: Wire,
    /// The wait for the lock was cut short, because the caller's deadline is earlier.
    pub(crate) hurried: bool,
}

/// Accepts `application/grpc` and `application/grpc+proto`, but not `application/grpc-web`, which
/// has no trailers of its own.
fn is_grpc(headers: &HeaderMap) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.as_bytes().split_at_checked(GRPC.len()));
    content_type.is_some_and(|(start, rest)| {
        start.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}

/// Returns whether the headers or trailers of a gRPC response carry the status of an error.
pub(crate) fn is_grpc_error(headers: &HeaderMap) -> bool {
    headers
        .get("grpc-status")
        .is_some_and(|status| status != "0")
}

/// The longest time that is reserved for sending the response before the deadline of the caller.
/// Without it, the timers of the server and the client, which have the same deadline and started
/// earlier, would always fire first.
const WAY_BACK: Duration = Duration::from_millis(50);

/// The [`grpc-timeout`] of a request: at most eight digits and a unit. A malformed value is
/// ignored.
///
/// [`grpc-timeout`]: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests
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

/// Protocol of HTTP services: refuses requests with a response made by `R`.
///
/// The error type of the inner service does not change, so axum's `Infallible` is kept and no
/// `HandleErrorLayer` is needed. The inner service finds a [`HeldLock`] in the request's
/// extensions.
#[derive(Clone)]
pub struct Http<R = StandardReject> {
    on_reject: R,
}

/// How long the lock of an HTTP request is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HoldUntil {
    /// Until the inner service has responded. The release is awaited before the *head* of the
    /// response is sent. A streamed body is sent without the lock.
    #[default]
    Response,
    /// Until the last frame of the body, including trailers, or until the body is dropped. The
    /// last frame is sent after the release. If the lock is lost before that, the body ends with
    /// an error, and a gRPC stream ends with trailers that carry it: at once, or after its last
    /// frame with [`OnLost::Error`](lock_runtime::OnLost::Error). With
    /// [`OnLost::Ignore`](lock_runtime::OnLost::Ignore) it ends as the inner service ends it.
    ///
    /// A response that switches protocols (101, WebSockets) has no body, and its lock is released
    /// with the head of the response.
    ///
    /// A client that does not read keeps the lock until [`max_hold`](crate::LockLayer::max_hold),
    /// a minute by default. Without one, each request is refused with 500, and an error event is
    /// emitted when the layer is put on a service. While the client does not read, the server does
    /// not poll the body: other clients get the lock, and the body ends as above with the next
    /// frame.
    /// Over HTTP/1.0, where the end of the connection is the end of the body, a client cannot
    /// distinguish an error from the end.
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
        let is_grpc = is_grpc(req.headers())
            && req.version() >= Version::HTTP_2
            && req.method() == Method::POST
            && key::is_grpc_route(req);
        Caller {
            wire: if is_grpc { Wire::Grpc } else { Wire::Http },
            hurried: false,
        }
    }

    fn patience(&self, req: &Request<ReqBody>, caller: Caller) -> Option<Duration> {
        let deadline = req
            .headers()
            .get("grpc-timeout")
            .filter(|_| caller.wire == Wire::Grpc)
            .and_then(grpc_timeout);
        deadline.map(|deadline| deadline - (deadline / 10).min(WAY_BACK))
    }

    fn route(req: &Request<ReqBody>) -> Option<&str> {
        let grpc_method = || key::grpc_method(req).filter(|_| is_grpc(req.headers()));
        key::matched_path(req).or_else(grpc_method)
    }

    fn enter(req: &mut Request<ReqBody>, held: HeldLock) {
        req.extensions_mut().insert(held);
    }

    fn leave(req: &mut Request<ReqBody>) {
        req.extensions_mut().remove::<HeldLock>();
    }

    fn is_failure(result: &Result<Response<ResBody>, Err>) -> bool {
        result.as_ref().map_or(true, |response| {
            let status = response.status();
            status.is_client_error()
                || status.is_server_error()
                || is_grpc_error(response.headers())
        })
    }

    fn has_route(result: &Result<Response<ResBody>, Err>) -> bool {
        let none = [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED];
        result
            .as_ref()
            .is_ok_and(|response| !none.contains(&response.status()))
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
            // After another content type, a gRPC caller would take trailers for a clean end.
            let is_grpc = caller.wire == Wire::Grpc && is_grpc(response.headers());
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

/// Protocol of services that do not speak HTTP: refuses requests with a [`ServiceError`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Plain {}

impl<Req, Res, Err> Protocol<Req, Res, Err> for Plain {
    type Response = Res;
    type Error = ServiceError<Err>;

    fn caller(&self, _req: &Req) -> Caller {
        Caller {
            wire: Wire::Http,
            hurried: false,
        }
    }

    fn patience(&self, _req: &Req, _caller: Caller) -> Option<Duration> {
        None
    }

    fn route(_req: &Req) -> Option<&str> {
        None
    }

    fn enter(_req: &mut Req, _held: HeldLock) {}

    fn leave(_req: &mut Req) {}

    fn is_failure(result: &Result<Res, Err>) -> bool {
        result.is_err()
    }

    fn has_route(_result: &Result<Res, Err>) -> bool {
        false
    }

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

/// Error type of services under [`Plain`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ServiceError<E> {
    /// The key of the lock cannot be extracted from the request.
    Key(KeyError),
    /// The lock was not acquired, or was lost.
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
