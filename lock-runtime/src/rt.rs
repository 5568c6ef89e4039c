//! What the expansion of `#[distributed_lock]` calls. Not for use by hand: it changes without notice.

use std::future::Future;

use crate::{
    ambient,
    error::LockErrorKind,
    guard::LockGuard,
    request::{LockRequest, granted},
    under_lock::{OnLoss, under_lock},
};
pub use crate::{
    client::LockClient,
    error::LockError,
    guard::HeldLock,
    key::{IntoLockKey, KeyWriter, LockKey},
    spec::LockSpec,
};

/// What a locked function gives when the lock was not to be had, or was lost.
///
/// Implemented for every `Result` whose error can be made from a [`LockError`], and, with the feature `axum`, for axum's
/// `Response`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot hold a `LockError`, and a locked function may have to return one",
    label = "no room for a `LockError`",
    note = "return a `Result` whose error implements `From<LockError>`, such as `LockError` itself",
    note = "or say what to return instead: `map_err = path`, where `path` is a `fn(LockError) -> {Self}`"
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

/// What a function returns that `on_busy = skip` has skipped.
#[diagnostic::on_unimplemented(
    message = "`on_busy = skip` does not know what to return as `{Self}`",
    label = "no default to return",
    note = "`skip` returns `Ok(Default::default())`, `None` or `()`; for anything else write `on_busy = value`"
)]
pub trait Skipped {
    /// Nothing was done.
    fn skipped() -> Self;
}

#[diagnostic::do_not_recommend]
impl Skipped for () {
    fn skipped() -> Self {}
}

#[diagnostic::do_not_recommend]
impl<T> Skipped for Option<T> {
    fn skipped() -> Self {
        None
    }
}

#[diagnostic::do_not_recommend]
impl<T: Default, E> Skipped for Result<T, E> {
    fn skipped() -> Self {
        Ok(T::default())
    }
}

/// The client of the task or of the process, for the function of that name.
pub fn ambient(function: &'static str) -> Result<LockClient, LockError> {
    ambient::ambient(function)
}

/// A key written out of text and values.
pub fn key(write: impl FnOnce(&mut KeyWriter)) -> Result<LockKey, LockError> {
    let mut writer = KeyWriter::new();
    write(&mut writer);
    writer.finish()
}

/// A request for one key.
pub fn one(
    client: Result<LockClient, LockError>,
    key: Result<LockKey, LockError>,
    spec: LockSpec,
) -> Result<LockRequest, LockError> {
    match client {
        Ok(client) => Ok(client.request(key, spec)),
        Err(error) => Err(match key {
            Ok(key) => error.with_key(&key),
            Err(_) => error,
        }),
    }
}

/// What the value of `keys = ..` has to be.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no list of keys",
    label = "no list of keys",
    note = "write `keys(\"account:{{from}}\", \"account:{{to}}\")`, or give a list of strings or of `LockKey`s; one key is `key = ..`"
)]
pub trait LockKeys {
    /// A request for all of them.
    fn all(
        self,
        client: Result<LockClient, LockError>,
        spec: LockSpec,
    ) -> Result<LockRequest, LockError>;
}

#[diagnostic::do_not_recommend]
impl<K: IntoIterator<Item: IntoLockKey>> LockKeys for K {
    fn all(
        self,
        client: Result<LockClient, LockError>,
        spec: LockSpec,
    ) -> Result<LockRequest, LockError> {
        match client {
            Ok(client) => Ok(client.request_all(self, spec)),
            // Of several keys it is the first, as with every error.
            Err(error) => Err(
                match self
                    .into_iter()
                    .filter_map(|key| key.into_lock_key().ok())
                    .min()
                {
                    Some(key) => error.with_key(&key),
                    None => error,
                },
            ),
        }
    }
}

/// Acquires the lock for the body.
pub fn enter(
    request: Result<LockRequest, LockError>,
) -> impl Future<Output = Result<LockGuard, LockError>> + Send + 'static {
    granted(request.and_then(LockRequest::asked))
}

/// Does somebody else hold the lock?
pub fn is_busy(error: &LockError) -> bool {
    matches!(
        error.kind(),
        LockErrorKind::Contended | LockErrorKind::WaitTimeout
    )
}

/// What the function says that was named for it.
pub fn map_err<T>(map: impl FnOnce(LockError) -> T, error: LockError) -> T {
    map(error)
}

/// Runs the body; a loss drops it.
pub fn cancel_on_loss<F: Future>(
    entered: LockGuard,
    body: F,
) -> impl Future<Output = Result<F::Output, LockError>> {
    under_lock(entered, body, OnLoss::Cancel)
}

/// Runs the body, whatever becomes of the lock. A loss has been traced, and so has a release that failed.
pub fn finish_despite_loss<F: Future>(
    entered: LockGuard,
    body: F,
) -> impl Future<Output = Result<F::Output, LockError>> {
    under_lock(entered, body, OnLoss::Finish)
}
