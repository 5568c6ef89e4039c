//! The messages between clients and servers.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    fence::FencingToken,
    store::{
        AcquireReply, Grant, Hold, IfBusy, PollReply, RaiseReply, ReleaseReply, RenewReply, Token,
    },
};

/// The number of a call; 0 if its reply is not awaited.
pub(super) type Call = u32;

#[derive(Clone, Debug)]
pub(super) enum Request {
    Greet,
    Acquire(Acquire),
    Poll(Hold),
    Renew(Hold, Duration),
    Release(Hold),
    Abandon(Hold),
    /// With the marker that the server must have.
    Raise(FencingToken, Option<u64>),
}

#[derive(Clone, Debug)]
pub(super) struct Acquire {
    pub(super) hold: Hold,
    pub(super) lease: Duration,
    pub(super) if_busy: IfBusy,
    pub(super) proposal: FencingToken,
    /// In the server's time.
    pub(super) deadline: u64,
    /// The client's deadline, in true time.
    pub(super) deadline_there: Instant,
    pub(super) marker: Option<u64>,
}

impl Request {
    /// Whether a grant may rely on the reply.
    pub(super) fn votes(&self) -> bool {
        matches!(
            self,
            Self::Acquire(_) | Self::Poll(_) | Self::Renew(..) | Self::Raise(..)
        )
    }

    /// Whether the request is repeated if the connection is lost.
    pub(super) fn is_repeated(&self) -> bool {
        matches!(
            self,
            Self::Poll(_) | Self::Renew(..) | Self::Abandon(_) | Self::Raise(..)
        )
    }

    pub(super) fn hold(&self) -> Option<&Hold> {
        match self {
            Self::Acquire(acquire) => Some(&acquire.hold),
            Self::Poll(hold) | Self::Renew(hold, _) | Self::Release(hold) | Self::Abandon(hold) => {
                Some(hold)
            }
            Self::Greet | Self::Raise(..) => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    Greeted(Greeted),
    /// With the server's time.
    Acquire(AcquireReply, u64),
    Strange(u64),
    Poll(PollReply),
    Renew(RenewReply),
    Release(ReleaseReply),
    Abandoned,
    Raise(RaiseReply),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Greeted {
    pub(super) micros: u64,
    pub(super) uptime: Duration,
    pub(super) marker: u64,
    pub(super) with_data: Duration,
}

impl super::sim::Sim {
    pub(super) fn show(&self, request: &Request) -> String {
        let name = |hold: &Hold| self.name(hold.token);
        match request {
            Request::Greet => "greet".into(),
            Request::Acquire(acquire) => {
                let proposal = short(acquire.proposal);
                format!(
                    "acquire {} {:?} {:?} ..{proposal}",
                    name(&acquire.hold),
                    acquire.if_busy,
                    acquire.lease
                )
            }
            Request::Poll(hold) => format!("poll {}", name(hold)),
            Request::Renew(hold, _) => format!("renew {}", name(hold)),
            Request::Release(hold) => format!("release {}", name(hold)),
            Request::Abandon(hold) => format!("abandon {}", name(hold)),
            Request::Raise(fence, _) => format!("raise ..{}", short(*fence)),
        }
    }

    pub(super) fn show_grant(&self, grant: &Grant) -> String {
        format!("granted ..{} for {:?}", short(grant.fence), grant.ttl)
    }

    pub(super) fn show_reply(&self, reply: &Reply) -> String {
        match reply {
            Reply::Acquire(AcquireReply::Granted(grant), _)
            | Reply::Poll(PollReply::Granted(grant)) => self.show_grant(grant),
            Reply::Acquire(reply, _) => format!("{reply:?}"),
            Reply::Poll(reply) => format!("{reply:?}"),
            Reply::Renew(reply) => format!("{reply:?}"),
            Reply::Release(reply) => format!("{reply:?}"),
            other => format!("{other:?}"),
        }
    }
}

/// The last digits of a fencing token: the others are the same for all.
pub(super) fn short(fence: FencingToken) -> u64 {
    fence.number() % 1_000_000_000
}

/// The stem of an acquisition's aliases, and the number of this alias.
pub(super) fn parts(token: Token) -> (u128, u64) {
    let hex = token.to_hex();
    let end = std::str::from_utf8(&hex[28..])
        .ok()
        .and_then(|end| u64::from_str_radix(end, 16).ok());
    (token.stem(), end.unwrap_or_default())
}
