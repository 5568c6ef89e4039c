//! Kinds of locks.
//!
//! | Request | Holders | Excludes |
//! |---|---|---|
//! | [`exclusive`], [`write`] | one | readers and other exclusive holders of the key |
//! | [`read`], [`shared`] | any number of readers | exclusive holders of the key |
//! | [`permits`] | at most *n* | further holders of a permit, never the locks above |
//! | [`all`] | one per key | as `exclusive`, for each key |
//!
//! [`exclusive`]: crate::LockClient::exclusive
//! [`write`]: crate::LockClient::write
//! [`read`]: crate::LockClient::read
//! [`shared`]: crate::LockClient::shared
//! [`permits`]: crate::LockClient::permits
//! [`all`]: crate::LockClient::all
//!
//! [`LockSpec`](crate::LockSpec), [`LockRequest`](crate::LockRequest), the attribute, the layer and
//! policy files use the same names.
//!
//! # Exclusive
//!
//! [`exclusive`] fits most work. Name the lock after the thing that it protects (`order:42`), not
//! after the code that runs. All code that changes the order then excludes all other code that
//! does.
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let paid = locks.exclusive("order:42").run(|_| async { "paid" }).await?;
//! assert_eq!(paid, "paid");
//! # Ok(()) }
//! ```
//!
//! Write values from outside through a [`KeyWriter`](crate::KeyWriter), which escapes them. The
//! attribute and the layer do so. A name built with `format!` is not escaped: the values `("1:2",
//! "3")` and `("1", "2:3")` then give the same key.
//!
//! # Read/write
//!
//! [`read`] is shared, [`write`] is not. Both are modes of one lock: an exclusive lock of the
//! same name is its writer.
//!
//! [`downgrade`](crate::LockGuard::downgrade) makes a writer a reader without a gap. There is no
//! upgrade, because two readers that upgrade would wait for each other.
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
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
//! [`permits`] admits at most *n* holders across all processes. Permits are a separate object:
//! `permits("mail", n)` and `exclusive("mail")` do not exclude each other.
//!
//! The number may change in a deployment: while two versions of a program run, each request counts
//! all holders against its own number, so there are never more holders than the largest number in
//! use. Requests are granted in the order in which they came: one that waits for a smaller number
//! of holders delays those behind it. Inspection shows the number of the first of the present
//! holders for all of them. Clients of earlier versions refuse a permit beside one of
//! another number with `ModeMismatch`: upgrade all processes before you change the number.
//!
//! # Several keys
//!
//! [`all`] sorts the keys, so two requests cannot deadlock. It acquires them one after the other
//! and renews those that it already holds. With [`no_wait`](crate::LockRequest::no_wait) it
//! acquires all or none: in one step on one server, in memory and within a slot of a cluster. Other
//! slots, permits and keys over several servers follow one after the other, and those that were
//! acquired are released if a later one is refused. Each of them may take the time of a call,
//! min(lease / 6, 500 ms), and all of them half of the lease, because the first lease has to be
//! renewed after the last grant. With the default lease of 30 s and a round trip of 5 ms these are
//! some thousand keys. If the time is over, the error names the key that was reached.
//!
//! # Re-entrant
//!
//! A lock belongs to a flow of work: a future and everything that it awaits. Code inside
//! [`run`](crate::LockRequest::run), a locked function, a locked route or
//! [`HeldLock::scope`](crate::HeldLock::scope) that requests the same lock would wait for itself.
//! The request is refused as `WouldDeadlock`. With [`reentrant`](crate::LockRequest::reentrant)
//! it enters the lock without a round trip, under the same fencing token.
//!
//! ```
//! # use lock_runtime::{LockClient, LockErrorKind};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
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
//! The branches of a `join!` are not nested in each other, and a spawned task is nested in
//! nothing: they contend like unrelated callers. Re-entry never depends on a thread. A guard
//! alone opens no scope.
