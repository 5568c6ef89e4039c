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
//! locks.clone().install()?;
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
//! | `rustls` | | `rediss://` |
//! | `records` | | locks in a database of your own: [`store::records`] |
//! | `postgres` | | the PostgreSQL store: `postgres://`; [`fencing`] tokens in your transactions |
//! | `postgres-rustls` | | TLS for `postgres://` |
//! | `http` | | errors as problem documents and as details of a gRPC status: [`web`] |
//! | `axum` | | `LockError` as a response, `HeldLock` as an extractor, [`web::readiness`] |
//! | `tonic` | | `LockError` as a `tonic::Status` |
//! | `metrics` | | metrics of all locks, through the crate `metrics`: [`metrics`] |
//! | `tracing` | | spans of acquires, holds and releases; events are written without it, too |
//! | `serde` | | serialization of specs, keys and tokens, and of all that operators see |

#![cfg_attr(docsrs, feature(doc_cfg))]
// Links to items of features that are not enabled.
#![cfg_attr(
    not(all(feature = "macros", feature = "redis", feature = "rustls")),
    allow(rustdoc::broken_intra_doc_links)
)]
// The simulators use some of it only, and they need these features.
#![cfg_attr(
    all(test, not(all(feature = "redis", feature = "records"))),
    allow(dead_code)
)]

pub mod fencing;
pub mod guide;
pub mod store;
pub mod web;

mod acquire;
mod activity;
mod ambient;
mod call;
mod client;
mod clients;
mod core;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod credentials;
mod driver;
mod error;
mod fence;
#[cfg(feature = "serde")]
mod fields;
mod guard;
mod health;
mod keeper;
mod key;
#[doc(hidden)]
pub mod log;
#[cfg(feature = "metrics")]
pub mod metrics;
mod name;

mod on_drop;
mod options;
mod owner;
#[cfg(any(feature = "rustls", feature = "postgres"))]
// Without TLS they are refused.
#[cfg_attr(
    not(any(feature = "rustls", feature = "postgres-rustls")),
    allow(dead_code)
)]
mod pem;
mod protocol;
mod request;
mod runtime;
#[cfg(all(test, feature = "redis", feature = "records"))]
#[path = "../sim/mod.rs"]
mod sim;
mod spec;
mod sync;
#[doc(hidden)]
pub mod text;
#[doc(hidden)]
pub mod time;
#[cfg(any(feature = "rustls", feature = "postgres-rustls"))]
mod tls;
mod under_lock;
mod view;
mod watch;

#[doc(hidden)]
#[path = "rt.rs"]
pub mod __rt;

pub use __rt::FromLockError;
// Compiler errors name these traits by their shortest path.
#[doc(hidden)]
pub use __rt::{LockKeys, Skipped};
pub use acquire::AcquireFuture;
pub use activity::{Activity, LossSeen, NameActivity};
pub use ambient::{AlreadyInstalled, AsDefaultFuture};
pub use client::{EnvVariable, ListedLock, LockClient, LockClientBuilder, LockList, LockPage};
#[cfg(any(feature = "redis", feature = "postgres"))]
pub use credentials::Credentials;
pub use error::{LockError, LockErrorKind, Loss};
pub use fence::{FencingToken, InvalidFencingToken};
pub use guard::{HeldLock, LockGuard, LostFuture, ReleaseFuture};
pub use health::{Finding, Health, ServerHealth, ServerRole, Severity, Verdict};
pub use key::{IntoLockKey, KeyWriter, LockKey, MAX_KEY_BYTES};
#[cfg(feature = "macros")]
pub use lock_macros::distributed_lock;
pub use name::LockName;
pub use owner::{ScopeFuture, is_held};
pub use request::LockRequest;
pub use spec::{
    DEFAULT_LEASE, DEFAULT_WAIT, LockKind, LockSpec, MAX_LEASE, MIN_LEASE, Mode, OnLost,
};
#[cfg(feature = "redis")]
pub use store::redis::RedisOptions;
pub use store::{
    ClientId, Holder, HolderId, Identity, Inspection, RevokeReply, RevokeScope, Waiter,
};
pub use under_lock::{RunFuture, WhileHeldFuture};
