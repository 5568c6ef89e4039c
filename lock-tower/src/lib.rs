//! Tower middleware that holds a distributed lock while a request is served.
//!
#![cfg_attr(feature = "axum-08", doc = "```")]
#![cfg_attr(not(feature = "axum-08"), doc = "```ignore")]
//! use axum::{Router, body::Body, extract::Path, http::{Request, StatusCode}, routing::post};
//! use lock_tower::{LockLayer, runtime::{HeldLock, LockClient}};
//! use tower::ServiceExt;
//!
//! // At most one payment per order runs at a time, in all processes.
//! async fn pay(Path(id): Path<u64>, lock: HeldLock) -> String {
//!     format!("order {id} paid under {}, fencing token {}", lock.key(), lock.fence())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let lock = LockLayer::new(locks.clone(), "order:{id:int}")?.no_wait();
//! let app: Router = Router::new().route("/orders/{id}/pay", post(pay).layer(lock));
//! let request = || Request::post("/orders/42/pay").body(Body::empty());
//!
//! let response = app.clone().oneshot(request()?).await?;
//! assert_eq!(response.status(), StatusCode::OK);
//!
//! // The layer awaits the release, so the lock is free when the response arrives.
//! let guard = locks.exclusive("order:42").no_wait().acquire().await?;
//!
//! // Another client holds the lock: the response is a problem document with a `Retry-After`.
//! let response = app.oneshot(request()?).await?;
//! assert_eq!(response.status(), StatusCode::CONFLICT);
//! assert_eq!(response.headers()["retry-after"], "1");
//! assert_eq!(response.headers()["content-type"], "application/problem+json");
//!
//! guard.release().await?;
//! locks.shutdown().await;
//! # Ok(()) }
//! ```
//!
//! # Request lifecycle
//!
//! 1. The layer determines the key from a [template](KeyTemplate), a closure or a custom
//!    [`KeyExtractor`].
//! 2. It acquires the lock, waiting up to 2 s by default ([`LockLayer::wait`]). If that fails,
//!    the request is refused as described in [Refusals](#refusals).
//!    From then on it is held for a minute at most ([`LockLayer::max_hold`]), so that no caller
//!    keeps it without end; see "What a caller can do to a lock" in `recipes`.
//! 3. It waits until the inner service is ready and calls it. The handler finds a
//!    [`HeldLock`](runtime::HeldLock) in the request's extensions (in axum, it is also an
//!    extractor). Within the handler, `#[distributed_lock(.., reentrant)]` and
//!    [`LockRequest::reentrant`](runtime::LockRequest::reentrant) re-enter the lock of the route.
//! 4. When the inner service has responded, the layer awaits the release, for at most one call to
//!    the store, and returns the response. This covers the *head* of the response: a streamed body
//!    is sent without the lock, unless [`HoldUntil::Body`] keeps the lock until the last frame.
//!
//! If the lock is lost while the request is served, the inner future is dropped and the caller
//! receives a `lost_..` code. A body that is being sent under the lock ends with an error, or
//! with a gRPC status in its trailers; it never looks complete. A service that responds after the
//! loss, as it has reached no await point, is no success either: its response is replaced, unless
//! it is an error itself (a status of 400 or above, a gRPC status other than 0, or the error of the
//! service). [`LockLayer::on_lost`] lets the service and the body run to their end, with
//! [`OnLost::Ignore`](runtime::OnLost::Ignore) also successfully. If a handler panics, the lock is
//! released. The layer fails closed: no request is served without its lock, unless the extractor
//! returns [`Target::Skip`], no route has matched, or [`LockLayer::fail_open`] is set.
//!
//! # Placement
//!
//! Usually the layer belongs on a route: `post(pay).layer(lock)`. There it sees axum's path
//! parameters, it covers the methods that were added to that `MethodRouter` before it, and the
//! template is next to the path. (Requests with other methods acquire the lock as well, only to
//! be answered with 405; with `post(pay).route_layer(lock)` they do not.)
//!
//! - `Router::route_layer(lock)` covers all routes that were added before it. Each of them must
//!   have the parameters of the template; a route without them responds with 500 and emits an
//!   error event.
//! - `Router::layer(lock)` covers these routes and the fallback. With a template of path
//!   parameters, requests to the fallback pass without a lock: a 404 stays a 404. Templates of
//!   headers, query, method and gRPC path do not need a route, and lock the fallback as well.
//! - Around a finished router, `ServiceBuilder::new().layer(lock).service(app)`, no request is
//!   routed yet: a template with path parameters responds with 500 and emits an error event.
//!   Templates of headers, query, method and gRPC path work everywhere.
//! - Around a `nest_service`, the parameters of the inner routes are not visible, and their
//!   requests pass without a lock. The first that is answered with anything but 404 or 405 emits an
//!   error event; see [`KeyTemplate`].
//!
//! The key does not depend on how the routers are nested or merged.
//!
//! With tonic, add the layer to the whole server, `Server::builder().layer(lock)`, or to one
//! service, `tonic::service::LayerExt::named_layer`. tonic's own limits and time-outs are always
//! outside of it. A handler finds its lock in the extensions of the request:
//! `request.extensions().get::<HeldLock>()`.
//!
//! To lock many routes in different ways, describe them in a file and put one layer around all of
//! them: `LockPolicies` (feature `policy`).
//!
//! # Ordering with other middleware
//!
//! The layer is always ready: it uses the capacity of the inner service only once it holds the
//! lock.
//!
//! - `ConcurrencyLimit` belongs inside (added *before* the lock with `.layer`, *after* it in a
//!   `ServiceBuilder`), so that requests that wait for a lock do not occupy the limit. Outside,
//!   they count as well, and one hot key can exhaust the limit. On an axum route, use
//!   `GlobalConcurrencyLimit`: axum applies the layers of a route anew for each connection, so
//!   each connection would get a limit of its own.
//! - `LoadShed` belongs inside as well, in the same `ServiceBuilder` or tuple as the limit,
//!   because a service made by axum's `.layer` is always ready. The lock is always ready, too, so
//!   outside of it `LoadShed` never sheds. To bound the number of waiting requests, use
//!   [`max_waiters`](runtime::LockClientBuilder::max_waiters); requests beyond it are refused
//!   with 503 at once.
//! - `Timeout` outside bounds the whole request: the wait for the lock, the wait for the inner
//!   capacity, and the handler. Make it longer than the wait for the lock. Inside, it bounds the
//!   handler, and the lock is released when the time-out elapses. The timer then does not include
//!   the wait for a limit that is further inside, unless that limit was added to the route with a
//!   separate `.layer`.
//! - `Buffer` may be on either side, because a request that waits for its lock does not block
//!   others. The same holds for `Trace`, `Compression` and the like: with [`HoldUntil::Body`], the
//!   lock is held until the last frame of the body that they produce.
//! - `CatchPanic` inside turns a panic into a response, and the release is awaited as usual.
//!   Outside, the lock is released in the background after a panic.
//! - Authentication and rate limits belong outside, so that a rejected request never enters the
//!   wait queue.
//!
//! # Client disconnects
//!
//! When a server drops the response future, the inner future is dropped at its await point and
//! the lock is released in the background. hyper drops it as soon as it notices that the client
//! has disconnected: at once over HTTP/2, and over HTTP/1 once the request body has been read, as
//! small bodies are. While a large body is unread, or a byte of the client's next request, hyper
//! does not notice a closed HTTP/1 connection, and the handler runs to completion under its lock.
//!
//! To run a handler to completion in any case, put a [`DetachLayer`] outside of the lock: the
//! handler then finishes under its lock even if the client has disconnected.
//!
//! # Refusals
//!
//! A refused request receives an [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457) problem
//! document with a stable `code`, or a trailers-only gRPC status if it is a gRPC call.
//! [`LockLayer::on_reject`] customizes these responses. Services that do not speak HTTP return
//! errors instead: [`LockLayer::plain`].
//!
//! A gRPC call is a `POST` over HTTP/2 with the content type `application/grpc`, on a route of
//! gRPC. If axum has matched the request, that is a route such as `/package.Service/{*rest}`, as
//! tonic registers it; otherwise a path such as `/package.Service/Method`. On other routes a caller
//! cannot have its refusal look like a success, with the status 200. (A service without a package
//! is one of gRPC if it begins with a capital, as the style guide of Protobuf says.)
//!
//! | error | HTTP | gRPC |
//! |---|---|---|
//! | `Contended`, `WaitTimeout`, `Blocked` | 409 + `Retry-After` | `ABORTED` + `RetryInfo` |
//! | `Overloaded` | 503 + `Retry-After` | `RESOURCE_EXHAUSTED` + `RetryInfo` |
//! | `Unavailable`, `ReadOnly`, `Full`, `ShuttingDown` | 503 | `UNAVAILABLE` |
//! | `Lost` | 500, no `Retry-After`: effects may exist | `ABORTED`, no `RetryInfo` |
//! | a part of the request that the key needs is missing or invalid | 400 | `INVALID_ARGUMENT` |
//! | any other | 500 | `INTERNAL` |
//!
//! The gRPC status is `DEADLINE_EXCEEDED`, without `RetryInfo`, if the `grpc-timeout` of the
//! request ended the wait. The layer stops waiting a tenth of the `grpc-timeout`, but at most 50
//! ms, before that deadline, so that the response arrives in time. Other timers that end a call
//! at its deadline, such as tonic's own, respond in their own way.
//!
//! `Retry-After`, or the `google.rpc.RetryInfo` in the details of a gRPC status, is
//! [`LockLayer::retry_after`] or the remaining lease of the holder, whichever is shorter.
//! [`LockLayer::status`] overrides the HTTP status. The name of the lock and the error of the
//! store are never sent to the caller; a `tracing` event records them.
//!
//! # Feature flags
//!
//! - `axum` (default): path parameters in templates, extractors for
//!   [`HeldLock`](runtime::HeldLock), and [`LockError`](runtime::LockError) as a response.
//! - `macros` (default): `runtime::distributed_lock`. A crate that depends on lock-runtime only
//!   through this crate adds `crate = lock_tower::runtime` to the arguments of the attribute.
//! - `tonic`: [`LockError`](runtime::LockError) as a `tonic::Status`, for handlers that acquire
//!   locks themselves. The layer speaks gRPC without this feature.
//! - `policy`: `LockPolicies`, the lock policies of routes from a file that can be reloaded at
//!   any time.
//! - `once`: `OnceLayer`, which serves a request once for each key and repeats its response, as for
//!   an `idempotency-key`.
//! - `metrics`: metrics of all locks, labelled by policy name, through the `metrics` crate; see
//!   `lock_runtime::metrics`.
//! - `inspector`: pages for operators that show the locks, who holds them and who waits, the
//!   contention of the process and the health of the store.
//! - `tracing`: a span `lock` at level debug around each request, from its acquire attempt on,
//!   with the fields `lock.name`, `lock.key`, `lock.fence`, `lock.waited_ms` and `outcome`.
//!   Events are emitted without this feature, too.
//! - `serde`: `Serialize` and `Deserialize` for [`LockSpec`](runtime::LockSpec),
//!   [`LockKey`](runtime::LockKey) and [`FencingToken`](runtime::FencingToken).
//! - `redis` (default) and `redis-rustls`: the features of lock-runtime of the same names.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use]
mod macros;

#[cfg(feature = "inspector")]
pub mod inspector;
pub mod key;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "axum-08")]
pub mod recipes;

mod detach;
mod future;
#[cfg(test)]
#[path = "../../lock-runtime/fuzz/promises.rs"]
mod fuzz;
mod layer;
#[cfg(feature = "once")]
mod once;
#[cfg(feature = "policy")]
mod policies;
mod policy;
mod protocol;
mod selector;
mod service;
mod watch;

pub use lock_runtime as runtime;

pub use detach::{Detach, DetachLayer, DetachedFuture};
pub use future::ResponseFuture;
pub use key::{IntoTarget, KeyError, KeyExtractor, KeyTemplate, Target, TemplateError};
pub use layer::{LockLayer, PolicyLayer};
#[cfg(feature = "once")]
pub use once::{FromBytes, OnceBody, OnceLayer, ServeOnce};
#[cfg(feature = "policy")]
pub use policies::{LockPolicies, PolicyError, PolicyMistake};
pub use policy::{HoldUntil, Policy};
pub use protocol::{
    Http, Plain, Protocol, ServiceError, Wire,
    body::LockBody,
    reject::{OnReject, Reason, Refusal, StandardReject},
};
pub use selector::{Keyed, Selector};
pub use service::Lock;
