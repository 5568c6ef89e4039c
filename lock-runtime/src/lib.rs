//! Distributed locks for async Rust.

pub mod store;

mod error;
mod fence;
mod key;
mod spec;

pub use error::{LockError, LockErrorKind, Loss};
pub use fence::FencingToken;
pub use key::{IntoLockKey, KeyWriter, LockKey, MAX_KEY_BYTES};
pub use spec::{DEFAULT_LEASE, DEFAULT_WAIT, Family, LockSpec, MAX_LEASE, MIN_LEASE, Mode, Wait};
