//! The messages between clients and servers.

use std::time::Duration;

use super::{network::Network, process::Message};
use crate::{
    guard::fence::FencingToken,
    protocol::{
        self,
        majority::{self, ServerRequest},
    },
    shell::time::Instant,
    store::{AcquireReply, Grant, Hold, KeyRequest, PollReply, Renewal, StoreEvent, Token},
};

/// The number of a call; 0 if its reply is not awaited.
pub(super) type Call = u32;

#[derive(Clone, Debug)]
pub(super) enum Request {
    Greet,
    /// To a server of a majority.
    Call(ServerRequest, Conditions),
    /// To a single store.
    Direct(Message),
}

/// The conditions under which a server executes a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Conditions {
    /// The deadline of an acquire, in the server's time. It is not known before the first
    /// connection.
    pub(super) deadline: Option<u64>,
    /// The same as the client means it, in true time.
    pub(super) deadline_there: Option<Instant>,
    /// The marker that the server must have.
    pub(super) marker: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) enum Reply {
    Greeted(Greeted),
    /// With the server's time.
    Call(majority::Reply, u64),
    /// The server has another marker.
    Strange(u64),
    Direct(majority::Reply),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Greeted {
    pub(super) micros: u64,
    pub(super) uptime: Duration,
    pub(super) marker: u64,
    pub(super) with_data: Duration,
}

/// Whether a grant may rely on the reply.
pub(super) fn votes(request: &ServerRequest) -> bool {
    use ServerRequest::{Acquire, Convert, Poll, Raise, Renew};
    matches!(
        request,
        Acquire(_) | Poll(_) | Renew(_) | Raise(..) | Convert(_)
    )
}

/// Whether the request is repeated if the connection is lost.
pub(super) fn is_repeated(request: &ServerRequest) -> bool {
    use ServerRequest::{Acquire, Release};
    !matches!(request, Acquire(_) | Release(_))
}

/// The alias that a request names.
pub(super) fn alias(request: &ServerRequest) -> Option<&Hold> {
    match request {
        ServerRequest::Acquire(request) => Some(&request.hold),
        ServerRequest::Renew(renewals) => renewals.first().map(|renewal| &renewal.hold),
        ServerRequest::Release(release) => Some(&release.hold),
        ServerRequest::Poll(hold) | ServerRequest::Convert(hold) | ServerRequest::Abandon(hold) => {
            Some(hold)
        }
        ServerRequest::Raise(..) | ServerRequest::Inspect(..) | ServerRequest::Revoke(..) => None,
    }
}

/// The tokens of the acquire requests in a message.
pub(super) fn acquires(message: &Message) -> Vec<Token> {
    match message {
        Message::One(protocol::Request::Acquire(request)) => vec![request.hold.token],
        Message::All(requests) => requests.iter().map(|request| request.hold.token).collect(),
        _ => Vec::new(),
    }
}

/// The leases that a request asks for, each with its token.
pub(super) fn leases(request: &Request) -> Vec<(Token, Duration)> {
    let acquire = |request: &KeyRequest| (request.hold.token, request.lease);
    let renew = |renewal: &Renewal| (renewal.hold.token, renewal.lease);
    match request {
        Request::Greet => Vec::new(),
        Request::Call(ServerRequest::Acquire(request), _) => vec![acquire(request)],
        Request::Call(ServerRequest::Renew(renewals), _) => renewals.iter().map(renew).collect(),
        Request::Call(..) => Vec::new(),
        Request::Direct(Message::All(requests)) => requests.iter().map(acquire).collect(),
        Request::Direct(Message::One(request)) => match request {
            protocol::Request::Acquire(request) => vec![acquire(request)],
            protocol::Request::Renew(renewal) => vec![renew(renewal)],
            protocol::Request::Release(release) => {
                let next = release.next.iter();
                next.map(|next| (next.token, next.lease)).collect()
            }
            _ => Vec::new(),
        },
        Request::Direct(Message::Revoke(..)) => Vec::new(),
    }
}

/// The tokens that a message introduces: the client that sends it takes care of them.
pub(super) fn introduces(message: &Message) -> Vec<Token> {
    match message {
        Message::One(protocol::Request::Release(release)) => {
            release.next.iter().map(|next| next.token).collect()
        }
        message => acquires(message),
    }
}

/// The reply of a store to a request for one lock.
pub(super) fn one(reply: majority::Reply) -> Option<protocol::Reply> {
    use protocol::Reply as One;
    Some(match reply {
        majority::Reply::Acquire(reply) => One::Acquire(reply),
        majority::Reply::Poll(reply) => One::Poll(reply),
        majority::Reply::Renew(mut replies) => One::Renew(replies.pop()?.ok()?),
        majority::Reply::Release(reply) => One::Release(reply),
        majority::Reply::Convert(reply) => One::Convert(reply),
        majority::Reply::Abandoned => One::Abandoned,
        _ => return None,
    })
}

impl Network {
    pub(super) fn show(&self, request: &Request) -> String {
        let request = match request {
            Request::Greet => return "greet".into(),
            Request::Call(request, _) => request,
            Request::Direct(message) => {
                let introduced = introduces(message);
                let names: Vec<_> = introduced.iter().map(|token| self.name(*token)).collect();
                return format!("{message:?} {names:?}");
            }
        };
        let name = alias(request).map_or_else(String::new, |hold| self.name(hold.token));
        match request {
            ServerRequest::Acquire(request) => {
                let (if_busy, lease) = (request.if_busy, request.lease);
                let number = request.proposal.map_or(0, short);
                format!("acquire {name} {if_busy:?} {lease:?} ..{number}")
            }
            ServerRequest::Poll(_) => format!("poll {name}"),
            ServerRequest::Renew(_) => format!("renew {name}"),
            ServerRequest::Release(_) => format!("release {name}"),
            ServerRequest::Abandon(hold) => format!("abandon {name} {:?}", hold.mode),
            ServerRequest::Convert(_) => format!("convert {name}"),
            ServerRequest::Raise(_, _, fence) => format!("raise ..{}", short(*fence)),
            other => format!("{other:?}"),
        }
    }

    pub(super) fn show_reply(&self, reply: &Reply) -> String {
        match reply {
            Reply::Call(majority::Reply::Acquire(AcquireReply::Granted(grant)), _)
            | Reply::Call(majority::Reply::Poll(PollReply::Granted(grant)), _) => show_grant(grant),
            Reply::Call(reply, _) => format!("{reply:?}"),
            other => format!("{other:?}"),
        }
    }

    pub(super) fn show_event(&self, event: &StoreEvent) -> String {
        match event {
            StoreEvent::Granted { hold, grant } => {
                format!("{} {}", self.name(hold.token), show_grant(grant))
            }
            other => format!("{other:?}"),
        }
    }
}

fn show_grant(grant: &Grant) -> String {
    format!("granted ..{} for {:?}", short(grant.fence), grant.ttl)
}

/// The last digits of a fencing token: the others are the same for all.
fn short(fence: FencingToken) -> u64 {
    fence.number() % 1_000_000_000
}

/// The number of an alias: the last 16 bits of its token.
pub(super) fn alias_number(token: Token) -> u16 {
    let hex = token.to_hex();
    let end = std::str::from_utf8(&hex[28..]).ok();
    end.and_then(|end| u16::from_str_radix(end, 16).ok())
        .unwrap_or_default()
}
