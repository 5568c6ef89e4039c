//! What the expansion of `#[distributed_lock]` calls. Not for use by hand: it changes without notice.

use crate::{ambient, client::LockClient, request::Acquire};
pub use crate::{
    error::LockError,
    key::{IntoLockKey, KeyWriter, LockKey},
    spec::LockSpec,
};

/// What a locked function gives when the lock was not to be had, or was lost.
///
/// Implemented for every `Result` whose error can be made from a [`LockError`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot hold a `LockError`, which a locked function may return",
    label = "no room for a `LockError`",
    note = "return a `Result` whose error implements `From<LockError>`"
)]
pub trait FromLockError {
    /// The function's own way to say it.
    fn from_lock_error(error: LockError) -> Self;
}

#[diagnostic::do_not_recommend]
impl<T, E: From<LockError>> FromLockError for Result<T, E> {
    fn from_lock_error(error: LockError) -> Self {
        Err(error.into())
    }
}

/// The client of the task or of the process.
pub fn ambient() -> Result<LockClient, LockError> {
    ambient::ambient()
}

/// A client that the function names.
pub fn client(client: &LockClient) -> Result<LockClient, LockError> {
    Ok(client.clone())
}

/// A key written out of text and values, with room for `capacity` bytes.
pub fn key(capacity: usize, write: impl FnOnce(&mut KeyWriter)) -> Result<LockKey, LockError> {
    let mut writer = KeyWriter::with_capacity(capacity);
    write(&mut writer);
    writer.finish()
}

/// A key that the function builds itself.
pub fn key_from(key: impl IntoLockKey) -> Result<LockKey, LockError> {
    key.into_lock_key()
}

/// Acquires the lock for the body. Boxed, as the future of the locked function would hold it whole, beside the body's arguments.
pub fn enter(client: Result<LockClient, LockError>, key: Result<LockKey, LockError>, spec: &LockSpec) -> Acquire {
    match client {
        Ok(client) => client.request(key, spec.clone()).acquire(),
        Err(error) => Acquire::refused(error),
    }
}
