//! The requests and replies of a round, and its outcomes.

use std::time::Duration;

use smallvec::SmallVec;

use super::super::Reply;
use crate::{
    guard::fence::FencingToken,
    shell::time::Instant,
    store::{AcquireReply, IfBusy, PollReply, RaiseReply, RenewReply, StoreError, Token},
};

/// One value for each server; there are usually up to five.
pub(crate) type PerServer<T> = SmallVec<[T; 5]>;

/// A request to one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Acquire(Token, IfBusy),
    Poll(Token),
    Renew(Token),
    /// Assigns this number to the acquisition, and makes the next fencing token larger.
    Raise(FencingToken),
}

/// The reply of a server.
#[derive(Clone, Debug)]
pub(crate) enum ServerAnswer {
    /// Also to a poll, unless the alias is gone.
    Acquire(AcquireReply),
    /// A poll found neither a holder nor a waiter of this alias.
    Gone,
    Renew(RenewReply),
    Raise(FencingToken, RaiseReply),
    Failed(StoreError),
}

impl ServerAnswer {
    pub(crate) fn new(reply: Result<Reply, StoreError>) -> Self {
        match reply {
            Ok(Reply::Acquire(reply)) => Self::Acquire(reply),
            Ok(Reply::Poll(PollReply::Granted(grant))) => {
                Self::Acquire(AcquireReply::Granted(grant))
            }
            Ok(Reply::Poll(PollReply::Queued {
                counter,
                holder_ttl,
            })) => Self::Acquire(AcquireReply::Queued {
                counter,
                holder_ttl,
            }),
            Ok(Reply::Poll(PollReply::Gone | PollReply::Done(_))) => Self::Gone,
            Ok(Reply::Raise(number, reply)) => Self::Raise(number, reply),
            Ok(Reply::Renew(mut replies)) => match replies.pop() {
                Some(Ok(reply)) => Self::Renew(reply),
                Some(Err(error)) => Self::Failed(error),
                None => Self::Failed(StoreError::no_reply()),
            },
            Ok(_) => Self::Failed(StoreError::no_reply()),
            Err(error) => Self::Failed(error),
        }
    }

    pub(crate) fn error(&self) -> Option<&StoreError> {
        match self {
            Self::Failed(error) => Some(error),
            _ => None,
        }
    }
}

/// Requests, each with the index of its server.
pub(crate) type Calls = PerServer<(usize, Ask)>;

/// The next step of a round.
#[derive(Debug)]
pub(crate) enum Next {
    Send(Calls),
    /// Wait for the next reply, at most until this time.
    Wait(Option<Instant>),
    /// Continue at this time, without waiting for replies.
    Pause(Instant),
    Done(Outcome),
}

/// The outcome of an exchange or of several.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A majority holds the lock until this time, with this number of reserved fencing tokens.
    Granted(FencingToken, Instant, u32),
    /// The acquisition waits in the queue. The lock may be free after this time.
    Queued(Duration),
    /// The lock is held by another acquisition, or cannot be granted.
    Refused(AcquireReply),
    /// The acquisition is neither a holder nor in the queue any more.
    Gone,
    /// Too few servers have replied; see [`Round::complaint`].
    Unreachable,
}

/// An alias that a server may know, and what is needed to end it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownAlias {
    pub(crate) server: usize,
    pub(crate) token: Token,
    /// An acquire under this alias may still be executed until then (rule 8).
    pub(crate) straggler_until: Option<Instant>,
    /// The alias is not known to hold the lock: it may be in the queue.
    pub(crate) may_be_queued: bool,
    /// The alias was to be converted to a reader. It is still a writer at a server that has not
    /// executed the conversion.
    pub(crate) was_writer: bool,
}

/// The time limits for votes that a round holds without a majority, and its poll interval.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeOuts {
    /// The limit if no other client can have a majority either.
    pub(crate) split: Duration,
    /// The limit if another client may have a majority.
    pub(crate) beaten: Duration,
    /// The interval at which a waiter polls the coordinator. If the lock is not handed off
    /// there, the waiter checks the other servers after this time, and then after intervals that
    /// double each time.
    pub(crate) poll: Duration,
}

impl TimeOuts {
    /// Derives the time-outs from the round trip. They are long enough for a release to reach every
    /// server. The `jitter`, in 0..1, differs between clients: of two clients that wait for each
    /// other, one gives up first.
    pub(crate) fn new(round_trip: Duration, jitter: f64) -> Self {
        let split = round_trip * 10 + Duration::from_millis(20);
        let beaten = Duration::from_secs(1);
        // If servers are slow, polls must not be the cause.
        let poll = (round_trip * 4 + Duration::from_millis(80)).min(beaten);
        Self {
            split: split.mul_f64(0.5 + jitter),
            beaten: beaten.mul_f64(0.5 + jitter),
            poll: poll.mul_f64(0.9 + 0.2 * jitter),
        }
    }
}
