//! The Tokio runtime of a call. It is required, and it needs timers.

use std::{cell::Cell, panic::catch_unwind, time::Duration};

use tokio::{
    runtime::{Handle, Id},
    time::sleep,
};

use crate::error::{LockError, LockErrorKind};

thread_local! {
    /// The last runtime that was checked on this thread, and whether it has timers.
    static LATEST: Cell<Option<(Id, bool)>> = const { Cell::new(None) };
}

/// Refuses a call outside a runtime, or in one without timers.
///
/// # Errors
/// `NoRuntime`, with the remedy.
pub(crate) fn check() -> Result<(), LockError> {
    current().map(drop)
}

/// Returns the runtime on which the caller is polled.
///
/// # Errors
/// Same as [`check`].
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

/// Returns whether the current runtime, which has this `id`, has timers.
fn has_timers(id: Id) -> bool {
    match LATEST.get() {
        Some((latest, timers)) if latest == id => timers,
        _ => {
            // Tokio reports missing timers only by a panic. It is caught here, once per thread
            // and runtime.
            let timers = catch_unwind(|| drop(sleep(Duration::ZERO))).is_ok();
            LATEST.set(Some((id, timers)));
            timers
        }
    }
}
