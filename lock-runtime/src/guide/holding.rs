//! Holding a lock: lease, loss, fencing tokens, shutdown.
//!
//! # The lease is the crash time-out
//!
//! The store keeps a lock for its lease, 30 s by default. The client renews the lease every third
//! of that time for as long as the guard lives. So the lease limits how long others wait for a
//! holder that died. It does not limit how long a live holder may hold the lock.
//!
//! A shorter lease frees the lock of a dead holder sooner. It is also lost sooner when the store
//! is out of reach.
//!
//! - [`max_hold`](crate::LockRequest::max_hold) ends the renewal for a holder that hangs. Without
//!   it the client logs one warning for a lock that was held for ten leases. A layer of lock-tower
//!   sets it to a minute, as a caller who sends the body of its request slowly, or does not read
//!   the response, would hold the lock without end;
//!   [`no_max_hold`](crate::LockRequest::no_max_hold) removes it.
//! - [`min_hold`](crate::LockRequest::min_hold) keeps the lock after an early release, for jobs
//!   that start on all replicas at almost the same time. It counts from the grant. No other holder
//!   gets the lock before its end, also if replies to the release are lost, unless the store is out
//!   of reach for the rest of the lease.
//!
//! # Loss
//!
//! A lock is lost when
//!
//! - no renewal succeeded until the lease ran out by the holder's own clock,
//! - the store replies that the holder no longer holds it,
//! - it was revoked, or
//! - `max_hold` passed.
//!
//! [`run`](crate::LockRequest::run), the attribute and the layer then drop the body at its next
//! await point, and return `Lost`. A body that ends all the same is no success either: without an
//! await point it could not be stopped, and another holder may have worked beside it.
//! [`on_lost`](crate::LockRequest::on_lost) chooses among the three treatments:
//!
//! | [`OnLost`](crate::OnLost) | the body | the result |
//! |---|---|---|
//! | `Cancel`, the default | is dropped at its next await point | `Lost` |
//! | `Error` | runs to its end | `Lost` |
//! | `Ignore` | runs to its end | that of the body |
//!
//! The owner of a guard watches [`lost`](crate::HeldLock::lost):
//!
//! ```
//! # use lock_runtime::{LockClient, LockErrorKind, Loss, RevokeScope};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let guard = locks.exclusive("order:42").acquire().await?;
//! locks.revoke("order:42", RevokeScope::Leased).await?;
//! let error = guard.lost().await;
//! assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Revoked));
//! # Ok(()) }
//! ```
//!
//! [`validity`](crate::HeldLock::validity) is the time for which the lock is certainly still
//! held: the rest of the lease less a drift of 1 % and 2 ms. Before a step that must not happen
//! twice, compare it with the duration of the step, or let the store confirm the lock with
//! [`verify`](crate::HeldLock::verify).
//!
//! # Fencing
//!
//! Each grant carries a [`FencingToken`](crate::FencingToken) that is larger than all earlier
//! ones of the key. Send it with every write, and let the resource refuse a token smaller than
//! the largest it has seen: [`fencing`](super::fencing) shows how. [`limits`](super::limits)
//! explains why no other measure is sufficient.
//!
//! # Waiting
//!
//! Requests for one key are served first come, first served; see [`waiting`](super::waiting).
//! `wait` limits the whole request. While the store is out of reach, the request keeps trying
//! within that time.
//!
//! In one client 10,000 requests may wait for one key, and 100,000 for all keys. Further requests
//! are refused as `Overloaded`. [`max_waiters`](crate::LockSpec::max_waiters) and
//! [`max_waiters_in_all`](crate::LockClientBuilder::max_waiters_in_all) set other limits.
//!
//! # Shutdown
//!
//! Dropping a guard, or a future that acquires a lock, releases the lock in the background. If
//! the process ends before that is done, the lock remains until its lease ends. Call
//! [`shutdown`](crate::LockClient::shutdown) last:
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! drop(locks.exclusive("order:42").acquire().await?);
//! locks.shutdown().await;
//! assert!(locks.inspect("order:42").await?.holders.is_empty());
//! # Ok(()) }
//! ```
