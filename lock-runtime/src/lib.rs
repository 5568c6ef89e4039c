//! Distributed locks for async Rust: acquire, renew, release.
//!
//! ```
//! use lock_runtime::{LockClient, LockError, distributed_lock};
//!
//! #[distributed_lock(key = "order:{order_id}", lease = "30s", wait = "2s")]
//! async fn pay(order_id: u64) -> Result<String, LockError> {
//!     Ok(format!("order {order_id} is paid")) // one runner per order in the whole fleet
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::in_memory(); // or LockClient::connect("redis://127.0.0.1/").await?
//! locks.clone().install()?;
//! assert_eq!(pay(42).await?, "order 42 is paid");
//! locks.shutdown().await;
//! # Ok(()) }
//! ```
//!
//! [`LockClient`] is the way in, [`LockSpec`] what can be asked of a lock, [`LockGuard`] and [`HeldLock`] what a holder has,
//! [`LockError`] what can go wrong. The [`guide`] is the manual, with a page on [what a lock cannot promise](guide::limits).
//! A layer for axum and other Tower services is in the crate `lock-tower`.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `macros` | yes | [`distributed_lock`] |
//! | `redis` | yes | the Redis store: `redis://` |
//! | `rustls` | | `rediss://` |
//! | `http` | | refusals as problem documents and gRPC details: [`web`] |
//! | `axum` | | `LockError` as a response, `HeldLock` as an extractor |
//! | `tonic` | | `LockError` as a `tonic::Status` |

#![cfg_attr(docsrs, feature(doc_cfg))]
// Links to items of features that are not enabled.
#![cfg_attr(
    not(all(feature = "macros", feature = "redis", feature = "rustls")),
    allow(rustdoc::broken_intra_doc_links)
)]

pub mod guide;
pub mod store;
pub mod web;

mod acquire;
mod ambient;
mod call;
mod client;
mod driver;
mod error;
#[cfg(test)]
mod explorer;
mod fence;
mod gate;
mod giving_back;
mod guard;
mod holding;
mod key;
mod lease;
mod named;
mod owner;
mod request;
mod runtime;
mod spec;
mod sync;
mod under_lock;

#[doc(hidden)]
#[path = "rt.rs"]
pub mod __rt;

pub use __rt::FromLockError;
// Errors of the compiler name them by the shortest path there is.
#[doc(hidden)]
pub use __rt::{LockKeys, Skipped};
pub use ambient::{AlreadyInstalled, Scoped};
pub use client::{LockClient, LockClientBuilder};
pub use error::{LockError, LockErrorKind, Loss};
pub use fence::FencingToken;
pub use guard::{HeldLock, LockGuard, Lost};
pub use key::{IntoLockKey, KeyWriter, LockKey, MAX_KEY_BYTES};
#[cfg(feature = "macros")]
pub use lock_macros::distributed_lock;
pub use named::{Acquire, Release};
pub use owner::{InScope, is_held};
pub use request::LockRequest;
pub use spec::{DEFAULT_LEASE, DEFAULT_WAIT, Family, LockSpec, MAX_LEASE, MIN_LEASE, Mode};
pub use store::{Holder, Inspection, RevokeReply, RevokeScope, Waiter};
pub use under_lock::{UnderLock, WhileHeld};
