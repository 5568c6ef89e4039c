//! A Tower layer that holds a distributed lock while a request is served.
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::{Router, body::Body, extract::Path, http::{Request, StatusCode}, routing::post};
//! use lock_tower::{LockLayer, runtime::{HeldLock, LockClient}};
//! use tower::ServiceExt;
//!
//! // One runner in the whole fleet per order.
//! async fn pay(Path(id): Path<u64>, lock: HeldLock) -> String {
//!     format!("order {id} paid under {}, fencing token {}", lock.key(), lock.fence())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let lock = LockLayer::new(locks.clone(), "order:{id:int}")?.no_wait();
//! let app: Router = Router::new().route("/orders/{id}/pay", post(pay).layer(lock));
//! let request = || Request::post("/orders/42/pay").body(Body::empty());
//!
//! let response = app.clone().oneshot(request()?).await?;
//! assert_eq!(response.status(), StatusCode::OK);
//!
//! // The release was awaited: the lock is free when the response is there.
//! let guard = locks.exclusive("order:42").no_wait().acquire().await?;
//!
//! // Somebody else is at it: a problem document says so, and when to try again.
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
//! # What a request goes through
//!
//! 1. The layer finds out the key: from a [template](KeyTemplate), a closure or a [`KeyExtractor`] of your own.
//! 2. It acquires the lock, waiting for 2 s at most ([`LockLayer::wait`]). It is refused as in the table below if that fails.
//! 3. It waits until the inner service is ready, and calls it. The handler finds a [`HeldLock`](runtime::HeldLock) in the
//!    request's extensions (an extractor in axum), and `#[distributed_lock(.., reentrant)]` and
//!    [`LockRequest::reentrant`](runtime::LockRequest::reentrant) enter the route's lock.
//! 4. When the inner service has answered, the release is awaited, for at most one call to the store, and then the response
//!    goes out. The *head* of the response, that is: a body that is streamed is sent without the lock, unless
//!    [`Hold::Body`] keeps it until the last frame.
//!
//! When the lock is lost on the way, the inner future is dropped and the caller is told `lost_..`; a body that is being
//! sent under the lock ends with an error, or with a gRPC status in its trailers, and never as if it were whole. A
//! handler that panics releases. The layer fails closed: without a lock nothing is served, unless an extractor says
//! [`Target::Skip`], no route has matched, or [`LockLayer::fail_open`] says so.
//!
//! # Where to put it
//!
//! On the route: `post(pay).layer(lock)`. There it sees what axum has found out, it covers the methods that were added to
//! that `MethodRouter` before, and the template can be read next to the path. (Other methods take the lock as well, to be
//! told 405; with `post(pay).route_layer(lock)` they do not.)
//!
//! - `Router::route_layer(lock)` covers every route that was added before it. All of them must have the parameters of the
//!   template; one that has not is answered with 500 and an error event.
//! - `Router::layer(lock)` covers these and the fallback. Under a template with path parameters that passes without a
//!   lock: a 404 stays a 404. Templates of headers, query, method and gRPC path ask for no route, and lock the fallback,
//!   too.
//! - Around a finished router, `ServiceBuilder::new().layer(lock).service(app)`, nothing is routed yet: a template with path
//!   parameters is answered with 500 and an error event. Templates of headers, query, method and gRPC path work everywhere.
//! - Around a `nest_service` the parameters of the routes within cannot be seen; see [`KeyTemplate`].
//!
//! The key is the same however the routers are nested or merged.
//!
//! In tonic it is a layer of the whole server, `Server::builder().layer(lock)`, or of one service,
//! `tonic::service::LayerExt::named_layer`. tonic's own limits and time-outs are always outside of it. A handler finds its
//! lock in the extensions of the request: `request.extensions().get::<HeldLock>()`.
//!
//! Many routes with locks of their own are easier to read in a file, which one layer around all of them goes by:
//! `LockPolicies` (feature `policy`).
//!
//! # Among other layers
//!
//! The layer is always ready: it takes the inner capacity only when it has the lock.
//!
//! - `ConcurrencyLimit` belongs inside (added *before* the lock with `.layer`, *after* it in a `ServiceBuilder`): then
//!   those that wait for a lock take no place. Outside it counts them too, and a hot key can use up all places. On an
//!   axum route take the `GlobalConcurrencyLimit`: axum puts a route's layers on anew for each connection, and another
//!   limit with them.
//! - `LoadShed` belongs inside as well, in one `ServiceBuilder` or tuple with the limit: what axum's `.layer` gives is
//!   always ready, and so is the lock. Outside it never sheds; in the store's stead,
//!   [`max_waiters`](runtime::LockClientBuilder::max_waiters) bounds those that wait, and the others get 503 at once.
//! - `Timeout` outside bounds everything: the wait for the lock, the wait for the inner capacity, and the handler. Make
//!   it longer than the wait. Inside it bounds the handler, and the lock is released when it strikes. The wait for a
//!   limit within it comes before its time begins, unless the limit was put on the route by a `.layer` of its own.
//! - `Buffer` may be on either side: who waits for a lock is in nobody's way. `Trace`, `Compression` and the like, too: with
//!   [`Hold::Body`] the lock is held until the last frame that they make of the body.
//! - `CatchPanic` inside makes a response of a panic, whose release is awaited; outside the lock is released in the
//!   background.
//! - Authentication and rate limits belong outside: who is not let in should not get into the line.
//!
//! # Callers that hang up
//!
//! When a server drops the response future, the inner future is dropped at its await point, and the lock is released in
//! the background. hyper does so as soon as it knows that the caller is gone: at once over HTTP/2, and over HTTP/1 once
//! the request's body has been read, as small ones are. While a large body is unread, a closed HTTP/1 connection goes
//! unnoticed, and the handler runs to its end, under its lock.
//!
//! A handler that must not be cut short goes under a [`DetachLayer`], outside of the lock: it then finishes under its lock
//! without its caller.
//!
//! # Refusals
//!
//! [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457) problem documents with a stable `code`, or trailers-only gRPC statuses
//! for requests of the content type `application/grpc`. [`LockLayer::on_reject`] says it in your own way. Services that do
//! not speak HTTP get errors instead: [`LockLayer::plain`].
//!
//! | kind | HTTP | gRPC |
//! |---|---|---|
//! | `Contended`, `WaitTimeout` | 409 + `Retry-After` | `ABORTED` + `RetryInfo`; `DEADLINE_EXCEEDED` if the `grpc-timeout` of the request ended |
//! | `Overloaded` | 503 + `Retry-After` | `RESOURCE_EXHAUSTED` + `RetryInfo` |
//! | `Unavailable`, `ReadOnly`, `ShuttingDown` | 503 | `UNAVAILABLE` |
//! | `Lost` | 500, no `Retry-After`: effects may exist | `ABORTED`, no `RetryInfo` |
//! | a part of the request that the key needs is missing or not valid | 400 | `INVALID_ARGUMENT` |
//! | anything else | 500 | `INTERNAL` |
//!
//! A `grpc-timeout` ends the wait a tenth of itself before it is over, 50 ms at most, so that the answer arrives.
//! Whatever else ends a call at its deadline, tonic's own timers included, says so in its own way.
//!
//! `Retry-After`, or the `google.rpc.RetryInfo` in the details of a gRPC status, is [`LockLayer::retry_after`] or what is
//! left of the holder's lease, whichever is shorter. [`LockLayer::status`] says another HTTP status. What the caller is
//! not told, the lock's name and the store's error, is in a `tracing` event.
//!
//! # Features
//!
//! `axum` (default): path parameters in templates, extractors for [`HeldLock`](runtime::HeldLock), and
//! [`LockError`](runtime::LockError) as a response.
//!
//! `macros` (default): `runtime::distributed_lock`. A crate that has lock-runtime only through this one adds
//! `crate = lock_tower::runtime` to the arguments of the attribute.
//!
//! `tonic`: [`LockError`](runtime::LockError) as a `tonic::Status`, for handlers that lock by themselves. The layer
//! speaks gRPC without it.
//!
//! `policy`: `LockPolicies`, which routes are locked and how, from a file that can be read again at any time.
//!
//! `metrics`: what requests wait, hold, lose and renew, by the names of their policies, through the crate of that name.
//!
//! `tracing`: a span `lock` around each request, from when it asks for its lock, with the fields `policy`, `key`, `fence`,
//! `waited_ms` and `outcome`, at the level debug. Events there are without it, too.
//!
//! `redis` (default) and `rustls`: the stores of lock-runtime of those names.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use]
mod macros;

pub mod key;
#[cfg(feature = "metrics")]
pub mod metrics;

mod body;
mod detach;
mod future;
mod layer;
#[cfg(feature = "policy")]
mod policies;
mod policy;
mod protocol;
mod reject;
mod service;
mod watch;

pub use lock_runtime as runtime;

pub use body::LockBody;
pub use detach::{Detach, DetachLayer, DetachedFuture};
pub use future::ResponseFuture;
pub use key::{IntoTarget, KeyError, KeyExtractor, KeyTemplate, Target, TemplateError};
pub use layer::LockLayer;
#[cfg(feature = "policy")]
pub use policies::{LockPolicies, PolicyError, PolicyLayer, PolicyMistake};
pub use policy::{DEFAULT_WAIT, Policy};
pub use protocol::{Hold, Http, Plain, Protocol, ServiceError, Wire};
pub use reject::{OnReject, Reason, Refusal, StandardReject};
pub use service::Lock;
