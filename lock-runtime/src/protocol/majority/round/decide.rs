//! The decisions of a round: when it has won, when it yields, which servers to ask next.

use std::{mem, time::Duration};

use super::{
    super::{MajorityCx, MajorityMutation, exchange::count::nth_largest},
    Ask, CHECK_OTHERS_EVERY, Next, Outcome, PerServer, Phase, Round, grace,
    vote::{Obstacle, Status, Vote, VoteStanding, VoteState},
};
use crate::{
    guard::fence::FencingToken,
    request::spec::Mode,
    shell::time::Instant,
    store::{AcquireReply, IfBusy, StoreError},
};

type Beyond<'a> = &'a dyn Fn(FencingToken) -> FencingToken;

impl Round {
    pub(super) fn votes(&self) -> impl Iterator<Item = Vote> + '_ {
        self.states.iter().filter_map(VoteState::vote)
    }

    fn count_of(&self, is_counted: impl Fn(&VoteState) -> bool) -> usize {
        self.states.iter().filter(|state| is_counted(state)).count()
    }

    pub(super) fn awaited(&self) -> usize {
        self.count_of(VoteState::is_awaited)
    }

    /// Determines the next step.
    ///
    /// `beyond` returns a fencing token larger than its argument.
    pub(crate) fn next(
        &mut self,
        deadline: Instant,
        beyond: Beyond<'_>,
        cx: &MajorityCx<'_>,
    ) -> Next {
        match self.phase {
            Phase::Coordinator => self.next_of_coordinator(deadline, cx),
            Phase::All => self.next_of_all(deadline, beyond, cx),
            Phase::Aside(until) if cx.now < until => Next::Pause(until),
            Phase::Aside(_) => {
                self.begin_exchange(cx.now);
                Next::Send(self.ask_all(deadline, cx.now))
            }
            Phase::Head => self.next_at_head(beyond, cx),
            Phase::Writing(fence) => self.next_of_writing(fence, beyond, cx),
            Phase::Over => self.over(Outcome::Gone),
        }
    }

    fn coordinator_status(&self) -> Option<&Status> {
        Some(&self.states[self.coordinator?].status)
    }

    /// The coordinator, if the acquisition waits in its queue.
    pub(super) fn waits_at(&self) -> Option<usize> {
        (self.coordinator)
            .filter(|coordinator| self.states[*coordinator].standing == VoteStanding::Queued)
    }

    pub(super) fn next_of_coordinator(&mut self, deadline: Instant, cx: &MajorityCx<'_>) -> Next {
        match self.coordinator_status().cloned() {
            Some(Status::Awaited) => Next::Wait(None),
            Some(Status::Voted) => {
                self.phase = Phase::Head;
                self.ask_others(IfBusy::Queue, deadline)
            }
            Some(Status::Denied(AcquireReply::Queued { holder_ttl, .. })) => {
                let stands_still = self.stands_still(cx);
                if stands_still && cx.now >= self.check_at
                    || cx.now - self.asked_all_at >= CHECK_OTHERS_EVERY
                {
                    self.phase = Phase::All;
                    self.asked_all_at = cx.now;
                    self.check_pause = (self.check_pause * 2).min(CHECK_OTHERS_EVERY);
                    self.check_at = cx.now + self.check_pause;
                    self.ask_others(IfBusy::Refuse, deadline)
                } else if self.states.iter().any(|state| state.held().is_some()) {
                    // The reply to an earlier check was late. The head may need these votes.
                    self.yield_to_queue(cx)
                } else {
                    self.waits_in_queue(holder_ttl, cx)
                }
            }
            Some(Status::Denied(reply @ AcquireReply::Busy { .. })) => {
                self.give_up(Outcome::Refused(reply))
            }
            // Votes alone decide this exchange. The next attempt chooses its coordinator anew.
            Some(Status::Failed(_) | Status::Denied(_)) if !self.polls => {
                self.phase = Phase::All;
                self.ask_others(IfBusy::Refuse, deadline)
            }
            Some(Status::Gone | Status::Failed(_) | Status::Denied(_) | Status::None) | None => {
                self.give_up(Outcome::Gone)
            }
        }
    }

    /// Asks all servers but the coordinator to vote. Where another client holds the lock, the
    /// acquisition joins the queue of that server, or does not join a queue in which it does not
    /// wait yet.
    fn ask_others(&mut self, if_busy: IfBusy, deadline: Instant) -> Next {
        Next::Send(self.ask_each(|round, server| {
            let is_other = Some(server) != round.coordinator;
            is_other.then(|| round.count(server, if_busy, deadline))
        }))
    }

    pub(super) fn next_of_all(
        &mut self,
        deadline: Instant,
        beyond: Beyond<'_>,
        cx: &MajorityCx<'_>,
    ) -> Next {
        let (votes, awaited) = (self.votes().count(), self.awaited());
        let coordinator = self.coordinator_status().cloned();
        if votes >= self.majority(cx) {
            let majority_at = *self.majority_at.get_or_insert(cx.now);
            let until = majority_at + grace(majority_at - self.since);
            return match coordinator {
                Some(Status::Awaited) if cx.now < until => Next::Wait(Some(until)),
                Some(status) if status.taken().is_some() => {
                    self.free_but_for_coordinator(beyond, cx)
                }
                _ => self.has_majority(beyond, cx),
            };
        }
        if votes + awaited >= self.majority(cx) || matches!(coordinator, Some(Status::Awaited)) {
            return Next::Wait(None);
        }
        // With servers that fail at once, the other replies still show whether the lock is held.
        if !self.is_beaten(cx) && self.answered() + awaited >= self.majority(cx) {
            return Next::Wait(None);
        }
        self.was_free = None;
        match coordinator {
            Some(Status::Voted) if self.if_busy == IfBusy::Queue && self.is_beaten(cx) => {
                self.phase = Phase::Head;
                Next::Send(self.ask_each(|round, server| {
                    let status = &round.states[server].status;
                    let is_busy = matches!(status, Status::Denied(AcquireReply::Busy { .. }));
                    is_busy.then(|| round.ask(server, IfBusy::Queue, deadline))
                }))
            }
            Some(Status::Denied(AcquireReply::Queued { .. })) => self.yield_to_queue(cx),
            _ if self.is_beaten(cx) => {
                let reply = self.refusal(cx);
                self.give_up(Outcome::Refused(reply))
            }
            _ => self.give_up(Outcome::Unreachable),
        }
    }

    pub(super) fn next_at_head(&mut self, beyond: Beyond<'_>, cx: &MajorityCx<'_>) -> Next {
        let (votes, awaited) = (self.votes().count(), self.awaited());
        if votes >= self.majority(cx) {
            return self.has_majority(beyond, cx);
        }
        if votes + awaited >= self.majority(cx) {
            return Next::Wait(None);
        }
        if !self.is_beaten(cx) {
            // The votes are kept: the round may go on with them, or the caller abandons them.
            return self.over(Outcome::Unreachable);
        }
        let since = *self.headless_since.get_or_insert(cx.now);
        // While no other client can have a majority, one of them has to give up its votes.
        let waits = self.count_of(|state| state.standing == VoteStanding::Queued);
        let time_outs = if waits >= self.majority(cx) {
            self.time_outs.beaten
        } else {
            self.time_outs.split
        };
        match (since + time_outs).checked_duration_since(cx.now) {
            Some(left) if !left.is_zero() && (votes > 0 || waits > 0) => {
                // Some of the votes for others may expire earlier.
                let holder_ttl = self.free_in(cx).map_or(left, |ends| ends.min(left));
                self.over(Outcome::Queued(holder_ttl))
            }
            _ => self.give_up(Outcome::Gone),
        }
    }

    pub(super) fn next_of_writing(
        &mut self,
        fence: FencingToken,
        beyond: Beyond<'_>,
        cx: &MajorityCx<'_>,
    ) -> Next {
        let agreed = self.votes().filter(|vote| self.is_for(vote, fence, cx));
        let (agreed, awaited) = (agreed.count(), self.awaited());
        if agreed >= self.majority(cx) {
            return self.agree(fence, cx);
        }
        if agreed + awaited >= self.majority(cx) {
            return Next::Wait(None);
        }
        // Others have taken the number or a larger one. The new number is larger than all that the
        // voting servers know, so it needs the replies of a majority.
        let (votes, is_exclusive) = (self.votes().count(), self.hold.mode == Mode::Exclusive);
        match self.votes().map(|vote| vote.end).max() {
            Some(end) if !is_exclusive && votes >= self.majority(cx) => self.agree(beyond(end), cx),
            _ if !is_exclusive && votes + awaited >= self.majority(cx) => Next::Wait(None),
            _ => self.give_up(Outcome::Unreachable),
        }
    }

    /// Continues after a majority has voted.
    pub(super) fn has_majority(&mut self, beyond: Beyond<'_>, cx: &MajorityCx<'_>) -> Next {
        let fence = if mem::take(&mut self.redraws) {
            // Larger than all that the voting servers know, so that a majority has to raise it.
            let largest = self.votes().map(|vote| vote.end).max();
            largest.max(self.fence).map(beyond)
        } else {
            // A repeated grant keeps its fencing token or gets a larger one.
            self.votes().map(|vote| vote.fence).max().max(self.fence)
        };
        match fence {
            Some(fence) => self.agree(fence, cx),
            None => self.give_up(Outcome::Unreachable),
        }
    }

    /// Whether a vote counts for this fencing token.
    ///
    /// A reader's vote counts if the server has given the number to this acquisition. No server
    /// gives it to another acquisition as well, and two majorities have a server in common, so no
    /// other reader has a majority for the number.
    ///
    /// A writer's vote also counts if the server's counter has reached the number without this
    /// acquisition. Proof: when the writer has its token, a majority holds the lock for the writer
    /// and knows the token. The same is true for any other grant when it has its token. One server
    /// is in both majorities and holds the lock for one of the two at a time. The later one drew
    /// its number at this server after the other had its token, which the server knew; so the later
    /// token is larger.
    fn is_for(&self, vote: &Vote, fence: FencingToken, cx: &MajorityCx<'_>) -> bool {
        // A majority has to know every number that is handed out.
        let is_known = vote.end >= fence.later(self.reserved_left());
        let is_given = vote.fence == fence || self.hold.mode == Mode::Exclusive;
        is_known && (is_given || cx.breaks(MajorityMutation::CountsWhatOthersHave))
            || cx.breaks(MajorityMutation::NoWriteBack)
    }

    /// Grants the lock with this fencing token, or writes it back to voters with another number.
    fn agree(&mut self, fence: FencingToken, cx: &MajorityCx<'_>) -> Next {
        let is_for = |vote: &Vote| self.is_for(vote, fence, cx);
        let (votes, majority) = (self.votes(), self.majority(cx));
        let agreed = nth_largest(votes.filter(is_for).map(|vote| vote.until), majority);
        let kept = nth_largest(self.votes().map(|vote| vote.until), majority);
        match (agreed, kept) {
            (Some(until), _) if until > cx.now => {
                let reserved = self.reserved_left();
                (self.fence, self.valid_until) = (Some(fence), Some(until));
                self.headless_since = None;
                return self.over(Outcome::Granted(fence, until, reserved));
            }
            (None, Some(until)) if until > cx.now => {}
            _ => return self.give_up(Outcome::Unreachable),
        }
        self.phase = Phase::Writing(fence);
        let end = fence.later(self.reserved_left());
        Next::Send(self.ask_each(|round, server| {
            let vote = round.states[server].vote()?;
            if round.is_for(&vote, fence, cx) {
                return None;
            }
            round.states[server].status = Status::Awaited;
            Some(Ask::Raise(end))
        }))
    }

    /// The number of fencing tokens to reserve: none for a repeated grant.
    pub(super) fn reserved_left(&self) -> u32 {
        if self.fence.is_none() {
            self.reserved
        } else {
            0
        }
    }

    pub(super) fn over(&mut self, outcome: Outcome) -> Next {
        self.phase = Phase::Over;
        Next::Done(outcome)
    }

    /// Whether a majority of the servers has replied. Without enough votes, another acquisition
    /// then holds the lock or has a claim to it.
    pub(super) fn is_beaten(&self, cx: &MajorityCx<'_>) -> bool {
        self.answered() >= self.majority(cx)
    }

    fn answered(&self) -> usize {
        self.count_of(|state| {
            matches!(
                state.status,
                Status::Voted | Status::Denied(_) | Status::Gone
            )
        })
    }

    /// The reply to a refused request. A reason that the caller can act on takes precedence.
    pub(super) fn refusal(&self, cx: &MajorityCx<'_>) -> AcquireReply {
        let denials = || {
            self.states.iter().filter_map(|state| match &state.status {
                Status::Denied(reply) => Some(reply),
                _ => None,
            })
        };
        let is_unfit = |reply: &&AcquireReply| {
            matches!(
                reply,
                AcquireReply::ForeignKey(_) | AcquireReply::ModeMismatch
            )
        };
        let unfit: PerServer<_> = denials().filter(is_unfit).collect();
        // A minority of servers with unfit data does not affect the others.
        if unfit.len() > self.states.len() - self.majority(cx) {
            return unfit[0].clone();
        }
        let is_taken = self
            .states
            .iter()
            .any(|state| state.status.taken().is_some());
        if !is_taken && denials().any(|reply| *reply == AcquireReply::Late) {
            return AcquireReply::Late;
        }
        let is_waited_for = |reply: &AcquireReply| matches!(reply, AcquireReply::Busy { has_waiters, .. } if *has_waiters);
        AcquireReply::Busy {
            holder_ttl: self.free_in(cx),
            has_waiters: denials().any(is_waited_for),
        }
    }

    /// The time until enough of the votes for others have expired for a majority, if none is
    /// released earlier. `None` if it is unknown.
    fn free_in(&self, cx: &MajorityCx<'_>) -> Option<Duration> {
        let ttls = self.states.iter().map(|state| state.status.taken());
        let mut ttls: PerServer<Option<Duration>> = ttls.flatten().collect();
        ttls.sort_by_key(|ttl| ttl.unwrap_or(Duration::MAX));
        let missing = self.majority(cx).saturating_sub(self.votes().count());
        ttls.get(missing.max(1) - 1).copied().flatten()
    }

    /// The vote of the coordinator for another acquisition, as of its reply in this exchange.
    fn obstacle(&self, cx: &MajorityCx<'_>) -> Option<Obstacle> {
        let state = &self.states[self.coordinator?];
        let holder_ttl = state.status.taken()?;
        let counter = match state.status {
            Status::Denied(AcquireReply::Queued { counter, .. }) => counter,
            _ => None,
        };
        // The server read its clock at some time between the request and the reply.
        let ends = holder_ttl.map(|ttl| (state.as_of.unwrap_or(cx.now) + ttl, cx.now + ttl));
        Some(Obstacle { counter, ends })
    }

    /// Whether the coordinator has not handed off the lock since the last check. If it has, the
    /// queue makes progress, and the next check is postponed.
    fn stands_still(&mut self, cx: &MajorityCx<'_>) -> bool {
        let obstacle = self.obstacle(cx);
        let before = std::mem::replace(&mut self.obstacle, obstacle);
        let both = before.zip(obstacle);
        let stands_still = both.is_some_and(|(before, now)| before.may_be(&now, self.hold.mode));
        if !stands_still {
            self.was_free = None;
            self.check_pause = self.time_outs.poll;
            self.check_at = cx.now + self.check_pause;
        }
        stands_still
    }

    /// Handles a majority of votes that lacks the coordinator's. The client with the coordinator's
    /// vote is about to ask the other servers and takes precedence, or it has died. So the round
    /// waits for it once, for as long as a hand-off takes.
    fn free_but_for_coordinator(&mut self, beyond: Beyond<'_>, cx: &MajorityCx<'_>) -> Next {
        let obstacle = self.obstacle(cx);
        let before = self.was_free.take();
        if let (Some(before), Some(obstacle)) = (before, obstacle)
            && before.may_be(&obstacle, self.hold.mode)
            && !cx.breaks(MajorityMutation::YieldsToDeadVote)
        {
            return self.has_majority(beyond, cx);
        }
        if before.is_some() {
            return self.yield_to_queue(cx);
        }
        let pause = match self.coordinator_status() {
            // A waiter takes precedence over a request that does not wait.
            Some(Status::Denied(AcquireReply::Busy {
                has_waiters: true, ..
            })) => return self.yield_to_queue(cx),
            // Leaves time for a second check.
            _ if self.if_busy == IfBusy::Refuse => {
                let left = self.answer_by.saturating_duration_since(cx.now);
                self.time_outs.split.min(left / 3)
            }
            // A writer may be in front. If it is alive it polls in the meantime.
            _ if self.hold.mode == Mode::Shared => self.time_outs.poll * 3,
            _ => self.time_outs.split,
        };
        let check_at = cx.now + pause;
        let next = self.yield_to_queue(cx);
        (self.was_free, self.check_at) = (obstacle, check_at);
        match next {
            Next::Done(Outcome::Queued(ttl)) => self.waits_in_queue(Some(ttl), cx),
            Next::Done(Outcome::Refused(_)) if cx.now < check_at && !self.then_queues => {
                self.phase = Phase::Aside(check_at);
                Next::Pause(check_at)
            }
            next => next,
        }
    }

    /// Waits in the coordinator's queue. The next poll is due in time for the next check, and soon
    /// in any case: otherwise a hand-off at the coordinator would go unnoticed.
    fn waits_in_queue(&mut self, holder_ttl: Option<Duration>, cx: &MajorityCx<'_>) -> Next {
        let check_in = self.check_at.saturating_duration_since(cx.now);
        let again_in = check_in.min(self.time_outs.poll);
        let holder_ttl = holder_ttl.map_or(again_in, |ttl| ttl.min(again_in));
        self.over(Outcome::Queued(holder_ttl))
    }

    /// Abandons the votes of the other servers and waits in the coordinator's queue. Without an
    /// entry in that queue the request is refused.
    pub(super) fn yield_to_queue(&mut self, cx: &MajorityCx<'_>) -> Next {
        self.stands_still(cx);
        let holder_ttl = self.coordinator_status().and_then(Status::taken);
        let (waits_at, refusal) = (self.waits_at(), self.refusal(cx));
        for server in (0..self.states.len()).filter(|server| Some(*server) != waits_at) {
            self.abandon_at(server);
        }
        match waits_at {
            Some(_) => self.waits_in_queue(holder_ttl.flatten(), cx),
            None => self.over(Outcome::Refused(refusal)),
        }
    }

    pub(super) fn give_up(&mut self, outcome: Outcome) -> Next {
        // The caller of a conversion ends it in both modes, as the lock may have to stay reserved.
        if !self.is_converted() {
            self.abandon_all();
        }
        self.over(outcome)
    }

    /// The reply of a server, for an error message.
    pub(crate) fn complaint(&self, server: usize) -> Result<&str, &StoreError> {
        Ok(match &self.states[server].status {
            Status::None => "was not asked",
            Status::Awaited => "has not answered yet",
            Status::Voted => "granted it",
            status if status.taken().is_some() => "granted it to another client",
            Status::Denied(AcquireReply::Late) => "received the request too late",
            Status::Denied(_) => "holds other data under the key of the lock",
            Status::Gone => "no longer knows the request",
            Status::Failed(error) => return Err(error),
        })
    }
}
