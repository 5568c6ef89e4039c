//! What a campaign says and hears, and what comes of it.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    fence::FencingToken,
    store::{AcquireReply, IfBusy, PollReply, RaiseReply, RenewReply, StoreError, Token},
};

/// One for each server: five, mostly.
pub(crate) type PerNode<T> = SmallVec<[T; 5]>;

/// What is to be said to one of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    Acquire(Token, IfBusy),
    Poll(Token),
    Renew(Token),
    /// The number is to be this acquisition's, and the next fencing token larger.
    Raise(FencingToken),
}

/// What a server has said.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    Acquire(AcquireReply),
    Poll(PollReply),
    Renew(RenewReply),
    Raise(FencingToken, RaiseReply),
    Failed(StoreError),
}

/// Something to say, and to whom.
pub(crate) type Calls = PerNode<(usize, Say)>;

/// What is to be done next.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is looked at where it is made"
)]
pub(crate) enum Next {
    Send(Calls),
    /// Wait for the next reply, at most until then.
    Wait(Option<Instant>),
    /// Go on at that time; no reply is waited for.
    Pause(Instant),
    Done(Outcome),
}

/// What came of a question.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It is held until then, by a majority.
    Granted {
        fence: FencingToken,
        until: Instant,
        spare: u32,
    },
    /// It waits in line.
    InLine { holder_ttl: Option<Duration> },
    /// Somebody else has it, or it cannot be had.
    Refused(AcquireReply),
    /// It is neither held nor in line any more.
    Gone,
    /// Too few servers have answered; see [`Campaign::complaints`].
    Unreachable,
}

/// A name that is not used any more, and that a server may know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) node: usize,
    pub(crate) token: Token,
    /// A request for it may still be executed until then (PROTOCOL 8).
    pub(crate) straggler_until: Option<Instant>,
    /// It is not known to hold: it may stand in line.
    pub(crate) lingers: bool,
}

/// How long a campaign that has no majority keeps what it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Nobody else can have a majority either.
    pub(crate) split: Duration,
    /// Somebody else may.
    pub(crate) beaten: Duration,
    /// How often a waiter asks the line node whether the lock is given on there. Where it is not,
    /// the other servers are looked at after that time, and then after twice as long each time.
    pub(crate) line: Duration,
}

impl Patience {
    /// Long enough for a release that is on its way to every server; and a different time for everybody, by a `jitter` in 0..1, so
    /// that of two who wait for each other one steps back first.
    pub(crate) fn new(round_trip: Duration, jitter: f64) -> Self {
        let split = round_trip * 10 + Duration::from_millis(20);
        let beaten = Duration::from_secs(1);
        // Where answers take long, questions are not to be what they wait for.
        let line = (round_trip * 4 + Duration::from_millis(80)).min(beaten);
        Self {
            split: split.mul_f64(0.5 + jitter),
            beaten: beaten.mul_f64(0.5 + jitter),
            line: line.mul_f64(0.9 + 0.2 * jitter),
        }
    }
}
