//! [`Protocol`]: how a [`Lock`](crate::Lock) takes part in the protocol of the inner service.
//! [`Http`] refuses requests with a response, [`Plain`] with an error.

pub(crate) mod body;
pub(crate) mod reject;
pub(crate) mod wire;

use std::{any::type_name, error::Error, fmt, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body;
use lock_runtime::{HeldLock, LockError, LockGuard};

pub(crate) use self::wire::Caller;
pub use self::wire::Wire;
use self::{
    body::LockBody,
    reject::{OnReject, Reason, Refusal, StandardReject},
    wire::{is_grpc, is_grpc_error, patience},
};
use crate::{
    key::{self, KeyError},
    policy::Policy,
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

/// Protocol of HTTP services: refuses requests with a response made by `R`.
///
/// The error type of the inner service does not change, so axum's `Infallible` is kept and no
/// `HandleErrorLayer` is needed. The inner service finds a [`HeldLock`] in the request's
/// extensions.
#[derive(Clone)]
pub struct Http<R = StandardReject> {
    on_reject: R,
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

/// The longest path of a gRPC method that becomes a name, in bytes: its caller chooses it.
const LONGEST_METHOD: usize = 200;

fn is_grpc_call<B>(req: &Request<B>) -> bool {
    is_grpc(req.headers())
        && req.version() >= Version::HTTP_2
        && req.method() == Method::POST
        && key::is_grpc_route(req)
}

/// Returns the properties of the caller that matter to refusals.
pub(crate) fn caller_of<B>(req: &Request<B>) -> Caller {
    let is_grpc = is_grpc_call(req);
    Caller {
        wire: if is_grpc { Wire::Grpc } else { Wire::Http },
        hurried: false,
    }
}

impl<ReqBody, ResBody: Body, Err, R: OnReject> Protocol<Request<ReqBody>, Response<ResBody>, Err>
    for Http<R>
{
    type Response = Response<LockBody<ResBody>>;
    type Error = Err;

    fn caller(&self, req: &Request<ReqBody>) -> Caller {
        caller_of(req)
    }

    fn patience(&self, req: &Request<ReqBody>, caller: Caller) -> Option<Duration> {
        match caller.wire {
            Wire::Http => None,
            Wire::Grpc => patience(req.headers()),
        }
    }

    fn route(req: &Request<ReqBody>) -> Option<&str> {
        let grpc_method = || key::grpc_method(req).filter(|_| is_grpc_call(req));
        let is_name = |method: &&str| method.len() <= LONGEST_METHOD;
        key::matched_path(req).or_else(|| grpc_method().filter(is_name))
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
