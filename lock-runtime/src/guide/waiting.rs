//! Who is next, and how soon.
//!
//! A request that cannot be granted waits for as long as its [`wait`](crate::LockSpec::wait) says. It is told, it does not ask: the
//! script that releases a lock makes the next in line its holder, draws that one's fencing token and tells it, in one step.
//!
//! # The order
//!
//! - **Within a process** requests for one lock are served first come first served, whatever their mode. Only the first of them
//!   stands in the store's line, for all.
//! - **Among processes** the store keeps the line. A process has one place in it for all who wait there with the same mode and
//!   lease; when the one in front gives up, the next one goes on with that place, so patience is not lost.
//! - **Readers** behind a writer are let in together; a reader stands behind a writer that waits, so writers do not starve.
//!   **Permits** are given out one by one.
//! - Nobody barges in: a request that does not wait is refused while somebody waits whose turn would be before.
//!
//! # Passing on
//!
//! Where many tasks of one process want one lock, a released lock goes to the next of them without a word to the store, under
//! the next of a block of fencing tokens that was reserved for it: 32 times or for 50 ms in a row. Then it goes back to the
//! store, which hands it to another process, or, if nobody else waits, takes it up again in the same round trip. Only a writer
//! passes to a writer with the same lease, with renewal on and enough of the lease left. Hand-offs stop at the first sign that the
//! store may have lost data ([`limits`](super::limits#tokens-that-were-reserved)). With
//! [`strict_order`](crate::LockRequest::strict_order) every release goes through the store:
//!
//! ```
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let turn = locks.exclusive("ticket-office").strict_order().acquire().await?;
//! # turn.release().await?;
//! # Ok(()) }
//! ```
//!
//! # How soon
//!
//! A waiter is granted a lock within milliseconds of the instant at which the store regards it as free:
//!
//! | the lock becomes free by | the first waiter |
//! |---|---|
//! | a release, a dropped guard, the last guard of a re-entered lock, a returned permit | is granted it in the same step, and informed by a push message |
//! | a downgrade, for readers | likewise |
//! | a revocation | likewise |
//! | a loss that the holder notices (`max_hold`, no answer for a lease), or a cancelled request | likewise, once the holder's process has abandoned it |
//! | a waiter in front that gives up | likewise |
//! | the end of a reservation ([`min_hold`](crate::LockRequest::min_hold)) | polls then: its latest reply or a push message announced the time |
//! | the end of the lease of a killed writer, of the last reader, of a permit holder | likewise |
//! | the end of a hand-off to a process that was killed while it waited | likewise |
//! | a killed process in front of it, for which the lock would be free (a writer before a reader) | polls when that one is passed over, 3 s after its last poll |
//!
//! Later, by the next poll, which is at most a second away: where a key was deleted or set by other programs; where the push message was lost, or
//! the first waiter is a process that is stopped or was killed a moment before; on a cluster of Redis 6, which has no sharded
//! channels; and while a cluster moves the lock's slot.
//!
//! When a waiter gives up or another one takes its place in the process, its queue entry is abandoned in the background. A release
//! that the server executes within that round trip finds no entry; the lock is then free until the request of the next waiter
//! arrives, one round trip later.
//!
//! # When somebody is gone
//!
//! What is pushed may be lost. Whoever stands in line therefore asks, at least once a second, at once after a broken connection, and
//! when the holder's lease ends; the store takes whoever it has not heard of for 3 s for gone, and passes them over. A lock that
//! was handed over is held for min(lease, 3 s) only until its holder has renewed it. So processes that are killed while they
//! wait delay the others by about 3 s in all, however many they are; a holder that is killed, by its lease.
//!
//! # Looking on
//!
//! [`inspect`](crate::LockClient::inspect) shows who holds a lock and who stands in its line, in order:
//!
//! ```
//! # use std::time::Duration;
//! # use lock_runtime::{LockClient, Mode};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::in_memory();
//! let guard = locks.exclusive("order:42").acquire().await?;
//! let next = tokio::spawn(locks.read("order:42").wait(Duration::from_secs(5)).acquire());
//! # while locks.inspect("order:42").await?.waiters.is_empty() { tokio::task::yield_now().await }
//! let seen = locks.inspect("order:42").await?;
//! assert_eq!(seen.holders[0].mode, Mode::Exclusive);
//! assert_eq!(seen.waiters[0].mode, Mode::Shared);
//! guard.release().await?;
//! # next.await.expect("no panic")?.release().await?;
//! # Ok(()) }
//! ```
