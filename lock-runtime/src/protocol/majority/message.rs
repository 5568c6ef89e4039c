//! The calls to the servers and their replies, and the replies to the callers.

use std::time::Duration;

use super::{RequestId, round::KnownAlias};
use crate::{
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::LockKind,
    shell::time::Instant,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, Inspection, KeyRequest, PollReply,
        RaiseReply, Release, ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope,
        StoreError, Token,
    },
};

/// A request to one server.
#[derive(Clone, Debug)]
pub(crate) enum ServerRequest {
    Acquire(KeyRequest),
    Poll(Hold),
    Renew(Vec<Renewal>),
    Raise(LockKey, LockKind, FencingToken),
    Release(Release),
    Convert(Hold),
    Abandon(Hold),
    Inspect(LockKey, LockKind),
    Revoke(LockKey, LockKind, RevokeScope),
}

/// The reply of one server, or of a majority to a caller.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Acquire(AcquireReply),
    /// Of a majority only.
    AcquireAll(AcquireAllReply),
    Poll(PollReply),
    Renew(Vec<Result<RenewReply, StoreError>>),
    /// Of one server only, with the number that was to be raised to.
    Raise(FencingToken, RaiseReply),
    Release(ReleaseReply),
    Convert(ConvertReply),
    Abandoned,
    /// A server has not confirmed the end of this alias, which ends with its lease.
    NotAbandoned(usize, Hold, StoreError),
    Inspect(Inspection),
    Revoke(RevokeReply),
}

/// A call to make.
#[derive(Debug)]
pub(crate) struct Send {
    pub(crate) request: ServerRequest,
    /// The time after which the call has failed. If it is `None`, the session limits the wait.
    pub(crate) timeout: Option<Duration>,
    /// To be handed back with the reply.
    pub(crate) ticket: CallTicket,
}

impl Send {
    /// A call of the request `id`.
    pub(super) fn new(
        id: RequestId,
        server: usize,
        request: ServerRequest,
        timeout: Option<Duration>,
        purpose: CallPurpose,
    ) -> Self {
        Self {
            request,
            timeout,
            ticket: CallTicket {
                server,
                id,
                purpose,
            },
        }
    }
}

/// The server of a call, its request and its purpose. It is returned with the reply.
#[derive(Clone, Debug)]
pub(crate) struct CallTicket {
    pub(crate) server: usize,
    /// The request that waits for the reply. It may be over by then.
    pub(crate) id: RequestId,
    pub(super) purpose: CallPurpose,
}

#[derive(Clone, Debug)]
pub(super) enum CallPurpose {
    /// A part of the exchange with this number, under this alias, sent at this time.
    Exchange(Token, u32, Instant),
    /// The renewal of several aliases, sent at this time, with the indices of their locks in the
    /// request of the caller.
    Renewal(Vec<(usize, Token)>, Instant),
    /// The release of a vote that the server holds for at most this lease, and keeps reserved until
    /// this time.
    Release(KnownAlias, Hold, Duration, Option<Instant>),
    Broadcast,
    End,
}

#[cfg(all(test, feature = "redis"))]
impl CallTicket {
    /// Returns whether the call releases this alias.
    pub(crate) fn releases(&self, token: Token) -> bool {
        matches!(&self.purpose, CallPurpose::Release(alias, ..) if alias.token == token)
    }
}

/// The next step of a request.
#[derive(Debug)]
pub(crate) enum Progress {
    /// Waits for a reply to one of its calls, until this time.
    Wait(Option<Instant>),
    /// The reply. With a time, it is delayed until the first calls of the ends of aliases that this
    /// visit has begun are over, but at most until this time.
    Done(Result<Reply, StoreError>, Option<Instant>),
}
