//! The client of several independent servers that agree by majority, without I/O: it is given the
//! time, random numbers, the requests of its callers and the replies of the servers, and returns
//! the calls to make.
//!
//! A request of a caller is begun by the method of its name and advanced by
//! [`MajoritySession::step`], after each reply to one of its calls and when its time has come. The
//! caller's task makes the calls that are returned. [`MajoritySession::replied`] takes the reply to
//! any call, even if the request is over by then: the reply shows the state of a server.

mod abandon;
mod acquire;
mod convert;
mod exchange;
mod message;
mod release;
mod renew;
pub(crate) mod round;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, time::Duration};

use foldhash::fast::RandomState;

use self::{
    acquire::RoundRequest,
    exchange::broadcast::{Broadcast, Count},
    exchange::contended::Contended,
    exchange::proposals::Proposals,
    exchange::server::Server,
    message::CallPurpose,
    round::{KnownAlias, PerServer, ServerAnswer},
};
pub(crate) use self::{
    exchange::count::majority,
    exchange::tally::inspected,
    message::{CallTicket, Progress, Reply, Send, ServerRequest},
    round::Round,
};
use super::PendingEnd;
use crate::{
    shell::time::Instant,
    store::{Grant, Hold, StoreError, StoreErrorKind, Token},
};

/// The time after which the reply to a call of a request that is over is no longer awaited.
pub(crate) const LONGEST_CALL: Duration = Duration::from_secs(2);

/// The number of a request. No two requests of a session have the same.
pub(crate) type RequestId = u64;

/// A rule of docs/PROTOCOL.md that a simulator switches off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MajorityMutation {
    /// Rule 28: the largest fencing token is not written back.
    NoWriteBack,
    /// Rule 28: a reader, like a writer, counts servers whose counters have passed the number.
    CountsWhatOthersHave,
    /// Rule 28: a number that a server has drawn is proposed to the others however old it is.
    ProposesOld,
    /// Half of the servers are enough.
    MajorityOffByOne,
    /// Half of the servers are enough for a renewal.
    RenewsByHalf,
    /// Rule 29: the vote of a server from an earlier exchange counts even if the server does
    /// not reply in this exchange.
    AddsUpExchanges,
    /// Rule 29: renewals of earlier exchanges count as well.
    AddsUpRenewals,
    /// Rule 1: the reply to an acquire is applied although its alias was abandoned.
    BelievesTheAbandoned,
    /// Rule 8: an alias is abandoned once, even if an acquire may still be delayed.
    AbandonsOnce,
    /// A majority without the coordinator's vote waits until that vote has expired.
    YieldsToDeadVote,
    /// The time in which a server must reply does not follow the measured round trip.
    FixedTimeOuts,
    /// A vote that is to stay reserved is abandoned after a release without a reply.
    AbandonsReserved,
}

/// The surroundings of one visit to a [`MajoritySession`], and its output.
pub(crate) struct MajorityCx<'a> {
    pub(crate) now: Instant,
    /// Microseconds since 1970, by the local clock.
    micros: u64,
    fraction: &'a mut dyn FnMut() -> f64,
    pub(crate) out: Output,
    /// The rule that a simulator has switched off.
    #[cfg(test)]
    pub(crate) mutation: Option<MajorityMutation>,
}

/// The output of a visit, in the order in which it is to be performed.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Ends of aliases to begin in the background: requests to be advanced like any other. Their
    /// first calls are sent ahead of all others, so that no later call meets an alias that is given
    /// up.
    pub(crate) ends: Vec<RequestId>,
    /// Calls to make in the background.
    pub(crate) background: Vec<Send>,
    /// Calls to make in the task of the caller.
    pub(crate) sends: Vec<Send>,
}

impl<'a> MajorityCx<'a> {
    /// The `fraction` returns random numbers in 0..1.
    pub(crate) fn new(now: Instant, micros: u64, fraction: &'a mut dyn FnMut() -> f64) -> Self {
        Self {
            now,
            micros,
            fraction,
            out: Output::default(),
            #[cfg(test)]
            mutation: None,
        }
    }

    /// Returns a random number in 0..1.
    fn fraction(&mut self) -> f64 {
        (self.fraction)()
    }

    /// Returns whether a simulator has switched this rule off.
    #[cfg(test)]
    fn breaks(&self, mutation: MajorityMutation) -> bool {
        self.mutation == Some(mutation)
    }

    #[cfg(not(test))]
    const fn breaks(&self, _: MajorityMutation) -> bool {
        false
    }
}

/// A request that is over.
fn over(reply: Result<Reply, StoreError>) -> (InProgress, Option<Instant>) {
    (InProgress::Over(reply, None), None)
}

/// The state of a client.
#[derive(Debug)]
pub(crate) struct MajoritySession {
    servers: Vec<Server>,
    /// The acquisitions that are held or wanted, by the stem of their tokens.
    rounds: HashMap<u128, Round, RandomState>,
    requests: HashMap<RequestId, InProgress, RandomState>,
    latest_request: RequestId,
    proposals: Proposals,
    contended: Contended,
    /// The moving average of the time in which a majority replies.
    pub(crate) round_trip: Duration,
    /// The rounds whose release was not confirmed, and until when their votes may last.
    unconfirmed: Vec<(Instant, u128)>,
}

/// A request in progress.
#[derive(Debug)]
enum InProgress {
    Round(RoundRequest),
    Broadcast(Broadcast),
    /// The end of an alias at this server.
    End(usize, PendingEnd),
    /// The reply, and until when the first calls of the ends that it has begun are awaited.
    Over(Result<Reply, StoreError>, Option<Instant>),
}

impl MajoritySession {
    /// Creates a session with servers of these names.
    pub(crate) fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self {
            servers: names.into_iter().map(Server::new).collect(),
            rounds: HashMap::default(),
            requests: HashMap::default(),
            latest_request: 0,
            proposals: Proposals::default(),
            contended: Contended::default(),
            round_trip: Duration::from_millis(1),
            unconfirmed: Vec::new(),
        }
    }

    /// Advances a request.
    pub(crate) fn step(&mut self, id: RequestId, cx: &mut MajorityCx<'_>) -> Progress {
        loop {
            let Some(request) = self.requests.remove(&id) else {
                return Progress::Done(Err(StoreError::no_reply()), None);
            };
            let (request, until) = match request {
                InProgress::Round(acquiring) => self.step_acquire(id, acquiring, cx),
                InProgress::Broadcast(broadcast) => self.step_broadcast(id, broadcast, cx),
                InProgress::End(server, pending) => Self::step_end(id, server, pending, cx),
                InProgress::Over(reply, until) => return Progress::Done(reply, until),
            };
            let is_over = matches!(request, InProgress::Over(..));
            self.requests.insert(id, request);
            if !is_over {
                return Progress::Wait(until);
            }
        }
    }

    /// Ends a request whose caller no longer waits for it. Calls that are made may still be
    /// replied to.
    pub(crate) fn cancel(&mut self, id: RequestId, now: Instant) {
        // The caller may never repeat a release that it does not await.
        if let Some(InProgress::Broadcast(broadcast)) = self.requests.remove(&id)
            && let Count::Release(hold) = broadcast.count
        {
            self.remove_later(hold.token.stem(), now);
        }
    }

    /// Removes a round once its votes have expired in any case.
    fn remove_later(&mut self, stem: u128, now: Instant) {
        if let Some(round) = self.rounds.get(&stem) {
            self.unconfirmed.push((now + round.longest_lease, stem));
        }
    }

    /// Removes the rounds of unconfirmed releases whose votes have expired.
    fn remove_expired(&mut self, now: Instant) {
        let expired = self.unconfirmed.extract_if(.., |(until, _)| *until < now);
        for (_, stem) in expired {
            self.rounds.remove(&stem);
        }
    }

    /// Applies the reply to a call.
    pub(crate) fn replied(
        &mut self,
        ticket: CallTicket,
        mut reply: Result<Reply, StoreError>,
        cx: &mut MajorityCx<'_>,
    ) {
        let (server, id) = (ticket.server, ticket.id);
        let error = reply.as_ref().err();
        match ticket.purpose {
            // These calls are sent to servers that do not reply, too.
            CallPurpose::End => self.end_replied(id, reply, cx),
            CallPurpose::Exchange(token, exchange, sent) => {
                let answer = ServerAnswer::new(reply);
                self.servers[server].replied(answer.error(), cx.now);
                if let Some(round) = self.rounds.get_mut(&token.stem()) {
                    round.replied(server, token, exchange, answer, sent, cx);
                    // No later step may follow, if the request that made this call is over.
                    self.abandon_unused(token.stem(), cx);
                }
            }
            CallPurpose::Renewal(aliases, sent) => {
                self.servers[server].replied(error, cx.now);
                if let Ok(Reply::Renew(replies)) = &mut reply {
                    self.renewed(server, &aliases, replies, sent, cx);
                }
                self.count(id, server, &aliases, reply, cx);
            }
            CallPurpose::Release(alias, hold, lease, keep_until) => {
                self.servers[server].replied(error, cx.now);
                self.released(&alias, &hold, (lease, keep_until), &reply, cx);
                self.count(id, server, &[], reply, cx);
            }
            CallPurpose::Broadcast => {
                self.servers[server].replied(error, cx.now);
                self.count(id, server, &[], reply, cx);
            }
        }
    }

    /// Applies a grant that a server has pushed. Returns whether its acquisition is to poll.
    pub(crate) fn pushed(&mut self, server: usize, hold: &Hold, grant: Grant) -> bool {
        // If it is not known, it belongs to another client, or has ended.
        let round = self.rounds.get_mut(&hold.token.stem());
        let round = round.filter(|round| round.hold.key == hold.key);
        round.is_some_and(|round| round.pushed(server, hold.token, grant))
    }

    /// The acquisitions that wait in the queue of this server.
    pub(crate) fn waiting_at(&self, server: usize) -> Vec<Hold> {
        let rounds = self.rounds.values();
        rounds.filter_map(|it| it.waiting_at(server)).collect()
    }

    /// Records that this server answers again.
    pub(crate) fn reconnected(&mut self, server: usize) {
        self.servers[server].reconnected();
    }

    /// The acquisition to which an alias belongs.
    pub(crate) fn round(&self, token: Token) -> Option<&Round> {
        self.rounds.get(&token.stem())
    }

    fn majority(&self) -> usize {
        majority(self.servers.len())
    }

    fn begin(&mut self, request: InProgress) -> RequestId {
        let id = self.next_id();
        self.requests.insert(id, request);
        id
    }

    fn next_id(&mut self) -> RequestId {
        self.latest_request += 1;
        self.latest_request
    }

    /// Begins a request that needs no call.
    fn answered(&mut self, reply: Reply) -> RequestId {
        self.begin(InProgress::Over(Ok(reply), None))
    }

    /// The error if too few servers have replied, with the `reply` of each server, or its error.
    fn too_few<'a>(&self, reply: impl Fn(usize) -> Result<&'a str, &'a StoreError>) -> StoreError {
        let (needed, servers) = (self.majority(), self.servers.len());
        // If all servers failed for the same reason, the error keeps its kind: a permanent cause
        // must not be reported as `Unavailable`.
        let mut kinds = (0..servers).filter_map(|server| reply(server).err().map(StoreError::kind));
        let first = kinds.next();
        let common = first.filter(|first| kinds.all(|kind| kind == *first));
        let named = self.servers.iter().enumerate();
        let replies = named.map(|(server, Server { name, .. })| match reply(server) {
            Ok(text) => format!("{name}: {text}"),
            Err(error) => format!("{name}: {error}"),
        });
        let replies = replies.collect::<Vec<_>>().join("; ");
        let text = format!("{needed} of {servers} servers are needed: {replies}");
        let count = |is: fn(&StoreError) -> bool| {
            let errors = (0..servers).filter_map(|server| reply(server).err());
            errors.filter(|error| is(error)).count()
        };
        // Without the servers that refuse calls there is no majority.
        let ends_waits = servers - count(StoreError::ends_waits) < needed;
        StoreError::new(common.unwrap_or(StoreErrorKind::Unavailable), text)
            .with_unsent(count(StoreError::is_unsent) == servers)
            .ending_waits(ends_waits)
            .passing(count(StoreError::is_transient) > 0)
    }
}

#[cfg(test)]
impl MajoritySession {
    /// Whether it takes care of an alias that this server may know.
    #[cfg(feature = "redis")]
    pub(crate) fn owns(&self, server: usize, token: Token) -> bool {
        let mut rounds = self.rounds.values();
        rounds.any(|round| round.known().any(|known| known == (server, token)))
            || self.requests.values().any(|request| {
                matches!(request, InProgress::End(at, pending)
                    if *at == server && pending.hold().token == token)
            })
    }

    /// The tokens of its acquisitions, and the number of its requests in progress.
    pub(crate) fn rest(&mut self, now: Instant) -> (Vec<Token>, usize) {
        self.remove_expired(now);
        let tokens = self.rounds.values().map(|round| round.hold.token);
        (tokens.collect(), self.requests.len())
    }

    pub(crate) fn coordinator(
        &self,
        key: &crate::request::key::LockKey,
        now: Instant,
    ) -> Option<usize> {
        exchange::server::coordinator(&self.servers, key, now)
    }
}
