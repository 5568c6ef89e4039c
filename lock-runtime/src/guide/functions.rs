//! Putting a lock on a function.
//!
//! ```
//! use lock_runtime::{LockClient, LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:{order_id}", lease = "30s", wait = "2s")]
//! async fn pay(order_id: u64) -> Result<String, LockError> {
//!     Ok(format!("order {order_id} is paid"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory(); // or LockClient::connect("redis://127.0.0.1/").await?
//! locks.clone().install()?;
//! assert_eq!(pay(42).await?, "order 42 is paid");
//! locks.shutdown().await;
//! # Ok(()) }
//! ```
//!
//! A call waits until it holds the lock, runs the body, gives the lock back and returns what the body returned. All arguments
//! are in the [table of the attribute](macro@crate::distributed_lock#arguments); this page shows them at work.
//!
//! # Which client
//!
//! [`install`](crate::LockClient::install) makes a client that of the whole process, [`scope`](crate::LockClient::scope) that of one
//! flow of work, which is what tests want; `client = ..` names one. With none of them the call returns
//! [`NoClient`](crate::LockErrorKind::NoClient), and the message names the function and shows the lines to write.
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
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! let error = pay(42).await.unwrap_err();
//! assert_eq!(error.kind(), LockErrorKind::NoClient);
//! assert!(error.to_string().contains("install()"));
//!
//! let locks = LockClient::in_memory();
//! locks.scope(pay(42)).await?;
//! Shop { locks }.ship(42).await?;
//! # Ok(()) }
//! ```
//!
//! # Which key
//!
//! A format string that names arguments, whatever patterns they are bound by; a format string with values; or any
//! expression. Values are escaped, an expression is taken as it is. A string without a placeholder says `global`, as it locks
//! the whole fleet out.
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
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! let order = || Order { shop: "north".into(), id: 42 };
//! assert!(pay(order()).await? && ship(order()).await? && report().await?);
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! With `keys` all of them are held, taken in one order everywhere, so that two calls cannot wait for each other; with
//! `no_wait` they are taken in one step, all or none.
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, distributed_lock};
//! #[distributed_lock(keys("account:{from}", "account:{to}"), guard = lock)]
//! async fn transfer(from: u64, to: u64) -> Result<usize, LockError> {
//!     Ok(lock.fences().count())
//! }
//!
//! // A number needs no escaping; for text from outside make the key by a `KeyWriter`.
//! #[distributed_lock(keys = items.iter().map(|item| format!("item:{item}")), guard = lock)]
//! async fn reserve(items: &[u64]) -> Result<usize, LockError> {
//!     Ok(lock.fences().count())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! let (there, back) = tokio::join!(transfer(1, 2), transfer(2, 1));
//! assert_eq!((there?, back?), (2, 2));
//! assert_eq!(reserve(&[7, 8, 9]).await?, 3);
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # Which lock
//!
//! `read`, `write`, `permits = n` are the [modes](super::modes); `lease`, `wait`, `no_wait`, `min_hold`, `max_hold`, `no_renew` and
//! `strict_order` are those of [`LockSpec`](crate::LockSpec). `spec = ..` takes all of them from configuration; what is written
//! beside it wins.
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
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! let config = Config { checkout: LockSpec::exclusive().lease(Duration::from_secs(10)) };
//! assert_eq!(pay(&config, 42).await?, 42);
//! send("north").await?;
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # What it returns
//!
//! A `Result` whose error can be made from a [`LockError`](crate::LockError): your own enum with `#[from]`, `std::io::Error`, `anyhow::Error`,
//! `Box<dyn Error + Send + Sync>`. Where that is not to be, `map_err` names a function from the error to what the function returns,
//! and `on_busy` says what to return if somebody else is at it. A job that all replicas start and one should do:
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, distributed_lock};
//! #[distributed_lock(key = "nightly-report", global, no_wait, min_hold = "5s", on_busy = skip, map_err = failed)]
//! async fn report() {
//!     println!("written once");
//! }
//!
//! fn failed(error: LockError) {
//!     eprintln!("no report tonight: {error}");
//! }
//!
//! #[distributed_lock(key = "order:{id}", no_wait, on_busy = Ok(format!("order {id} is being paid")))]
//! async fn pay(id: u64) -> Result<String, std::io::Error> {
//!     Ok(format!("order {id} is paid"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! tokio::join!(report(), report(), report());
//!
//! let somebody_else = locks.exclusive("order:42").acquire().await?;
//! assert_eq!(pay(42).await?, "order 42 is being paid");
//! somebody_else.release().await?;
//! assert_eq!(pay(42).await?, "order 42 is paid");
//! # Ok::<_, Box<dyn std::error::Error>>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! `on_busy` is for [`Contended`](crate::LockErrorKind::Contended) and [`WaitTimeout`](crate::LockErrorKind::WaitTimeout) only: a store that
//! is out of reach is an error, not somebody at work.
//!
//! # The lock in the body
//!
//! `guard = name` gives the body its lock as a [`&HeldLock`](crate::HeldLock): the fencing token to send with every write, what is left
//! of the lease, the loss.
//!
//! ```
//! # use lock_runtime::{FencingToken, LockClient, LockError, distributed_lock};
//! #[distributed_lock(key = "order:{id}", guard = lock)]
//! async fn pay(id: u64) -> Result<FencingToken, LockError> {
//!     // No row changed: a later holder has written.
//!     // UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence <= :fence
//!     Ok(lock.fence())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! assert!(pay(42).await? < pay(42).await?);
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # When the lock is lost
//!
//! The body is dropped at the `.await` where it stands, and the function returns [`Lost`](crate::LockErrorKind::Lost). What it changed by then
//! stays changed, `&mut self` included. With `on_lost = finish` it runs to its end and gives its result; the loss is traced as
//! a warning. That is for work that is worse half-done than done twice, and whose writes carry the fencing token.
//!
//! ```
//! # use lock_runtime::{LockClient, LockError, LockErrorKind, RevokeScope, distributed_lock};
//! # use std::time::Duration;
//! #[distributed_lock(key = "order:{id}", client = locks)]
//! async fn cancelled(locks: &LockClient, id: u64) -> Result<&'static str, LockError> {
//!     locks.revoke("order:42", RevokeScope::Leased).await?; // an operator, say
//!     tokio::time::sleep(Duration::from_secs(60)).await; // ends here
//!     Ok("not reached")
//! }
//!
//! #[distributed_lock(key = "order:{id}", client = locks, on_lost = finish, guard = lock)]
//! async fn finished(locks: &LockClient, id: u64) -> Result<&'static str, LockError> {
//!     locks.revoke("order:42", RevokeScope::Leased).await?;
//!     lock.lost().await;
//!     Ok("done, and the loss is in the log")
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! let locks = LockClient::in_memory();
//! let error = cancelled(&locks, 42).await.unwrap_err();
//! assert!(matches!(error.kind(), LockErrorKind::Lost(_)));
//! assert_eq!(finished(&locks, 42).await?, "done, and the loss is in the log");
//! # Ok(()) }
//! ```
//!
//! # Who is who
//!
//! A lock belongs to a flow of work: a future, and what it awaits. A locked function that is called within another one of the same
//! key would wait for itself, and is refused as [`WouldDeadlock`](crate::LockErrorKind::WouldDeadlock); with `reentrant` it enters, without a round
//! trip, under the same fencing token. Recursion is the same.
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
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! pay(42).await?;
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! Within a lock for reading, the same lock for writing is refused as well, re-entrant or not: it would wait for its own readers. A bare
//! guard, `locks.exclusive(..).acquire()`, opens no scope: what is called while it lives is no part of it, except by
//! [`guard.scope(..)`](crate::HeldLock::scope).
//!
//! A locked function that is called from a service under a `LockLayer` of lock-tower is within the lock of the request, if both have the
//! same client; with another client it is a stranger and waits for itself:
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
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! let layer = LockLayer::plain(locks.clone(), |id: &u64| LockKey::new(format!("order:{id}")));
//! let service = layer.layer(service_fn(async |id: u64| charge(id).await));
//! let _token = service.oneshot(42).await?; // without `reentrant`: WouldDeadlock
//! # Ok::<_, Box<dyn std::error::Error>>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! The branches of a `join!` are not within each other: they contend like strangers, re-entrant or not. Within a lock that
//! encloses both, both enter it.
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
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # locks.scope(async {
//! let (one, two) = tokio::join!(charge(42), charge(42));
//! assert_ne!(one?, two?); // one after the other
//! charge_twice(42).await?;
//! # Ok::<_, LockError>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! A spawned task is within nothing, neither the client's `scope` nor the lock. It takes a clone of the lock along, by
//! [`HeldLock::scope`](crate::HeldLock::scope). What enters there keeps the lock until it is done, also when the function has returned:
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
//!     let stranger = tokio::spawn(charge(id)).await?;
//!     assert_eq!(stranger.unwrap_err().kind(), LockErrorKind::WaitTimeout);
//!
//!     let lock = lock.clone();
//!     let child = tokio::spawn(async move { (lock.fence(), lock.scope(charge(id)).await) });
//!     let (ours, theirs) = child.await?;
//!     assert_eq!(ours, theirs?);
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! LockClient::in_memory().install()?; // which a spawned task finds
//! pay(42).await?;
//! # Ok(()) }
//! ```
//!
//! # Where it can stand
//!
//! On free functions, methods with any receiver, associated functions, async methods of traits and their defaults, and methods in an
//! `#[async_trait]` impl. `#[tracing::instrument]`, `#[axum::debug_handler]` and the like go above or below it; `#[tokio::test]` and
//! `#[tokio::main]` make the function a plain one, so they go below.
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
//! Where lock-runtime has another name, or is there only as a part of another crate, `crate = ..` says where:
//!
//! ```
//! mod platform { pub mod locks { pub use lock_runtime::*; } } // a crate of its own, say
//! use platform::locks::{LockClient, LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:{id}", crate = platform::locks)]
//! async fn pay(id: u64) -> Result<u64, LockError> {
//!     Ok(id)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
//! assert_eq!(LockClient::in_memory().scope(pay(42)).await?, 42);
//! # Ok(()) }
//! ```
