//! The tokens that the store has confirmed as ended. A server that takes the place of another may
//! lack the latest of these writes, and would keep a lock for a holder that has released it.

use std::collections::VecDeque;

use super::super::{Cx, Session, abandon::Ending};
use crate::shell::time::Instant;

/// The number of tokens that are remembered: more than a client ends in the time by which replicas
/// are usually behind.
const MOST: usize = 1_024;

/// The longest result that is remembered, in bytes. With a longer one the token is forgotten.
const LONGEST: usize = 1_024;

/// The tokens that were ended last.
#[derive(Clone, Default)]
pub(in crate::protocol) struct Ended(VecDeque<EndedToken>);

#[derive(Clone)]
struct EndedToken {
    ending: Ending,
    /// Its lease is over by then in any case.
    until: Instant,
}

impl Ended {
    /// Records that the store has confirmed a call that was sent at `sent`.
    pub(in crate::protocol) fn push(&mut self, ending: Ending, sent: Instant, until: Instant) {
        while self.0.len() >= MOST || self.0.front().is_some_and(|it| it.until <= sent) {
            self.0.pop_front();
        }
        if ending.result_len() <= LONGEST {
            self.0.push_back(EndedToken { ending, until });
        }
    }
}

impl Session {
    /// Ends the latest tokens again, as the store may have lost that.
    pub(in crate::protocol) fn end_again(&mut self, cx: &mut Cx<'_>) {
        for it in std::mem::take(&mut self.ended.0) {
            let left = it.until.saturating_duration_since(cx.now);
            if !left.is_zero() {
                self.end_once_more(it.ending, left, cx);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::{
        guard::fence::FencingToken,
        request::{key::LockKey, spec::Mode},
        store::{Hold, Token},
    };

    fn ending(result: usize) -> Ending {
        let hold = Hold::new(LockKey::new("k").unwrap(), Mode::Exclusive, Token::random());
        let result = (FencingToken::new(7).unwrap(), Arc::from(vec![0; result]));
        Ending::Release(hold, None, Some(result))
    }

    #[test]
    fn tokens_are_remembered_until_their_leases_are_over() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut ended = Ended::default();
        for number in 1..=5 {
            ended.push(ending(0), start, start + number * second);
        }
        ended.push(ending(0), start + 2 * second, start + 9 * second);
        assert_eq!(ended.0.len(), 4, "the lease of two is over");
        for _ in 0..2 * MOST {
            ended.push(ending(0), start, start + 9 * second);
        }
        assert_eq!(ended.0.len(), MOST);
    }

    #[test]
    fn tokens_with_long_results_are_forgotten() {
        let now = Instant::now();
        let mut ended = Ended::default();
        ended.push(ending(LONGEST), now, now + Duration::from_secs(1));
        ended.push(ending(LONGEST + 1), now, now + Duration::from_secs(1));
        assert_eq!(ended.0.len(), 1);
    }
}
