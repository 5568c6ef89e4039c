//! A key and a spec bound to a client: created by `LockClient::exclusive` and similar methods,
//! consumed by `acquire` and `run`.

pub(crate) mod key;
pub(crate) mod name;
pub(crate) mod options;
pub(crate) mod spec;

use std::{fmt, future::Future, sync::Arc};

use smallvec::smallvec;

use crate::{
    error::{LockError, LockErrorKind},
    guard::{HeldLock, LockGuard},
    observe::watch::{self, WatchedRequest},
    request::key::IntoLockKey,
    request::name::RequestName,
    request::spec::{LockSpec, Terms},
    shell::acquire::{AcquireFuture, Keys, acquire},
    shell::core::Core,
};

/// A request for a lock.
///
/// Nothing happens before [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) or
/// [`run`](Self::run). These also return the typed error of an invalid key or spec. Every setter
/// overrides the client's default; [`LockSpec`] describes each option.
#[must_use = "a request does nothing until it is acquired or run"]
#[derive(Clone)]
pub struct LockRequest {
    pub(crate) core: Arc<Core>,
    pub(crate) keys: Result<Keys, LockError>,
    pub(crate) spec: LockSpec,
    pub(crate) name: Option<RequestName>,
}

impl LockRequest {
    pub(crate) fn one(core: Arc<Core>, key: impl IntoLockKey, spec: LockSpec) -> Self {
        Self {
            core,
            keys: key.into_lock_key().map(|key| smallvec![key]),
            spec,
            name: None,
        }
    }

    /// The largest number of keys of a request: the store takes some 30 µs for each, in which it
    /// serves no other request.
    const MOST_KEYS: usize = 1000;

    pub(crate) fn all(
        core: Arc<Core>,
        keys: impl IntoIterator<Item = impl IntoLockKey>,
        spec: LockSpec,
    ) -> Self {
        let keys = keys.into_iter().map(IntoLockKey::into_lock_key);
        let keys = keys.collect::<Result<Keys, _>>().and_then(|mut keys| {
            if keys.is_empty() {
                let message = "no key was given; name at least one";
                return Err(LockError::new(LockErrorKind::InvalidKey, message));
            }
            keys.sort_unstable();
            keys.dedup();
            if keys.len() > Self::MOST_KEYS {
                let message = format!(
                    "{} keys were given, and a request has at most {}; lock one key for all of them",
                    keys.len(),
                    Self::MOST_KEYS
                );
                return Err(LockError::new(LockErrorKind::InvalidKey, message));
            }
            Ok(keys)
        });
        Self {
            core,
            keys,
            spec,
            name: None,
        }
    }

    /// Sets the name of the request in metrics, traces and errors; without one, it is counted as
    /// `unnamed`. See the [guide](crate::guide::observing).
    ///
    /// A name stands for a place in the code or a kind of lock, and is never a key: each one has
    /// metrics of its own.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let locks = lock_runtime::LockClient::in_memory();
    /// let held = locks.exclusive("order:42").name("checkout").acquire().await?;
    /// let request = locks.exclusive("order:42").name("refund").no_wait();
    /// let error = request.acquire().await.unwrap_err();
    /// assert_eq!(error.name(), Some("refund"));
    /// # Ok(()) }
    /// ```
    pub fn name(self, name: impl Into<RequestName>) -> Self {
        let name = Some(name.into()).filter(|name| !name.as_str().is_empty());
        Self { name, ..self }
    }

    /// Sets the name unless there is one.
    pub(crate) fn or_name(self, name: &'static str) -> Self {
        match self.name {
            Some(_) => self,
            None => self.name(name),
        }
    }

    pub(crate) fn with(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        Self {
            spec: set(self.spec),
            ..self
        }
    }

    crate::__lock_options!(crate::__lock_setters);

    /// Acquires the lock. Waiting requests are served first come, first served; see the
    /// [guide](crate::guide::waiting).
    ///
    /// Give the guard a name, such as `_guard`, and keep it for as long as the work takes: dropping
    /// it releases the lock. `let _ = request.acquire().await?` drops it at once, without a
    /// warning.
    ///
    /// While the store is unreachable, the request retries until its wait is over.
    ///
    /// # Errors
    /// `WaitTimeout`, `Contended` (with [`no_wait`](Self::no_wait)), `Overloaded`,
    /// `WouldDeadlock`, `Unavailable`, `ModeMismatch`, `ForeignKey`, `InvalidKey`, `InvalidSpec`,
    /// `NoRuntime`, `ShuttingDown`, and the errors of a server that refuses the request.
    ///
    /// `Lost` if one of several keys is lost while the request waits for the others, or if a
    /// `reentrant` request enters a lock that has been lost.
    ///
    /// # Cancellation
    /// Dropping the future leaves nothing behind: the next waiter continues with the queue entry,
    /// and a lock that may have been granted in the meantime is abandoned in the background.
    pub fn acquire(self) -> AcquireFuture {
        AcquireFuture::new(self.acquired())
    }

    /// Acquires the lock if it is free. The same as [`acquire`](Self::acquire) with
    /// [`no_wait`](Self::no_wait), but returns `None` instead of `Contended`.
    ///
    /// Take the guard out: `is_some()` drops it, and the work runs without the lock.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let locks = lock_runtime::LockClient::in_memory();
    /// if let Some(guard) = locks.exclusive("report").try_acquire().await? {
    ///     // .. the work ..
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of `acquire`, except `Contended`.
    ///
    /// # Cancellation
    /// As `acquire`.
    pub async fn try_acquire(self) -> Result<Option<LockGuard>, LockError> {
        match self.no_wait().acquired().await {
            Ok(guard) => Ok(Some(guard)),
            Err(error) if error.kind() == LockErrorKind::Contended => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires the lock, runs `body` under it and releases it.
    ///
    /// `body` runs in a frame of the lock, in which `reentrant` requests re-enter it. When the
    /// lock is lost, the body is dropped at its next await point, unless
    /// [`on_lost`](Self::on_lost) is set. The release is awaited for at most one call time-out
    /// (min(lease/6, 500 ms)); one that is not confirmed is logged and continues in the background.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), and `Lost`, also if the body has ended after the loss:
    /// see [`OnLost`](crate::OnLost). Its output is then dropped, even if it is an error.
    ///
    /// # Cancellation
    /// Dropping the future drops the body and releases the lock in the background.
    pub async fn run<F, Fut>(self, body: F) -> Result<Fut::Output, LockError>
    where
        F: FnOnce(HeldLock) -> Fut,
        Fut: Future,
    {
        let guard = self.acquired().await?;
        let held = guard.held();
        guard.run(async { body(held).await }).await
    }

    pub(crate) fn acquired(
        self,
    ) -> impl Future<Output = Result<LockGuard, LockError>> + Send + 'static {
        granted(self.asked())
    }

    /// Validates the request before the future is created, so that the future carries less.
    pub(crate) fn asked(self) -> Result<Asked, LockError> {
        let Self {
            core,
            keys,
            spec,
            name,
        } = self;
        let checked = || {
            let keys = keys?;
            let of = |error: LockError| error.with_key(keys.first());
            let terms = spec.terms(&core.defaults).map_err(of)?;
            core.limits.check(&terms, keys.len()).map_err(of)?;
            Ok((keys, terms))
        };
        match checked() {
            Ok((keys, terms)) => Ok(Asked {
                core,
                keys,
                terms,
                name,
            }),
            Err(error) => {
                watch::refused(name.as_ref(), spec.mode(), &error);
                core.activity.ended(name.as_ref(), error.key(), Err(&error));
                Err(error.with_name(name.as_ref()))
            }
        }
    }
}

/// A validated request.
pub(crate) struct Asked {
    core: Arc<Core>,
    keys: Keys,
    terms: Terms,
    name: Option<RequestName>,
}

/// Acquires the keys of a validated request.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn stores its arguments twice, and so does a block that moves out of its captures"
)]
pub(crate) fn granted(
    asked: Result<Asked, LockError>,
) -> impl Future<Output = Result<LockGuard, LockError>> + Send + 'static {
    async move {
        match &asked {
            Ok(asked) => {
                let Asked {
                    core,
                    keys,
                    terms,
                    name,
                } = asked;
                let attempt = WatchedRequest::begin(name.as_ref(), keys, terms.mode);
                let watched = (name.as_ref(), &attempt);
                let outcome = attempt.within(acquire(core, keys, terms, watched)).await;
                let recorded = outcome.as_ref().map(LockGuard::recorded);
                attempt.ended(recorded);
                let refused = outcome.as_ref().err().and_then(LockError::key);
                let key = refused.or(keys.first());
                core.activity.ended(name.as_ref(), key, recorded);
                outcome.map_err(|error| error.with_name(name.as_ref()))
            }
            Err(error) => Err(error.clone()),
        }
    }
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest")
            .field("keys", &self.keys)
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::LockClient;

    /// Ten thousand requests may wait for one key, and each keeps its future in memory meanwhile.
    #[tokio::test]
    async fn a_request_that_waits_is_small() {
        let size = size_of_val(&LockClient::in_memory().exclusive("k").acquired());
        assert!(size <= 1_700, "{size} bytes");
    }
}
