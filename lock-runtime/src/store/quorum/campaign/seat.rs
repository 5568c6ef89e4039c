//! Where one server stands in a campaign, and what it has said.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    fence::FencingToken,
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
        Self { token, standing: Standing::Outside, pushed: None, straggler_until: None, as_of: None, word: Word::None }
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
    pub(super) fence: FencingToken,
    /// Its next token is larger than this: the last of those that it has reserved, or was told of.
    pub(super) end: FencingToken,
    pub(super) until: Instant,
}

impl Vote {
    pub(super) fn new(grant: Grant, sent: Instant) -> Self {
        Self { fence: grant.fence, end: grant.fence.later(grant.spare), until: sent + grant.ttl }
    }
}

/// What a server has said in this round.
#[derive(Clone, Debug)]
pub(super) enum Word {
    /// It was not asked.
    None,
    Awaited,
    /// It holds the lock for us.
    Vote,
    InLine(Option<Duration>),
    Refused(AcquireReply),
    Gone,
    Failed(StoreError),
}
