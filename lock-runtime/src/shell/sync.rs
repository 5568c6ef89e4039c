//! Mutex locking, in one place for the whole crate.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stay consistent when a thread panics. No user code runs while a mutex
/// is locked, except for wakers, and these are woken after it is unlocked.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
