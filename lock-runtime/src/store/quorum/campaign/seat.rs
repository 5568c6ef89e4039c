//! Where one server stands in a campaign, and what it has said.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    fence::FencingToken,
    spec::Mode,
    store::{AcquireReply, Grant, StoreError, Token},
};

/// Where one server stands.
#[derive(Debug)]
pub(super) struct Seat {
    /// The name of the acquisition there. It is another one after each time that it was given up (PROTOCOL 1).
    pub(super) token: Token,
    pub(super) standing: Standing,
    /// Told by the server, and not asked about yet.
    pub(super) pushed: Option<Grant>,
    /// The deadline of an acquire whose reply has not come.
    pub(super) straggler_until: Option<Instant>,
    /// When the request was sent whose reply this comes from.
    pub(super) as_of: Option<Instant>,
    pub(super) word: Word,
}

impl Seat {
    pub(super) fn new(token: Token) -> Self {
        Self {
            token,
            standing: Standing::Outside,
            pushed: None,
            straggler_until: None,
            as_of: None,
            word: Word::None,
        }
    }

    pub(super) fn vote(&self) -> Option<Vote> {
        match (&self.word, self.standing) {
            (Word::Vote, Standing::Holds(vote)) => Some(vote),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The server does not know the name.
    Outside,
    /// It may.
    Asked,
    InLine,
    Holds(Vote),
}

/// A server that holds the lock for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vote {
    /// The number that it has given to this acquisition, and to no other.
    pub(super) fence: FencingToken,
    /// Its next number is larger than this: the last of those that it has reserved, or that it was
    /// raised to.
    pub(super) end: FencingToken,
    pub(super) until: Instant,
}

impl Vote {
    pub(super) fn new(grant: Grant, sent: Instant) -> Self {
        Self {
            fence: grant.fence,
            end: grant.fence.later(grant.spare),
            until: sent + grant.ttl,
        }
    }
}

/// A vote of the line node for another acquisition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Obstacle {
    /// The latest fencing token there.
    pub(super) counter: Option<FencingToken>,
    /// It ends between these two, if it is not given back before.
    pub(super) ends: Option<(Instant, Instant)>,
}

impl Obstacle {
    /// Whether the two may be of one grant. If not, the lock has been given on in between; or a
    /// writer that is before this reader in the queue has polled, which puts off the end.
    pub(super) fn may_be(&self, other: &Self, mode: Mode) -> bool {
        // While a writer waits the counter stays as it is.
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

/// Servers count in whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(2);

/// What a server has said in this round.
#[derive(Clone, Debug)]
pub(super) enum Word {
    /// It was not asked.
    None,
    Awaited,
    /// It holds the lock for us.
    Vote,
    InLine {
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    },
    Refused(AcquireReply),
    Gone,
    Failed(StoreError),
}
