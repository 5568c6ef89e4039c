//! Functions and traits for the expansion of `#[distributed_lock]`. Not a public API: it changes
//! without notice.

use std::{future::Future, ops::Deref, time::Duration};

pub use crate::{
    client::LockClient,
    client::ambient::ambient,
    error::LockError,
    guard::HeldLock,
    request::key::{IntoLockKey, KeyWriter, LockKey},
    request::spec::{LockSpec, OnLost},
};
use crate::{
    error::LockErrorKind,
    guard::LockGuard,
    guard::under_lock::RunFuture,
    once::{Once, OnceEntry, OnceGuard, OnceRequest},
    request::{LockRequest, granted},
};

/// A return type that can hold a [`LockError`].
///
/// A locked function returns such a type, or converts the error with `map_err`, because the lock
/// may be unavailable or may be lost. The trait is implemented for every `Result` whose error can
/// be created from a [`LockError`] and, with the feature `axum`, for axum's `Response`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot hold a `LockError`, and a locked function may have to return one",
    label = "no room for a `LockError`",
    note = "return a `Result` whose error implements `From<LockError>`, such as `LockError` itself",
    note = "or convert the error: `map_err = path`, where `path` is a `fn(LockError) -> {Self}`"
)]
pub trait FromLockError {
    /// Converts the error into the return type of the function.
    fn from_lock_error(error: LockError) -> Self;
}

#[diagnostic::do_not_recommend]
impl<T, E: From<LockError>> FromLockError for Result<T, E> {
    fn from_lock_error(error: LockError) -> Self {
        Err(error.into())
    }
}

/// A return type that has a value for calls that `on_busy = skip` skips.
#[diagnostic::on_unimplemented(
    message = "`on_busy = skip` has no value to return as `{Self}`",
    label = "no default to return",
    note = "`skip` returns `Ok(Default::default())`, `None` or `()`; for anything else write `on_busy = value`"
)]
pub trait Skipped {
    /// Returns the value of a call that was skipped.
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

/// Builds a key from text and values.
pub fn key(write: impl FnOnce(&mut KeyWriter)) -> Result<LockKey, LockError> {
    let mut writer = KeyWriter::new();
    write(&mut writer);
    writer.finish()
}

/// Creates a request for one key.
pub fn one(
    client: Result<LockClient, LockError>,
    key: Result<LockKey, LockError>,
    spec: LockSpec,
) -> Result<LockRequest, LockError> {
    match client {
        Ok(client) => Ok(client.request(key, spec)),
        Err(error) => Err(error.with_key(key.as_ref().ok())),
    }
}

/// A value of `keys = ..`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a list of keys",
    label = "not a list of keys",
    note = "write `keys(\"account:{{from}}\", \"account:{{to}}\")`, or give a list of strings or of `LockKey`s; one key is `key = ..`"
)]
pub trait LockKeys {
    /// Creates a request for all of the keys.
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
            Err(error) => {
                // As in all errors about several keys, the error names the first one.
                let keys = self.into_iter().filter_map(|key| key.into_lock_key().ok());
                Err(error.with_key(keys.min().as_ref()))
            }
        }
    }
}

/// Acquires the lock for the body.
pub fn enter(
    request: Result<LockRequest, LockError>,
    name: &'static str,
) -> impl Future<Output = Result<LockGuard, LockError>> + Send + 'static {
    let named = request.map_err(|error| error.with_name(Some(&name.into())));
    granted(named.and_then(|request| request.or_name(name).asked()))
}

/// The state in which the body is found that runs once.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "not public")]
pub enum Entered {
    /// It runs now.
    Fresh(OnceGuard),
    /// It has run before.
    Done(Done),
}

/// What was kept, under this key.
#[derive(Debug)]
pub struct Done(LockKey, Once<Vec<u8>>);

/// Begins the body, unless it has run before.
pub async fn begin(
    request: Result<LockRequest, LockError>,
    name: &'static str,
    keep: Duration,
) -> Result<Entered, LockError> {
    let request = request.map_err(|error| error.with_name(Some(&name.into())))?;
    let request = OnceRequest::new(request.or_name(name), keep);
    let key = request.key()?;
    Ok(match request.begin().await? {
        OnceEntry::Vacant(guard) => Entered::Fresh(guard),
        OnceEntry::Done(done) => Entered::Done(Done(key, done)),
    })
}

/// The return type of a function that runs once, whose value can be kept.
#[diagnostic::on_unimplemented(
    message = "the value of `{Self}` cannot be kept, as `once` does",
    label = "no value to keep",
    note = "return a `Result` whose value implements `Serialize` and `DeserializeOwned`, with the feature `serde` of lock-runtime, or `Result<(), E>`"
)]
pub trait Recorded: Sized {
    /// Returns whether it is an error, which is not kept.
    fn is_failure(&self) -> bool;

    /// Returns what is kept.
    fn record(&self) -> Result<Vec<u8>, LockError>;

    /// Returns what was kept.
    fn replay(done: &Once<Vec<u8>>) -> Result<Self, LockError>;
}

#[cfg(feature = "serde")]
#[diagnostic::do_not_recommend]
impl<T: serde::Serialize + serde::de::DeserializeOwned, E> Recorded for Result<T, E> {
    fn is_failure(&self) -> bool {
        self.is_err()
    }

    fn record(&self) -> Result<Vec<u8>, LockError> {
        self.as_ref()
            .map_or_else(|_| Ok(Vec::new()), crate::once::write)
    }

    fn replay(done: &Once<Vec<u8>>) -> Result<Self, LockError> {
        crate::once::read(done).map(Ok)
    }
}

#[cfg(not(feature = "serde"))]
#[diagnostic::do_not_recommend]
impl<E> Recorded for Result<(), E> {
    fn is_failure(&self) -> bool {
        self.is_err()
    }

    fn record(&self) -> Result<Vec<u8>, LockError> {
        // As JSON.
        Ok(b"null".to_vec())
    }

    fn replay(_done: &Once<Vec<u8>>) -> Result<Self, LockError> {
        Ok(Ok(()))
    }
}

/// Returns the value of a body that has run before.
pub fn replay<T: Recorded>(Done(key, done): Done) -> Result<T, LockError> {
    T::replay(&done).map_err(|error| error.with_key(&key))
}

/// Runs the body, and records its value.
pub async fn run_once<F: Future<Output: Recorded>>(
    entered: OnceGuard,
    body: F,
) -> Result<F::Output, LockError> {
    entered.run(body).await
}

/// Returns the path of the function that contains the closure. That of a method contains its type.
pub fn path_of<F>(_closure: F) -> &'static str {
    std::any::type_name::<F>().trim_end_matches("::{{closure}}")
}

/// Returns whether the error means that the lock is held by another holder.
pub fn is_busy(error: &LockError) -> bool {
    matches!(
        error.kind(),
        LockErrorKind::Contended | LockErrorKind::WaitTimeout | LockErrorKind::Running
    )
}

/// Calls the function that the argument `map_err` names.
pub fn map_err<T>(map: impl FnOnce(LockError) -> T, error: LockError) -> T {
    map(error)
}

/// Runs the body. `is_failure` tells an output that is an error of the body itself.
pub fn run<F: Future>(
    entered: LockGuard,
    body: F,
    is_failure: fn(&F::Output) -> bool,
) -> RunFuture<F> {
    RunFuture::new(entered, body, is_failure)
}

/// The output of a locked function, to be asked for an error. The expansion knows its type: for a
/// `Result`, its own method comes before that of [`Plain`], which stands for all other types.
#[derive(Debug)]
pub struct Returned<'a, T>(pub &'a T, pub Plain);

/// An output that is never an error.
#[derive(Debug)]
pub struct Plain;

impl Plain {
    /// Returns `false`.
    pub fn is_failure(&self) -> bool {
        false
    }
}

impl<T> Deref for Returned<'_, T> {
    type Target = Plain;

    fn deref(&self) -> &Plain {
        &self.1
    }
}

impl<T, E> Returned<'_, Result<T, E>> {
    /// Returns whether the function returns an error.
    pub fn is_failure(&self) -> bool {
        self.0.is_err()
    }
}
