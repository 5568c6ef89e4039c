//! [`OnceLayer`]: requests that are served once for a key, and whose response is repeated.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, TryStreamExt, future::BoxFuture, stream};
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode,
    header::{
        CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LOCATION, CONTENT_TYPE,
        ETAG, LOCATION,
    },
    request::Parts,
};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{
    BodyExt as _, BodyStream, Full, LengthLimitError, Limited, StreamBody,
    combinators::UnsyncBoxBody,
};
use lock_runtime::{
    Begun, LockClient, LockErrorKind, LockKey, LockSpec, OnceGuard, OnceRequest,
    web::{ErrorClass, Problem},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tower::util::ServiceExt as _;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument as _;

use crate::{
    detach::DetachedFuture,
    key::{KeyExtractor, KeyTemplate, Target, TemplateError},
    policy::Policy,
    protocol::{
        body::BoxError,
        reject::{Reason, Refusal},
        wire::{Caller, Wire},
    },
};

/// The header of a response that is repeated.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Layer that serves a request once for each key, and answers later requests for the key with the
/// stored response.
///
/// The key contains **the caller** and what the caller sends to name the request, as in
/// `"pay:{header.x-user}:{header.idempotency-key}"`, where authentication outside of this layer
/// has checked the user. A key that another caller can name shows that caller the response.
///
/// 1. The body of the request is read, up to [`max_request`](Self::max_request); beyond, the
///    response is 413. A request without a header that the key names is answered with 400.
/// 2. The first request runs, under the lock of the key. Others with the same key wait for it, or
///    are refused with 409 (`running`).
///    It runs in a task of its own, to its end, also if its client disconnects.
/// 3. Its response is stored for [`keep`](Self::keep), if its status is 200 to 499 and not 408,
///    409, 425 or 429: status, body, and the headers that [`headers`](Self::headers) names. Later
///    requests receive it, with the header `idempotent-replayed: true`, and the handler does not
///    run. A response with another status is not stored, and the next request runs.
/// 4. A later request that differs in method, path, query or body is refused with 422
///    (`key_reused`).
///
/// A response is sent once its body has ended, or is longer than
/// [`max_response`](Self::max_response). A longer one, and one with trailers, is stored without its
/// body: later requests are refused with 409 (`response_not_kept`). The layer is for HTTP, and not
/// for gRPC, whose responses have trailers.
///
/// The handler finds a [`HeldLock`](lock_runtime::HeldLock) in the extensions of the request. If
/// the lock is lost, or a minute has passed (set [`LockSpec::max_hold`] for a longer handler), the
/// handler is dropped, nothing is stored, and the next request runs. What is exact, and what is
/// not, is on the page `once` of the guide of lock-runtime. The names follow
/// draft-ietf-httpapi-idempotency-key-header.
///
#[cfg_attr(feature = "axum-08", doc = "```")]
#[cfg_attr(not(feature = "axum-08"), doc = "```ignore")]
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use lock_tower::{OnceLayer, runtime::LockClient};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = LockClient::in_memory();
/// let once = OnceLayer::new(locks, "pay:{header.x-user}:{header.idempotency-key}")?;
/// let app: Router = Router::new().route("/payments", post(async || "paid").layer(once));
/// let request = || {
///     let request = Request::post("/payments").header("x-user", "7");
///     request.header("idempotency-key", "8e03978e").body(Body::from("5 EUR"))
/// };
/// let first = app.clone().oneshot(request()?).await?;
/// assert!(!first.headers().contains_key("idempotent-replayed"));
/// let again = app.oneshot(request()?).await?;
/// assert_eq!(again.headers()["idempotent-replayed"], "true");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct OnceLayer<K = KeyTemplate> {
    locks: LockClient,
    key: K,
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    policy: Policy,
    keep: Duration,
    most_of_request: usize,
    most_of_response: usize,
    headers: Arc<[HeaderName]>,
    is_stored: fn(StatusCode) -> bool,
}

impl OnceLayer {
    /// Creates a new [`OnceLayer`] with the key that `template` gives for a request. See
    /// [`KeyTemplate`].
    ///
    /// # Errors
    /// If no request could fill the template, or if it has no placeholder.
    pub fn new(locks: LockClient, template: &str) -> Result<Self, TemplateError> {
        let key = KeyTemplate::not_constant(template)?;
        Ok(Self::with_key(locks, key).name(template))
    }
}

impl<K> OnceLayer<K> {
    /// The time for which a response is kept by default.
    pub const DEFAULT_KEEP: Duration = OnceRequest::DEFAULT_KEEP;
    /// The longest body of a request by default, in bytes.
    pub const DEFAULT_MAX_REQUEST: usize = 1024 * 1024;
    /// The longest body of a response that is stored by default, in bytes.
    pub const DEFAULT_MAX_RESPONSE: usize = OnceRequest::DEFAULT_MOST;

    /// Creates a new [`OnceLayer`] with a [`KeyExtractor`]. A request whose target is
    /// [`Target::Skip`] is served as it is.
    pub fn with_key(locks: LockClient, key: K) -> Self {
        let settings = Settings {
            policy: Policy::new("once"),
            keep: Self::DEFAULT_KEEP,
            most_of_request: Self::DEFAULT_MAX_REQUEST,
            most_of_response: Self::DEFAULT_MAX_RESPONSE,
            headers: [
                CONTENT_TYPE,
                CONTENT_ENCODING,
                CONTENT_LANGUAGE,
                CONTENT_DISPOSITION,
                CONTENT_LOCATION,
                LOCATION,
                ETAG,
            ]
            .into(),
            is_stored: |status| {
                (200..500).contains(&status.as_u16())
                    && !matches!(status.as_u16(), 408 | 409 | 425 | 429)
            },
        };
        Self {
            locks,
            key,
            settings,
        }
    }

    fn set(self, set: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = self.settings;
        set(&mut settings);
        Self { settings, ..self }
    }

    /// Sets the name of this layer in metrics, spans and refusals. It is not the key. It defaults
    /// to the text of the template.
    pub fn name(self, name: impl Into<Arc<str>>) -> Self {
        self.set(|it| it.policy = it.policy.clone().named(name))
    }

    /// Sets the time for which a response is kept; a second to 366 days, 24 h by default.
    pub fn keep(self, keep: Duration) -> Self {
        self.set(|it| it.keep = keep)
    }

    /// Replaces the options of the lock with `spec`. A request waits 2 s by default for another one
    /// that runs. [`LockSpec::no_wait`] refuses it with 409 at once.
    pub fn spec(self, spec: LockSpec) -> Self {
        self.set(|it| it.policy = it.policy.clone().spec(spec))
    }

    /// Sets the length of the longest body of a request, in bytes; 1 MiB by default. It is kept in
    /// memory while the request is served.
    pub fn max_request(self, most: usize) -> Self {
        self.set(|it| it.most_of_request = most)
    }

    /// Sets the length of the longest body of a response that is stored, in bytes; 64 KiB by
    /// default.
    pub fn max_response(self, most: usize) -> Self {
        self.set(|it| it.most_of_response = most)
    }

    /// Sets the headers of a response that are stored; by default `content-type`,
    /// `content-encoding`, `content-language`, `content-disposition`, `content-location`,
    /// `location` and `etag`.
    pub fn headers(self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        self.set(|it| it.headers = headers.into_iter().collect())
    }

    /// Sets the statuses whose responses are stored.
    pub fn store_if(self, is_stored: fn(StatusCode) -> bool) -> Self {
        self.set(|it| it.is_stored = is_stored)
    }
}

impl<S, K: Clone> Layer<S> for OnceLayer<K> {
    type Service = ServeOnce<S, K>;

    fn layer(&self, inner: S) -> Self::Service {
        let policy = &self.settings.policy;
        let checked = policy.spec_for(&self.locks).and_then(|spec| {
            let once = self.locks.once("key").spec(spec).keep(self.settings.keep);
            Ok(once.check()?)
        });
        if let Err(error) = checked {
            let policy = policy.name();
            tracing::error!(policy, %error, "the options of the layer are invalid: every request will be refused with 500");
        }
        ServeOnce {
            inner,
            layer: self.clone(),
        }
    }
}

/// Middleware that serves a request once for each key. See [`OnceLayer`].
#[derive(Clone, Debug)]
pub struct ServeOnce<S, K = KeyTemplate> {
    inner: S,
    layer: OnceLayer<K>,
}

impl<S, K> ServeOnce<S, K> {
    inner_service!();
}

impl<S, K, B, R> Service<Request<B>> for ServeOnce<S, K>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    K: KeyExtractor<Request<B>>,
    B: Body<Data = Bytes, Error: Into<BoxError>> + From<Bytes> + Send + 'static,
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
            key,
            settings,
        } = &self.layer;
        let target = key.target(&mut req);
        let (inner, locks, settings) = (self.inner.clone(), locks.clone(), settings.clone());
        Box::pin(async move {
            match target {
                Ok(Target::Lock(key)) => settings.serve(inner, &locks, key, req).await,
                Ok(Target::Skip | Target::Unrouted) => {
                    Ok(inner.oneshot(req).await?.map(OnceBody::new))
                }
                Err(error) => Ok(settings.refused(&error.into())),
            }
        })
    }
}

impl Settings {
    async fn serve<S, B, R>(
        self,
        inner: S,
        locks: &LockClient,
        key: LockKey,
        req: Request<B>,
    ) -> Result<Response<OnceBody>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + From<Bytes> + Send + 'static,
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let (mut parts, body) = req.into_parts();
        let body = match Limited::new(body, self.most_of_request).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                return Ok(problem(
                    StatusCode::PAYLOAD_TOO_LARGE,
                    "body_too_large",
                    TOO_LONG,
                ));
            }
            Err(_) => return Ok(problem(StatusCode::BAD_REQUEST, "bad_request", UNREADABLE)),
        };
        let fingerprint = fingerprint(&parts, &body);
        let spec = match self.policy.spec_for(locks) {
            Ok(spec) => spec,
            Err(error) => return Ok(self.refused(&error.into())),
        };
        let name = self.policy.shared_name();
        // The rest of what is stored is small beside the body.
        let most = self.most_of_response.saturating_add(MOST_OF_HEAD);
        let once = locks.once(key).spec(spec).name(name).keep(self.keep);
        let guard = match once.max_bytes(most).begin().await {
            Ok(Begun::Running(guard)) => guard,
            Ok(Begun::Done(done)) => return Ok(Stored::replay(&done.value, fingerprint)),
            Err(error) => return Ok(self.refused(&error.into())),
        };
        let held = guard.held();
        parts.extensions.insert(held);
        let req = Request::from_parts(parts, B::from(body));
        // A client that has given up sends its request again, and the work must not be done anew.
        let running = self.run(inner, guard, fingerprint, req).in_current_span();
        DetachedFuture::of(tokio::spawn(running)).await
    }

    async fn run<S, B, R>(
        self,
        inner: S,
        guard: OnceGuard,
        fingerprint: [u8; 32],
        req: Request<B>,
    ) -> Result<Response<OnceBody>, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let served = async {
            let response = inner.oneshot(req).await?;
            Ok(self.collected(response).await)
        };
        match guard.while_held_unless(served, Result::is_err).await {
            Err(error) => Ok(self.refused(&error.into())),
            Ok((Err(error), guard)) => {
                // An error is logged, and the release continues in the background.
                let _ = guard.release().await;
                Err(error)
            }
            Ok((Ok((head, body, response)), guard)) => {
                let kept = (head, body);
                Ok(self.finish(guard, fingerprint, kept, response).await)
            }
        }
    }

    /// Reads the body of a response that is to be stored, as far as it can be. Returns what is
    /// stored, and the response.
    async fn collected<R>(
        &self,
        response: Response<R>,
    ) -> (Option<Head>, Option<Bytes>, Response<OnceBody>)
    where
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let (parts, body) = response.into_parts();
        if !(self.is_stored)(parts.status) {
            let response = Response::from_parts(parts, OnceBody::new(body));
            return (None, None, response);
        }
        let kept = self.headers.iter().flat_map(|name| {
            let values = parts.headers.get_all(name).into_iter();
            values.map(|value| (name.as_str().to_owned(), value.as_bytes().to_vec()))
        });
        let head = Head {
            status: parts.status.as_u16(),
            headers: kept.collect(),
        };
        let mut body = Box::pin(body);
        let (mut data, mut rest) = (BytesMut::new(), None);
        while let Some(frame) = body.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(bytes)) if data.len() + bytes.len() <= self.most_of_response => {
                    data.extend_from_slice(&bytes);
                }
                // Too long, trailers, or an error: it is sent as it is.
                Ok(Ok(bytes)) => rest = Some(Ok(Frame::data(bytes))),
                Ok(Err(frame)) => rest = Some(Ok(frame)),
                Err(error) => rest = Some(Err(error.into())),
            }
            if rest.is_some() {
                break;
            }
        }
        let data = data.freeze();
        let Some(rest) = rest else {
            let sent = OnceBody::new(Full::new(data.clone()));
            return (Some(head), Some(data), Response::from_parts(parts, sent));
        };
        // A response that has failed is not stored.
        let head = rest.is_ok().then_some(head);
        let begun = [Ok(Frame::data(data)), rest];
        let frames =
            stream::iter(begun).chain(TryStreamExt::map_err(BodyStream::new(body), Into::into));
        let sent = OnceBody::new(StreamBody::new(frames));
        (head, None, Response::from_parts(parts, sent))
    }

    /// Stores a response, or makes the key free.
    async fn finish(
        &self,
        guard: OnceGuard,
        fingerprint: [u8; 32],
        (head, body): (Option<Head>, Option<Bytes>),
        response: Response<OnceBody>,
    ) -> Response<OnceBody> {
        let ended = match head {
            None => guard.release().await,
            Some(head) => {
                let stored = Stored {
                    fingerprint,
                    head,
                    body: body.map(|body| body.to_vec()),
                };
                match postcard::to_allocvec(&stored) {
                    Ok(stored) => guard.complete(&stored).await,
                    Err(_) => guard.release().await,
                }
            }
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
        let caller = Caller {
            wire: Wire::Http,
            hurried: false,
        };
        let refusal = Refusal::new(reason, caller, &self.policy);
        refusal.trace();
        refusal
            .to_response()
            .map(|body| OnceBody::new(Full::new(body)))
    }
}

const TOO_LONG: &str = "The body is longer than this service accepts.";
const UNREADABLE: &str = "The body could not be read.";
const REUSED: &str = "The key was used for another request.";
const NOT_KEPT: &str = "The request was served, and its response could not be kept.";

/// The room for the status and the headers of a stored response, in bytes.
const MOST_OF_HEAD: usize = 16 * 1024;

fn problem(status: StatusCode, code: &'static str, detail: &str) -> Response<OnceBody> {
    let problem = Problem::new(ErrorClass::BadRequest, code, detail).status(status);
    let response: Response<String> = problem.into_response();
    response.map(|body| OnceBody::new(Full::new(Bytes::from(body))))
}

/// Returns a digest of the request. A part that differs in length cannot make up for another.
fn fingerprint(parts: &Parts, body: &Bytes) -> [u8; 32] {
    #[cfg(feature = "axum-08")]
    // A nested router has removed its prefix from the other one.
    let uri = parts
        .extensions
        .get::<axum::extract::OriginalUri>()
        .map_or(&parts.uri, |original| &original.0);
    #[cfg(not(feature = "axum-08"))]
    let uri = &parts.uri;
    let target = uri.path_and_query().map_or("", |it| it.as_str());
    let mut digest = Sha256::new();
    for part in [parts.method.as_str().as_bytes(), target.as_bytes(), body] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// What is stored of a response.
#[derive(Serialize, Deserialize)]
struct Stored {
    fingerprint: [u8; 32],
    head: Head,
    /// `None` if it was too long.
    body: Option<Vec<u8>>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    status: u16,
    headers: Vec<(String, Vec<u8>)>,
}

impl Stored {
    /// Returns the stored response to an equal request.
    fn replay(stored: &[u8], fingerprint: [u8; 32]) -> Response<OnceBody> {
        let Ok(stored) = postcard::from_bytes::<Self>(stored) else {
            tracing::error!("a stored response is of another version, and cannot be read");
            let code = LockErrorKind::InvalidResult.code();
            let (status, detail) = (
                StatusCode::INTERNAL_SERVER_ERROR,
                ErrorClass::INTERNAL_DETAIL,
            );
            return problem(status, code, detail);
        };
        if stored.fingerprint != fingerprint {
            return problem(StatusCode::UNPROCESSABLE_ENTITY, "key_reused", REUSED);
        }
        let Some(body) = stored.body else {
            return problem(StatusCode::CONFLICT, "response_not_kept", NOT_KEPT);
        };
        let mut response = Response::new(OnceBody::new(Full::new(Bytes::from(body))));
        *response.status_mut() = StatusCode::from_u16(stored.head.status).unwrap_or_default();
        let headers: &mut HeaderMap = response.headers_mut();
        for (name, value) in stored.head.headers {
            let name = HeaderName::try_from(name).ok();
            if let Some((name, value)) = name.zip(HeaderValue::try_from(value).ok()) {
                headers.append(name, value);
            }
        }
        headers.insert(REPLAYED, HeaderValue::from_static("true"));
        response
    }
}

/// The body of a response: that of the inner service, of a stored response or of a refusal.
pub struct OnceBody(UnsyncBoxBody<Bytes, BoxError>);

impl OnceBody {
    fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self(UnsyncBoxBody::new(body.map_err(Into::into)))
    }
}

/// An empty body.
impl Default for OnceBody {
    fn default() -> Self {
        Self::new(Full::default())
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
