//! The store: the table of the in-memory store, behind a network.

use std::collections::BTreeMap;

use tokio::time::Instant;

use crate::{
    protocol::{Mutation, Reply, Request},
    sim::process::{Message, StoreReply},
    store::{
        AcquireAllReply, AcquireReply, Grant, Hold, IfBusy, KeyRequest, RenewReply, StoreEvent,
        Token,
        memory::table::{Fences, Step, Table},
    },
};

#[derive(Default)]
pub(super) struct Server {
    pub(super) table: Table,
    fences: Fences,
    /// When each token was granted its lock.
    pub(super) granted_at: BTreeMap<Token, Instant>,
}

/// The effects of a request.
pub(super) struct Executed {
    pub(super) reply: StoreReply,
    /// Events for the process of a token, or for all processes.
    pub(super) events: Vec<(Option<Token>, StoreEvent)>,
}

impl Server {
    /// Executes a request, as [`MemoryStore`](crate::store::MemoryStore) does.
    pub(super) fn execute(
        &mut self,
        message: &Message,
        mutation: Option<Mutation>,
        now: Instant,
    ) -> Executed {
        let caller = match message {
            Message::One(Request::Acquire(request)) => Some(request.hold.token),
            Message::One(Request::Poll(hold)) => Some(hold.token),
            _ => None,
        };
        let Self { table, fences, .. } = self;
        let mut step = Step::new(now, fences, caller);
        step.lets_nobody_in = mutation == Some(Mutation::OnlyReleaseAdvances)
            && !matches!(message, Message::One(Request::Release(_)));
        let reply = match message {
            Message::One(request) => {
                StoreReply::One(execute_one(table, request, mutation, &mut step))
            }
            Message::All(requests) => StoreReply::All(execute_all(table, requests, &mut step)),
            Message::Revoke(key, kind) => StoreReply::Revoke(table.revoke(key, *kind, &mut step)),
        };
        let mut granted = Vec::new();
        let to_whom = |event| match event {
            StoreEvent::Granted { ref hold, .. } => {
                granted.push(hold.token);
                (Some(hold.token), event)
            }
            StoreEvent::Revoked { token } => (Some(token), event),
            event => (None, event),
        };
        let events = step.events.into_iter().map(to_whom).collect();
        for token in granted.into_iter().chain(granted_by(message, &reply)) {
            self.granted_at.entry(token).or_insert(now);
        }
        Executed { reply, events }
    }

    /// Deletes all data. The clock continues.
    pub(super) fn flush(&mut self) {
        self.table = Table::default();
    }
}

/// The tokens that hold a lock according to a reply.
fn granted_by(message: &Message, reply: &StoreReply) -> Vec<Token> {
    use crate::store::{PollReply, ReleaseReply};
    match (message, reply) {
        (Message::One(request), StoreReply::One(reply)) => match (request, reply) {
            (Request::Acquire(request), Reply::Acquire(AcquireReply::Granted(_))) => {
                vec![request.hold.token]
            }
            (Request::Poll(hold), Reply::Poll(PollReply::Granted(_))) => vec![hold.token],
            (Request::Release(release), Reply::Release(ReleaseReply::Passed(_))) => {
                release.next.into_iter().map(|next| next.token).collect()
            }
            _ => Vec::new(),
        },
        (Message::All(requests), StoreReply::All(AcquireAllReply::Granted(_))) => {
            requests.iter().map(|request| request.hold.token).collect()
        }
        _ => Vec::new(),
    }
}

fn execute_one(
    table: &mut Table,
    request: &Request,
    mutation: Option<Mutation>,
    step: &mut Step<'_>,
) -> Reply {
    match request {
        Request::Acquire(request) => Reply::Acquire(table.acquire(request, step)),
        Request::Poll(hold) => Reply::Poll(table.poll(hold, step)),
        Request::Release(release) => Reply::Release(table.release(release, step)),
        Request::Abandon(hold) => {
            table.abandon(hold, step);
            Reply::Abandoned
        }
        Request::Convert(hold) => Reply::Convert(table.convert(hold, step)),
        Request::Renew(renewal) => match table.renew(renewal, step.now) {
            RenewReply::Renewed { .. } if mutation == Some(Mutation::RenewalShortens) => {
                table.shorten(&renewal.hold, renewal.lease, step.now);
                Reply::Renew(RenewReply::Renewed { ttl: renewal.lease })
            }
            reply => Reply::Renew(reply),
        },
    }
}

fn execute_all(table: &mut Table, requests: &[KeyRequest], step: &mut Step<'_>) -> AcquireAllReply {
    let requests: Vec<_> = requests
        .iter()
        .map(|request| KeyRequest {
            if_busy: IfBusy::Refuse,
            ..request.clone()
        })
        .collect();
    for (index, request) in requests.iter().enumerate() {
        if let Some(reply) = table.verdict(request, step) {
            if let AcquireReply::Granted(_) = reply {
                continue;
            }
            return AcquireAllReply::Refused { index, reply };
        }
    }
    let grants: Vec<Grant> = requests
        .iter()
        .map(|request| match table.acquire(request, step) {
            AcquireReply::Granted(grant) => grant,
            reply => panic!("free a moment ago: {reply:?}"),
        })
        .collect();
    AcquireAllReply::Granted(grants)
}

/// The tokens that a message introduces: the process that sends it takes care of them.
pub(super) fn introduces(message: &Message) -> Vec<Token> {
    match message {
        Message::One(Request::Acquire(request)) => vec![request.hold.token],
        Message::One(Request::Release(release)) => {
            release.next.into_iter().map(|next| next.token).collect()
        }
        Message::All(requests) => requests.iter().map(|request| request.hold.token).collect(),
        _ => Vec::new(),
    }
}

/// The acquire requests of a message.
pub(super) fn acquires(message: &Message) -> Vec<Hold> {
    match message {
        Message::One(Request::Acquire(request)) => vec![request.hold.clone()],
        Message::All(requests) => requests.iter().map(|it| it.hold.clone()).collect(),
        _ => Vec::new(),
    }
}
