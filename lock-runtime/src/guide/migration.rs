//! Moving from Redisson, ShedLock or redsync.
//!
//! # Redisson
//!
//! | Redisson | lock-runtime |
//! |---|---|
//! | `getLock(name)`, `getFairLock(name)` | [`exclusive(key)`][exclusive]; waiters are always queued in order |
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
//! | `RedissonRedLock` | [`redlock`](crate::LockClientBuilder::redlock) |
//!
//! `lock()` in Redisson waits without a limit. Here a request waits for at most 10 s by default, and for at most 24 h.
//!
//! # ShedLock
//!
//! | ShedLock | lock-runtime |
//! |---|---|
//! | `@SchedulerLock(name = "report")` | `#[distributed_lock(key = "report", global, no_wait, on_busy = skip)]` |
//! | `LockingTaskExecutor` | [`no_wait`] and [`run`]; a skipped run is `Contended` |
//! | `lockAtMostFor`, for a node that dies | [`lease`]: a live holder renews it, so it can be short |
//! | `lockAtMostFor`, for a task that hangs | [`max_hold`]: the task is dropped at its next `.await` |
//! | `lockAtLeastFor` | [`min_hold`] |
//! | `LockExtender` | [`extend`] |
//! | `KeepAliveLockProvider` | the default |
//! | `LockAssert.assertLocked()` | `debug_assert!(is_held(&key))`, see [`is_held`] |
//! | `LockProvider` | the URL of the store |
//!
//! `lease` with [`no_renew`] is the literal equivalent of `lockAtMostFor`: the lock ends at that time, whatever the task does.
//! See also the [recipe for scheduled jobs](super::recipes#a-scheduled-job-on-many-replicas).
//!
//! # redsync
//!
//! | redsync | lock-runtime |
//! |---|---|
//! | `redsync.New(pool)` | [`connect("redis://..")`](crate::LockClient::connect) |
//! | `redsync.New(pool1, pool2, pool3)` | [`redlock`](crate::LockClientBuilder::redlock) |
//! | `rs.NewMutex(name)` | [`exclusive(key)`][exclusive] |
//! | `WithExpiry(d)` (8 s) | [`lease`] (30 s), which is renewed |
//! | `WithTries(n)`, `WithRetryDelay(d)` | [`wait`]: one entry in the wait queue instead of retries |
//! | `Lock()`, `TryLock()` | [`acquire`], [`try_acquire`] |
//! | `Unlock()` | [`release`], or drop the guard |
//! | `Extend()` | not needed; [`extend`] for a single extension |
//! | `Until()` | [`validity`] |
//! | `Valid()` | [`verify`] |
//! | `Value()` | none: the token of a holder is not public; use [`fence`] for fencing |
//!
//! # Switching
//!
//! A lock of the old library and a lock of this one do not exclude each other: they are different records. While processes of
//! both kinds run, the work is not protected. There are two safe ways to switch.
//!
//! **In one deployment.** Stop all old processes, wait for the longest lease of the old library, and start the new ones.
//!
//! **In three rolling deployments.** In the first one all processes start to hold both locks, the old one outside:
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
//! | Deployment | Running together | Excluded by |
//! |---|---|---|
//! | 1: old to both | processes with the old lock, processes with both | the old lock |
//! | 2: both to new | processes with both, processes with the new lock | the new lock |
//!
//! **Caveat:** acquire the two locks in the same order everywhere, or two processes wait for each other until a time-out. The old
//! lock must not expire before the work is done, as before.
