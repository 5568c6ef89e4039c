//! The requests and replies of a campaign, and its outcomes.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    fence::FencingToken,
    store::{AcquireReply, IfBusy, PollReply, RaiseReply, RenewReply, StoreError, Token},
};

/// One value for each server; there are usually up to five.
pub(crate) type PerNode<T> = SmallVec<[T; 5]>;

/// A request to one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    Acquire(Token, IfBusy),
    Poll(Token),
    Renew(Token),
    /// Gives this number to the acquisition, and makes the next fencing token larger.
    Raise(FencingToken),
}

/// The reply of a server.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    Acquire(AcquireReply),
    Poll(PollReply),
    Renew(RenewReply),
    Raise(FencingToken, RaiseReply),
    Failed(StoreError),
}

/// Requests, each with the index of its server.
pub(crate) type Calls = PerNode<(usize, Say)>;

/// The next step of a campaign.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is looked at where it is made"
)]
pub(crate) enum Next {
    Send(Calls),
    /// Wait for the next reply, at most until this time.
    Wait(Option<Instant>),
    /// Continue at this time, without waiting for replies.
    Pause(Instant),
    Done(Outcome),
}

/// The outcome of a round or of several.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A majority holds the lock until this time.
    Granted {
        fence: FencingToken,
        until: Instant,
        reserved: u32,
    },
    /// The acquisition waits in the queue.
    InLine { holder_ttl: Option<Duration> },
    /// The lock is held by another acquisition, or cannot be granted.
    Refused(AcquireReply),
    /// The acquisition is neither a holder nor in the queue any more.
    Gone,
    /// Too few servers have replied; see [`Campaign::complaints`].
    Unreachable,
}

/// An alias that is no longer used and that a server may know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) node: usize,
    pub(crate) token: Token,
    /// An acquire under this alias may still be executed until then (PROTOCOL 8).
    pub(crate) straggler_until: Option<Instant>,
    /// The alias is not known to hold the lock: it may be in the queue.
    pub(crate) lingers: bool,
}

/// Time-outs of a campaign: how long it keeps its votes without having a majority.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// If no other client can have a majority either.
    pub(crate) split: Duration,
    /// If another client may have a majority.
    pub(crate) beaten: Duration,
    /// The interval at which a waiter polls the coordinator. If the lock is not handed off
    /// there, the waiter checks the other servers after this time, and then after intervals that
    /// double each time.
    pub(crate) line: Duration,
}

impl Patience {
    /// Derives the time-outs from the round trip. They are long enough for a release to reach every
    /// server. The `jitter`, in 0..1, differs between clients: of two clients that wait for each
    /// other, one gives up first.
    pub(crate) fn new(round_trip: Duration, jitter: f64) -> Self {
        let split = round_trip * 10 + Duration::from_millis(20);
        let beaten = Duration::from_secs(1);
        // If servers are slow, polls must not be the cause.
        let line = (round_trip * 4 + Duration::from_millis(80)).min(beaten);
        Self {
            split: split.mul_f64(0.5 + jitter),
            beaten: beaten.mul_f64(0.5 + jitter),
            line: line.mul_f64(0.9 + 0.2 * jitter),
        }
    }
}
