//! A key and a spec bound to a client: created by `LockClient::exclusive` and similar methods,
//! consumed by `acquire` and `run`.

use std::{fmt, future::Future, sync::Arc};

use smallvec::smallvec;

use crate::{
    acquire::{AcquireFuture, Keys, acquire},
    core::Core,
    error::{LockError, LockErrorKind},
    guard::{HeldLock, LockGuard},
    key::IntoLockKey,
    spec::{LockSpec, Terms},
    under_lock::{CancelOnLossFuture, OnLoss},
};

/// A request for a lock.
///
/// Nothing happens before [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) or
/// [`run`](Self::run). These also return the typed error of an invalid key or spec. Every setter
/// overrides the client's default; [`LockSpec`] describes each option.
#[must_use = "a request does nothing until it is acquired or run"]
#[derive(Clone)]
pub struct LockRequest {
    core: Arc<Core>,
    keys: Result<Keys, LockError>,
    spec: LockSpec,
}

impl LockRequest {
    pub(crate) fn one(core: Arc<Core>, key: impl IntoLockKey, spec: LockSpec) -> Self {
        Self {
            core,
            keys: key.into_lock_key().map(|key| smallvec![key]),
            spec,
        }
    }

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
            Ok(keys)
        });
        Self { core, keys, spec }
    }

    fn with(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        Self {
            spec: set(self.spec),
            ..self
        }
    }

    crate::__lock_options!(crate::__lock_setters);

    /// Acquires the lock. Waiting requests are served first come, first served; see the
    /// [guide](crate::guide::waiting).
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
    /// lock is lost, the body is dropped at its next await point. The release is awaited for at
    /// most one call time-out (min(lease/6, 500 ms)). A release that fails is logged and never
    /// replaces the result of the body.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), and `Lost`.
    ///
    /// # Cancellation
    /// Dropping the future drops the body and releases the lock in the background.
    pub async fn run<F, Fut>(self, body: F) -> Result<Fut::Output, LockError>
    where
        F: FnOnce(HeldLock) -> Fut,
        Fut: Future,
    {
        let guard = self.acquired().await?;
        let body = body(guard.held());
        CancelOnLossFuture::new(guard, body, OnLoss::Cancel).await
    }

    pub(crate) fn acquired(
        self,
    ) -> impl Future<Output = Result<LockGuard, LockError>> + Send + 'static {
        granted(self.asked())
    }

    /// Validates the request before the future is created, so that the future carries less.
    pub(crate) fn asked(self) -> Result<Asked, LockError> {
        let Self { core, keys, spec } = self;
        let keys = keys?;
        let named = |error: LockError| error.with_key(keys.first());
        let terms = spec.terms(&core.defaults).map_err(named)?;
        core.limits.check(&terms, keys.len()).map_err(named)?;
        Ok(Asked { core, keys, terms })
    }
}

/// A validated request.
pub(crate) struct Asked {
    core: Arc<Core>,
    keys: Keys,
    terms: Terms,
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
            Ok(Asked { core, keys, terms }) => acquire(core, keys, terms).await,
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
