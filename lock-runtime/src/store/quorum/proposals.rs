//! The fencing tokens that a client proposes to all servers at once.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::fence::FencingToken;

/// A clock that never goes back, and that has seen every fencing token its client has: max(last seen + 1, microseconds since 1970). So
/// its numbers are mostly larger than what any server has given out, and all servers answer the same (a [hybrid logical clock]).
///
/// [hybrid logical clock]: https://cse.buffalo.edu/tech-reports/2014-04.pdf
#[derive(Debug, Default)]
pub(super) struct Proposals(AtomicU64);

impl Proposals {
    pub(super) fn next(&self) -> FencingToken {
        self.next_at(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64))
    }

    /// The same at `micros` since 1970.
    pub(super) fn next_at(&self, micros: u64) -> FencingToken {
        let Self(latest) = self;
        let next = |latest| FencingToken::next(FencingToken::new(latest), micros);
        let (Ok(latest) | Err(latest)) =
            latest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |latest| Some(next(latest).number()));
        next(latest)
    }

    /// A grant has this token.
    pub(super) fn seen(&self, fence: FencingToken) {
        self.0.fetch_max(fence.number(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proposal_is_larger_than_all_that_was_seen() {
        let proposals = Proposals::default();
        let first = proposals.next();
        let far = first.later(1_000_000_000);
        proposals.seen(far);
        proposals.seen(first);
        let second = proposals.next();
        assert!(far < second && second < proposals.next());
    }
}
