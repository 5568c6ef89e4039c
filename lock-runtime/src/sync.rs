//! The one way this crate locks a mutex.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stay whole when a thread panics: nothing here runs a user's code while it holds one, except for
/// wakers, which are woken after the mutex is let go.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
