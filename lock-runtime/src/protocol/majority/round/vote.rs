//! The state of a round at one server.

use std::time::Duration;

use super::KnownAlias;
use crate::{
    guard::fence::FencingToken,
    protocol::held::lease::Correction,
    request::spec::Mode,
    shell::time::Instant,
    store::{AcquireReply, Grant, StoreError, Token},
};

/// The state of a round at one server.
#[derive(Debug)]
pub(super) struct VoteState {
    /// The alias of the acquisition here. It is replaced when it is abandoned (rule 1).
    pub(super) token: Token,
    pub(super) was_writer: bool,
    pub(super) standing: VoteStanding,
    /// The server has renewed the lock, so it holds it although its grant has not arrived.
    pub(super) renewed: bool,
    /// The number of a grant that the server has pushed. It may be forged, so the server is polled.
    pub(super) pushed: Option<FencingToken>,
    /// The deadline of an acquire whose reply is outstanding.
    pub(super) straggler_until: Option<Instant>,
    /// When the request was sent whose reply set `standing`.
    pub(super) as_of: Option<Instant>,
    pub(super) status: Status,
    pub(super) correction: Correction,
}

impl VoteState {
    pub(super) fn new(token: Token) -> Self {
        Self {
            token,
            was_writer: false,
            standing: VoteStanding::Outside,
            renewed: false,
            pushed: None,
            straggler_until: None,
            as_of: None,
            status: Status::None,
            correction: Correction::default(),
        }
    }

    /// The alias, if this server may know it.
    pub(super) fn known_at(&self, server: usize) -> Option<KnownAlias> {
        let is_known = self.standing != VoteStanding::Outside;
        is_known.then_some(KnownAlias {
            server,
            token: self.token,
            straggler_until: self.straggler_until,
            may_be_queued: self.held().is_none(),
            was_writer: self.was_writer,
        })
    }

    pub(super) fn is_awaited(&self) -> bool {
        matches!(self.status, Status::Awaited)
    }

    /// The latest vote, of whichever exchange.
    pub(super) fn held(&self) -> Option<Vote> {
        match self.standing {
            VoteStanding::Holds(vote) => Some(vote),
            _ => None,
        }
    }

    /// The vote in this exchange.
    pub(super) fn vote(&self) -> Option<Vote> {
        self.held().filter(|_| matches!(self.status, Status::Voted))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VoteStanding {
    /// The server does not know the alias.
    Outside,
    /// The server may know the alias.
    Asked,
    Queued,
    Holds(Vote),
}

/// The vote of a server that holds the lock for this acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vote {
    /// The number that the server has given to this acquisition and to no other.
    pub(super) fence: FencingToken,
    /// The server's next number is larger than this. It is the last of the numbers that the server
    /// has reserved, or the one that it was raised to.
    pub(super) end: FencingToken,
    pub(super) until: Instant,
}

impl Vote {
    pub(super) fn new(grant: Grant, sent: Instant) -> Self {
        Self {
            fence: grant.fence,
            end: grant.fence.later(grant.reserved),
            until: sent + grant.ttl,
        }
    }
}

/// A vote of the coordinator for another acquisition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Obstacle {
    /// The latest fencing token at the coordinator.
    pub(super) counter: Option<FencingToken>,
    /// The vote expires between these two times, unless it is released earlier.
    pub(super) ends: Option<(Instant, Instant)>,
}

impl Obstacle {
    /// Whether both may belong to the same grant. If not, the lock was handed off in between, or a
    /// writer in front of this reader in the queue has polled, which postpones the end.
    pub(super) fn may_be(&self, other: &Self, mode: Mode) -> bool {
        // The counter does not change while a writer waits, so it proves nothing to a reader.
        let same_counter =
            mode != Mode::Shared && self.counter.is_some() && self.counter == other.counter;
        same_counter
            || match (self.ends, other.ends) {
                (Some((from, to)), Some((other_from, other_to))) => {
                    from <= other_to + ROUNDING && other_from <= to + ROUNDING
                }
                (None, None) => true,
                _ => false,
            }
    }
}

/// Servers report times in whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(2);

/// The reply of a server in this exchange.
#[derive(Clone, Debug)]
pub(super) enum Status {
    /// The server was not asked.
    None,
    Awaited,
    /// The server holds the lock for this acquisition.
    Voted,
    /// The server queues the acquisition or refuses it.
    Denied(AcquireReply),
    Gone,
    Failed(StoreError),
}

impl Status {
    /// The remaining lease of another acquisition, if the server has voted for one.
    pub(super) fn taken(&self) -> Option<Option<Duration>> {
        match *self {
            Self::Denied(
                AcquireReply::Busy { holder_ttl, .. } | AcquireReply::Queued { holder_ttl, .. },
            ) => Some(holder_ttl),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_known_by_its_number_or_by_its_end() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let of = |number, from: u32| Obstacle {
            counter: FencingToken::new(number),
            ends: Some((now + second * from, now + second * (from + 1))),
        };
        let unknown = Obstacle {
            counter: None,
            ends: None,
        };
        let cases = [
            // The same number, or a number that proves nothing to a reader.
            (of(7, 10), of(7, 20), Mode::Exclusive, true),
            (of(7, 10), of(7, 20), Mode::Shared, false),
            (of(7, 10), of(8, 20), Mode::Exclusive, false),
            // Ends that overlap.
            (of(7, 10), of(8, 10), Mode::Exclusive, true),
            (of(7, 10), of(8, 11), Mode::Exclusive, true),
            (of(7, 11), of(8, 10), Mode::Shared, true),
            (unknown, unknown, Mode::Exclusive, true),
            (unknown, of(7, 10), Mode::Exclusive, false),
        ];
        for (one, other, mode, may_be) in cases {
            assert_eq!(one.may_be(&other, mode), may_be, "{one:?} {other:?}");
            assert_eq!(other.may_be(&one, mode), may_be, "{other:?} {one:?}");
        }
        // Ends that differ by no more than two servers' rounding.
        let nano = Duration::from_nanos(1);
        for (apart, may_be) in [(ROUNDING, true), (ROUNDING + nano, false)] {
            let at = |end| Obstacle {
                counter: None,
                ends: Some((end, end)),
            };
            let (one, other) = (at(now), at(now + apart));
            assert_eq!(one.may_be(&other, Mode::Exclusive), may_be, "{apart:?}");
            assert_eq!(other.may_be(&one, Mode::Exclusive), may_be, "{apart:?}");
        }
    }
}
