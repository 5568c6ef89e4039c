//! Locking a function with `#[distributed_lock]`.
//!
//! ```
//! use lock_runtime::{LockClient, LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:{order_id}", lease = "30s", wait = "2s")]
//! async fn pay(order_id: u64) -> Result<String, LockError> {
//!     Ok(format!("order {order_id} is paid"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory(); // or LockClient::connect("redis://127.0.0.1/").await?
//! locks.clone().install()?;
//! assert_eq!(pay(42).await?, "order 42 is paid");
//! locks.shutdown().await;
//! # Ok(()) }
//! ```
//!
//! A call acquires the lock, runs the body, releases the lock and returns the result of the body.
//! This page shows each argument in an example. The [table of
//! arguments](macro@crate::distributed_lock#arguments) is in the documentation of the attribute.
//!
//! # The client
//!
//! | Client | Scope |
//! |---|---|
//! | [`install`](crate::LockClient::install) | the whole process |
//! | [`as_default`](crate::LockClient::as_default) | one flow of work, for example a test |
//! | `client = ..` | one function |
//!
//! Without any of them the call returns [`NoClient`](crate::LockErrorKind::NoClient). The message
//! names the function and shows the missing lines.
//!
//! ```
//! use lock_runtime::{LockClient, LockError, LockErrorKind, distributed_lock};
//!
//! #[distributed_lock(key = "order:{id}")]
//! async fn pay(id: u64) -> Result<(), LockError> {
//!     Ok(())
//! }
//!
//! struct Shop {
//!     locks: LockClient,
//! }
//!
//! impl Shop {
//!     #[distributed_lock(key = "order:{id}", client = self.locks)]
//!     async fn ship(&self, id: u64) -> Result<(), LockError> {
//!         Ok(())
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! let error = pay(42).await.unwrap_err();
//! assert_eq!(error.kind(), LockErrorKind::NoClient);
//! assert!(error.to_string().contains("install()"));
//!
//! let locks = LockClient::in_memory();
//! locks.as_default(pay(42)).await?;
//! Shop { locks }.ship(42).await?;
//! # Ok(()) }
//! ```
//!
//! # The key
//!
//! The key is a format string that names arguments (bound by any pattern), a format string with
//! values, or any expression. Values in a format string are escaped. An expression is used
//! unchanged.
//!
//! A string without a placeholder gives the same key for every call, so one call at a time runs
//! across all processes. It needs the argument `global` as a confirmation.
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, LockKey, distributed_lock, is_held};
//! struct Order { shop: String, id: u64 }
//!
//! #[distributed_lock(key = "order:{shop}:{id:06}")]
//! async fn pay(Order { shop, id }: Order) -> Result<bool, LockError> {
//!     Ok(is_held(&LockKey::new("order:north:000042")?))
//! }
//!
//! #[distributed_lock(key("order:{}:{:06}", order.shop, order.id))]
//! async fn ship(order: Order) -> Result<bool, LockError> {
//!     Ok(is_held(&LockKey::new("order:north:000042")?))
//! }
//!
//! #[distributed_lock(key = "nightly-report", global)]
//! async fn report() -> Result<bool, LockError> {
//!     Ok(is_held(&LockKey::new("nightly-report")?))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! let order = || Order { shop: "north".into(), id: 42 };
//! assert!(pay(order()).await? && ship(order()).await? && report().await?);
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! `keys` acquires several locks and holds all of them. They are acquired in the same order
//! everywhere, so two calls cannot deadlock. With `no_wait` all are acquired or none, on one server
//! in one step.
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, distributed_lock};
//! #[distributed_lock(keys("account:{from}", "account:{to}"), guard = lock)]
//! async fn transfer(from: u64, to: u64) -> Result<usize, LockError> {
//!     Ok(lock.fences().count())
//! }
//!
//! // A number needs no escaping. For text from outside, build the key with a `KeyWriter`.
//! #[distributed_lock(keys = items.iter().map(|item| format!("item:{item}")), guard = lock)]
//! async fn reserve(items: &[u64]) -> Result<usize, LockError> {
//!     Ok(lock.fences().count())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! let (there, back) = tokio::join!(transfer(1, 2), transfer(2, 1));
//! assert_eq!((there?, back?), (2, 2));
//! assert_eq!(reserve(&[7, 8, 9]).await?, 3);
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # The lock
//!
//! `exclusive` (or `write`), `read` (or `shared`) and `permits = n` are the
//! [modes](super::modes). All options of [`LockSpec`](crate::LockSpec) are arguments of the same
//! name: `lease`, `wait`, `no_wait`, `renew`, `no_renew`, `reentrant`, `no_reentrant`, `min_hold`,
//! `max_hold`, `no_max_hold`, `strict_order`, `no_strict_order` and `max_waiters`. `spec = ..`
//! takes all of them from configuration, which the feature `serde` can deserialize. Options beside
//! `spec` override it. A mode beside `spec` does not compile, because the mode is a part of the
//! spec.
//!
//! ```
//! use std::time::Duration;
//! use lock_runtime::{LockClient, LockError, LockSpec, distributed_lock};
//!
//! struct Config { checkout: LockSpec }
//!
//! #[distributed_lock(key = "order:{id}", spec = config.checkout, no_wait)]
//! async fn pay(config: &Config, id: u64) -> Result<u64, LockError> {
//!     Ok(id)
//! }
//!
//! #[distributed_lock(key = "mail:{server}", permits = 3, max_hold = "1m")]
//! async fn send(server: &str) -> Result<(), LockError> {
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! let config = Config { checkout: LockSpec::exclusive().lease(Duration::from_secs(10)) };
//! assert_eq!(pay(&config, 42).await?, 42);
//! send("north").await?;
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # The return type
//!
//! The function returns a `Result` whose error type implements `From<LockError>`: your own enum
//! with `#[from]`, `std::io::Error`, `anyhow::Error`, or `Box<dyn Error + Send + Sync>`.
//!
//! - For other return types, `map_err` names a function from the error to the return value.
//! - `on_busy` gives the return value for a lock that is held by another caller.
//!
//! A job that all replicas start and only one should run:
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, distributed_lock};
//! #[distributed_lock(
//!     key = "nightly-report", global, no_wait, min_hold = "5s", on_busy = skip, map_err = failed
//! )]
//! async fn report() {
//!     println!("written once");
//! }
//!
//! fn failed(error: LockError) {
//!     eprintln!("no report tonight: {error:#}");
//! }
//!
//! #[distributed_lock(key = "order:{id}", no_wait, on_busy = Ok(format!("order {id} is busy")))]
//! async fn pay(id: u64) -> Result<String, std::io::Error> {
//!     Ok(format!("order {id} is paid"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! tokio::join!(report(), report(), report());
//!
//! let other = locks.exclusive("order:42").acquire().await?;
//! assert_eq!(pay(42).await?, "order 42 is busy");
//! other.release().await?;
//! assert_eq!(pay(42).await?, "order 42 is paid");
//! # Ok::<_, Box<dyn std::error::Error>>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! `on_busy` applies to [`Contended`](crate::LockErrorKind::Contended) and
//! [`WaitTimeout`](crate::LockErrorKind::WaitTimeout) only. A store that is out of reach is an
//! error.
//!
//! # The lock in the body
//!
//! `guard = name` gives the body access to its lock, as a [`&HeldLock`](crate::HeldLock): the
//! fencing token to send with every write, the remaining validity, and the loss.
//!
//! ```
//! # use lock_runtime::{FencingToken, LockClient, LockError, distributed_lock};
//! #[distributed_lock(key = "order:{id}", guard = lock)]
//! async fn pay(id: u64) -> Result<FencingToken, LockError> {
//!     // If this changes no row, a later holder has written.
//!     // UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence <= :fence
//!     Ok(lock.fence())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! assert!(pay(42).await? < pay(42).await?);
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # Loss of the lock
//!
//! The body is dropped at its current `.await`, and the function returns
//! [`Lost`](crate::LockErrorKind::Lost). Changes that the body made until then remain, including
//! those to `&mut self`.
//!
//! With `on_lost = error` the body runs to its end, and the function then returns `Lost`. With
//! `on_lost = ignore` it returns the result of the body. Use them for work that is worse half-done
//! than done twice, and whose writes carry the fencing token.
//!
//! A loss cannot stop a body that computes without an `.await`. If it ends after the loss, another
//! holder may have worked at the same time. By default the function then returns `Lost` as well,
//! and the message says that the body has ended. An error that the body itself returns is kept. In
//! each case a warning names the function, the key, the fencing token and the time since the loss.
//! See [`OnLost`](crate::OnLost).
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, LockErrorKind, RevokeScope, distributed_lock};
//! # use std::time::Duration;
//! #[distributed_lock(key = "order:{id}", client = locks)]
//! async fn cancelled(locks: &LockClient, id: u64) -> Result<&'static str, LockError> {
//!     locks.revoke("order:42", RevokeScope::Leased).await?; // by an operator, for example
//!     tokio::time::sleep(Duration::from_secs(60)).await; // ends here
//!     Ok("not reached")
//! }
//!
//! #[distributed_lock(key = "order:{id}", client = locks, on_lost = ignore, guard = lock)]
//! async fn finished(locks: &LockClient, id: u64) -> Result<&'static str, LockError> {
//!     locks.revoke("order:42", RevokeScope::Leased).await?;
//!     lock.lost().await;
//!     Ok("done, and the loss is in the log")
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! let locks = LockClient::in_memory();
//! let error = cancelled(&locks, 42).await.unwrap_err();
//! assert!(matches!(error.kind(), LockErrorKind::Lost(_)));
//! assert_eq!(finished(&locks, 42).await?, "done, and the loss is in the log");
//! # Ok(()) }
//! ```
//!
//! # Nested calls
//!
//! A lock belongs to a flow of work: a future and everything that it awaits. If a locked function
//! calls another one with the same key, the inner call would wait for its caller. It is refused
//! as [`WouldDeadlock`](crate::LockErrorKind::WouldDeadlock). With `reentrant` it enters the lock
//! without a round trip, under the same fencing token. The same applies to recursion.
//!
//! ```
//! # use lock_runtime::{FencingToken, LockClient, LockError, LockErrorKind, distributed_lock};
//! #[distributed_lock(key = "order:{id}", reentrant, guard = lock)]
//! async fn charge(id: u64) -> Result<FencingToken, LockError> {
//!     Ok(lock.fence())
//! }
//!
//! #[distributed_lock(key = "order:{id}")]
//! async fn charge_once(id: u64) -> Result<(), LockError> {
//!     Ok(())
//! }
//!
//! #[distributed_lock(key = "order:{id}", guard = lock)]
//! async fn pay(id: u64) -> Result<(), LockError> {
//!     assert_eq!(charge(id).await?, lock.fence());
//!     assert_eq!(charge_once(id).await.unwrap_err().kind(), LockErrorKind::WouldDeadlock);
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! pay(42).await?;
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! Inside a read lock, a request for the same lock as a writer is refused as well, re-entrant or
//! not: it would wait for its own reader.
//!
//! A guard from `locks.exclusive(..).acquire()` opens no scope. Calls made while it lives are not
//! nested in it, except inside [`guard.scope(..)`](crate::HeldLock::scope).
//!
//! A locked function called from a service under a `LockLayer` of lock-tower is nested in the
//! lock of the request, if both use the same client. With another client it is not nested, and
//! waits for its own request:
//!
//! ```
//! # use lock_runtime::{FencingToken, LockClient, LockError, LockKey, distributed_lock};
//! # use lock_tower::LockLayer;
//! # use tower::{Layer, ServiceExt, service_fn};
//! #[distributed_lock(key = "order:{id}", reentrant, guard = lock)]
//! async fn charge(id: u64) -> Result<FencingToken, LockError> {
//!     Ok(lock.fence())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! let layer = LockLayer::plain(locks.clone(), |id: &u64| LockKey::new(format!("order:{id}")));
//! let service = layer.layer(service_fn(async |id: u64| charge(id).await));
//! let _token = service.oneshot(42).await?; // without `reentrant`: WouldDeadlock
//! # Ok::<_, Box<dyn std::error::Error>>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! The branches of a `join!` are not nested in each other. They contend like unrelated callers,
//! re-entrant or not. Inside a lock that encloses both, both enter it:
//!
//! ```
//! # use lock_runtime::{FencingToken, LockClient, LockError, distributed_lock};
//! #[distributed_lock(key = "order:{id}", reentrant, guard = lock)]
//! async fn charge(id: u64) -> Result<FencingToken, LockError> {
//!     Ok(lock.fence())
//! }
//!
//! #[distributed_lock(key = "order:{id}", guard = lock)]
//! async fn charge_twice(id: u64) -> Result<(), LockError> {
//!     let (one, two) = tokio::join!(charge(id), charge(id));
//!     assert_eq!((one?, two?), (lock.fence(), lock.fence())); // at the same time
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.as_default(async {
//! let (one, two) = tokio::join!(charge(42), charge(42));
//! assert_ne!(one?, two?); // one after the other
//! charge_twice(42).await?;
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! A spawned task is nested in nothing, neither in the client's `as_default` nor in the lock. To
//! nest it, run its future in [`HeldLock::scope`](crate::HeldLock::scope) of a clone of the lock. A
//! guard that was entered there keeps the lock until it is released, even if the function has
//! returned:
//!
//! ```
//! # use lock_runtime::{FencingToken, LockClient, LockError, LockErrorKind, distributed_lock};
//! #[distributed_lock(key = "order:{id}", reentrant, wait = "50ms", guard = lock)]
//! async fn charge(id: u64) -> Result<FencingToken, LockError> {
//!     Ok(lock.fence())
//! }
//!
//! #[distributed_lock(key = "order:{id}", guard = lock)]
//! async fn pay(id: u64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let unrelated = tokio::spawn(charge(id)).await?;
//!     assert_eq!(unrelated.unwrap_err().kind(), LockErrorKind::WaitTimeout);
//!
//!     let lock = lock.clone();
//!     let child = tokio::spawn(async move { (lock.fence(), lock.scope(charge(id)).await) });
//!     let (ours, theirs) = child.await?;
//!     assert_eq!(ours, theirs?);
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! LockClient::in_memory().install()?; // found by spawned tasks, too
//! pay(42).await?;
//! # Ok(()) }
//! ```
//!
//! # Supported functions
//!
//! The attribute supports free functions, methods with any receiver, associated functions, async
//! methods of traits and their defaults, and methods in an `#[async_trait]` impl.
//!
//! `#[tracing::instrument]`, `#[axum::debug_handler]` and similar attributes go above or below
//! it. `#[tokio::test]` and `#[tokio::main]` make the function a synchronous one, so they go
//! below.
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, distributed_lock};
//! trait Pay {
//!     fn shop(&self) -> &str;
//!
//!     #[distributed_lock(key("order:{}:{id}", self.shop()))]
//!     async fn pay(&self, id: u64) -> Result<u64, LockError> {
//!         Ok(id)
//!     }
//! }
//!
//! #[distributed_lock(key = "orders", global, client = LockClient::in_memory())]
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), LockError> {
//!     assert!(lock_runtime::is_held(&lock_runtime::LockKey::new("orders")?));
//!     Ok(())
//! }
//! ```
//!
//! If lock-runtime has another name, or is only available through another crate, `crate = ..`
//! gives its path:
//!
//! ```
//! mod platform { pub mod locks { pub use lock_runtime::*; } } // usually a crate
//! use platform::locks::{LockClient, LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:{id}", crate = platform::locks)]
//! async fn pay(id: u64) -> Result<u64, LockError> {
//!     Ok(id)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! assert_eq!(LockClient::in_memory().as_default(pay(42)).await?, 42);
//! # Ok(()) }
//! ```
