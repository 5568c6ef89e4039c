//! The lock of work that is done once, while it runs.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::Once;
use crate::{
    error::{LockError, LockErrorKind},
    guard::{HeldLock, LockGuard},
    observe::watch::{self, OnceOutcome},
    request::name::RequestName,
    shell::{
        rt::Recorded,
        time::{Instant, sleep_until},
    },
    store::HolderId,
};

/// The pause between two looks at a result whose record was not confirmed.
const LOOK: Duration = Duration::from_millis(100);

/// The lock of work that is done once, while it runs. Dropping it records nothing and releases the
/// lock in the background.
#[must_use = "dropping the guard releases the lock"]
#[derive(Debug)]
pub struct OnceGuard {
    pub(super) guard: LockGuard,
    pub(super) keep: Duration,
    most: usize,
    pub(super) run: Run,
}

/// The run of the work, which is counted when it ends.
#[derive(Debug)]
pub(super) struct Run {
    name: Option<RequestName>,
    /// The bytes of its result.
    pub(super) recorded: Option<usize>,
}

impl Drop for Run {
    fn drop(&mut self) {
        let outcome = match self.recorded {
            Some(_) => OnceOutcome::Ran,
            None => OnceOutcome::Unrecorded,
        };
        watch::once(self.name.as_ref(), outcome, self.recorded.unwrap_or(0));
    }
}

impl OnceGuard {
    pub(super) fn new(
        guard: LockGuard,
        name: Option<RequestName>,
        keep: Duration,
        most: usize,
    ) -> Self {
        let run = Run {
            name,
            recorded: None,
        };
        Self {
            guard,
            keep,
            most,
            run,
        }
    }

    /// Returns a view of the lock, with its fencing token and its loss.
    pub fn held(&self) -> HeldLock {
        self.guard.held()
    }

    /// Records the result and releases the lock, in one step.
    ///
    /// A call without a reply is repeated in the background, and the store is asked whether it has
    /// the result, until the lease has ended.
    ///
    /// # Errors
    /// `Lost` if the lock was lost: nothing was recorded. `InvalidResult` for a result that is too
    /// long, `ModeMismatch` if the lock was entered again: nothing was recorded, and the lock is
    /// released, in the latter case with its last guard. `ReleaseUnknown` if the store did not
    /// answer: the result may or may not have been recorded; or if it refused the result, as one
    /// that is too long for it: then it was not, and the message says so. `NoRuntime`.
    ///
    /// # Cancellation
    /// Before the first poll, dropping the future records nothing. Afterwards the record continues
    /// in the background.
    pub async fn complete(self, result: &[u8]) -> Result<(), LockError> {
        let checked = self.check_length(result);
        let Self {
            guard,
            keep,
            mut run,
            ..
        } = self;
        let key = guard.key().clone();
        if let Err(error) = checked {
            let _ = guard.release().await;
            return Err(error.with_key(&key));
        }
        let view = guard.views()[0].clone();
        let core = &view.core;
        // A waiter that a forged message has deceived may have the fencing token of the holder.
        let own = core.visit(|state, _| {
            let hold = state.session.hold_of(view.id)?;
            Some(HolderId::of(&key, hold.token, true))
        });
        let until = Instant::now() + guard.validity();
        let error = match guard.complete(Arc::from(result), keep).await {
            Err(error) if error.kind() == LockErrorKind::ReleaseUnknown => error,
            known => {
                run.recorded = known.is_ok().then_some(result.len());
                return known;
            }
        };
        if !is_transient(&error) {
            let hint = "the result was not recorded, as the store refuses it";
            return Err(error.with_hint(Some(hint)));
        }
        while Instant::now() < until {
            sleep_until(Instant::now() + LOOK).await;
            if let Ok(Some(done)) = core.bounded(&key, core.store.done(&key)).await
                && Some(done.id) == own
            {
                run.recorded = Some(result.len());
                return Ok(());
            }
        }
        Err(error.with_hint(Some("whether the result was recorded is unknown")))
    }

    pub(super) fn check_length(&self, result: &[u8]) -> Result<(), LockError> {
        let (length, most) = (result.len(), self.most);
        if length <= most {
            return Ok(());
        }
        let message = format!(
            "its result has {length} bytes, and {most} are the most; raise `max_bytes`, or keep it \
             elsewhere and return where it is"
        );
        Err(LockError::new(LockErrorKind::InvalidResult, message))
    }

    /// Runs `body` as [`LockGuard::while_held_unless`] does.
    #[doc(hidden)]
    pub async fn while_held_unless<F: Future>(
        self,
        body: F,
        is_failure: fn(&F::Output) -> bool,
    ) -> Result<(F::Output, Self), LockError> {
        let (output, guard) = self.guard.while_held_unless(body, is_failure).await?;
        Ok((output, Self { guard, ..self }))
    }

    /// Runs a body, and records its value unless it is a failure.
    async fn recorded<O>(
        self,
        body: impl Future<Output = O>,
        is_failure: fn(&O) -> bool,
        record: impl FnOnce(&O) -> Result<Vec<u8>, LockError>,
    ) -> Result<O, LockError> {
        let key = self.guard.key().clone();
        let (value, guard) = self.while_held_unless(body, is_failure).await?;
        if is_failure(&value) {
            // An error is logged, and the release continues in the background.
            let _ = guard.release().await;
            return Ok(value);
        }
        let result = record(&value).map_err(|error| error.with_key(&key))?;
        guard.complete(&result).await?;
        Ok(value)
    }

    /// Runs a body that returns a value, or an error, which is not recorded.
    pub(super) async fn run_fresh<T, E>(
        self,
        body: impl Future<Output = Result<T, E>>,
        record: impl FnOnce(&T) -> Result<Vec<u8>, LockError>,
    ) -> Result<Result<Once<T>, E>, LockError> {
        let fence = self.guard.fence();
        let record = |value: &Result<T, E>| value.as_ref().map_or_else(|_| Ok(Vec::new()), record);
        let value = self.recorded(body, Result::is_err, record).await?;
        Ok(value.map(|value| Once {
            value,
            fence,
            at: SystemTime::now(),
            is_replay: false,
        }))
    }

    /// Runs the body of a function with the attribute.
    pub(crate) async fn run<T: Recorded>(
        self,
        body: impl Future<Output = T>,
    ) -> Result<T, LockError> {
        self.recorded(body, T::is_failure, T::record).await
    }

    /// Releases the lock and records nothing. See [`LockGuard::release`].
    ///
    /// # Errors
    /// Those of [`LockGuard::release`].
    ///
    /// # Cancellation
    /// As [`LockGuard::release`].
    pub async fn release(self) -> Result<(), LockError> {
        self.guard.release().await
    }
}

fn is_transient(error: &LockError) -> bool {
    error
        .store_error()
        .is_some_and(|error| error.is_transient())
}
