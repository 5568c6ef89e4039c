//! Requests to several servers at once that a majority decides.

use std::{mem, time::Duration};

use super::super::{
    CallPurpose, InProgress, MajorityCx, MajoritySession, PerServer, Reply, RequestId, Send,
    ServerRequest,
    abandon::ending_timeout,
    convert::Conversion,
    exchange::tally::{self, Ballot, Held, Renewed},
    exchange::time_out::majority_timeout,
    over, renew,
    round::grace,
};
use crate::{
    request::key::LockKey,
    request::spec::{LockKind, LockSpec},
    shell::time::Instant,
    store::{
        ConvertReply, Hold, Inspection, ReleaseReply, RevokeReply, RevokeScope, StoreError, Token,
    },
};

/// A request to several servers.
#[derive(Debug)]
pub(in crate::protocol::majority) struct Broadcast {
    pub(in crate::protocol::majority) count: Count,
    ballot: Ballot,
    begun: Instant,
    /// The time-out, or the end of the wait for the coordinator once a majority has decided.
    until: Instant,
    awaited: PerServer<usize>,
    /// The errors of the servers that failed to reply.
    failed: Vec<(usize, StoreError)>,
    is_decided: bool,
    /// The server whose reply is awaited a little longer after the decision.
    coordinator: Option<usize>,
}

/// The replies so far.
#[derive(Debug)]
pub(in crate::protocol::majority) enum Count {
    /// To the renewal of each lock.
    Renewals(Vec<Renewed>),
    Release(Hold),
    Conversion(Conversion),
    Inspection(Vec<Inspection>),
    Revocation(Vec<RevokeReply>),
}

impl MajoritySession {
    /// Determines the state of a lock at a majority.
    pub(crate) fn inspect(
        &mut self,
        key: &LockKey,
        kind: LockKind,
        cx: &mut MajorityCx<'_>,
    ) -> RequestId {
        let request = ServerRequest::Inspect(key.clone(), kind);
        self.ask_all(&request, Count::Inspection(Vec::new()), cx)
    }

    pub(crate) fn revoke(
        &mut self,
        key: &LockKey,
        kind: LockKind,
        scope: RevokeScope,
        cx: &mut MajorityCx<'_>,
    ) -> RequestId {
        let request = ServerRequest::Revoke(key.clone(), kind, scope);
        self.ask_all(&request, Count::Revocation(Vec::new()), cx)
    }

    /// Sends the same request to every server.
    fn ask_all(
        &mut self,
        request: &ServerRequest,
        count: Count,
        cx: &mut MajorityCx<'_>,
    ) -> RequestId {
        let call = |server| (server, request.clone(), CallPurpose::Broadcast);
        let calls = (0..self.servers.len()).map(call);
        self.broadcast(
            count,
            majority_timeout(LockSpec::MAX_LEASE),
            None,
            calls,
            cx,
        )
    }

    /// Begins a request to several servers.
    pub(in crate::protocol::majority) fn broadcast(
        &mut self,
        count: Count,
        timeout: Duration,
        coordinator: Option<usize>,
        calls: impl IntoIterator<Item = (usize, ServerRequest, CallPurpose)>,
        cx: &mut MajorityCx<'_>,
    ) -> RequestId {
        let id = self.next_id();
        let mut awaited = PerServer::new();
        for (server, request, purpose) in calls {
            awaited.push(server);
            let timeout = match &purpose {
                CallPurpose::Release(_, _, lease, _) => Some(ending_timeout(*lease)),
                _ => None,
            };
            let send = Send::new(id, server, request, timeout, purpose);
            cx.out.sends.push(send);
        }
        let broadcast = Broadcast {
            count,
            ballot: Ballot::new(self.servers.len(), awaited.len()),
            begun: cx.now,
            until: cx.now + timeout,
            awaited,
            failed: Vec::new(),
            is_decided: false,
            coordinator,
        };
        self.requests.insert(id, InProgress::Broadcast(broadcast));
        id
    }

    /// Counts the reply of a server. The locks of a batch of renewals are those with these numbers.
    pub(in crate::protocol::majority) fn count(
        &mut self,
        id: RequestId,
        server: usize,
        batch: &[(usize, Token)],
        reply: Result<Reply, StoreError>,
        cx: &MajorityCx<'_>,
    ) {
        let Some(InProgress::Broadcast(broadcast)) = self.requests.get_mut(&id) else {
            return;
        };
        broadcast.awaited.retain(|awaited| *awaited != server);
        let reply = match reply {
            Ok(reply) if !broadcast.is_decided => reply,
            Ok(_) => return,
            Err(error) => return broadcast.failed.push((server, error)),
        };
        let ballot = &mut broadcast.ballot;
        let is_decided = match (&mut broadcast.count, reply) {
            (Count::Renewals(tallies), Reply::Renew(replies)) => {
                renew::count(tallies, broadcast.begun, server, batch, replies);
                tallies.iter().all(|tally| tally.held(cx) != Held::Open)
            }
            (Count::Release(_), Reply::Release(reply)) => {
                ballot.count(reply == ReleaseReply::Released)
            }
            (Count::Conversion(conversion), Reply::Convert(reply)) => {
                if let ConvertReply::Converted(grant) = reply {
                    conversion.grants.push((server, grant));
                }
                ballot.count(reply != ConvertReply::NotHeld)
            }
            (Count::Inspection(seen), Reply::Inspect(inspection)) => {
                seen.push(inspection);
                false
            }
            (Count::Revocation(replies), Reply::Revoke(reply)) => {
                replies.push(reply);
                false
            }
            _ => false,
        };
        if is_decided {
            broadcast.is_decided = true;
            let grace = grace(cx.now - broadcast.begun);
            broadcast.until = broadcast.until.min(cx.now + grace);
        }
    }

    pub(in crate::protocol::majority) fn step_broadcast(
        &mut self,
        id: RequestId,
        mut broadcast: Broadcast,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        let (is_decided, until) = (broadcast.is_decided, broadcast.until);
        let is_awaited = |server: usize| broadcast.awaited.contains(&server);
        let is_over = broadcast.awaited.is_empty()
            || is_decided && !broadcast.coordinator.is_some_and(is_awaited)
            || until <= cx.now;
        if !is_over {
            return (InProgress::Broadcast(broadcast), Some(until));
        }
        if !is_decided {
            let error = StoreError::timed_out(until - broadcast.begun);
            for server in mem::take(&mut broadcast.awaited) {
                self.servers[server].open(error.clone(), cx.now);
                broadcast.failed.push((server, error.clone()));
            }
        }
        let (servers, begun, failed) = (self.servers.len(), broadcast.begun, broadcast.failed);
        let unanswered = || self.unanswered(&failed);
        let decision = || broadcast.ballot.decided().ok_or_else(unanswered);
        over(match broadcast.count {
            Count::Renewals(tallies) => {
                Ok(Reply::Renew(self.all_renewed(tallies, begun, &failed, cx)))
            }
            Count::Release(hold) => {
                let decision = decision();
                self.finish_release(&hold, decision, cx.now)
            }
            Count::Conversion(conversion) => {
                let decision = decision();
                return self.finish_conversion(id, conversion, begun, decision, cx);
            }
            Count::Inspection(seen) if seen.len() < self.majority() => Err(unanswered()),
            Count::Inspection(seen) => Ok(Reply::Inspect(tally::inspected(servers, seen))),
            Count::Revocation(replies) => tally::revoked(servers, &replies)
                .map(Reply::Revoke)
                .ok_or_else(unanswered),
        })
    }

    /// The error if too few servers have replied.
    pub(in crate::protocol::majority) fn unanswered(
        &self,
        failed: &[(usize, StoreError)],
    ) -> StoreError {
        self.too_few(|server| {
            let error = failed.iter().find(|(failed, _)| *failed == server);
            error.map_or(Ok("has answered"), |(_, error)| Err(error))
        })
    }
}
