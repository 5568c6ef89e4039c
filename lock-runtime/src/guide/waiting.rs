//! The wait queue: order, hand-off, latency, dead waiters.
//!
//! A request that cannot be granted waits for at most its [`wait`](crate::LockSpec::wait). The
//! waiter is notified and does not have to poll: the script that releases a lock also grants it
//! to the next waiter, draws that waiter's fencing token and notifies it, in one step.
//!
//! # The order
//!
//! - **Within a process** requests for one lock are served first come, first served, in any mode.
//!   Only the first of them has an entry in the store's wait queue, on behalf of all.
//! - **Among processes** the store keeps the wait queue. A process has one entry for all its
//!   waiters with the same mode and lease. When the first of them gives up, the next one takes
//!   over the entry, so its position is not lost.
//! - **Readers** behind a writer are admitted together. A reader queues behind a waiting writer,
//!   so writers do not starve.
//! - **Permits** are granted one by one.
//! - **No barging:** a request that does not wait is refused while there is a waiter that comes
//!   before it.
//!
//! # Hand-off within a process
//!
//! When several tasks of one process wait for a lock, a release hands it off to the next of them
//! without a call to the store. The fencing tokens for this come from a block that the store
//! reserved with the grant.
//!
//! After 32 hand-offs or 50 ms in a row the lock goes back to the store. The store hands it off
//! to another process, or, if no other process waits, grants it again in the same round trip.
//!
//! A local hand-off is only possible from a writer to a writer with the same lease, with renewal
//! on and enough of the lease left. Local hand-offs stop at the first sign that the store may
//! have lost data ([`limits`](super::limits#tokens-that-were-reserved)).
//!
//! With [`strict_order`](crate::LockRequest::strict_order) every release goes through the store:
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let turn = locks.exclusive("ticket-office").strict_order().acquire().await?;
//! # turn.release().await?;
//! # Ok(()) }
//! ```
//!
//! # Latency
//!
//! A waiter is granted a lock within milliseconds of the instant at which the store regards it as
//! free.
//!
//! The first waiter is granted the lock **in the same step, and notified by a push message**, if
//! the lock becomes free by
//!
//! - a release, a dropped guard, the last guard of a re-entered lock, or a returned permit,
//! - a downgrade, for readers,
//! - a revocation,
//! - a loss that the holder notices (`max_hold`, no reply for a lease) or a cancelled request,
//!   once the holder's process has abandoned the lock, or
//! - a waiter in front that gives up.
//!
//! The first waiter **polls at that time**, which its latest reply or a push message announced,
//! if the lock becomes free by
//!
//! - the end of a reservation ([`min_hold`](crate::LockRequest::min_hold)),
//! - the end of the lease of a killed writer, of the last reader or of a permit holder, or
//! - the end of a hand-off to a process that was killed while it waited.
//!
//! If only a killed process in front of it keeps a waiter from a free lock (a writer before a
//! reader, for example), the waiter **polls when that process is passed over**, 3 s after the
//! last poll of that process.
//!
//! In the following cases a waiter is granted the lock **at its next poll**, at most a second
//! later:
//!
//! - another program deleted or set the key,
//! - the push message was lost,
//! - the first waiter is a process that is stopped, or was killed a moment before,
//! - the store is a cluster of Redis 6, which has no sharded channels, or
//! - the cluster is moving the slot of the lock.
//!
//! When a waiter gives up, or another one of its process takes its place, its queue entry is
//! abandoned in the background. A release that the server executes within that round trip finds
//! no entry. The lock is then free until the request of the next waiter arrives, one round trip
//! later.
//!
//! # Dead waiters
//!
//! Push messages can be lost. A waiter therefore polls at least once a second, immediately after
//! a broken connection, and when the holder's lease ends. The store passes over a waiter that has
//! not polled for 3 s.
//!
//! A lock that was handed off is held for min(lease, 3 s) until its new holder has renewed it.
//!
//! So processes that are killed while they wait delay the others by about 3 s in all, however
//! many they are. A holder that is killed delays them by its lease.
//!
//! # Inspection
//!
//! [`inspect`](crate::LockClient::inspect) returns the holders of a lock and its wait queue, in
//! order:
//!
//! ```
//! # use std::time::Duration;
//! # use lock_runtime::{LockClient, Mode};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let guard = locks.exclusive("order:42").acquire().await?;
//! let next = tokio::spawn(locks.read("order:42").wait(Duration::from_secs(5)).acquire());
//! # while locks.inspect("order:42").await?.waiters.is_empty() { tokio::task::yield_now().await }
//! let seen = locks.inspect("order:42").await?;
//! assert_eq!(seen.holders[0].mode, Mode::Exclusive);
//! assert_eq!(seen.waiters[0].mode, Mode::Shared);
//! println!("held by {} for {:?}", seen.holders[0].client, seen.holders[0].held_for);
//! guard.release().await?;
//! # next.await.expect("no panic")?.release().await?;
//! # Ok(()) }
//! ```
//!
//! A client has a name, `<program>@<host>:<process>` unless
//! [`identity`](crate::LockClientBuilder::identity) sets another one. Inspections show it for
//! holders and waiters, and the error of a request that has waited in vain names the holder:
//! `lock order:42: still held after waiting for 5.0s; held by orders@web-3:4711 for 12s`.
//!
//! [`list`](crate::LockClient::list) returns the same for all locks whose names begin with a
//! prefix. [`revoke`](crate::LockClient::revoke) with the
//! [`id`](crate::Holder::id) of a holder takes the lock away from this holder, and does nothing if
//! the lock has changed hands since it was inspected:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! # use lock_runtime::{LockClient, RevokeReply, RevokeScope};
//! # let locks = LockClient::in_memory();
//! # let guard = locks.exclusive("order:42").acquire().await?;
//! let seen = locks.inspect("order:42").await?;
//! let scope = RevokeScope::Holder(seen.holders[0].id);
//! match locks.revoke("order:42", scope).await? {
//!     RevokeReply::Revoked => println!("revoked"),
//!     RevokeReply::Changed => println!("another client holds it by now"),
//!     reply => println!("left alone: {reply:?}"),
//! }
//! # guard.release().await.unwrap_err();
//! # Ok(()) }
//! ```
