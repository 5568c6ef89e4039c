//! [`ServeOnce`]: the middleware that [`OnceLayer`] applies.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use http_body::Body;
use lock_runtime::{
    ErrorClass, LockClient, LockErrorKind, LockKey, OnceEntry, OnceGuard, web::Problem,
};
use tower::util::ServiceExt as _;
use tower_service::Service;
use tracing::Instrument as _;

use super::{
    FromBytes, OnceBody, OnceLayer, Settings,
    stored::{Collected, Fingerprint, MOST_OF_HEAD, Unfit, fingerprint, replay},
};
use crate::{
    detach::DetachedFuture,
    key::{KeyTemplate, Target},
    policy::{OnceTerms, Policy},
    protocol::{
        body::{BoxError, Buffered},
        caller_of,
        reject::{Reason, Refusal, refused_in_grpc},
        wire::{Caller, Wire, patience},
    },
    selector::{Keyed, Selector},
};

/// Middleware that serves a request once for each key. See [`OnceLayer`].
#[derive(Clone, Debug)]
pub struct ServeOnce<S, L = Keyed<KeyTemplate>> {
    inner: S,
    layer: OnceLayer<L>,
}

/// The extension of a request that is served once, with the key: a policy layer further in that
/// finds the same key leaves it alone.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(feature = "policy"),
    expect(dead_code, reason = "only policies compare the key")
)]
pub(crate) struct ServedOnce(pub(crate) LockKey);

impl<S, L> ServeOnce<S, L> {
    pub(super) fn new(inner: S, layer: OnceLayer<L>) -> Self {
        Self { inner, layer }
    }

    inner_service!();
}

impl<S, L, B, R> Service<Request<B>> for ServeOnce<S, L>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: Selector<Request<B>>,
    B: Body<Data = Bytes, Error: Into<BoxError>> + FromBytes + Send + 'static,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<OnceBody>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut req: Request<B>) -> Self::Future {
        let OnceLayer {
            locks,
            selector,
            settings,
        } = &self.layer;
        let caller = caller_of(&req);
        let (policy, target) = selector.select_once(&mut req);
        let (inner, locks) = (self.inner.clone(), locks.clone());
        let mut settings = settings.clone();
        if let Some(terms) = policy.once() {
            settings.terms = terms;
        }
        let serving = Serving {
            policy,
            caller,
            settings,
        };
        Box::pin(async move {
            match target {
                Ok(Target::Lock(key)) => serving.serve(inner, &locks, key, req).await,
                Ok(Target::Skip | Target::Unrouted) => {
                    Ok(inner.oneshot(req).await?.map(OnceBody::new))
                }
                Err(error) => Ok(serving.refused(&error.into())),
            }
        })
    }
}

/// The service of one request.
struct Serving {
    policy: Arc<Policy>,
    caller: Caller,
    settings: Settings,
}

/// The reasons of this layer to refuse a request.
enum Rejection {
    TooLong,
    Unreadable,
    Stored(Unfit),
}

impl Serving {
    async fn serve<S, B, R>(
        mut self,
        inner: S,
        locks: &LockClient,
        key: LockKey,
        req: Request<B>,
    ) -> Result<Response<OnceBody>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + FromBytes + Send + 'static,
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let OnceTerms {
            keep,
            most_of_request,
            most_of_response,
        } = self.settings.terms;
        let (mut parts, body) = req.into_parts();
        let body = match Buffered::read(body, most_of_request).await {
            Buffered {
                next: None, data, ..
            } => data,
            Buffered {
                next: Some(Ok(_)), ..
            } => return Ok(self.rejected(&Rejection::TooLong)),
            Buffered {
                next: Some(Err(_)), ..
            } => return Ok(self.rejected(&Rejection::Unreadable)),
        };
        let fingerprint = fingerprint(&parts, &body);
        let mut spec = match self.policy.spec_for(locks) {
            Ok(spec) => spec,
            Err(error) => return Ok(self.refused(&error.into())),
        };
        if let (Wire::Grpc, Some(patience)) = (self.caller.wire, patience(&parts.headers)) {
            let hurried = spec.clone().wait_at_most(patience);
            self.caller.hurried = hurried != spec;
            spec = hurried;
        }
        // The rest of what is stored is small beside the body.
        let most = most_of_response.saturating_add(MOST_OF_HEAD);
        let once = locks.once(&key).spec(spec).name(self.policy.shared_name());
        let once = once.keep(keep).max_bytes(most);
        let guard = match once.clone().begin().await {
            Ok(OnceEntry::Vacant(guard)) => guard,
            Ok(OnceEntry::Done(done)) => {
                return Ok(replay(&done.value, fingerprint).unwrap_or_else(|unfit| {
                    if let Unfit::Reused = unfit {
                        once.conflicts();
                    }
                    self.rejected(&Rejection::Stored(unfit))
                }));
            }
            Err(error) => return Ok(self.refused(&error.into())),
        };
        parts.extensions.insert(guard.held());
        parts.extensions.insert(ServedOnce(key));
        let req = Request::from_parts(parts, B::from_bytes(body));
        // A client that has given up sends its request again, and the work must not be done anew.
        let running = self.run(inner, guard, fingerprint, req).in_current_span();
        DetachedFuture::of(tokio::spawn(running)).await
    }

    async fn run<S, B, R>(
        self,
        inner: S,
        guard: OnceGuard,
        fingerprint: Fingerprint,
        req: Request<B>,
    ) -> Result<Response<OnceBody>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let served = async {
            let response = inner.oneshot(req).await?;
            let collected = Collected::of(response, fingerprint, &self.settings);
            Ok(collected.await)
        };
        match guard.while_held_unless(served, Result::is_err).await {
            Err(error) => Ok(self.refused(&error.into())),
            Ok((Err(error), guard)) => {
                // An error is logged, and the release continues in the background.
                let _ = guard.release().await;
                Err(error)
            }
            Ok((Ok(collected), guard)) => Ok(self.finish(guard, collected).await),
        }
    }

    /// Stores a response, or makes the key free.
    async fn finish(&self, guard: OnceGuard, collected: Collected) -> Response<OnceBody> {
        let Collected { stored, response } = collected;
        let ended = match stored {
            None => guard.release().await,
            Some(stored) => guard.complete(&stored).await,
        };
        match ended {
            Err(error) if matches!(error.kind(), LockErrorKind::Lost(_)) => {
                self.refused(&error.into())
            }
            // The work is done, and a warning says that it may be done again.
            Err(error) => {
                let policy = self.policy.name();
                tracing::warn!(policy, %error, "the response may not have been stored");
                response
            }
            Ok(()) => response,
        }
    }

    fn refused(&self, reason: &Reason) -> Response<OnceBody> {
        let refusal = Refusal::new(reason, self.caller, &self.policy);
        refusal.trace();
        refusal.to_response().map(OnceBody::of)
    }

    fn rejected(&self, rejection: &Rejection) -> Response<OnceBody> {
        let (status, code, detail) = match rejection {
            Rejection::TooLong => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "body_too_large",
                "The body is longer than this service accepts.",
            ),
            Rejection::Unreadable => (
                StatusCode::BAD_REQUEST,
                "bad_request",
                "The body could not be read.",
            ),
            Rejection::Stored(Unfit::Reused) => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "key_reused",
                "The key was used for another request.",
            ),
            Rejection::Stored(Unfit::NotKept) => (
                StatusCode::CONFLICT,
                "response_not_kept",
                "The request was served, and its response could not be kept.",
            ),
            Rejection::Stored(Unfit::Unreadable) => {
                let policy = self.policy.name();
                tracing::error!(
                    policy,
                    "a stored response is of another version, and cannot be read"
                );
                (
                    StatusCode::INTERNAL_SERVER_ERROR,
                    LockErrorKind::InvalidResult.code(),
                    ErrorClass::INTERNAL_DETAIL,
                )
            }
        };
        match self.caller.wire {
            Wire::Http => {
                let problem = Problem::new(ErrorClass::BadRequest, code, detail).status(status);
                let response: Response<String> = problem.into_response();
                response.map(|body| OnceBody::of(body.into()))
            }
            Wire::Grpc => {
                let class = match status {
                    StatusCode::INTERNAL_SERVER_ERROR => ErrorClass::Internal,
                    _ => ErrorClass::BadRequest,
                };
                refused_in_grpc(class.grpc_code(), detail).map(OnceBody::of)
            }
        }
    }
}
