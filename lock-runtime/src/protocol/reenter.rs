//! Re-entry: whether a request may enter a lock that an enclosing scope holds.

use crate::{
    error::LockErrorKind,
    spec::{Mode, Terms},
};

/// Returns the reason why a request may not enter a lock that is held in mode `held`.
pub(crate) fn may_enter(held: Mode, terms: &Terms) -> Result<(), (LockErrorKind, &'static str)> {
    match (held, terms.mode) {
        (Mode::Shared, Mode::Exclusive) => Err((
            LockErrorKind::WouldDeadlock,
            "an enclosing scope holds it for reading, so it can never be acquired for writing; acquire it for writing in that scope",
        )),
        (Mode::Permits(held), Mode::Permits(wanted)) if held != wanted => Err((
            LockErrorKind::ModeMismatch,
            "an enclosing scope holds it with another number of permits",
        )),
        _ if !terms.reentrant => Err((
            LockErrorKind::WouldDeadlock,
            "an enclosing scope of this flow holds it; set `reentrant`, or acquire it only once",
        )),
        _ => Ok(()),
    }
}
