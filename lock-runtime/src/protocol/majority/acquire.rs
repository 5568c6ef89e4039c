//! Acquire attempts and polls, which run a round until it has an outcome.

use std::time::Duration;

use super::{
    CallPurpose, InProgress, MajorityCx, MajorityMutation, MajoritySession, PerServer, Reply,
    RequestId, Send, ServerAnswer, ServerRequest,
    exchange::proposals::Proposals,
    exchange::server::coordinator,
    exchange::time_out::majority_timeout,
    over,
    round::{Ask, Calls, Next, Outcome, Round, TimeOuts},
};
use crate::{
    protocol::{STRAGGLE, acquire::UNENDED},
    request::spec::call_timeout,
    shell::time::Instant,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, IfBusy, KeyRequest, PollReply,
        Renewal, StoreError, StoreErrorKind, Token,
    },
};

/// The parameters that all exchanges of a request have in common.
#[derive(Debug)]
pub(super) struct ExchangeTerms {
    /// The time by which the caller must have a reply. It is a little before the caller's time-out,
    /// so that the caller gets an error that names the servers that did not reply.
    answer_by: Instant,
    /// The latest time at which an acquire may be executed.
    pub(super) deadline: Instant,
    /// For each server, the alias of a reader in whose group this one may be admitted.
    reader_group: Option<PerServer<Option<Token>>>,
}

impl ExchangeTerms {
    /// The parameters of a request that must end within this time.
    fn within(time: Duration, now: Instant) -> Self {
        Self {
            answer_by: now + time * 9 / 10,
            deadline: now + time + STRAGGLE,
            reader_group: None,
        }
    }

    /// The parameters of a request that continues an acquisition.
    pub(super) fn of(round: &Round, now: Instant) -> Self {
        let answer_by = now + majority_timeout(round.lease);
        Self {
            answer_by,
            deadline: answer_by + STRAGGLE,
            reader_group: None,
        }
    }
}

/// A request that runs a round until it has an outcome.
#[derive(Debug)]
pub(super) struct RoundRequest {
    token: Token,
    kind: Kind,
    terms: ExchangeTerms,
    begun: Instant,
    /// The start of the latest exchange.
    sent: Instant,
    /// The time within which a server must reply.
    timeout: Duration,
}

#[derive(Debug)]
enum Kind {
    Acquire,
    Poll,
    /// A reader that was a writer.
    Conversion,
    /// Several locks, one after the other, and the grants so far.
    All(Vec<KeyRequest>, Vec<Grant>),
}

impl RoundRequest {
    fn new(
        token: Token,
        kind: Kind,
        terms: ExchangeTerms,
        timeout: Duration,
        now: Instant,
    ) -> Self {
        Self {
            token,
            kind,
            begun: now,
            sent: now,
            timeout,
            terms,
        }
    }

    /// The end of the latest exchange, even if some servers have not replied.
    fn silent_at(&self) -> Instant {
        self.terms.answer_by.min(self.sent + self.timeout)
    }

    /// The last part of a conversion, which a majority has executed.
    pub(super) fn of_conversion(round: &Round, now: Instant) -> Self {
        let terms = ExchangeTerms::of(round, now);
        let timeout = majority_timeout(round.lease);
        Self::new(round.hold.token, Kind::Conversion, terms, timeout, now)
    }
}

impl MajoritySession {
    pub(crate) fn acquire(&mut self, request: &KeyRequest, cx: &mut MajorityCx<'_>) -> RequestId {
        self.remove_expired(cx.now);
        if let Some(refused) = self.refused_unsent(&request.hold) {
            return refused;
        }
        let first = self.first_exchange(request, Kind::Acquire, cx);
        self.begin_round(first, cx)
    }

    /// Acquires all locks or none: a grant only counts if all locks are granted. The locks are
    /// acquired one after the other in the order of the requests. Of several requests with locks in
    /// common, the first to acquire the first of these locks proceeds, and no two requests are both
    /// refused because of each other.
    pub(crate) fn acquire_all(
        &mut self,
        requests: &[KeyRequest],
        cx: &mut MajorityCx<'_>,
    ) -> RequestId {
        let Some(first) = requests.first() else {
            return self.answered(Reply::AcquireAll(AcquireAllReply::Granted(Vec::new())));
        };
        if let Some(refused) = self.refused_unsent(&first.hold) {
            return refused;
        }
        let kind = Kind::All(requests.to_vec(), Vec::new());
        let first = self.first_exchange(first, kind, cx);
        self.begin_round(first, cx)
    }

    /// Refuses a new acquisition while too many votes are yet to be given up, such as at a server
    /// that does not answer: each takes a task until its lease ends.
    fn refused_unsent(&mut self, hold: &Hold) -> Option<RequestId> {
        let is_refused =
            self.requests.len() >= UNENDED && !self.rounds.contains_key(&hold.token.stem());
        is_refused.then(|| {
            let error = StoreError::new(
                StoreErrorKind::Unavailable,
                "too many votes of requests that were given up are yet to be ended; see whether all \
                 servers answer",
            );
            self.begin(InProgress::Over(Err(error.with_unsent(true)), None))
        })
    }

    pub(crate) fn poll(&mut self, hold: &Hold, cx: &mut MajorityCx<'_>) -> RequestId {
        let stem = hold.token.stem();
        let Some(round) = self.rounds.get_mut(&stem) else {
            return self.answered(Reply::Poll(PollReply::Gone));
        };
        let (lease, terms) = (round.lease, ExchangeTerms::of(round, cx.now));
        let calls = round.poll(terms.deadline, cx.now);
        let timeout = self.server_timeout(lease, cx);
        let acquiring = RoundRequest::new(hold.token, Kind::Poll, terms, timeout, cx.now);
        self.begin_round((acquiring, calls), cx)
    }

    /// Begins a request with its first exchange.
    fn begin_round(&mut self, first: (RoundRequest, Calls), cx: &mut MajorityCx<'_>) -> RequestId {
        let ((acquiring, calls), id) = (first, self.next_id());
        self.exchange(id, &acquiring, calls, cx);
        self.requests.insert(id, InProgress::Round(acquiring));
        id
    }

    /// The first exchange of a request, with its calls.
    fn first_exchange(
        &mut self,
        request: &KeyRequest,
        kind: Kind,
        cx: &mut MajorityCx<'_>,
    ) -> (RoundRequest, Calls) {
        let Hold { ref key, token, .. } = request.hold;
        let (now, lease) = (cx.now, request.lease);
        let reader_group = request.reader_group.and_then(|group| self.round(group));
        let reader_group = reader_group.map(|group| {
            let servers = 0..self.servers.len();
            servers.map(|server| group.held_at(server)).collect()
        });
        let terms = match kind {
            // Each of several locks has the time of a call.
            Kind::All(..) => ExchangeTerms::within(call_timeout(lease), now),
            // The deadline is the end of the caller's wait plus `STRAGGLE`.
            _ => ExchangeTerms::within(time_left(request, now), now),
        };
        let terms = ExchangeTerms {
            reader_group,
            ..terms
        };
        let calls = if let Some(round) = self.rounds.get_mut(&token.stem()) {
            round.poll(terms.deadline, now)
        } else {
            let time_outs = TimeOuts::new(self.round_trip, cx.fraction());
            let coordinator = coordinator(&self.servers, key, now);
            let mut round = Round::new(request, self.servers.len(), coordinator, time_outs, now);
            // A request for several locks waits for none of them.
            if let Kind::All(..) = kind {
                round.if_busy = IfBusy::Refuse;
            }
            let calls = round.acquire(self.contended.is(key, now), terms.deadline, now);
            self.rounds.insert(token.stem(), round);
            calls
        };
        let timeout = self.server_timeout(lease, cx);
        (RoundRequest::new(token, kind, terms, timeout, now), calls)
    }

    /// Sends the calls of an exchange.
    fn exchange(
        &mut self,
        id: RequestId,
        acquiring: &RoundRequest,
        calls: Calls,
        cx: &mut MajorityCx<'_>,
    ) {
        let sends = self.sends(id, acquiring.token.stem(), &acquiring.terms, calls, cx);
        cx.out.sends.extend(sends);
    }

    /// Runs the round as far as the replies allow.
    pub(super) fn step_acquire(
        &mut self,
        id: RequestId,
        mut acquiring: RoundRequest,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        let stem = acquiring.token.stem();
        let (micros, round_trip, jitter) = (cx.micros, self.round_trip, cx.fraction());
        let beyond = |fence| Proposals::beyond(fence, micros, round_trip, jitter);
        let until = loop {
            let Some(round) = self.rounds.get_mut(&stem) else {
                return over(Err(StoreError::no_reply()));
            };
            let deadline = (acquiring.terms.deadline).max(cx.now + acquiring.timeout + STRAGGLE);
            let next = round.next(deadline, &beyond, cx);
            self.abandon_unused(stem, cx);
            match next {
                Next::Send(calls) => {
                    acquiring.sent = cx.now;
                    acquiring.terms.deadline = deadline;
                    self.exchange(id, &acquiring, calls, cx);
                }
                Next::Pause(until) => break until,
                Next::Wait(grace) => {
                    let silent_at = acquiring.silent_at();
                    let until = grace.map_or(silent_at, |grace| grace.min(silent_at));
                    // Calls that this visit has returned have a chance to be replied to.
                    if until > cx.now || !cx.out.sends.is_empty() {
                        break until;
                    }
                    self.time_is_up(&acquiring, cx);
                }
                Next::Done(outcome) => return self.outcome(id, acquiring, outcome, cx),
            }
        };
        (InProgress::Round(acquiring), Some(until))
    }

    /// Stops waiting for the servers that have not replied.
    fn time_is_up(&mut self, acquiring: &RoundRequest, cx: &MajorityCx<'_>) {
        let Some(round) = self.rounds.get_mut(&acquiring.token.stem()) else {
            return;
        };
        let error = StoreError::timed_out(cx.now - acquiring.begun);
        let silent = round.time_is_up(&error, cx);
        // A circuit breaker does not open if its server had less than the full time.
        if cx.now - acquiring.sent >= acquiring.timeout {
            if silent.len() >= self.majority() {
                self.measured(acquiring.timeout);
            }
            for server in silent {
                self.servers[server].open(error.clone(), cx.now);
            }
        }
    }

    /// Returns the calls of an exchange, and abandons the aliases that it replaces. Servers with an
    /// open circuit breaker are not called and fail at once.
    pub(super) fn sends(
        &mut self,
        id: RequestId,
        stem: u128,
        terms: &ExchangeTerms,
        calls: Calls,
        cx: &mut MajorityCx<'_>,
    ) -> PerServer<Send> {
        let (now, majority) = (cx.now, self.majority());
        let Some(round) = self.rounds.get_mut(&stem) else {
            return PerServer::new();
        };
        let (drawn, lease) = (round.drawn(), round.lease);
        let proposal = match drawn {
            Some(drawn) if cx.breaks(MajorityMutation::ProposesOld) => drawn,
            drawn => self.proposals.beside(drawn, cx.micros, lease),
        };
        // With less than a majority of healthy servers, ask all: ignore the circuit breakers.
        let well = self.servers.iter().filter(|server| server.is_well(now));
        let spares = well.count() >= majority;
        let mut sends = PerServer::new();
        for (server, ask) in calls {
            let (hold, lease) = (&round.hold, round.lease);
            let (token, request) = match ask {
                Ask::Acquire(token, if_busy) => {
                    let group = terms.reader_group.as_ref().and_then(|group| group[server]);
                    let request = KeyRequest::new(hold.alias(token), lease, terms.deadline)
                        .reserved(round.reserved)
                        .reader_group(group);
                    let proposal = Some(proposal);
                    let request = KeyRequest {
                        if_busy,
                        proposal,
                        ..request
                    };
                    (token, ServerRequest::Acquire(request))
                }
                Ask::Poll(token) => (token, ServerRequest::Poll(hold.alias(token))),
                Ask::Renew(token) => {
                    let renewal = Renewal::new(hold.alias(token), lease);
                    (token, ServerRequest::Renew(vec![renewal]))
                }
                Ask::Raise(fence) => {
                    let token = round.held_at(server).unwrap_or(hold.token);
                    let (key, kind) = (hold.key.clone(), hold.mode.kind());
                    (token, ServerRequest::Raise(key, kind, fence))
                }
            };
            let exchange = round.exchange;
            if spares && let Err(error) = self.servers[server].admits(now) {
                let answer = ServerAnswer::Failed(error);
                round.replied(server, token, exchange, answer, now, cx);
                continue;
            }
            let purpose = CallPurpose::Exchange(token, exchange, now);
            sends.push(Send::new(id, server, request, None, purpose));
        }
        self.abandon_unused(stem, cx);
        sends
    }

    /// Converts the outcome of a round to the reply to the caller.
    fn outcome(
        &mut self,
        id: RequestId,
        acquiring: RoundRequest,
        outcome: Outcome,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        let (token, kind) = (acquiring.token, acquiring.kind);
        let is_conversion = matches!(kind, Kind::Conversion);
        let at_once = matches!(outcome, Outcome::Granted(..)) && !matches!(kind, Kind::Poll);
        if !at_once && let Some(round) = self.rounds.get(&token.stem()) {
            let key = &round.hold.key;
            self.contended.note(key, self.round_trip, cx.now);
        }
        let reply = match outcome {
            Outcome::Granted(fence, until, reserved) => {
                self.proposals.seen(fence.later(reserved));
                let ttl = |from| until.saturating_duration_since(from);
                if is_conversion {
                    let grant = Grant::new(fence, ttl(cx.now));
                    return over(Ok(Reply::Convert(ConvertReply::Converted(grant))));
                }
                // Only the last exchange is measured, as a pause between exchanges is no round
                // trip. A conversion is not: it may have sent nothing.
                self.measured(cx.now - acquiring.sent);
                AcquireReply::Granted(Grant::new(fence, ttl(acquiring.begun)).reserved(reserved))
            }
            Outcome::Unreachable => {
                let error = self.unreachable(token);
                return match kind {
                    Kind::All(requests, grants) => {
                        let error = error.of_key(grants.len());
                        self.refuse_all(&requests, Err(error), cx)
                    }
                    // The caller abandons the token.
                    _ => over(Err(error)),
                };
            }
            _ if is_conversion => return over(Err(self.unreachable(token))),
            Outcome::Queued(ttl) => AcquireReply::Queued {
                counter: None,
                holder_ttl: Some(ttl),
            },
            Outcome::Refused(reply) => reply,
            Outcome::Gone => AcquireReply::Busy {
                holder_ttl: None,
                has_waiters: false,
            },
        };
        let goes_on = matches!(
            reply,
            AcquireReply::Granted(_) | AcquireReply::Queued { .. }
        );
        if !goes_on {
            self.rounds.remove(&token.stem());
        }
        match kind {
            Kind::All(requests, grants) => self.next_of_all(id, requests, grants, reply, cx),
            Kind::Poll => over(Ok(Reply::Poll(match reply {
                AcquireReply::Granted(grant) => PollReply::Granted(grant),
                AcquireReply::Queued {
                    counter,
                    holder_ttl,
                } => PollReply::Queued {
                    counter,
                    holder_ttl,
                },
                _ => PollReply::Gone,
            }))),
            Kind::Acquire | Kind::Conversion => over(Ok(Reply::Acquire(reply))),
        }
    }

    /// Continues with the next of several locks, or abandons those that were granted.
    fn next_of_all(
        &mut self,
        id: RequestId,
        requests: Vec<KeyRequest>,
        mut grants: Vec<Grant>,
        reply: AcquireReply,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        let index = grants.len();
        // The TTL counts from this request. The caller counts it from the start of the batch, which
        // is earlier and therefore safe.
        let reply = if let AcquireReply::Granted(grant) = reply {
            grants.push(grant);
            let Some(request) = requests.get(grants.len()).cloned() else {
                return over(Ok(Reply::AcquireAll(AcquireAllReply::Granted(grants))));
            };
            if time_left(&request, cx.now) >= call_timeout(request.lease) {
                let kind = Kind::All(requests, grants);
                let (next, calls) = self.first_exchange(&request, kind, cx);
                self.exchange(id, &next, calls, cx);
                return (InProgress::Round(next), Some(cx.now));
            }
            Err(StoreError::out_of_turn(grants.len(), requests.len()))
        } else {
            let reply = AcquireAllReply::Refused { index, reply };
            Ok(Reply::AcquireAll(reply))
        };
        self.refuse_all(&requests, reply, cx)
    }

    /// Ends a request for several locks, and abandons those that were granted.
    fn refuse_all(
        &mut self,
        requests: &[KeyRequest],
        reply: Result<Reply, StoreError>,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        let rounds = requests.iter();
        let until = rounds.filter_map(|request| self.abandon_round(&request.hold, cx));
        (InProgress::Over(reply, until.max()), None)
    }

    /// The error for a round with too few replies.
    fn unreachable(&self, token: Token) -> StoreError {
        let round = self.round(token);
        round.map_or_else(StoreError::no_reply, |round| {
            self.too_few(|server| round.complaint(server))
        })
    }
}

/// The time that the caller still waits for.
fn time_left(request: &KeyRequest, now: Instant) -> Duration {
    request.deadline.saturating_duration_since(now + STRAGGLE)
}
