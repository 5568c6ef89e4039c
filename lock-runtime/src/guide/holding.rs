//! Lease, wait, loss, fencing, the end of the process.
//!
//! # The lease is how fast a crash is noticed
//!
//! The store keeps a lock for its lease, 30 s by default, and the client renews it every third of that for as long as the
//! guard lives. So the lease says how long others wait for a holder that died, not how long a living one may hold. A shorter
//! lease frees the lock of the dead sooner, and is lost sooner when the store is out of reach.
//!
//! [`max_hold`](crate::LockRequest::max_hold) ends renewal of a holder that hangs; a lock without it that was held for ten leases is warned of once. [`min_hold`](crate::LockRequest::min_hold) keeps the
//! lock after an early release, for jobs that fire everywhere at almost the same time.
//!
//! # Loss
//!
//! A lock is lost when no renewal succeeded until the lease ran out by the holder's own clock, when the store says that it
//! is somebody else's or nobody's, when it was revoked, or when `max_hold` passed. [`run`](crate::LockRequest::run), the
//! macro and the layer then drop the body at its next await point. Who holds a guard watches [`lost`](crate::HeldLock::lost):
//!
//! ```
//! # use lock_runtime::{LockClient, LockErrorKind, Loss, RevokeScope};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let guard = locks.exclusive("order:42").acquire().await?;
//! locks.revoke("order:42", RevokeScope::Leased).await?;
//! let error = guard.lost().await;
//! assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Revoked));
//! # Ok(()) }
//! ```
//!
//! [`validity`](crate::HeldLock::validity) is what is surely left, a drift of 1 % and 2 ms subtracted. Before a step that
//! must not happen twice, compare it with what the step takes, or ask the store by [`verify`](crate::HeldLock::verify).
//!
//! # Fencing
//!
//! Every grant carries a [`FencingToken`](crate::FencingToken) larger than those before it. Send it with every write, and let the resource refuse a
//! smaller one than it has seen: [`limits`](super::limits) says why nothing else will do.
//!
//! # Waiting
//!
//! Requests for one key are served first come first served; [`waiting`](super::waiting) tells how. `wait` limits the whole; while the store is out of reach a request goes on trying within it. More than 10,000 waiting for
//! one key, or 100,000 in all, are refused as `Overloaded`: [`max_waiters`](crate::LockSpec::max_waiters),
//! [`max_waiters_in_all`](crate::LockClientBuilder::max_waiters_in_all).
//!
//! # The end
//!
//! Dropping a guard, or a future that acquires, gives the lock back in the background. A process that ends before leaves the
//! lock to its lease, so call [`shutdown`](crate::LockClient::shutdown) last:
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! drop(locks.exclusive("order:42").acquire().await?);
//! locks.shutdown().await;
//! assert!(locks.inspect("order:42").await?.holders.is_empty());
//! # Ok(()) }
//! ```
