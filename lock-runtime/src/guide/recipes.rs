//! Recipes: short solutions to common problems.
//!
//! | Recipe | Uses |
//! |---|---|
//! | [A job on many replicas](#a-scheduled-job-on-many-replicas) | `no_wait`, `min_hold` |
//! | [Tests](#tests) | [`in_memory`](crate::LockClient::in_memory), a paused clock |
//! | [Blocking code](#blocking-code) | `spawn_blocking`, `Handle::block_on` |
//! | [A worker that is stopped](#a-worker-that-is-stopped) | `shutdown` |
//! | [Several permits at once](#several-permits-at-once) | [`permits`][permits] |
//! | [One lock for two services](#one-lock-for-two-services) | [`KeyWriter`](crate::KeyWriter) |
//!
//! `lock_tower::recipes` has recipes for axum and tonic: a key from a JSON body, from a cookie or
//! from an authenticated user, graceful shutdown on SIGTERM, and probes of readiness and liveness.
//!
//! # A scheduled job on many replicas
//!
//! All replicas start the job, and one of them runs it. `no_wait` makes the others skip it.
//! `min_hold` keeps the lock after a short run, so that a replica that starts a little later
//! skips it, too.
//!
#![cfg_attr(feature = "macros", doc = "```")]
#![cfg_attr(not(feature = "macros"), doc = "```ignore")]
//! use std::time::Duration;
//!
//! use lock_runtime::{LockClient, LockError, distributed_lock};
//! use tokio::time::{MissedTickBehavior, interval};
//! # use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
//! # static RUNS: AtomicU32 = AtomicU32::new(0);
//!
//! #[distributed_lock(
//!     key = "send-invoices", global, client = locks, no_wait, min_hold = "55s", on_busy = skip
//! )]
//! async fn send_invoices(locks: &LockClient) -> Result<(), LockError> {
//!     // ...
//! #   RUNS.fetch_add(1, Relaxed);
//!     Ok(())
//! }
//!
//! async fn every_minute(locks: LockClient) {
//!     let mut ticks = interval(Duration::from_secs(60));
//!     ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
//!     loop {
//!         ticks.tick().await;
//!         if let Err(error) = send_invoices(&locks).await {
//!             eprintln!("invoices not sent: {error:#}");
//!         }
//!     }
//! }
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! # let locks = LockClient::in_memory();
//! # let other = async {
//! #     tokio::time::sleep(Duration::from_secs(20)).await;
//! #     every_minute(locks.clone()).await
//! # };
//! # let both = async { tokio::join!(every_minute(locks.clone()), other) };
//! # assert!(tokio::time::timeout(Duration::from_secs(170), both).await.is_err());
//! # assert_eq!(RUNS.load(Relaxed), 3);
//! # }
//! ```
//!
//! tokio's `interval` starts with its process, so the replicas tick at different times.
//! `min_hold` must then be a little less than the period, as above. A scheduler that goes by the
//! time of day, such as the crate `tokio-cron-scheduler`, starts the job on all replicas at
//! almost the same time. Then `min_hold` only has to exceed the difference between their clocks,
//! and a few seconds suffice.
//!
//! **Caveat:** the lock does not record that the job has run. If the replica crashes during the
//! job, the next tick after the end of the lease starts it again. If the job fails, `min_hold`
//! still applies, and the next run is at the next tick.
//!
//! # A worker that is stopped
//!
//! An orchestrator stops a worker by SIGTERM, and kills it after a grace period. A worker that ends
//! without more ado leaves its locks until their leases end. This one takes no new job, lets the
//! current one end for a while, and releases its lock in any case: the future of `run` releases
//! the lock when it is dropped, and `shutdown` waits for that.
//!
//! ```
//! use std::{future::Future, time::Duration};
//!
//! use lock_runtime::{LockClient, LockError};
//! use tokio::{pin, select, time::{sleep, timeout}};
//!
//! async fn work(locks: &LockClient, job: u64) -> Result<(), LockError> {
//!     let lock = locks.exclusive(format!("job:{job}"));
//!     lock.run(|_| async { sleep(Duration::from_secs(3)).await }).await
//! }
//!
//! // `stop` is, for example, `async { signal(SignalKind::terminate()).unwrap().recv().await; }`
//! // with tokio::signal::unix.
//! async fn worker(locks: LockClient, stop: impl Future<Output = ()>) {
//!     pin!(stop);
//!     for job in 0.. {
//!         let working = work(&locks, job);
//!         pin!(working);
//!         let (is_stopped, done) = select! {
//!             done = &mut working => (false, Ok(done)),
//!             () = &mut stop => (true, timeout(Duration::from_secs(20), &mut working).await),
//!         };
//!         if let Ok(Err(error)) = done {
//!             eprintln!("job {job}: {error:#}");
//!         }
//!         if is_stopped {
//!             break;
//!         }
//!     }
//!     locks.shutdown().await;
//! }
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! # let store = std::sync::Arc::new(lock_runtime::store::MemoryStore::new());
//! # let stop = sleep(Duration::from_secs(7));
//! # worker(LockClient::with_store(store.clone()), stop).await;
//! # let other = LockClient::with_store(store);
//! # assert!(other.exclusive("job:2").try_acquire().await.unwrap().is_some());
//! # }
//! ```
//!
//! **Caveat:** give the job less time than the grace period (30 s in Kubernetes), and leave a few
//! seconds for `shutdown`. A bare `drop(guard)` as the last line of `main` releases nothing: the
//! runtime ends before the release is sent.
//!
//! # Tests
//!
//! Pass the client to the code under test, and give each test a client of its own. Each
//! [`LockClient::in_memory`](crate::LockClient::in_memory) has its own store, so tests that run
//! in parallel do not affect each other. The store uses tokio's clock: with `start_paused`
//! (tokio's feature `test-util`) waits and leases pass at once.
//!
//! ```
//! use std::time::Duration;
//!
//! use lock_runtime::{LockClient, LockError, LockErrorKind};
//!
//! async fn pay(locks: &LockClient, id: u64) -> Result<String, LockError> {
//!     let lock = locks.exclusive(format!("order:{id}")).wait(Duration::from_secs(2));
//!     lock.run(|_| async move { format!("order {id} is paid") }).await
//! }
//!
//! // In a test module, under #[tokio::test(start_paused = true)]:
//! async fn a_locked_order_is_not_paid() -> Result<(), LockError> {
//!     let locks = LockClient::in_memory();
//!     let other = locks.exclusive("order:42").acquire().await?;
//!     let error = pay(&locks, 42).await.unwrap_err(); // after 2 s of the paused clock
//!     assert_eq!(error.kind(), LockErrorKind::WaitTimeout);
//!
//!     other.release().await?;
//!     assert_eq!(pay(&locks, 42).await?, "order 42 is paid");
//!     Ok(())
//! }
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), LockError> { a_locked_order_is_not_paid().await }
//! ```
//!
//! Run functions under `#[distributed_lock]` that name no client in
//! [`LockClient::as_default`](crate::LockClient::as_default).
//! [`LockClient::revoke`](crate::LockClient::revoke) makes a holder lose its lock.
//!
//! **Caveat:** [`install`](crate::LockClient::install) sets the client of the whole process, and
//! so of all tests in the binary. A paused clock is for the in-memory store only: with a real
//! server it skips over the time-outs while a reply is on its way.
//!
//! # Blocking code
//!
//! Acquire and release the lock with `Handle::block_on` on the thread of `spawn_blocking`. The
//! client renews the lease on the runtime in the meantime. The thread is in no scope of the
//! caller: a lock that the caller holds is contended there, unless
//! [`HeldLock::scope`](crate::HeldLock::scope) wraps the request.
//!
//! ```
//! use lock_runtime::{FencingToken, LockClient, LockError};
//! use tokio::{runtime::Handle, task::spawn_blocking};
//!
//! fn write_report(fence: FencingToken) {
//!     // blocking I/O
//! }
//!
//! fn report(locks: &LockClient) -> Result<(), LockError> {
//!     let runtime = Handle::current();
//!     let guard = runtime.block_on(locks.exclusive("report").acquire())?;
//!     write_report(guard.fence());
//!     runtime.block_on(guard.release()) // `Lost`, if the lock was lost in the meantime
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory();
//! spawn_blocking(move || report(&locks)).await??;
//! # Ok(()) }
//! ```
//!
//! **Caveat:** a loss cannot stop blocking code. Between its steps check
//! [`is_lost`](crate::HeldLock::is_lost) or [`validity`](crate::HeldLock::validity), and send the
//! fencing token with each write.
//!
//! An async task that computes or blocks for longer than its lease, without an await point, loses
//! no lock: a thread of the library notices that the client's task is late, and renews the locks of
//! the process on a connection of its own, on any kind of runtime ([which
//! stores](super::limits#a-task-that-blocks-its-runtime)). It logs a warning, as such a task still
//! delays all others of its worker, and a loss cannot stop it.
//!
//! # Several permits at once
//!
//! A request is for one permit. Work that needs several takes them one after the other, while it
//! holds a lock for that: without it, two tasks with a part of the permits each would wait for each
//! other.
//!
//! ```
//! use std::num::NonZeroU32;
//!
//! use lock_runtime::{LockClient, LockError};
//!
//! const SENDERS: NonZeroU32 = NonZeroU32::new(3).unwrap();
//!
//! async fn send_to_all(locks: &LockClient) -> Result<(), LockError> {
//!     let turn = locks.exclusive("mailer:several").acquire().await?;
//!     let first = locks.permits("mailer", SENDERS).acquire().await?;
//!     let second = locks.permits("mailer", SENDERS).acquire().await?;
//!     turn.release().await?;
//!     // ...
//!     first.release().await?;
//!     second.release().await
//! }
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), LockError> {
//! # let locks = LockClient::in_memory();
//! # tokio::try_join!(send_to_all(&locks), send_to_all(&locks), send_to_all(&locks))?;
//! # Ok(()) }
//! ```
//!
//! # One lock for two services
//!
//! Two services exclude each other if they lock the same key, of the same kind, in the same
//! namespace of the same store. Put the function that builds the key into a crate that both
//! services use:
//!
//! ```
//! use lock_runtime::{KeyWriter, LockClient, LockError, LockKey};
//!
//! /// The lock of an order, in all services.
//! pub fn order_lock(shop: &str, id: u64) -> Result<LockKey, LockError> {
//!     let mut key = KeyWriter::new();
//!     key.lit("order:").arg(format_args!("{shop}")).lit(":").arg(format_args!("{id}"));
//!     key.finish()
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), LockError> {
//! # let store = std::sync::Arc::new(lock_runtime::store::MemoryStore::new());
//! # let connect = || LockClient::with_store(store.clone());
//! // Each: LockClient::builder().namespace("shop").connect("redis://10.0.0.1/0").await?
//! let orders = connect();
//! let billing = connect();
//!
//! let guard = orders.exclusive(order_lock("north", 42)).acquire().await?;
//! assert!(billing.exclusive(order_lock("north", 42)).try_acquire().await?.is_none());
//! # guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! | Must agree | Details |
//! |---|---|
//! | the store | the same server and database number, Sentinel primary or cluster |
//! | the servers of `redlock:` | the same, in the same order, with the same `longest_lease` |
//! | the namespace | [`namespace`](crate::LockClientBuilder::namespace), `lock` by default |
//! | the key | byte for byte, after formatting and escaping: `order:7` is not `order:07` |
//! | the kind | exclusive, read and write locks exclude each other; permits are separate |
//!
//! All other settings may differ: lease, wait, `min_hold`, `max_hold`, order and re-entry.
//!
//! **Caveat:** `#[distributed_lock(key = "order:{id}")]`, the templates of lock-tower and
//! `KeyWriter` escape values, `format!` does not. For the value `a:b` the first three give
//! `order:a%3Ab` and `format!` gives `order:a:b`, which is another lock.
//!
//! [permits]: crate::LockClient::permits
