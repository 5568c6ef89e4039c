//! The fencing tokens that a client proposes to all servers at once.

use std::time::Duration;

use crate::guard::fence::FencingToken;

/// The most by which a number that is proposed may lag behind the clock.
const MOST_LAG: Duration = Duration::from_secs(1);

/// A clock that never goes back and is ahead of every fencing token that its client has seen:
/// max(last seen + 1, microseconds since 1970), a [hybrid logical clock]. Its numbers are usually
/// larger than any that a server has given out, so all servers reply with the same number.
///
/// [hybrid logical clock]: https://cse.buffalo.edu/tech-reports/2014-04.pdf
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::protocol::majority) struct Proposals(Option<FencingToken>);

impl Proposals {
    /// The next proposal at `micros` microseconds since 1970.
    pub(in crate::protocol::majority) fn next(&mut self, micros: u64) -> FencingToken {
        let next = FencingToken::next(self.0, micros).unwrap_or(FencingToken::LAST);
        self.0 = Some(next);
        next
    }

    /// The next proposal of an acquisition that has `drawn` this number at a server. It is proposed
    /// unless it lags behind the clock, so that the other servers reply with the same one and no
    /// write-back is needed. A server that has lost its data may have given numbers up to its clock
    /// to other acquisitions, and votes again after a longest lease; one whose record has expired
    /// has none. So a tenth of the `lease`, a second at most, is left for the message from the wait
    /// queue.
    pub(in crate::protocol::majority) fn beside(
        &mut self,
        drawn: Option<FencingToken>,
        micros: u64,
        lease: Duration,
    ) -> FencingToken {
        let next = self.next(micros);
        let lag = (lease / 10).min(MOST_LAG).as_micros() as u64;
        let is_recent = |drawn: &FencingToken| drawn.number().saturating_add(lag) >= micros;
        drawn.filter(is_recent).unwrap_or(next)
    }

    /// Records the token of a grant.
    pub(in crate::protocol::majority) fn seen(&mut self, fence: FencingToken) {
        self.0 = self.0.max(Some(fence));
    }

    /// A number to raise the servers' counters to, at `micros` microseconds since 1970, if their
    /// largest is `fence`. It is far enough ahead of the clock that the numbers of grants do not
    /// reach it within a `round_trip`. The `jitter`, in 0..1, makes it differ from that of another
    /// client that chooses a number at the same time. It is never far from `fence`: a client whose
    /// clock is far ahead must not use up the numbers of a year.
    pub(in crate::protocol::majority) fn beyond(
        fence: FencingToken,
        micros: u64,
        round_trip: Duration,
        jitter: f64,
    ) -> FencingToken {
        let ahead = round_trip.mul_f64(1.0 + jitter).as_micros() as u64;
        let least = fence.later(1 + (64.0 * jitter) as u32);
        let most = fence.number().saturating_add(16 * ahead);
        let by_clock = FencingToken::new(micros.saturating_add(ahead).min(most));
        by_clock.map_or(least, |by_clock| by_clock.max(least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proposal_is_larger_than_all_that_was_seen() {
        let mut proposals = Proposals::default();
        let first = proposals.next(1);
        let far = first.later(1_000_000_000);
        proposals.seen(far);
        proposals.seen(first);
        let second = proposals.next(2);
        assert!(far < second && second < proposals.next(2));
    }

    #[test]
    fn a_number_that_lags_is_not_proposed() {
        const NOON: u64 = 1_800_000_000_000_000;
        let (second, day) = (Duration::from_secs(1), Duration::from_secs(86_400));
        for (drawn, lease, proposed) in [
            (NOON + 5, second, NOON + 5),
            (NOON - 100_000, second, NOON - 100_000),
            (NOON - 100_001, second, NOON),
            (NOON - 1_000_000, day, NOON - 1_000_000),
            (NOON - 1_000_001, day, NOON),
        ] {
            let drawn = FencingToken::new(drawn);
            let proposal = Proposals::default().beside(drawn, NOON, lease);
            assert_eq!(proposal.number(), proposed);
        }
    }

    #[test]
    fn beyond_is_larger_and_ignores_a_clock_far_ahead() {
        let round_trip = Duration::from_millis(1);
        let fence = FencingToken::new(1_800_000_000_000_000).unwrap();
        for jitter in [0.0, 0.5, 0.999] {
            for (clock, least, most) in [
                (-1_000_000_000, 1, 64),
                (0, 1_000, 2_000),
                (1_000_000_000, 16_000, 32_000),
            ] {
                let micros = fence.number().saturating_add_signed(clock);
                let beyond = Proposals::beyond(fence, micros, round_trip, jitter);
                let by = beyond.number() - fence.number();
                assert!((least..=most).contains(&by), "{clock} {jitter}: {by}");
            }
        }
    }
}
