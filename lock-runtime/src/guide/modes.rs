//! Which lock.
//!
//! # One holder
//!
//! [`exclusive`](crate::LockClient::exclusive) is what most work needs. Name the lock after the thing it protects, not after the code:
//! `order:42`, so that everything that touches the order excludes everything else that does.
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let paid = locks.exclusive("order:42").run(|_| async { "paid" }).await?;
//! assert_eq!(paid, "paid");
//! # Ok(()) }
//! ```
//!
//! A value that comes from outside goes through a [`KeyWriter`](crate::KeyWriter), which the macro and the layer do by
//! themselves; a name that is put together by `format!` lets `("1:2", "3")` meet `("1", "2:3")`.
//!
//! # Readers and a writer
//!
//! [`read`](crate::LockClient::read) shares, [`write`](crate::LockClient::write) does not; they are modes of one lock, and an
//! exclusive lock of that name is the writer. A writer becomes a reader without a gap by
//! [`downgrade`](crate::LockGuard::downgrade); the way back does not exist, as two readers would wait for each other.
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let writer = locks.write("catalog").acquire().await?;
//! let reader = writer.downgrade().await?;
//! let another = locks.read("catalog").try_acquire().await?;
//! assert!(another.is_some());
//! assert!(locks.write("catalog").try_acquire().await?.is_none());
//! # drop(reader); Ok(()) }
//! ```
//!
//! # Permits
//!
//! [`permits`](crate::LockClient::permits) lets at most *n* in, in the whole fleet. The number is part of the lock. Permits are an object
//! of their own: `permits("mail", n)` and `exclusive("mail")` do not exclude each other.
//!
//! # Several keys
//!
//! [`all`](crate::LockClient::all) sorts the keys, so that two requests cannot wait for each other, and takes them one
//! after the other, renewing what it has; with [`no_wait`](crate::LockRequest::no_wait), all or none in one step.
//!
//! # Entering again
//!
//! A lock belongs to a flow of work: a future, and what it awaits. Code within [`run`](crate::LockRequest::run), a locked
//! function, a locked route or [`HeldLock::scope`](crate::HeldLock::scope) that asks for the same lock would wait for itself,
//! and is refused as `WouldDeadlock`; with [`reentrant`](crate::LockRequest::reentrant) it enters, without a round trip,
//! under the same fencing token.
//!
//! ```
//! # use lock_runtime::{LockClient, LockErrorKind};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let inner = locks.clone();
//! locks.exclusive("order:42").run(|_| async move {
//!     let refused = inner.exclusive("order:42").acquire().await.map(drop);
//!     assert_eq!(refused.map_err(|error| error.kind()), Err(LockErrorKind::WouldDeadlock));
//!     inner.reentrant("order:42").run(|_| async {}).await
//! }).await??;
//! # Ok(()) }
//! ```
//!
//! The branches of a `join!` are not within each other, and a spawned task is within nothing: they contend like strangers.
//! Nothing ever depends on a thread. A bare guard opens no scope of its own.
