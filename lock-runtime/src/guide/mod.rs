//! The user guide.
//!
//! | Page | Contents |
//! |---|---|
//! | [`functions`] | Locking a function: each argument of `#[distributed_lock]`, with an example |
//! | [`modes`] | Kinds of locks: exclusive, read/write, permits, several keys, re-entrant |
//! | [`waiting`] | The wait queue: order, hand-off, latency, dead waiters |
//! | [`holding`] | Holding a lock: lease, loss, fencing tokens, shutdown |
//! | [`limits`] | The limits of a lease lock, and the remedies |
//! | [`fencing`] | How to make it safe: fencing tokens in PostgreSQL, other databases and Redis |
//! | [`redis`] | Redis as the store: URLs, Sentinel, clusters, TLS, data layout, settings |
//! | [`postgres`] | PostgreSQL as the store: schema, rights, poolers, standbys |
//! | [`stores`] | Locks in a database of your own |
//! | [`majority`] | Several independent servers and a majority vote (Redlock) |
//! | [`observing`] | Names, metrics and spans; Prometheus and OpenTelemetry |
//! | [`lockctl`] | Locks on the command line, and commands under a lock |
//! | [`recipes`] | Scheduled jobs, tests, blocking code, a lock shared by two services |
//! | [`migration`] | Moving from Redisson, ShedLock or redsync |
//!
//! The page for operators, with who holds which lock and who waits, is `lock_tower::inspector`.
//! Recipes for axum and tonic (keys from a body, a cookie or a user, and graceful shutdown) are on
//! the page `lock_tower::recipes`.

pub mod fencing;
#[cfg(feature = "macros")]
pub mod functions;
pub mod holding;
pub mod limits;
pub mod lockctl;
pub mod majority;
pub mod migration;
pub mod modes;
pub mod observing;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod recipes;
pub mod redis;
#[cfg(feature = "records")]
pub mod stores;
pub mod waiting;
