//! Votes that their previous holder has passed on to this acquisition while it waits.
//!
//! The coordinator reports to a holder which queue entry is next. With its release, the holder
//! names that acquisition, the heir, to all servers, and each of them passes its vote on to the
//! *name*: the alias in the coordinator's wait queue. So the heir has a majority as soon as the
//! push messages arrive, without a call.
//!
//! No server can have granted the lock to the name before the request was sent that queued it. So a
//! vote that was passed on lasts at least until min(lease, [`Grant::HANDOFF_LEASE`]) after that
//! moment, however late its push message arrives; or for the time that the message says, if that is
//! shorter.

use std::time::Duration;

use super::{
    AbandonedAlias, Cx, Mutation, PerServer, Round, majority,
    vote::{Standing, Status, Vote, VoteState, passed_until},
};
use crate::{
    guard::fence::FencingToken,
    request::spec::{Mode, call_timeout},
    shell::time::Instant,
    store::{Grant, Heir, Token},
};

/// The time for which the next waiter is considered alive after the coordinator has reported it.
pub(super) const NEXT_IS_ALIVE: Duration = Duration::from_secs(1);

/// The number of aliases of an acquisition that push messages may use up. Other programs may be
/// able to send any number, and an alias must not be issued again.
const MOST_BY_MESSAGES: u16 = 10_000;

/// The state of the name at a server other than the coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Passed {
    /// It was not used there.
    #[default]
    Never,
    Vote(Vote),
    /// It is or was the alias there, or was abandoned. No further vote is passed on to it.
    Over,
    /// Its release is awaited. A push message has arrived in the meantime if `is_late`. A message
    /// with a number beyond `end` is about a vote that was passed on later. While the number at
    /// this server is not known, `end` is that of the hold; the server may lag behind it.
    Releasing {
        is_late: bool,
        end: Option<FencingToken>,
    },
    Released {
        end: Option<FencingToken>,
    },
}

impl Passed {
    /// Applies a push message that arrives after the end of the hold.
    pub(crate) fn pushed_late(&mut self, number: FencingToken) -> Pushed {
        match self {
            Self::Releasing { is_late, end } if *end >= Some(number) => {
                (*is_late, *end) = (true, Some(number));
            }
            Self::Released { end } if *end >= Some(number) => *end = Some(number),
            _ => return Pushed::Unwanted,
        }
        Pushed::Recorded
    }

    /// Records the reply to the release. Returns whether the name has to be abandoned: the vote was
    /// passed on to it after the release had been executed.
    pub(crate) fn released(&mut self, is_released: bool) -> bool {
        let (is_late, end) = match *self {
            Self::Releasing { is_late, end } => (is_late, end),
            Self::Released { end } => (false, end),
            _ => (false, None),
        };
        *self = if is_released {
            Self::Released { end }
        } else {
            Self::Over
        };
        is_late && !is_released
    }
}

/// The meaning of a push message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The acquisition polls after this time.
    PollAfter(Duration),
    Recorded,
    /// The server holds the lock for an alias that is no longer used there.
    Unwanted,
}

impl Round {
    /// The alias in the coordinator's wait queue, and when it was first sent.
    fn name(&self) -> Option<(Token, Instant)> {
        let state = &self.states[self.coordinator?];
        let since = state
            .asked_since
            .filter(|_| self.hold.mode == Mode::Exclusive)?;
        Some((state.token, since))
    }

    /// A vote that was passed on to the name. A holder that a forged message has deceived passes it
    /// on for a shorter time than the lease, as the servers say in their messages.
    fn vote_of(&self, grant: Grant, since: Instant) -> Vote {
        Vote::until(grant, passed_until(since, self.lease.min(grant.ttl)))
    }

    /// Whether a release may name an alias of this acquisition as its heir.
    pub(crate) fn may_be_named(&self) -> bool {
        // An acquire that is still on its way may queue it after the end of the acquisition.
        self.may_be_named || self.all_known().any(|alias| self.may_name(&alias))
    }

    /// Whether a release may name this alias: it may be a writer in a wait queue.
    pub(super) fn may_name(&self, alias: &AbandonedAlias) -> bool {
        alias.may_be_queued && (self.hold.mode == Mode::Exclusive || alias.was_writer)
    }

    /// Whether the coordinator has granted the lock to this acquisition.
    fn is_first(&self) -> bool {
        self.coordinator.is_some_and(|coordinator| {
            let state = &self.states[coordinator];
            state.pushed.is_some() || state.held().is_some()
        })
    }

    /// Whether a vote that lasts until then is enough to hold the lock. With less time than a
    /// renewal may take, the servers are asked.
    fn is_enough(&self, until: Instant, cx: &Cx<'_>) -> bool {
        let needed = match cx.breaks(Mutation::ConfirmsNothing) {
            false => call_timeout(self.lease),
            true => Duration::ZERO,
        };
        until > cx.now + needed
    }

    /// Records a grant that a server has pushed. `is_named` and `next` are those of
    /// [`StoreEvent::Granted`](crate::store::StoreEvent::Granted).
    pub(crate) fn pushed(
        &mut self,
        server: usize,
        token: Token,
        grant: Grant,
        is_named: bool,
        next: Option<&Heir>,
        cx: &Cx<'_>,
    ) -> Pushed {
        let is_coordinator = self.coordinator == Some(server);
        let name = self.name().filter(|(name, _)| *name == token);
        if self.closed {
            // An earlier name may still be the alias at a server, and be named again.
            return match name {
                Some(_) => self.passed[server].pushed_late(grant.fence),
                None => Pushed::Unwanted,
            };
        }
        let state = &mut self.states[server];
        if state.token == token {
            if is_coordinator {
                self.next = next.map(|next| (next.clone(), cx.now));
                self.is_named = is_named;
            }
            match state.standing {
                Standing::Asked | Standing::Queued => state.pushed = Some(grant),
                Standing::Holds(vote) => {
                    // The vote had ended, and was passed on once more.
                    if vote.end < grant.fence {
                        let vote = Vote::until(grant, vote.until).unproven();
                        state.standing = Standing::Holds(vote);
                    }
                    return Pushed::Recorded;
                }
                Standing::Outside => {
                    if self.names < MOST_BY_MESSAGES {
                        state.standing = Standing::Asked;
                        self.abandon_at(server);
                    }
                    return Pushed::Recorded;
                }
            }
            if self.fence.is_some() {
                if let Some((_, since)) = self.name().filter(|_| is_coordinator) {
                    let vote = self.vote_of(grant, since).unproven();
                    if self.is_enough(vote.until, cx) {
                        self.take_passed(server, vote, cx.now);
                    }
                }
                return Pushed::Recorded;
            }
            // The other servers do not grant it on their own.
            if !is_named || !is_coordinator {
                return Pushed::PollAfter(Duration::ZERO);
            }
            return self.polls_after(server, cx);
        }
        let Some((_, since)) = name else {
            // A message for an alias that was not sent yet is forged. Its abandonment could be
            // executed after the alias is sent, and end a vote that counts.
            let is_next = |it: &VoteState| it.token == token && it.asked_since.is_none();
            let is_issued = self.hold.token.number_of(token) <= self.names;
            return match is_issued && !self.states.iter().any(is_next) {
                true => Pushed::Unwanted,
                false => Pushed::Recorded,
            };
        };
        if !self.may_be_passed(server, cx) {
            return Pushed::Unwanted;
        }
        let vote = if cx.breaks(Mutation::CountsFromPush) {
            Vote::until(grant, cx.now + self.lease.min(Grant::HANDOFF_LEASE))
        } else {
            self.vote_of(grant, since)
        };
        if self.fence.is_none() {
            self.passed[server] = Passed::Vote(vote);
            return self.polls_after(server, cx);
        }
        if !self.is_wanted(vote, server, cx) {
            self.passed[server] = Passed::Over;
            return Pushed::Unwanted;
        }
        self.take_passed(server, vote.unproven(), cx.now);
        Pushed::Recorded
    }

    fn may_be_passed(&self, server: usize, cx: &Cx<'_>) -> bool {
        self.passed[server] != Passed::Over || cx.breaks(Mutation::CountsAbandonedName)
    }

    /// The time after which the acquisition polls, as the server with this number has voted.
    fn polls_after(&self, server: usize, cx: &Cx<'_>) -> Pushed {
        let votes = self.votes_without_a_call(cx).len();
        let has_majority = votes >= majority(self.states.len());
        let is_from_coordinator = self.coordinator == Some(server);
        match (has_majority, self.is_first()) {
            (true, true) => Pushed::PollAfter(Duration::ZERO),
            // This vote is no longer enough.
            (false, true) if is_from_coordinator && votes == 0 => Pushed::PollAfter(Duration::ZERO),
            // The other messages are on their way.
            (true, false) => Pushed::PollAfter(self.time_outs.grace),
            (false, true) if is_from_coordinator => Pushed::PollAfter(self.time_outs.grace),
            (false, _) => Pushed::Recorded,
        }
    }

    /// The votes of which the acquisition knows by push messages alone, with the number that most
    /// of them have. A number in a single message is no proof that its server knows it: it may be
    /// forged.
    fn votes_without_a_call(&self, cx: &Cx<'_>) -> PerServer<(usize, Vote)> {
        let name = self.name();
        let vote = |server: usize| {
            let (_, since) = name?;
            let vote = match self.passed[server] {
                Passed::Vote(vote) => vote,
                // If the others were not to pass their votes on, their messages are forged: that of
                // one server and a grant by the coordinator would be a majority.
                _ if self.coordinator == Some(server) && self.is_named => {
                    self.vote_of(self.states[server].pushed?, since)
                }
                _ => return None,
            };
            self.is_enough(vote.until, cx).then_some((server, vote))
        };
        let mut votes: PerServer<_> = (0..self.states.len()).filter_map(vote).collect();
        let is_same = |one: Vote, other: Vote| (one.fence, one.end) == (other.fence, other.end);
        let count = |it: Vote| votes.iter().filter(|(_, vote)| is_same(*vote, it)).count();
        let most = votes
            .iter()
            .map(|(_, vote)| *vote)
            .max_by_key(|it| count(*it));
        votes.retain(|(_, vote)| most.is_some_and(|most| is_same(*vote, most)));
        votes
    }

    /// Takes the votes of which the acquisition knows by push messages alone, if they are a
    /// majority.
    pub(super) fn wins_without_a_call(&mut self, cx: &Cx<'_>) -> bool {
        let votes = self.votes_without_a_call(cx);
        if self.fence.is_some() || votes.len() < self.majority(cx) {
            return false;
        }
        for (server, vote) in votes {
            self.take_passed(server, vote, cx.now);
            self.states[server].status = Status::Voted;
        }
        true
    }

    /// Makes the name the alias at a server that has passed its vote on to it.
    fn take_passed(&mut self, server: usize, vote: Vote, now: Instant) {
        self.use_name(server);
        let state = &mut self.states[server];
        state.standing = Standing::Holds(vote);
        state.pushed = None;
        state.straggler_until = None;
        // Replies to earlier requests do not show the vote.
        state.as_of = Some(now);
    }

    /// Makes the name the alias at a server.
    fn use_name(&mut self, server: usize) {
        let (Some((name, _)), Some(coordinator)) = (self.name(), self.coordinator) else {
            return;
        };
        if self.states[server].token != name {
            self.abandon_at(server);
            // In the queue of another server, it may be named at the coordinator as well.
            self.states[coordinator].is_name = true;
            let asked_since = self.states[coordinator].asked_since;
            let state = &mut self.states[server];
            (state.token, state.is_name, state.asked_since) = (name, true, asked_since);
            self.passed[server] = Passed::Over;
        }
    }

    /// Uses the name at all servers from the start, which rule 34 forbids.
    pub(crate) fn use_name_at_once(&mut self) {
        for state in &mut self.states {
            state.token = self.hold.token;
        }
    }

    /// Prepares a request to a server that is to vote for this acquisition. A server that has
    /// passed its vote on, or may have as the coordinator has granted the lock, is asked under the
    /// name.
    pub(super) fn prepare(&mut self, server: usize, cx: &Cx<'_>) {
        match self.passed[server] {
            Passed::Vote(_) => self.use_name(server),
            Passed::Never
                if self.is_first()
                    && self.coordinator != Some(server)
                    && self.states[server].standing == Standing::Outside =>
            {
                self.use_name(server);
            }
            _ => {}
        }
        if self.states[server].held().is_some() && self.has_ended(server, cx) {
            self.abandon_at(server);
        }
    }

    /// Whether a vote that was passed on is taken beside a majority. With another number it is
    /// asked for anew.
    fn is_wanted(&self, vote: Vote, server: usize, cx: &Cx<'_>) -> bool {
        self.is_enough(vote.until, cx)
            && self.states[server].standing == Standing::Outside
            && Some(vote.fence) == self.fence
    }

    /// Takes or abandons the votes that were passed on and were not needed for the majority.
    pub(super) fn settle_passed(&mut self, cx: &Cx<'_>) {
        for server in 0..self.states.len() {
            if let Passed::Vote(vote) = self.passed[server] {
                if self.is_wanted(vote, server, cx) {
                    self.take_passed(server, vote.unproven(), cx.now);
                } else {
                    self.abandon_passed(server);
                }
            }
        }
    }

    /// Abandons the name at a server that has passed its vote on to it.
    pub(super) fn abandon_passed(&mut self, server: usize) {
        if let (Passed::Vote(_), Some((name, _))) = (self.passed[server], self.name()) {
            self.abandoned.push(AbandonedAlias::of_vote(server, name));
            self.passed[server] = Passed::Over;
        }
    }

    /// The acquisition to which a release now passes the votes on.
    pub(crate) fn heir(&self, now: Instant) -> Option<Heir> {
        let (next, reported_at) = self.next.as_ref()?;
        let is_alive = now - *reported_at < NEXT_IS_ALIVE;
        (is_alive && self.hold.mode == Mode::Exclusive).then(|| next.clone())
    }

    /// The name, as the alias of a server that may still receive a vote for it.
    pub(crate) fn passed_later(&self, server: usize) -> Option<AbandonedAlias> {
        let (name, _) = self.name()?;
        let may_be = matches!(self.passed[server], Passed::Never | Passed::Vote(_));
        may_be.then(|| AbandonedAlias::of_vote(server, name))
    }

    /// Records the release of an alias at a server.
    pub(crate) fn releases(&mut self, alias: &AbandonedAlias) {
        if self.name().is_some_and(|(name, _)| name == alias.token) {
            let state = &self.states[alias.server];
            let end = match (state.standing, self.passed[alias.server]) {
                (Standing::Holds(vote), _) | (_, Passed::Vote(vote)) => Some(vote.end),
                // An acquire is granted in a reply.
                (Standing::Asked, _) => None,
                // The number of this vote is larger than one that has ended. It may be smaller than
                // that of the hold all the same.
                _ => state
                    .pushed
                    .map(|grant| grant.fence)
                    .or(state.ended)
                    .or(self.fence),
            };
            let is_late = false;
            self.passed[alias.server] = Passed::Releasing { is_late, end };
        }
    }

    /// Records the reply to the release of an alias at a server. Returns whether the alias has to
    /// be abandoned.
    pub(crate) fn released(&mut self, server: usize, alias: Token, is_released: bool) -> bool {
        let is_name = self.name().is_some_and(|(name, _)| name == alias);
        is_name && self.passed[server].released(is_released)
    }

    /// Records that a lock was revoked at a server before this acquisition has won.
    pub(crate) fn revoked(&mut self, server: usize, alias: Token) {
        if self.fence.is_none() {
            if self.states[server].token == alias {
                self.states[server].pushed = None;
            } else if self.name().is_some_and(|(name, _)| name == alias) {
                self.abandon_passed(server);
            }
        }
    }

    /// The name, and its state at each server.
    pub(crate) fn into_passed(self) -> (Option<Token>, PerServer<Passed>) {
        (self.name().map(|(name, _)| name), self.passed)
    }
}
