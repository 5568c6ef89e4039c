//! The Tokio runtime on which a call is made: there has to be one, with timers.

use std::{cell::Cell, panic::catch_unwind, time::Duration};

use tokio::{
    runtime::{Handle, Id},
    time::sleep,
};

use crate::error::{LockError, LockErrorKind};

thread_local! {
    /// The runtime that was looked at last on this thread, and whether it has timers.
    static LATEST: Cell<Option<(Id, bool)>> = const { Cell::new(None) };
}

/// Refuses a call that is made outside of a runtime, or in one without timers.
///
/// # Errors
/// `NoRuntime`, with the remedy.
pub(crate) fn check() -> Result<(), LockError> {
    current().map(drop)
}

/// Finds out whether the current runtime has timers, if it is not known on this thread. That may run a panic hook of the
/// application, so it comes before anything is locked.
pub(crate) fn look() {
    if let Ok(runtime) = Handle::try_current() {
        has_timers(runtime.id());
    }
}

/// The runtime on which the caller is polled.
///
/// # Errors
/// As [`check`].
pub(crate) fn current() -> Result<Handle, LockError> {
    let message = match Handle::try_current() {
        Ok(runtime) if has_timers(runtime.id()) => return Ok(runtime),
        Ok(_) => {
            "the Tokio runtime has no timers; build it with `enable_all()`, as `#[tokio::main]` does"
        }
        Err(_) => {
            "the call is made outside of a Tokio runtime; make it within `#[tokio::main]`, or within `Runtime::block_on`"
        }
    };
    Err(LockError::new(LockErrorKind::NoRuntime, message))
}

/// Whether the current runtime, which is called `id`, has timers.
fn has_timers(id: Id) -> bool {
    match LATEST.get() {
        Some((latest, timers)) if latest == id => timers,
        _ => {
            // Tokio tells by a panic alone, which is met here once for a thread and its runtime.
            let timers = catch_unwind(|| drop(sleep(Duration::ZERO))).is_ok();
            LATEST.set(Some((id, timers)));
            timers
        }
    }
}
