//! Moving from Redisson, ShedLock or redsync.
//!
//! # Redisson
//!
//! | Redisson | lock-runtime |
//! |---|---|
//! | `getLock(name)`, `getFairLock(name)` | [`exclusive`]; always first come, first served |
//! | `lock()` with the watchdog | the default: the `lease` is renewed every third of it |
//! | `lockWatchdogTimeout` (30 s) | [`lease`] (30 s) |
//! | `lock(leaseTime, unit)` | `lease` with [`no_renew`] |
//! | `tryLock()` | [`try_acquire`], or [`no_wait`] |
//! | `tryLock(waitTime, unit)` | [`wait`] |
//! | `unlock()` | [`release`], or drop the guard |
//! | `forceUnlock()` | [`revoke`] |
//! | `isLocked()`, `remainTimeToLive()` | [`inspect`] |
//! | `isHeldByCurrentThread()` | [`is_held`]; by flow of work instead of by thread |
//! | re-entry by thread | [`reentrant`], by flow of work: it survives `.await` |
//! | `getReadWriteLock(name)` | [`read`], [`write`] |
//! | `getPermitExpirableSemaphore(name)` | [`permits`] |
//! | `getMultiLock(..)` | [`all`] |
//! | `getFencedLock(name)`, `getToken()` | any lock, with [`fence`] |
//! | `RedissonRedLock` | [`connect_redlock`](crate::LockClientBuilder::connect_redlock) |
//!
//! Redisson keeps a hash under the name of a lock that is held. A request for the same key in
//! this library is then refused as `ForeignKey`.
//!
//! `lock()` in Redisson waits without a limit. Here a request waits for at most 10 s by default,
//! and for at most 24 h.
//!
//! # ShedLock
//!
//! | ShedLock | lock-runtime |
//! |---|---|
//! | `@SchedulerLock(name = "report")` | `key = "report", global, no_wait, on_busy = skip` |
//! | `LockingTaskExecutor` | [`no_wait`] and [`run`]; a skipped run is `Contended` |
//! | `lockAtMostFor`, for a node that dies | [`lease`]: renewed, so it can be short |
//! | `lockAtMostFor`, for a task that hangs | [`max_hold`]: drops the task at an `.await` |
//! | `lockAtLeastFor` | [`min_hold`] |
//! | `LockExtender` | [`extend`] |
//! | `KeepAliveLockProvider` | the default |
//! | `LockAssert.assertLocked()` | `debug_assert!(is_held(&key))`, see [`is_held`] |
//! | `LockProvider` | the URL of the store |
//!
//! The first row shows arguments of `#[distributed_lock]`.
//!
//! [`lease`] with [`no_renew`] is the literal equivalent of `lockAtMostFor`: the lock ends at
//! that time, whatever the task does. See also the [recipe for scheduled
//! jobs](super::recipes#a-scheduled-job-on-many-replicas).
//!
//! # redsync
//!
//! | redsync | lock-runtime |
//! |---|---|
//! | `redsync.New(pool)` | [`connect("redis://..")`](crate::LockClient::connect) |
//! | `redsync.New(pool1, ..)` | [`connect_redlock`](crate::LockClientBuilder::connect_redlock) |
//! | `rs.NewMutex(name)` | [`exclusive`] |
//! | `WithExpiry(d)` (8 s) | [`lease`] (30 s), which is renewed |
//! | `WithTries(n)`, `WithRetryDelay(d)` | [`wait`]: a place in the wait queue, no retries |
//! | `Lock()`, `TryLock()` | [`acquire`], [`try_acquire`] |
//! | `Unlock()` | [`release`], or drop the guard |
//! | `Extend()` | not needed; [`extend`] for a single extension |
//! | `Until()` | [`validity`] |
//! | `Valid()` | [`verify`] |
//! | `Value()` | none: the token of a holder is not public; use [`fence`] for fencing |
//!
//! # Switching
//!
//! A lock of the old library and a lock of this one do not exclude each other, because they are
//! different records (with [one exception](#set-nx-px-on-one-server)). The work is not protected
//! while processes with the old lock and processes with the new lock run together. There are two
//! safe ways to switch.
//!
//! **In one deployment.** Stop all old processes, wait for the longest lease of the old library,
//! and start the new processes.
//!
//! **In two rolling deployments.** The first one brings processes that hold both locks, the
//! second one processes that hold only the new lock:
//!
//! | Running together | Excluded by |
//! |---|---|
//! | old lock, both locks | the old lock |
//! | both locks, new lock | the new lock |
//!
//! ```
//! use lock_runtime::{LockClient, LockError};
//! # struct OldGuard;
//! # async fn old_lock(name: &str) -> Result<OldGuard, LockError> { Ok(OldGuard) }
//!
//! async fn pay(locks: &LockClient, id: u64) -> Result<String, LockError> {
//!     // A guard of the old library, which releases its lock when it is dropped.
//!     let _old = old_lock(&format!("lock:order:{id}")).await?;
//!     let lock = locks.exclusive(format!("order:{id}"));
//!     lock.run(|_| async move { format!("order {id} is paid") }).await
//! }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # assert_eq!(pay(&LockClient::in_memory(), 42).await?, "order 42 is paid");
//! # Ok(()) }
//! ```
//!
//! **Caveat:** acquire the two locks in the same order everywhere, or two processes wait for each
//! other until a time-out. The old lock must still be valid when the work ends, exactly as
//! before.
//!
//! # SET NX PX on one server
//!
//! redsync with one pool, redis-py, rslock and others write `SET key token NX PX expiry`. An
//! exclusive lock of this library is the same record, under the key `<namespace>:<name>`. So the
//! redsync mutex `shop:order:42` and the exclusive lock `order:42` of the namespace `shop`
//! exclude each other on the same server, and old and new processes may run together.
//!
//! **Caveat:** the other library does not know the wait queue. Its waiters may overtake those of
//! this one, and may starve while there are any. A release by the other library is found by a
//! poll, within a second. The other library gives no fencing tokens. Read locks and permits have
//! another record.
//!
//! [`exclusive`]: crate::LockClient::exclusive
//! [`read`]: crate::LockClient::read
//! [`write`]: crate::LockClient::write
//! [`permits`]: crate::LockClient::permits
//! [`all`]: crate::LockClient::all
//! [`inspect`]: crate::LockClient::inspect
//! [`revoke`]: crate::LockClient::revoke
//! [`lease`]: crate::LockRequest::lease
//! [`wait`]: crate::LockRequest::wait
//! [`no_wait`]: crate::LockRequest::no_wait
//! [`no_renew`]: crate::LockRequest::no_renew
//! [`min_hold`]: crate::LockRequest::min_hold
//! [`max_hold`]: crate::LockRequest::max_hold
//! [`reentrant`]: crate::LockRequest::reentrant
//! [`acquire`]: crate::LockRequest::acquire
//! [`try_acquire`]: crate::LockRequest::try_acquire
//! [`run`]: crate::LockRequest::run
//! [`release`]: crate::LockGuard::release
//! [`extend`]: crate::LockGuard::extend
//! [`fence`]: crate::HeldLock::fence
//! [`validity`]: crate::HeldLock::validity
//! [`verify`]: crate::HeldLock::verify
//! [`is_held`]: crate::is_held
