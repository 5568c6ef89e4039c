//! Recipes for axum and tonic.
//!
//! | Recipe | Uses |
//! |---|---|
//! | [A key from a JSON body](#a-key-from-a-json-body) | [`LockRequest::run`] in the handler |
//! | [A key from a cookie](#a-key-from-a-cookie) | [`LockLayer::with_key`] |
//! | [A key from an authenticated user](#a-key-from-an-authenticated-user) | [`from_extension`] |
//! | [What a caller can do](#what-a-caller-can-do-to-a-lock) | [`max_hold`], [`permits`] |
//! | [Graceful shutdown of axum](#graceful-shutdown-of-axum) | [`LockClient::shutdown`] |
//! | [Graceful shutdown of tonic](#graceful-shutdown-of-tonic) | [`LockClient::shutdown`] |
//! | [Readiness and liveness](#readiness-and-liveness) | [`readiness`], [`LockClient::health`] |
//! | [A page for operators](#a-page-for-operators) | `Inspector` (feature `inspector`) |
//!
//! Scheduled jobs, tests, blocking code and locks shared by services are in the guide of
//! lock-runtime, on the page [`recipes`](crate::runtime::guide::recipes).
//!
//! [`LockRequest::run`]: crate::runtime::LockRequest::run
//! [`LockLayer::with_key`]: crate::LockLayer::with_key
//! [`from_extension`]: crate::key::from_extension
//! [`max_hold`]: crate::LockLayer::max_hold
//! [`permits`]: crate::LockLayer::permits
//! [`LockClient::shutdown`]: crate::runtime::LockClient::shutdown
//! [`LockClient::health`]: crate::runtime::LockClient::health
//! [`readiness`]: crate::runtime::web::readiness
//!
//! # A key from a JSON body
//!
//! A layer runs before the body is read. So extract the body first, and acquire the lock in the
//! handler. A [`LockError`](crate::runtime::LockError) is a response with the statuses of the
//! layer:
//!
//! ```
//! use axum::{Json, Router, extract::State, routing::post};
//! use lock_tower::runtime::{KeyWriter, LockClient, LockError};
//! # use axum::{body::Body, http::Request};
//! # use tower::ServiceExt;
//!
//! #[derive(serde::Deserialize)]
//! struct Payment {
//!     order: String,
//! }
//!
//! async fn pay(
//!     State(locks): State<LockClient>,
//!     Json(Payment { order }): Json<Payment>,
//! ) -> Result<String, LockError> {
//!     let key = KeyWriter::new().lit("order:").arg(format_args!("{order}")).finish();
//!     let lock = locks.exclusive(key).no_wait();
//!     lock.run(|_| async move { format!("order {order} is paid") }).await
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let app = Router::new().route("/payments", post(pay)).with_state(locks.clone());
//! # let request = || {
//! #     Request::post("/payments")
//! #         .header("content-type", "application/json")
//! #         .body(Body::from(r#"{"order":"42"}"#))
//! # };
//! # assert_eq!(app.clone().oneshot(request()?).await?.status(), 200);
//! # let guard = locks.exclusive("order:42").acquire().await?;
//! # assert_eq!(app.oneshot(request()?).await?.status(), 409);
//! # guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! **Caveat:** the settings of a layer do not apply here. In particular a request waits for at
//! most 10 s by default, and not 2 s as in a layer.
//!
//! # A key from a cookie
//!
//! A closure or a function reads the parts of the request that a [template](crate::KeyTemplate)
//! cannot name. A missing cookie is answered with 400:
//!
//! ```
//! use axum::{
//!     Router,
//!     body::Body,
//!     http::{HeaderMap, Request, header::COOKIE},
//!     routing::post,
//! };
//! use lock_tower::{
//!     KeyError, LockLayer,
//!     runtime::{KeyWriter, LockClient, LockKey},
//! };
//! # use tower::ServiceExt;
//!
//! /// For the key and for the handler: of two cookies with one name, parsers take different ones.
//! fn cart(headers: &HeaderMap) -> Option<u64> {
//!     let cookies = headers.get_all(COOKIE).iter();
//!     let mut carts = cookies
//!         .filter_map(|cookies| cookies.to_str().ok())
//!         .flat_map(|cookies| cookies.split(';'))
//!         .filter_map(|cookie| cookie.trim().strip_prefix("cart="));
//!     let cart = carts.next()?.parse().ok()?;
//!     carts.next().is_none().then_some(cart)
//! }
//!
//! fn key(request: &Request<Body>) -> Result<LockKey, KeyError> {
//!     let cart = cart(request.headers())
//!         .ok_or_else(|| KeyError::bad_request("One cookie \"cart\" with a number is needed."))?;
//!     Ok(KeyWriter::new().lit("cart:").arg(format_args!("{cart}")).finish()?)
//! }
//!
//! async fn checkout(headers: HeaderMap) -> String {
//!     format!("{:?}", cart(&headers))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let lock = LockLayer::with_key(locks.clone(), key).no_wait();
//! let app: Router = Router::new().route("/checkout", post(checkout).layer(lock));
//! # let request = || {
//! #     Request::post("/checkout").header(COOKIE, "theme=dark; cart=7").body(Body::empty())
//! # };
//! # assert_eq!(app.clone().oneshot(request()?).await?.status(), 200);
//! # let guard = locks.exclusive("cart:7").acquire().await?;
//! # assert_eq!(app.clone().oneshot(request()?).await?.status(), 409);
//! # let without = Request::post("/checkout").body(Body::empty())?;
//! # assert_eq!(app.clone().oneshot(without).await?.status(), 400);
//! # for twice in ["cart=7; cart=8", "cart=x", "cart=7%38"] {
//! #     let request = Request::post("/checkout").header(COOKIE, twice).body(Body::empty())?;
//! #     assert_eq!(app.clone().oneshot(request).await?.status(), 400);
//! # }
//! # guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! **Caveat:** the key is visible in the store and in events. Do not use a cookie that is a
//! secret, such as a session id: take the user behind it, as in the next recipe, or a digest.
//!
//! # A key from an authenticated user
//!
//! The middleware that authenticates the request puts the user into the extensions of the
//! request, and [`from_extension`] reads it there. The user implements
//! [`IntoTarget`](crate::IntoTarget):
//!
//! ```
//! use axum::{
//!     Router,
//!     extract::Request,
//!     http::StatusCode,
//!     middleware::{Next, from_fn},
//!     response::Response,
//!     routing::post,
//! };
//! use lock_tower::{
//!     IntoTarget, KeyError, LockLayer, Target, key,
//!     runtime::{KeyWriter, LockClient},
//! };
//! # use axum::body::Body;
//! # use tower::ServiceExt;
//!
//! #[derive(Clone)]
//! struct User(u64);
//!
//! impl IntoTarget for User {
//!     fn into_target(self) -> Result<Target, KeyError> {
//!         Ok(KeyWriter::new().lit("user:").arg(format_args!("{}", self.0)).finish()?.into())
//!     }
//! }
//!
//! async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
//! #   fn user_of(_request: &Request) -> Option<User> {
//! #       _request.headers().contains_key("authorization").then_some(User(7))
//! #   }
//!     let user = user_of(&request).ok_or(StatusCode::UNAUTHORIZED)?;
//!     request.extensions_mut().insert(user);
//!     Ok(next.run(request).await)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let lock = LockLayer::with_key(locks.clone(), key::from_extension::<User>()).no_wait();
//! // The first layer of a tuple is the outer one.
//! let layers = (from_fn(authenticate), lock);
//! let app: Router = Router::new().route("/profile", post(async || "saved").layer(layers));
//! # let request = || {
//! #     Request::post("/profile").header("authorization", "Bearer t").body(Body::empty())
//! # };
//! # assert_eq!(app.clone().oneshot(request()?).await?.status(), 200);
//! # let guard = locks.exclusive("user:7").acquire().await?;
//! # assert_eq!(app.clone().oneshot(request()?).await?.status(), 409);
//! # let anonymous = Request::post("/profile").body(Body::empty())?;
//! # assert_eq!(app.oneshot(anonymous).await?.status(), 401);
//! # guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! **Caveat:** the authentication must be outside of the lock. A request without the extension is
//! answered with 500 and an error event.
//!
//! # What a caller can do to a lock
//!
//! A request takes its lock before its body has been read, with a key whose values the caller
//! chooses. So a caller can
//!
//! - hold the lock while it sends the body slowly, or never, and under `HoldUntil::Body` while it
//!   does not read the response: for `max_hold`, a minute by default;
//! - send many requests for one key, so that others wait or are refused: up to
//!   [`max_waiters`](crate::LockLayer::max_waiters), 10,000 by default, wait in a process;
//! - hold the locks of many keys at once;
//! - ask for ever new keys, which fills the store: each leaves its fencing token for a day, in
//!   Redis 150 bytes and more for a long key. `{id:int}` and `{id:uuid}` accept no other text, and
//!   [`keep_fences_for`](crate::runtime::LockClientBuilder::keep_fences_for) sets a shorter time.
//!
//! After `max_hold` other clients get the lock, also while the caller stays connected. The handler
//! is cancelled; with [`OnLost`](crate::runtime::OnLost) set to `Error` or `Ignore` it runs on
//! *beside the next holder*, for as long as the caller likes.
//!
//! Layers outside of the lock bound the rest. This route reads the body before it locks, within
//! 5 s, and serves at most two requests of a user at a time:
//!
//! ```
//! use std::{num::NonZeroU32, time::Duration};
//! use axum::{
//!     Router,
//!     body::{Bytes, to_bytes},
//!     extract::Request,
//!     http::StatusCode,
//!     middleware::{Next, from_fn},
//!     response::Response,
//!     routing::post,
//! };
//! use lock_tower::{
//!     IntoTarget, KeyError, LockLayer, Target, key,
//!     runtime::{ErrorClass, KeyWriter, LockClient},
//! };
//! use tokio::time::timeout;
//! # use axum::body::Body;
//! # use futures_util::stream;
//! # use tower::ServiceExt;
//!
//! #[derive(Clone)]
//! struct User(u64);
//!
//! impl IntoTarget for User {
//!     fn into_target(self) -> Result<Target, KeyError> {
//!         Ok(KeyWriter::new().lit("user:").arg(format_args!("{}", self.0)).finish()?.into())
//!     }
//! }
//!
//! async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
//! #   fn user_of(request: &Request) -> Option<User> {
//! #       request.headers().contains_key("authorization").then_some(User(7))
//! #   }
//!     let user = user_of(&request).ok_or(StatusCode::UNAUTHORIZED)?;
//!     request.extensions_mut().insert(user);
//!     Ok(next.run(request).await)
//! }
//!
//! async fn read_body(request: Request, next: Next) -> Result<Response, StatusCode> {
//!     let (parts, body) = request.into_parts();
//!     let body = timeout(Duration::from_secs(5), to_bytes(body, 64 * 1024)).await;
//!     let body = body.map_err(|_| StatusCode::REQUEST_TIMEOUT)?;
//!     let body = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?;
//!     Ok(next.run(Request::from_parts(parts, body.into())).await)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # tokio::time::pause();
//! let locks = LockClient::in_memory();
//! // Counted in this process, without a call to a store.
//! let each_user = LockLayer::with_key(LockClient::in_memory(), key::from_extension::<User>())
//!     .permits(NonZeroU32::new(2).unwrap())
//!     .no_wait()
//!     .status(ErrorClass::Busy, StatusCode::TOO_MANY_REQUESTS);
//! let lock = LockLayer::new(locks.clone(), "order:{id:int}")?
//!     .max_waiters(100)
//!     .max_hold(Duration::from_secs(10));
//! // The first layer of a tuple is the outer one.
//! let layers = (from_fn(authenticate), each_user, from_fn(read_body), lock);
//! let pay = post(async |order: Bytes| order).layer(layers);
//! let app: Router = Router::new().route("/orders/{id}/pay", pay);
//! # let never = || Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
//! # let request = |body| {
//! #     Request::post("/orders/7/pay").header("authorization", "Bearer t").body(body).unwrap()
//! # };
//! # let ask = |body| tokio::spawn(app.clone().oneshot(request(body)));
//! # let slow = [ask(never()), ask(never())];
//! # tokio::time::sleep(Duration::from_secs(1)).await;
//! # assert_eq!(ask(Body::empty()).await??.status(), 429);
//! # let free = locks.exclusive("order:7").no_wait().acquire().await?;
//! # free.release().await?;
//! # for slow in slow {
//! #     assert_eq!(slow.await??.status(), 408);
//! # }
//! # assert_eq!(ask(Body::from("all of it")).await??.status(), 200);
//! # assert_eq!(ask(Body::from(vec![7; 65 * 1024])).await??.status(), 413);
//! # let anonymous = Request::post("/orders/7/pay").body(Body::empty())?;
//! # assert_eq!(app.oneshot(anonymous).await?.status(), 401);
//! # Ok(()) }
//! ```
//!
//! tonic reads the message of a call within its service, so under the lock: what bounds it is
//! `max_hold`, or a time-out of the server that is shorter. The same goes for streams: a stream of
//! requests is cut off after `max_hold`, and with `HoldUntil::Body` so is one of responses, with
//! the status `ABORTED`. Set `max_hold` to the longest that a stream may take.
//!
//! A caller that chooses the keys can make other callers fail, too: by requests that wait, for
//! [`max_waiters_in_all`](lock_runtime::LockClientBuilder::max_waiters_in_all), and by requests
//! that it gives up, which are limited as well. A limit for each caller, as above, prevents the
//! first and slows the second, which a limit of its requests per second prevents.
//! Under a [`DetachLayer`](crate::DetachLayer) it belongs inside of that layer.
//!
//! **Caveat:** a time-out for the body that is inside of the lock, such as that of tower-http for
//! each frame, does not bound the hold: a caller that sends a byte in each period never exceeds it.
//!
//! # Graceful shutdown of axum
//!
//! On SIGTERM the server stops accepting connections and finishes the open requests, under their
//! locks. Then [`LockClient::shutdown`] waits until all locks are released, for a few seconds at
//! most:
//!
//! ```no_run
//! use axum::Router;
//! use lock_tower::runtime::LockClient;
//! use tokio::{net::TcpListener, signal::unix::{SignalKind, signal}};
//!
//! async fn serve(app: Router, locks: LockClient) -> std::io::Result<()> {
//!     let mut terminate = signal(SignalKind::terminate())?;
//!     let listener = TcpListener::bind("0.0.0.0:8080").await?;
//!     let served = axum::serve(listener, app)
//!         .with_graceful_shutdown(async move {
//!             terminate.recv().await;
//!         })
//!         .await;
//!     locks.shutdown().await;
//!     served
//! }
//! ```
//!
//! **Caveat:** axum waits for open requests without a limit. Put a time-out on the handlers
//! (`TimeoutLayer` of tower-http), so that both steps end within the grace period of the
//! orchestrator, 30 s in Kubernetes. Requests that are cut off leave their locks until the leases
//! end. The server does not wait for requests under a [`DetachLayer`](crate::DetachLayer).
//!
//! # Graceful shutdown of tonic
//!
//! The steps are the same. The lock is a layer of the server:
//!
//! ```no_run
//! use lock_tower::{LockLayer, runtime::LockClient};
//! use tokio::signal::unix::{SignalKind, signal};
//! use tonic::{service::Routes, transport::Server};
//!
//! async fn serve(services: Routes, locks: LockClient) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut terminate = signal(SignalKind::terminate())?;
//!     let lock = LockLayer::new(locks.clone(), "item:{header.x-item}")?;
//!     let served = Server::builder()
//!         .layer(lock)
//!         .add_routes(services)
//!         .serve_with_shutdown("0.0.0.0:50051".parse()?, async move {
//!             terminate.recv().await;
//!         })
//!         .await;
//!     locks.shutdown().await;
//!     Ok(served?)
//! }
//! ```
//!
//! **Caveat:** tonic waits for open streams without a limit, too. A handler that streams has to
//! end its streams on the same signal, for example through the `CancellationToken` of tokio-util.
//!
//! # Readiness and liveness
//!
//! An orchestrator sends requests only to processes that are ready, and restarts those that are
//! not alive. Only readiness depends on the store:
//!
//! ```
//! use axum::{Router, routing::get};
//! use lock_tower::runtime::{LockClient, web::readiness};
//! # use axum::{body::Body, http::Request};
//! # use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let app: Router = Router::new()
//!     .route("/ready", readiness(&locks))
//!     .route("/alive", get(|| async { "alive" }));
//! # for (path, status) in [("/ready", 200), ("/alive", 200)] {
//! #     let request = Request::get(path).body(Body::empty())?;
//! #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
//! # }
//! locks.shutdown().await;
//! # for (path, status) in [("/ready", 503), ("/alive", 200)] {
//! #     let request = Request::get(path).body(Body::empty())?;
//! #     tokio::time::sleep(std::time::Duration::from_millis(1_050)).await;
//! #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
//! # }
//! # Ok(()) }
//! ```
//!
//! - `/ready` responds with 200 while locks are granted, also by a part of the servers
//!   (`degraded`), and with 503 otherwise. The process then gets no requests that it could only
//!   refuse, and gets them again within a second of the store's return.
//! - `/alive` shows that the process runs. It must not ask the store: a restart does not bring the
//!   store back, and an outage would restart all processes at once. Each of them would lose the
//!   locks that it holds, and all would connect at the same time when the store is back.
//! - The time-out of a probe should be 2 s or more, since a server that hangs is given a second.
//! - The body of `/ready` has only codes, such as `eviction`. Print
//!   [`Health`](crate::runtime::health::Health) for the details: it has a remedy for each finding.
//!
//! **Caveat:** if all processes share one store, an outage makes all of them unready at the same
//! time, and also requests that need no lock are refused. If those are many, or the layer is set
//! to `fail_open`, leave the store out of `/ready`, and alert on the verdict instead.
//!
//! # A page for operators
//!
//! `Inspector` (feature `inspector`) shows all locks and can revoke them, so only operators may
//! reach it. It has no access control of its own: put the middleware of the application around it.
//! This one asks for a password, and passes on the name of the operator for the log of revocations:
//!
#![cfg_attr(feature = "inspector", doc = "```")]
#![cfg_attr(not(feature = "inspector"), doc = "```ignore")]
//! use axum::{
//!     Router,
//!     extract::Request,
//!     http::{StatusCode, header},
//!     middleware::{self, Next},
//!     response::{IntoResponse, Response},
//! };
//! use lock_tower::{inspector::Inspector, runtime::LockClient};
//!
//! #[derive(Clone)]
//! struct Operator(&'static str);
//!
//! async fn operators_only(mut request: Request, next: Next) -> Response {
//!     // In an application: its sessions, or the header of an authenticating proxy. Browsers send
//!     // these and passwords with event streams as well, but no bearer tokens.
//!     let login = request.headers().get(header::AUTHORIZATION);
//!     match login.map(|login| login.as_bytes()) {
//!         // alice:night-shift, in base64
//!         Some(b"Basic YWxpY2U6bmlnaHQtc2hpZnQ=") => {
//!             request.extensions_mut().insert(Operator("alice"));
//!             next.run(request).await
//!         }
//!         _ => {
//!             let ask = [(header::WWW_AUTHENTICATE, "Basic realm=\"locks\"")];
//!             (StatusCode::UNAUTHORIZED, ask).into_response()
//!         }
//!     }
//! }
//!
//! # use {axum::body::Body, tower::ServiceExt as _};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! let inspector = Inspector::new(locks)
//!     .allow_revoke("https://ops.example.com")
//!     .caller(|request| Some(request.extensions.get::<Operator>()?.0.into()));
//! let operators: Router = Router::new()
//!     .nest_service("/locks", inspector)
//!     .layer(middleware::from_fn(operators_only));
//! # let get = || Request::get("/locks").header("host", "ops.example.com");
//! # let response = operators.clone().oneshot(get().body(Body::empty())?).await?;
//! # assert_eq!(response.status(), 401);
//! # let request = get().header("authorization", "Basic YWxpY2U6bmlnaHQtc2hpZnQ=");
//! # let request = request.body(Body::empty())?;
//! # assert_eq!(operators.oneshot(request).await?.status(), 200);
//! # Ok(()) }
//! ```
//!
//! The origin is that of the page as the browsers of the operators see it. Requests that name
//! another host are refused, so behind a proxy that changes the header `Host` to another name, add
//! `.allow_host("orders.internal")`.
