//! Distributed locks for async Rust: acquire, renew, release.
//!
//! ```
//! use lock_runtime::{LockClient, LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:{order_id}", lease = "30s", wait = "2s")]
//! async fn pay(order_id: u64) -> Result<String, LockError> {
//!     // Across all processes, at most one caller per order runs this.
//!     Ok(format!("order {order_id} is paid"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory(); // or LockClient::connect("redis://127.0.0.1/").await?
//! locks.install()?;
//! assert_eq!(pay(42).await?, "order 42 is paid");
//! locks.shutdown().await;
//! # Ok(()) }
//! ```
//!
//! [`LockClient`] is the entry point. [`LockSpec`] holds the options of a lock,
//! [`LockGuard`] and [`HeldLock`] stand for a lock that is held, and [`LockError`] is the
//! error type. The [`guide`] is the manual; its page on [limits](guide::limits) lists the
//! guarantees that a lock cannot give.
//!
//! The crate `lock-tower` provides a layer for axum and other Tower services.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `macros` | yes | [`distributed_lock`] |
//! | `redis` | yes | the Redis store: `redis://` |
//! | `redis-rustls` | | `rediss://` |
//! | `records` | | locks in a database of your own: [`store::records`] |
//! | `postgres` | | the PostgreSQL store: `postgres://`; [`fencing`] tokens in your transactions |
//! | `postgres-rustls` | | TLS for `postgres://` |
//! | `etcd` | | the etcd store: `etcd://` |
//! | `etcd-rustls` | | `etcds://` |
//! | `zookeeper` | | the ZooKeeper store: `zookeeper://` |
//! | `http` | | errors as problem documents and as details of a gRPC status: [`web`] |
//! | `axum` | | `LockError` as a response, `HeldLock` as an extractor, [`web::readiness`] |
//! | `tonic` | | `LockError` as a `tonic::Status` |
//! | `metrics` | | metrics of all locks, through the crate `metrics`: [`metrics`] |
//! | `tracing` | | spans of acquires, holds and releases; events are written without it, too |
//! | `serde` | | serialization of specs, keys and tokens, and of all that operators see |

#![cfg_attr(docsrs, feature(doc_cfg))]
// Links to items of features that are not enabled.
#![cfg_attr(
    not(all(feature = "macros", feature = "redis", feature = "redis-rustls")),
    allow(rustdoc::broken_intra_doc_links)
)]
// The simulators use some of it only, and they need these features.
#![cfg_attr(
    all(test, not(all(feature = "redis", feature = "records"))),
    allow(dead_code)
)]

pub mod guide;
pub mod store;
pub mod web;

mod client;
mod error;
#[cfg(test)]
#[path = "../fuzz/mod.rs"]
mod fuzz;
mod guard;
mod observe;
mod once;
mod protocol;
mod request;
mod shell;
#[cfg(all(test, feature = "redis", feature = "records"))]
#[path = "../sim/mod.rs"]
mod sim;

// Compiler errors name this trait by its shortest path.
pub use shell::rt::FromLockError;

pub use client::ambient::AlreadyInstalled;
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
pub use client::credentials::Credentials;
pub use client::{EnvVariable, LockClient, LockClientBuilder};
pub use error::{ErrorClass, LockError, LockErrorKind, Loss};
pub use guard::fence::{FencingToken, InvalidFencingToken};
pub use guard::fencing;
pub use guard::owner::is_held;
pub use guard::{HeldLock, LockGuard};
#[cfg(feature = "macros")]
pub use lock_macros::distributed_lock;
#[cfg(feature = "metrics")]
pub use observe::metrics;
#[doc(hidden)]
pub use observe::{log, text};
pub use once::{Once, OnceEntry, OnceGuard, OnceRequest};
pub use request::LockRequest;
pub use request::key::{IntoLockKey, KeyWriter, LockKey};
pub use request::name::RequestName;
pub use request::spec::{LockKind, LockSpec, Mode, OnLost};
#[doc(hidden)]
pub use shell::rt::{LockKeys, Skipped};
#[doc(hidden)]
pub use shell::{rt as __rt, time};
#[cfg(feature = "etcd")]
pub use store::etcd::settings::EtcdOptions;
#[cfg(feature = "postgres")]
pub use store::postgres::settings::PostgresOptions;
#[cfg(feature = "redis")]
pub use store::redis::settings::RedisOptions;

/// The futures of requests, guards and scopes.
pub mod future {
    pub use crate::client::ambient::AsDefaultFuture;
    pub use crate::guard::owner::ScopeFuture;
    pub use crate::guard::under_lock::{RunFuture, WhileHeldFuture};
    pub use crate::guard::{LostFuture, ReleaseFuture};
    pub use crate::shell::acquire::AcquireFuture;
}

/// The state of the servers of a store. See [`LockClient::health`].
pub mod health {
    pub use crate::observe::health::{
        Finding, Health, ServerHealth, ServerRole, Severity, Verdict,
    };
}

/// What operators see of the locks of a store and of this process, and what they can do to them.
/// See [`LockClient::inspect`], [`LockClient::list`], [`LockClient::revoke`] and
/// [`LockClient::activity`].
pub mod operator {
    pub use crate::client::{
        Inspect, ListPage, ListedLock, LockList, LockPage, Revocation, Revoke,
    };
    pub use crate::observe::activity::{Activity, LostLock, NameActivity};
    pub use crate::store::identity::{ClientId, HolderId, Identity};
    pub use crate::store::inspection::{Holder, Inspection, Waiter};
}
