//! Work that is done once for a key: a lock that keeps the result.

mod guard;
#[cfg(feature = "postgres")]
mod in_transaction;

use std::{
    fmt,
    time::{Duration, SystemTime},
};

pub use self::guard::OnceGuard;
use crate::{
    client::LockClient,
    error::{LockError, LockErrorKind},
    guard::{HeldLock, fence::FencingToken},
    observe::{
        text::Short,
        watch::{self, OnceOutcome},
    },
    request::{
        LockRequest,
        key::{IntoLockKey, LockKey},
        name::RequestName,
        spec::{LockKind, LockSpec, Mode},
    },
    store::{Done, RevokeReply, RevokeScope},
};

/// Defines the setters of the options that such work can have: it has one holder, which does not
/// enter itself, and keeps a result in place of a reservation.
macro_rules! setters {
    (
        options {
            $(
                $(#[$doc:meta])*
                $option:ident($($arg:ident: $of:ty)?) { $field:ident: $value:expr }
            )*
        }
        modes $modes:tt
    ) => {
        $( setters! { @$option $(#[$doc])* ($($arg: $of)?) } )*
    };
    (@reentrant $($rest:tt)*) => {};
    (@min_hold $($rest:tt)*) => {};
    (@$option:ident $(#[$doc:meta])* ($($arg:ident: $of:ty)?)) => {
        $(#[$doc])*
        pub fn $option(self $(, $arg: $of)?) -> Self {
            self.with(|spec| spec.$option($($arg)?))
        }
    };
}

impl LockClient {
    /// Creates a request for work that is done once for `key`, whose result the store keeps for
    /// [`keep`](OnceRequest::keep).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let locks = lock_runtime::LockClient::in_memory();
    /// let charge = || {
    ///     let charge = locks.once("invoice:42");
    ///     charge.run_bytes(async |_held| Ok::<_, std::io::Error>(b"receipt 7".to_vec()))
    /// };
    /// let first = charge().await?.unwrap();
    /// let again = charge().await?.unwrap();
    /// assert!(!first.is_replay && again.is_replay);
    /// assert_eq!(again.value, b"receipt 7");
    /// # Ok(()) }
    /// ```
    pub fn once(&self, key: impl IntoLockKey) -> OnceRequest {
        OnceRequest::new(self.exclusive(key), OnceRequest::DEFAULT_KEEP)
    }
}

/// A request for work that is done once for a key, created by [`LockClient::once`].
///
/// The key is *free*, *running* (an exclusive lock with this lease, renewal and wait) or *done*,
/// with the result, for [`keep`](Self::keep). A request for a key that is running waits, and
/// receives the result without running. Work that fails, panics, is cancelled or loses its lock
/// records nothing, and the key is free again; after a loss, when its lease ends.
///
/// Other requests for the lock of this name are refused as
/// [`Done`](LockErrorKind::Done) while it is done.
#[must_use = "a request does nothing until it is begun or run"]
#[derive(Clone)]
pub struct OnceRequest {
    request: LockRequest,
    keep: Duration,
    most: usize,
}

impl OnceRequest {
    /// The time for which a result is kept by default.
    pub const DEFAULT_KEEP: Duration = Duration::from_secs(24 * 60 * 60);
    /// The longest result by default, in bytes.
    pub const DEFAULT_MAX_BYTES: usize = 64 * 1024;
    /// The longest time for which a result is kept.
    const LONGEST_KEEP: Duration = Duration::from_secs(366 * 24 * 60 * 60);

    pub(crate) fn new(request: LockRequest, keep: Duration) -> Self {
        Self {
            request,
            keep,
            most: Self::DEFAULT_MAX_BYTES,
        }
    }

    /// Sets the time for which the result is kept; a second to 366 days, 24 h by default. It counts
    /// from the record of the result.
    pub fn keep(self, keep: Duration) -> Self {
        Self { keep, ..self }
    }

    /// Sets the length of the longest result that is recorded, in bytes; 64 KiB by default. A
    /// longer one is refused as [`InvalidResult`](LockErrorKind::InvalidResult).
    pub fn max_bytes(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// Sets the name of the request. See [`LockRequest::name`].
    pub fn name(self, name: impl Into<RequestName>) -> Self {
        let request = self.request.name(name);
        Self { request, ..self }
    }

    /// Replaces the options of the lock with `spec`. Options that it leaves unset come from the
    /// client's defaults. Another mode than exclusive, `reentrant` and `min_hold` are refused as
    /// `InvalidSpec` when the request is made.
    pub fn spec(self, spec: LockSpec) -> Self {
        self.with(|_| spec)
    }

    fn with(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        let request = self.request.with(set);
        Self { request, ..self }
    }

    crate::__lock_options!(setters);

    /// Returns the result if the work is done, and otherwise begins it.
    ///
    /// # Errors
    /// [`Running`](LockErrorKind::Running) with [`no_wait`](Self::no_wait), and the other errors of
    /// [`LockRequest::acquire`]. `InvalidSpec` for a mode other than exclusive, `reentrant`,
    /// `min_hold`, a `keep` out of range, and a majority of servers, which keeps no results.
    ///
    /// # Cancellation
    /// As [`LockRequest::acquire`].
    pub async fn begin(self) -> Result<OnceEntry, LockError> {
        self.checked()?;
        let Self {
            request,
            keep,
            most,
        } = self;
        let error = match request.clone().acquired().await {
            Ok(guard) => {
                let guard = OnceGuard::new(guard, request.name, keep, most);
                return Ok(OnceEntry::Vacant(guard));
            }
            Err(error) => error,
        };
        match (error.kind(), error.result::<Done>()) {
            (LockErrorKind::Done, Some(done)) => {
                watch::once(request.name.as_ref(), OnceOutcome::Replayed, 0);
                Ok(OnceEntry::Done(Once::replay(done.clone())))
            }
            (LockErrorKind::Contended, _) => {
                watch::once(request.name.as_ref(), OnceOutcome::Running, 0);
                let message = "another task or process is at work on it";
                let running = LockError::new(LockErrorKind::Running, message);
                let running = running.with_key(error.key()).with_free_in(error.free_in());
                Err(running.with_name(request.name.as_ref()))
            }
            _ => Err(error),
        }
    }

    /// Returns the result if the work is done, and otherwise runs `body`, records the value that it
    /// returns and releases the lock, in one step.
    ///
    /// `body` runs as with [`LockRequest::run`]. An error of `body` is returned and not recorded;
    /// to record an error as well, return it as a part of the value.
    ///
    /// # Errors
    /// Those of [`begin`](Self::begin) and of [`OnceGuard::complete`].
    ///
    /// # Cancellation
    /// Dropping the future drops the body, records nothing and releases the lock in the background.
    /// If it is dropped while the result is being recorded, the record continues.
    pub async fn run_bytes<E>(
        self,
        body: impl AsyncFnOnce(HeldLock) -> Result<Vec<u8>, E>,
    ) -> Result<Result<Once<Vec<u8>>, E>, LockError> {
        match self.begin().await? {
            OnceEntry::Done(once) => Ok(Ok(once)),
            OnceEntry::Vacant(guard) => {
                let body = body(guard.held());
                guard.run_fresh(body, |value| Ok(value.clone())).await
            }
        }
    }

    /// Returns the result if the work is done, and otherwise runs `body`, records the value that it
    /// returns as JSON and releases the lock. See [`run_bytes`](Self::run_bytes).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # let locks = lock_runtime::LockClient::in_memory();
    /// let invoice = locks.once("invoice:42").keep(Duration::from_secs(48 * 3600));
    /// let receipt = invoice.run(async |_held| Ok::<u32, std::io::Error>(7)).await??;
    /// assert_eq!(receipt.value, 7);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`run_bytes`](Self::run_bytes), and
    /// [`InvalidResult`](LockErrorKind::InvalidResult) for a value that cannot be serialized, and
    /// for one in the store that this program cannot read. `body` has not run then.
    ///
    /// # Cancellation
    /// As [`run_bytes`](Self::run_bytes).
    #[cfg(feature = "serde")]
    pub async fn run<T, E>(
        self,
        body: impl AsyncFnOnce(HeldLock) -> Result<T, E>,
    ) -> Result<Result<Once<T>, E>, LockError>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        let key = self.key()?;
        let named = |error: LockError| error.with_key(&key);
        match self.begin().await? {
            OnceEntry::Done(once) => {
                let value = read(&once).map_err(named)?;
                Ok(Ok(once.with(value)))
            }
            OnceEntry::Vacant(guard) => {
                let body = body(guard.held());
                guard.run_fresh(body, write).await
            }
        }
    }

    /// Returns the result if the work is done.
    ///
    /// # Errors
    /// `InvalidKey`, `NoRuntime`, `Unavailable`, or a refusal of the server.
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub async fn stored(self) -> Result<Option<Once<Vec<u8>>>, LockError> {
        self.checked()?;
        let done = self.request.done(&self.key()?).await?;
        Ok(done.map(Once::replay))
    }

    /// Removes the result, so that the work runs again. Returns whether there was one. A key that
    /// is running is left alone.
    ///
    /// # Errors
    /// `InvalidKey`, `NoRuntime`, `Unavailable`, or a refusal of the server.
    ///
    /// # Cancellation
    /// If the future is dropped, the result may or may not have been removed.
    pub async fn forget(self) -> Result<bool, LockError> {
        self.checked()?;
        let key = self.key()?;
        let Some(Done { id, .. }) = self.request.done(&key).await? else {
            return Ok(false);
        };
        let scope = RevokeScope::Holder(id);
        let core = &self.request.core;
        let reply = core.store.revoke(&key, LockKind::Lock, scope);
        let reply = core.bounded(&key, reply).await?;
        Ok(reply == RevokeReply::Revoked)
    }

    /// Counts another request under the key of this one, which was refused.
    #[doc(hidden)]
    pub fn conflicts(&self) {
        watch::once(self.request.name.as_ref(), OnceOutcome::Conflict, 0);
    }

    pub(crate) fn key(&self) -> Result<LockKey, LockError> {
        // A request has at least one key.
        self.request.keys.clone().map(|keys| keys[0].clone())
    }

    fn checked(&self) -> Result<(), LockError> {
        let named = |error: LockError| error.with_key(self.key().ok().as_ref());
        self.check().map_err(named)
    }

    /// # Errors
    /// `InvalidSpec`, with the remedy.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), LockError> {
        let Self { request, keep, .. } = self;
        let terms = request.spec.terms(&request.core.defaults)?;
        let complaint = if terms.mode != Mode::Exclusive {
            "work that is done once has one holder; remove the mode".into()
        } else if terms.min_hold.is_some() {
            "a result is kept after the work, so `min_hold` has no meaning; remove it".into()
        } else if terms.reentrant {
            "work that is done once does not enter itself; remove `reentrant`".into()
        } else if !request.core.limits.results {
            "the store keeps no results, as a majority of servers cannot; use one server".into()
        } else if !(Duration::from_secs(1)..=Self::LONGEST_KEEP).contains(keep) {
            format!(
                "a `keep` of {} is out of range; give a second to 366 days",
                Short(*keep)
            )
        } else {
            return Ok(());
        };
        Err(LockError::new(LockErrorKind::InvalidSpec, complaint))
    }
}

impl LockRequest {
    async fn done(&self, key: &LockKey) -> Result<Option<Done>, LockError> {
        let done = self.core.bounded(key, self.core.store.done(key)).await;
        done.map_err(|error| error.with_name(self.name.as_ref()))
    }
}

impl fmt::Debug for OnceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnceRequest")
            .field("request", &self.request)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}

/// The state in which a [`OnceRequest`] has found its key.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "there is no third state")]
pub enum OnceEntry {
    /// The work was done before.
    Done(Once<Vec<u8>>),
    /// The work is to be done now, by the caller.
    Vacant(OnceGuard),
}

/// The result of work that is done once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Once<T> {
    /// The result.
    pub value: T,
    /// The fencing token under which the work ran.
    pub fence: FencingToken,
    /// When the result was recorded: by the clock of the store, or by that of this process if the
    /// work ran now.
    pub at: SystemTime,
    /// Whether the work was done before, and did not run now.
    pub is_replay: bool,
}

impl Once<Vec<u8>> {
    fn replay(done: Done) -> Self {
        let Done {
            value, fence, at, ..
        } = done;
        Self {
            value,
            fence,
            at,
            is_replay: true,
        }
    }

    #[cfg(feature = "serde")]
    fn with<T>(self, value: T) -> Once<T> {
        let Self {
            fence,
            at,
            is_replay,
            ..
        } = self;
        Once {
            value,
            fence,
            at,
            is_replay,
        }
    }
}

/// Serializes a value.
#[cfg(feature = "serde")]
pub(crate) fn write<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, LockError> {
    serde_json::to_vec(value).map_err(|error| {
        let message = format!("its result cannot be recorded: {error}");
        LockError::new(LockErrorKind::InvalidResult, message)
    })
}

/// Deserializes a value.
#[cfg(feature = "serde")]
pub(crate) fn read<T: serde::de::DeserializeOwned>(done: &Once<Vec<u8>>) -> Result<T, LockError> {
    serde_json::from_slice(&done.value).map_err(|error| {
        let message =
            format!("its result was recorded by another version, and cannot be read: {error}");
        LockError::new(LockErrorKind::InvalidResult, message)
    })
}
