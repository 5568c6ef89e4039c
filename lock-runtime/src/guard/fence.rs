//! The fencing token: a number by which a resource orders the holders of a lock.

use std::{error::Error, fmt, num::NonZeroU64, time::Duration};

/// The number of a grant, larger than that of every earlier grant of the same key.
///
/// A lease cannot stop a paused process from writing after the lease has expired. The
/// resource can: it remembers the largest token it has seen and refuses smaller ones (Martin
/// Kleppmann, [How to do distributed locking][Kleppmann]). Send the token with every write,
/// and compare it where the write happens.
///
/// The number is max(previous + 1, the store's clock in microseconds since 1970), and at most
/// [`i64::MAX`], so it fits a signed 64-bit column: bind `i64::from(token)` to a parameter of a
/// query. The gap between two tokens has no meaning.
///
/// With the feature `serde`, a token is serialized as its number.
///
/// ```
/// use lock_runtime::FencingToken;
/// let column: i64 = 1_800_000_000_000_000;
/// let token = FencingToken::try_from(column)?;
/// assert_eq!(i64::from(token), column);
/// assert!(FencingToken::try_from(0_i64).is_err());
/// # Ok::<(), lock_runtime::InvalidFencingToken>(())
/// ```
///
/// [Kleppmann]: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "u64", into = "u64")
)]
pub struct FencingToken(NonZeroU64);

impl FencingToken {
    /// The time for which a store keeps the latest fencing token of a lock after its last use,
    /// unless [`LockClientBuilder::keep_fences_for`](crate::LockClientBuilder::keep_fences_for)
    /// sets another.
    pub const KEPT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

    const MAX: u64 = i64::MAX as u64;
    /// The largest token. No store of this crate grants it.
    pub(crate) const LAST: Self = Self(NonZeroU64::new(Self::MAX).expect("it is not zero"));

    /// Wraps a number that came from a store or from a resource. Returns `None` for zero and for
    /// numbers above [`i64::MAX`], which no grant ever has. `TryFrom` returns an error instead.
    pub fn new(number: u64) -> Option<Self> {
        let fits = number <= Self::MAX;
        NonZeroU64::new(number).filter(|_| fits).map(Self)
    }

    /// Returns the number, to be sent with each write.
    pub const fn number(self) -> u64 {
        self.0.get()
    }

    /// Returns the token `by` positions later in a reserved block, or the last of all.
    #[must_use]
    pub(crate) fn later(self, by: u32) -> Self {
        Self(self.0.saturating_add(by.into())).min(Self::LAST)
    }

    /// Returns the token of the next grant at `micros` (microseconds since 1970):
    /// `max(previous + 1, micros)`. `None` if there is no larger one: a store then grants the lock
    /// to no request.
    #[must_use]
    #[doc(hidden)]
    pub fn next(previous: Option<Self>, micros: u64) -> Option<Self> {
        let after = previous.map_or(1, |token| token.number().saturating_add(1));
        Self::new(after.max(micros))
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

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> i64 {
        token.number().cast_signed()
    }
}

impl TryFrom<u64> for FencingToken {
    type Error = InvalidFencingToken;

    fn try_from(number: u64) -> Result<Self, InvalidFencingToken> {
        Self::new(number).ok_or(InvalidFencingToken(()))
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = InvalidFencingToken;

    fn try_from(number: i64) -> Result<Self, InvalidFencingToken> {
        // A negative number becomes one that is too large.
        Self::try_from(number.cast_unsigned())
    }
}

/// A number that no fencing token has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidFencingToken(());

impl fmt::Display for InvalidFencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = FencingToken::MAX;
        write!(f, "a fencing token is a number from 1 to {last}")
    }
}

impl Error for InvalidFencingToken {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn try_from_accepts_the_numbers_that_fit_both_types() {
        for number in [1, 7, i64::MAX] {
            let token = FencingToken::try_from(number).unwrap();
            assert_eq!(FencingToken::try_from(u64::from(token)), Ok(token));
            assert_eq!(i64::from(token), number);
        }
        for number in [i64::MIN, -1, 0] {
            assert_eq!(FencingToken::try_from(number), Err(InvalidFencingToken(())));
        }
        for number in [0, i64::MAX.cast_unsigned() + 1, u64::MAX] {
            let error = FencingToken::try_from(number).unwrap_err();
            assert!(error.to_string().contains("1 to 9223372036854775807"));
        }
    }

    #[test]
    fn the_next_token_is_larger_or_there_is_none() {
        let next = |previous, micros| FencingToken::next(FencingToken::new(previous), micros);
        let last = i64::MAX.cast_unsigned();
        for (previous, micros, expected) in [
            (0, 0, Some(1)),
            (6, 0, Some(7)),
            (6, 9, Some(9)),
            (last - 1, 0, Some(last)),
            (last, 0, None),
            (0, u64::MAX, None),
        ] {
            let next = next(previous, micros).map(FencingToken::number);
            assert_eq!(next, expected, "{previous} {micros}");
        }
        assert_eq!(FencingToken::LAST.number(), last);
        assert_eq!(FencingToken::LAST.later(1), FencingToken::LAST);
    }
}
