//! The fencing token: a number by which a resource orders the holders of a lock.

use std::{fmt, num::NonZeroU64};

/// The number of a grant, larger than that of every earlier grant of the same key.
///
/// A lease cannot stop a paused process from writing after the lease has expired. The
/// resource can: it remembers the largest token it has seen and refuses smaller ones (Martin
/// Kleppmann, [How to do distributed locking][Kleppmann]). Send the token with every write,
/// and compare it where the write happens.
///
/// The number is max(previous + 1, the store's clock in microseconds since 1970), so it fits a
/// signed 64-bit column. The gap between two tokens has no meaning.
///
/// [Kleppmann]: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(NonZeroU64);

impl FencingToken {
    /// Wraps a number that came from a store or from a resource. Returns `None` for zero, which
    /// no grant ever has.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    /// Returns the number, to be sent with each write.
    pub fn number(self) -> u64 {
        self.0.get()
    }

    /// Returns the token `by` positions later in a reserved block.
    #[must_use]
    pub(crate) fn later(self, by: u32) -> Self {
        Self(self.0.saturating_add(by.into()))
    }

    /// Returns the token of the next grant at `micros` (microseconds since 1970):
    /// `max(previous + 1, micros)`.
    #[must_use]
    pub fn next(previous: Option<Self>, micros: u64) -> Self {
        let after = previous.map_or(1, |token| token.number().saturating_add(1));
        Self(NonZeroU64::MIN.max(NonZeroU64::new(after.max(micros)).unwrap_or(NonZeroU64::MIN)))
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> u64 {
        token.number()
    }
}
