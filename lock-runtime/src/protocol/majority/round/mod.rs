//! One acquisition at several servers, as its client sees it. This is a state machine without I/O:
//! it is given the time and the replies.
//!
//! Only votes count: a majority of the servers must hold the lock for this acquisition. One of the
//! servers, the *coordinator*, also keeps the wait queue: waiters queue there, and a waiter to
//! which the coordinator hands off the lock asks the other servers. So clients that want the same
//! lock do not split the votes as long as they can reach the coordinator. If they cannot, votes
//! alone decide, and a client without a majority gives up its votes after a randomized time.
//!
//! At each server the acquisition goes by an *alias*: by its token, until that is abandoned there,
//! and then by a token that shares its stem. An abandoned alias is never used again.

mod ask;
mod decide;
mod message;
#[cfg(test)]
mod tests;
mod vote;

use std::{mem, time::Duration};

pub(crate) use self::message::{
    Ask, Calls, KnownAlias, Next, Outcome, PerServer, ServerAnswer, TimeOuts,
};
use self::vote::{Obstacle, Status, Vote, VoteStanding, VoteState};
use super::{MajorityCx, MajorityMutation, exchange::count::majority};
use crate::{
    guard::fence::FencingToken,
    protocol::{STRAGGLE, held::lease::drift},
    request::spec::Mode,
    shell::time::Instant,
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, RaiseReply, RenewReply, Renewal, StoreError,
        Token,
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Only the coordinator was asked.
    Coordinator,
    /// All servers were asked at once.
    All,
    /// A majority has voted for this acquisition, and the coordinator for another one. All servers
    /// are asked again at this time.
    Aside(Instant),
    /// The coordinator holds the lock for this acquisition, and the other servers were asked.
    Head,
    /// A fencing token is being written back to the servers that have another number.
    Writing(FencingToken),
    Over,
}

/// The state of one acquisition.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) hold: Hold,
    pub(super) lease: Duration,
    /// The longest lease requested so far: everything that a server holds expires within it.
    pub(super) longest_lease: Duration,
    /// The release has begun: no more votes are requested (rule 13).
    pub(super) closed: bool,
    /// The number of fencing tokens to reserve after that of the grant.
    pub(super) reserved: u32,
    states: PerServer<VoteState>,
    /// The number of aliases used so far, beyond the token itself.
    names: u16,
    /// The number of this exchange, which each of its requests carries. It distinguishes its
    /// replies from those of earlier exchanges.
    pub(super) exchange: u32,
    /// The index of the coordinator.
    pub(super) coordinator: Option<usize>,
    pub(super) if_busy: IfBusy,
    /// The caller follows a refusal with a request that queues.
    then_queues: bool,
    /// The acquisition was in the queue before this exchange.
    polls: bool,
    phase: Phase,
    /// The start of this exchange.
    since: Instant,
    /// When this exchange reached a majority; the coordinator's reply may be outstanding.
    majority_at: Option<Instant>,
    /// The coordinator's vote for another acquisition, as of the last check.
    obstacle: Option<Obstacle>,
    /// The same as of a check in which a majority was free nevertheless.
    was_free: Option<Obstacle>,
    /// When to check the other servers if the coordinator's vote stays the same, and the pause
    /// until the check after that.
    check_at: Instant,
    check_pause: Duration,
    /// The end of the caller's wait.
    answer_by: Instant,
    time_outs: TimeOuts,
    /// The time since when the acquisition has had no majority at the head of the queue.
    headless_since: Option<Instant>,
    /// When all servers were asked last.
    asked_all_at: Instant,
    fence: Option<FencingToken>,
    /// The end of the validity that the grant or the latest renewal has given.
    pub(super) valid_until: Option<Instant>,
    /// A reader has or counts a number that it may have got before this exchange, or that an
    /// earlier waiter may have got. Others may have received larger fencing tokens since, so it
    /// draws a new one.
    redraws: bool,
    /// The aliases that are no longer used, to be ended.
    abandoned: PerServer<KnownAlias>,
}

/// The pause after which a waiter in the coordinator's queue also asks the other servers, although
/// the coordinator has not admitted it: the coordinator may be held up by a client that has no
/// other vote. The waiter asks earlier if the coordinator does not hand off the lock.
const CHECK_OTHERS_EVERY: Duration = Duration::from_millis(700);

/// The shortest time for which a majority waits for the coordinator's reply.
const SHORTEST_GRACE: Duration = Duration::from_micros(300);

/// How long to wait for the coordinator's reply, once a majority has replied after `took`.
pub(super) fn grace(took: Duration) -> Duration {
    took.max(SHORTEST_GRACE)
}

impl Round {
    /// Creates an acquisition that has not asked any server yet. If `coordinator` is given, this
    /// server is the coordinator.
    pub(crate) fn new(
        request: &KeyRequest,
        servers: usize,
        coordinator: Option<usize>,
        time_outs: TimeOuts,
        now: Instant,
    ) -> Self {
        let (hold, deadline) = (request.hold.clone(), request.deadline);
        // A reader has a single fencing token.
        let is_writer = hold.mode == Mode::Exclusive;
        Self {
            states: (0..servers).map(|_| VoteState::new(hold.token)).collect(),
            names: 0,
            exchange: 0,
            hold,
            lease: request.lease,
            longest_lease: request.lease,
            closed: false,
            reserved: if is_writer { request.reserved } else { 0 },
            polls: false,
            coordinator,
            if_busy: request.if_busy,
            then_queues: request.then_queues,
            phase: Phase::Over,
            since: now,
            majority_at: None,
            obstacle: None,
            was_free: None,
            check_at: now,
            check_pause: time_outs.poll,
            answer_by: deadline.checked_sub(STRAGGLE).unwrap_or(deadline),
            time_outs,
            headless_since: None,
            asked_all_at: now,
            fence: None,
            valid_until: None,
            redraws: false,
            abandoned: PerServer::new(),
        }
    }

    /// The largest number given to this acquisition, while it has no fencing token yet.
    pub(crate) fn drawn(&self) -> Option<FencingToken> {
        let number_of = |state: &VoteState| state.held().map(|vote| vote.fence).or(state.pushed);
        let drawn = self.states.iter().filter_map(number_of).max();
        drawn.filter(|_| self.fence.is_none())
    }

    /// Whether a renewal at a server extends this hold. A server with a larger number may have
    /// executed an acquire late, after another client has held the lock. So its vote counts only if
    /// the reply arrives while the hold is valid without it.
    pub(super) fn extends(&self, server: usize, now: Instant) -> bool {
        let vote = self.states[server].held();
        vote.is_some_and(|vote| Some(vote.fence) <= self.fence)
            || (self.valid_until).is_some_and(|until| now + drift(self.lease) < until)
    }

    /// Returns a renewal of the vote of a server.
    pub(super) fn renewal(&mut self, server: usize, alias: Hold, lease: Duration) -> Renewal {
        let at_most = self.states[server].correction.at_most(self.longest_lease);
        Renewal::new(alias, lease).at_most(at_most)
    }

    /// Returns how much of the TTL counts that a server has reported for its vote.
    pub(super) fn counted(&mut self, server: usize, ttl: Duration) -> Duration {
        let correction = &mut self.states[server].correction;
        correction.counted(ttl, self.longest_lease)
    }

    /// The alias at a server that holds the lock for this acquisition.
    pub(crate) fn held_at(&self, server: usize) -> Option<Token> {
        let state = &self.states[server];
        state.held().map(|_| state.token)
    }

    /// Returns whether a grant for this time lasts until a renewal of it is answered.
    #[cfg(all(test, feature = "redis"))]
    pub(crate) fn lasts(&self, ttl: Duration) -> bool {
        ttl + drift(self.lease) > crate::request::spec::call_timeout(self.lease)
    }

    /// The expiry of the latest vote of each server, of whichever exchange.
    pub(super) fn expiries(&self) -> impl Iterator<Item = Instant> + '_ {
        let votes = self.states.iter().filter_map(VoteState::held);
        votes.map(|vote| vote.until)
    }

    /// The aliases that the servers may know.
    pub(crate) fn known(&self) -> impl Iterator<Item = (usize, Token)> + '_ {
        self.all_known().map(|alias| (alias.server, alias.token))
    }

    /// The same, with all that is needed to end them.
    pub(crate) fn all_known(&self) -> impl Iterator<Item = KnownAlias> + '_ {
        let states = self.states.iter().enumerate();
        states.filter_map(|(server, state)| state.known_at(server))
    }

    /// Makes this acquisition a reader, before the servers convert it.
    pub(crate) fn converts(&mut self) {
        self.hold.mode = Mode::Shared;
        for state in &mut self.states {
            state.was_writer = true;
        }
    }

    /// Returns whether this acquisition was that of a writer.
    pub(super) fn is_converted(&self) -> bool {
        self.states.iter().any(|state| state.was_writer)
    }

    /// Records the servers that have converted the writer to a reader, on requests sent at `sent`.
    /// Begins the exchange that determines its fencing token.
    pub(crate) fn converted(&mut self, grants: &[(usize, Grant)], sent: Instant, now: Instant) {
        self.begin_exchange(now);
        self.phase = Phase::Head;
        for (server, grant) in grants {
            let state = &mut self.states[*server];
            state.standing = VoteStanding::Holds(Vote::new(*grant, sent));
            state.as_of = Some(sent);
            state.status = Status::Voted;
        }
    }

    /// Takes the aliases that are to be abandoned.
    pub(crate) fn take_abandoned(&mut self) -> PerServer<KnownAlias> {
        mem::take(&mut self.abandoned)
    }

    fn majority(&self, cx: &MajorityCx<'_>) -> usize {
        majority(self.states.len()) - usize::from(cx.breaks(MajorityMutation::MajorityOffByOne))
    }

    /// The acquisition, if it waits in the queue of this server.
    pub(crate) fn waiting_at(&self, server: usize) -> Option<Hold> {
        let waits = self.fence.is_none() && self.states[server].standing == VoteStanding::Queued;
        waits.then(|| self.hold.clone())
    }

    /// Applies the reply of a server to the request sent at `sent`, in the exchange with this
    /// number, under the alias `token`.
    pub(crate) fn replied(
        &mut self,
        server: usize,
        token: Token,
        exchange: u32,
        answer: ServerAnswer,
        sent: Instant,
        cx: &MajorityCx<'_>,
    ) {
        let is_current = exchange == self.exchange;
        let state = &mut self.states[server];
        let believes = cx.breaks(MajorityMutation::BelievesTheAbandoned);
        let (is_ours, is_current) = (believes || state.token == token, believes || is_current);
        // The latest request determines the state at the server, so replies to earlier ones are
        // outdated. A raised number stays raised.
        let is_outdated = state.as_of.is_some_and(|as_of| sent < as_of)
            && !matches!(answer, ServerAnswer::Raise(..));
        if !is_ours || is_outdated {
            return;
        }
        let renewed = matches!(answer, ServerAnswer::Renew(RenewReply::Renewed { .. }));
        let held = |grant| (VoteStanding::Holds(Vote::new(grant, sent)), Status::Voted);
        let (standing, status) = match answer {
            ServerAnswer::Acquire(AcquireReply::Granted(grant)) => held(grant),
            ServerAnswer::Acquire(reply @ AcquireReply::Queued { .. }) => {
                (VoteStanding::Queued, Status::Denied(reply))
            }
            ServerAnswer::Acquire(reply) => (VoteStanding::Outside, Status::Denied(reply)),
            // The notification was outdated: the acquisition still waits.
            ServerAnswer::Renew(RenewReply::Gone) if state.standing == VoteStanding::Queued => {
                let reply = AcquireReply::Queued {
                    counter: None,
                    holder_ttl: None,
                };
                (VoteStanding::Queued, Status::Denied(reply))
            }
            ServerAnswer::Gone | ServerAnswer::Renew(RenewReply::Gone) => {
                (VoteStanding::Outside, Status::Gone)
            }
            ServerAnswer::Renew(RenewReply::Renewed { ttl }) => match state.standing {
                VoteStanding::Holds(vote) => {
                    // No renewal shortens the lease, but the reply to an early one may come late.
                    let until = vote.until.max(sent + ttl);
                    (VoteStanding::Holds(Vote { until, ..vote }), Status::Voted)
                }
                // Without a fencing token it is not a grant yet. The next request obtains one. That
                // of a message may be forged.
                standing => (standing, Status::None),
            },
            ServerAnswer::Raise(number, reply) => {
                let VoteStanding::Holds(vote) = &mut state.standing else {
                    return;
                };
                let latest = match reply {
                    RaiseReply::Raised => number,
                    RaiseReply::NotRaised { latest } => latest,
                };
                vote.end = vote.end.max(latest);
                // A writer's own number begins its block; the raised number ends it.
                if reply == RaiseReply::Raised && self.hold.mode != Mode::Exclusive {
                    vote.fence = vote.fence.max(number);
                }
                // A server is not sent another number while its reply is awaited.
                if is_current && state.is_awaited() {
                    state.status = Status::Voted;
                }
                return;
            }
            ServerAnswer::Failed(error) => {
                // An unsent acquire leaves nothing behind, but the server keeps its earlier state.
                if error.is_unsent() && state.standing == VoteStanding::Asked {
                    state.standing = VoteStanding::Outside;
                    state.straggler_until = None;
                }
                if is_current && state.is_awaited() {
                    self.failed(server, error, cx);
                }
                return;
            }
        };
        // A reply that arrives after its exchange updates the state of the server, but is no vote.
        let counts = is_current && state.is_awaited();
        let is_gone = matches!(status, Status::Gone);
        if counts {
            state.status = status;
        }
        if is_gone {
            // The alias was used at this server, so it must not be used again (rule 9).
            state.standing = VoteStanding::Asked;
            return self.abandon_at(server);
        }
        state.as_of = Some(sent);
        state.straggler_until = None;
        state.pushed = None;
        state.standing = standing;
        state.renewed = renewed;
    }

    /// Records a grant that a server has pushed. Returns whether the acquisition is to poll: it
    /// waits for the grant, and the other servers do not grant it on their own.
    pub(crate) fn pushed(&mut self, server: usize, token: Token, grant: Grant) -> bool {
        let state = &mut self.states[server];
        let awaits = matches!(state.standing, VoteStanding::Asked | VoteStanding::Queued);
        if self.closed || state.token != token || !awaits {
            return false;
        }
        // The reply to a poll states the last of the numbers that the server has drawn.
        state.pushed = Some(grant.fence.later(grant.reserved));
        self.fence.is_none()
    }

    /// Stops waiting for the servers that have not replied yet, and returns them.
    pub(crate) fn time_is_up(
        &mut self,
        error: &StoreError,
        cx: &MajorityCx<'_>,
    ) -> PerServer<usize> {
        let mut silent = PerServer::new();
        for server in 0..self.states.len() {
            if self.states[server].is_awaited() {
                self.failed(server, error.clone(), cx);
                silent.push(server);
            }
        }
        silent
    }

    fn failed(&mut self, server: usize, error: StoreError, cx: &MajorityCx<'_>) {
        let state = &mut self.states[server];
        state.status = Status::Failed(error);
        if cx.breaks(MajorityMutation::AddsUpExchanges)
            && let VoteStanding::Holds(vote) = &mut state.standing
        {
            vote.until = self.since + self.lease;
            state.status = Status::Voted;
        }
    }

    /// Abandons all aliases.
    pub(crate) fn abandon_all(&mut self) {
        (0..self.states.len()).for_each(|server| self.abandon_at(server));
    }

    fn abandon_at(&mut self, server: usize) {
        let Some(known) = self.states[server].known_at(server) else {
            return;
        };
        self.abandoned.push(known);
        self.names = self.names.wrapping_add(1);
        let next = VoteState::new(self.hold.token.alias(self.names));
        let state = &mut self.states[server];
        state.status = mem::replace(state, next).status;
    }
}
