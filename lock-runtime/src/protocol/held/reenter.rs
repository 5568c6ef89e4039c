//! Re-entry: whether a request may enter a lock that an enclosing scope holds.

use crate::{
    error::LockErrorKind,
    request::spec::{Mode, Terms},
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

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, time::Duration};

    use super::*;
    use crate::request::spec::Wait;

    /// Without `reentrant` no lock is entered again, in whatever modes. With it, all but a writer
    /// under a reader, and another number of permits.
    #[test]
    fn only_a_reentrant_request_enters_a_lock_again() {
        let [one, two] = [1, 2].map(|number| Mode::Permits(NonZeroU32::new(number).unwrap()));
        let (writer, reader) = (Mode::Exclusive, Mode::Shared);
        for (held, wanted, may) in [
            (writer, writer, true),
            (writer, reader, true),
            (reader, reader, true),
            (reader, writer, false),
            (two, two, true),
            (two, one, false),
        ] {
            for reentrant in [false, true] {
                let wait = Wait::AtMost(Duration::from_secs(1));
                let mut terms = Terms::plain(wanted, Duration::from_secs(30), wait);
                terms.reentrant = reentrant;
                let entered = may_enter(held, &terms).is_ok();
                assert_eq!(entered, may && reentrant, "{wanted:?} under {held:?}");
            }
        }
    }
}
