//! Distributed locks for async Rust.

pub mod store;

mod acquire;
mod ambient;
mod client;
mod driver;
mod error;
mod fence;
mod gate;
mod guard;
mod holding;
mod key;
mod lease;
mod owner;
mod request;
mod spec;
mod sync;
mod under_lock;

#[doc(hidden)]
#[path = "rt.rs"]
pub mod __rt;

pub use __rt::FromLockError;
pub use ambient::{AlreadyInstalled, Scoped};
pub use client::{LockClient, LockClientBuilder};
pub use error::{LockError, LockErrorKind, Loss};
pub use fence::FencingToken;
pub use guard::{HeldLock, LockGuard, Lost};
pub use key::{IntoLockKey, KeyWriter, LockKey, MAX_KEY_BYTES};
#[cfg(feature = "macros")]
pub use lock_macros::distributed_lock;
pub use owner::{InScope, is_held};
pub use request::{Acquire, LockRequest};
pub use spec::{DEFAULT_LEASE, DEFAULT_WAIT, Family, LockSpec, MAX_LEASE, MIN_LEASE, Mode, Wait};
pub use store::{Holder, Inspection, RevokeReply, RevokeScope};
pub use under_lock::UnderLock;
