//! [`OnceLayer`]: requests that are served once for a key, and whose response is repeated.

mod body;
mod serve;
mod stored;

use std::{sync::Arc, time::Duration};

use http::{
    HeaderName, StatusCode,
    header::{
        CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LOCATION,
        CONTENT_TYPE, ETAG, LOCATION, VARY,
    },
};
use lock_runtime::{LockClient, LockSpec, RequestName};
use tower_layer::Layer;

use crate::{
    key::{KeyTemplate, TemplateError},
    policy::{OnceTerms, Policy},
    selector::Keyed,
};

#[cfg(feature = "policy")]
pub(crate) use self::serve::ServedOnce;
pub use self::{
    body::{FromBytes, OnceBody},
    serve::ServeOnce,
};

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
///    It runs in a task of its own, until its response has been stored, also if its client
///    disconnects.
/// 3. Its response is stored for [`keep`](Self::keep), if its status is 200 to 499 and not 408,
///    409, 425 or 429: status, body, and the headers that [`headers`](Self::headers) names. Later
///    requests receive it, with the header `idempotent-replayed: true`, and the handler does not
///    run. A response with another status, and one whose body fails, is not stored, and the next
///    request runs: as soon as there is a status, which may be before the end of the body.
/// 4. A later request that differs in method, path, query or body is refused with 422
///    (`key_reused`).
///
/// A response is sent once its body has ended, or is longer than
/// [`max_response`](Self::max_response). A longer one, and one whose headers, body and trailers
/// together are longer by more than 16 KiB, is stored as done, however it ends: later requests are
/// refused with 409 (`response_not_kept`).
///
/// Calls of gRPC are served in the same way, with their messages and trailers, and are refused in
/// the form of gRPC. It is for unary calls: a stream of requests is read to its end first. A
/// response is stored with any status but `CANCELLED`, `UNKNOWN`, `DEADLINE_EXCEEDED`,
/// `RESOURCE_EXHAUSTED`, `ABORTED`, `INTERNAL`, `UNAVAILABLE` and `DATA_LOSS`; one of gRPC-Web,
/// whose status is within the body, never.
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
pub struct OnceLayer<L = Keyed<KeyTemplate>> {
    locks: LockClient,
    selector: L,
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    /// Those of requests whose policy has none.
    terms: OnceTerms,
    headers: Arc<[HeaderName]>,
    is_stored: fn(StatusCode) -> bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            terms: OnceTerms::default(),
            headers: [
                CONTENT_TYPE,
                CONTENT_ENCODING,
                CONTENT_LANGUAGE,
                CONTENT_DISPOSITION,
                CONTENT_LOCATION,
                LOCATION,
                ETAG,
                CACHE_CONTROL,
                VARY,
            ]
            .into(),
            is_stored: |status| {
                (200..500).contains(&status.as_u16())
                    && !matches!(status.as_u16(), 408 | 409 | 425 | 429)
            },
        }
    }
}

impl OnceLayer {
    /// Creates a new [`OnceLayer`] with the key that `template` gives for a request. See
    /// [`KeyTemplate`]. A warning is logged if it names no part of the request but the header
    /// `idempotency-key`: the caller must be a part of the key.
    ///
    /// # Errors
    /// If no request could fill the template, or if it has no placeholder.
    pub fn new(locks: LockClient, template: &str) -> Result<Self, TemplateError> {
        let key = KeyTemplate::not_constant(template)?;
        key.warn_without_caller(template);
        Ok(Self::with_key(locks, key).name(template.to_owned()))
    }
}

#[cfg(feature = "policy")]
impl OnceLayer<crate::LockPolicies> {
    /// Creates a new [`OnceLayer`] for the routes of a policy file that have `once`. Other requests
    /// are passed on. Put it around the [`PolicyLayer`](crate::PolicyLayer) with the same policies,
    /// which refuses the requests of these routes otherwise.
    ///
    /// ```
    /// use axum::{Router, routing::post};
    /// use lock_tower::{LockPolicies, OnceLayer, PolicyLayer, runtime::LockClient};
    ///
    /// # fn main() -> Result<(), lock_tower::PolicyError> {
    /// let policies = LockPolicies::from_toml_str(r#"
    ///     [routes."POST /payments"]
    ///     key = "pay:{header.x-user}:{header.idempotency-key}"
    ///     once = { keep = "24h", result = "64KiB" }
    /// "#)?;
    /// let locks = LockClient::in_memory();
    /// let app: Router = Router::new()
    ///     .route("/payments", post(async || "paid"))
    ///     .layer(PolicyLayer::new(locks.clone(), policies.clone()))
    ///     .layer(OnceLayer::with_policies(locks, policies));
    /// # Ok(()) }
    /// ```
    pub fn with_policies(locks: LockClient, policies: crate::LockPolicies) -> Self {
        Self {
            locks,
            selector: policies,
            settings: Settings::default(),
        }
    }
}

impl<K> OnceLayer<Keyed<K>> {
    /// Creates a new [`OnceLayer`] with a [`KeyExtractor`](crate::KeyExtractor). A request whose
    /// target is [`Target::Skip`](crate::Target::Skip) is served as it is.
    pub fn with_key(locks: LockClient, key: K) -> Self {
        Self {
            locks,
            selector: Keyed::new(key).set_named(|policy| policy.with_name("once")),
            settings: Settings::default(),
        }
    }

    /// Sets the name of this layer in metrics, spans and refusals. It is not the key. It defaults
    /// to the text of the template.
    pub fn name(self, name: impl Into<RequestName>) -> Self {
        let selector = self.selector.set_named(|policy| policy.with_name(name));
        Self { selector, ..self }
    }

    /// Sets the time for which a response is kept; a second to 366 days, 24 h by default.
    pub fn keep(self, keep: Duration) -> Self {
        self.set(|it| it.terms.keep = keep)
    }

    /// Replaces the options of the lock with `spec`. A request waits 2 s by default for another one
    /// that runs. [`LockSpec::no_wait`] refuses it with 409 at once.
    pub fn spec(self, spec: LockSpec) -> Self {
        let selector = self.selector.set(|policy| policy.with_spec(spec));
        Self { selector, ..self }
    }

    /// Sets the length of the longest body of a request, in bytes; 1 MiB by default. It is kept in
    /// memory while the request is served.
    pub fn max_request(self, most: usize) -> Self {
        self.set(|it| it.terms.most_of_request = most)
    }

    /// Sets the length of the longest body of a response that is stored, in bytes; 64 KiB by
    /// default.
    pub fn max_response(self, most: usize) -> Self {
        self.set(|it| it.terms.most_of_response = most)
    }
}

impl<L> OnceLayer<L> {
    /// The time for which a response is kept by default.
    pub const DEFAULT_KEEP: Duration = OnceTerms::KEEP;
    /// The longest body of a request by default, in bytes.
    pub const DEFAULT_MAX_REQUEST: usize = OnceTerms::MOST_OF_REQUEST;
    /// The longest body of a response that is stored by default, in bytes.
    pub const DEFAULT_MAX_RESPONSE: usize = OnceTerms::MOST_OF_RESPONSE;

    fn set(self, set: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = self.settings;
        set(&mut settings);
        Self { settings, ..self }
    }

    /// Sets the headers of a response that are stored; by default `content-type`,
    /// `content-encoding`, `content-language`, `content-disposition`, `content-location`,
    /// `location`, `etag`, `cache-control` and `vary`. All trailers are stored as well, and of gRPC
    /// the headers that begin with `grpc-`.
    pub fn headers(self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        self.set(|it| it.headers = headers.into_iter().collect())
    }

    /// Sets the statuses whose responses are stored. It has no effect on gRPC.
    pub fn store_if(self, is_stored: fn(StatusCode) -> bool) -> Self {
        self.set(|it| it.is_stored = is_stored)
    }

    fn around<S>(&self, inner: S) -> ServeOnce<S, L>
    where
        L: Clone,
    {
        ServeOnce::new(inner, self.clone())
    }
}

impl<S, K: Clone> Layer<S> for OnceLayer<Keyed<K>> {
    type Service = ServeOnce<S, Keyed<K>>;

    fn layer(&self, inner: S) -> Self::Service {
        let policy: &Policy = &self.selector.policy;
        let checked = policy.spec_for(&self.locks).and_then(|spec| {
            let once = self.locks.once("key").spec(spec);
            Ok(once.keep(self.settings.terms.keep).check()?)
        });
        if let Err(error) = checked {
            let policy = policy.name();
            tracing::error!(policy, %error, "the options of the layer are invalid: every request will be refused with 500");
        }
        self.around(inner)
    }
}

#[cfg(feature = "policy")]
impl<S> Layer<S> for OnceLayer<crate::LockPolicies> {
    type Service = ServeOnce<S, crate::LockPolicies>;

    fn layer(&self, inner: S) -> Self::Service {
        self.around(inner)
    }
}
