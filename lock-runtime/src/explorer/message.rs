//! The messages on the network, and their form in a trace.

use std::fmt;

use super::sim::{Sim, Who};
use crate::store::{
    AcquireReply, Grant, Hold, KeyRequest, PollReply, Release, ReleaseReply, RenewReply, Renewal,
    Token,
};

/// The number of a call to the store.
pub(super) type Call = u32;

#[derive(Clone, Debug)]
pub(super) enum Request {
    Acquire(KeyRequest),
    Poll(Hold),
    Renew(Renewal),
    Release(Release),
    Abandon(Hold),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    Acquire(AcquireReply),
    Poll(PollReply),
    Renew(RenewReply),
    Release(ReleaseReply),
    Abandoned,
}

impl Request {
    pub(super) fn hold(&self) -> &Hold {
        match self {
            Self::Acquire(request) => &request.hold,
            Self::Renew(renewal) => &renewal.hold,
            Self::Release(release) => &release.hold,
            Self::Poll(hold) | Self::Abandon(hold) => hold,
        }
    }

    /// The token that the store first sees in this request.
    pub(super) fn introduces(&self) -> Option<Token> {
        match self {
            Self::Acquire(request) => Some(request.hold.token),
            Self::Release(release) => release.next.map(|next| next.token),
            _ => None,
        }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}{}", self.process, "'".repeat(self.life as usize))
    }
}

impl Sim {
    pub(super) fn show(&self, request: &Request) -> String {
        let hold = request.hold();
        let (key, token) = (&hold.key, self.name(hold.token));
        match request {
            Request::Acquire(request) => {
                let (mode, lease, reserved) = (hold.mode, request.lease, request.reserved);
                format!(
                    "acquire {token} {key:?} {mode:?} lease {lease:?} {:?} reserved {reserved}",
                    request.if_busy
                )
            }
            Request::Poll(_) => format!("poll {token}"),
            Request::Renew(renewal) => format!("renew {token} for {:?}", renewal.lease),
            Request::Release(release) => {
                let next = release
                    .next
                    .map(|next| format!(" and take up {}", self.name(next.token)));
                let keep_for = release
                    .keep_for
                    .map(|keep_for| format!(" keep for {keep_for:?}"));
                format!(
                    "release {token}{}{}",
                    next.unwrap_or_default(),
                    keep_for.unwrap_or_default()
                )
            }
            Request::Abandon(_) => format!("abandon {token}"),
        }
    }

    pub(super) fn show_grant(&self, grant: &Grant) -> String {
        format!(
            "granted, fence ..{} reserved {}, for {:?}",
            grant.fence.number() % 1_000_000_000,
            grant.reserved,
            grant.ttl
        )
    }

    pub(super) fn show_reply(&self, reply: &Reply) -> String {
        match reply {
            Reply::Acquire(AcquireReply::Granted(grant))
            | Reply::Poll(PollReply::Granted(grant))
            | Reply::Release(ReleaseReply::Passed(grant)) => self.show_grant(grant),
            Reply::Acquire(AcquireReply::Queued { holder_ttl, .. })
            | Reply::Poll(PollReply::Queued { holder_ttl, .. })
            | Reply::Release(ReleaseReply::Queued { holder_ttl, .. }) => {
                format!("queued, holder's ttl {holder_ttl:?}")
            }
            Reply::Acquire(reply) => format!("{reply:?}"),
            Reply::Poll(reply) => format!("{reply:?}"),
            Reply::Renew(reply) => format!("{reply:?}"),
            Reply::Release(reply) => format!("{reply:?}"),
            Reply::Abandoned => "abandoned".to_owned(),
        }
    }
}
