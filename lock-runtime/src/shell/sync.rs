//! The locking of a mutex, and a function that runs when a scope, a future or a task ends early.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stay consistent when a thread panics. No user code runs while a mutex
/// is locked, except for wakers, and these are woken after it is unlocked.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function when it is dropped, unless it is disarmed first.
pub(crate) struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> OnDrop<F> {
    pub(crate) fn new(function: F) -> Self {
        Self(Some(function))
    }

    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(function) = self.0.take() {
            function();
        }
    }
}
