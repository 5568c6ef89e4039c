//! The decisions of a campaign: when it has won, when it yields, and which servers to ask next.

use std::{mem, time::Duration};

use tokio::time::Instant;

#[cfg(test)]
use super::Broken;
use super::{
    super::majority::nth_largest,
    Campaign, LOOKS_ROUND_EVERY, Next, Outcome, PerNode, Phase, Say, grace,
    seat::{Obstacle, Seat, Standing, Vote, Word},
};
use crate::{
    fence::FencingToken,
    spec::Mode,
    store::{AcquireReply, IfBusy, StoreError},
};

type Beyond<'a> = &'a dyn Fn(FencingToken) -> FencingToken;

impl Campaign {
    pub(super) fn votes(&self) -> impl Iterator<Item = Vote> + '_ {
        self.seats.iter().filter_map(Seat::vote)
    }

    pub(super) fn awaited(&self) -> usize {
        self.seats
            .iter()
            .filter(|seat| matches!(seat.word, Word::Awaited))
            .count()
    }

    /// Determines the next step.
    ///
    /// `beyond` returns a fencing token larger than its argument.
    pub(crate) fn next(&mut self, deadline: Instant, now: Instant, beyond: Beyond<'_>) -> Next {
        if mem::take(&mut self.redraws) {
            self.fence = self.fence.map(beyond);
        }
        match self.phase {
            Phase::Line => self.next_in_line(deadline, now),
            Phase::All => self.next_of_all(deadline, now),
            Phase::Aside(until) if now < until => Next::Pause(until),
            Phase::Aside(_) => {
                self.begin_round(now);
                Next::Send(self.ask_all(deadline, now))
            }
            Phase::Head => self.next_at_head(now),
            Phase::Writing(fence) => self.next_of_writing(fence, now, beyond),
            Phase::Over => self.over(Outcome::Gone),
        }
    }

    pub(super) fn line_word(&self) -> Option<&Word> {
        self.line.map(|line| &self.seats[line].word)
    }

    pub(super) fn next_in_line(&mut self, deadline: Instant, now: Instant) -> Next {
        match self.line_word().cloned() {
            Some(Word::Awaited) => Next::Wait(None),
            Some(Word::Vote) => self.become_head(deadline),
            Some(Word::InLine { holder_ttl, .. }) => {
                let stands_still = self.stands_still(now);
                if stands_still && now >= self.look_at
                    || now - self.asked_all_at >= LOOKS_ROUND_EVERY
                {
                    self.phase = Phase::All;
                    self.asked_all_at = now;
                    self.look_pause = (self.look_pause * 2).min(LOOKS_ROUND_EVERY);
                    self.look_at = now + self.look_pause;
                    self.ask_others(deadline)
                } else {
                    self.waits_in_line(holder_ttl, now)
                }
            }
            Some(Word::Refused(reply @ AcquireReply::Busy { .. })) => {
                self.give_up(Outcome::Refused(reply))
            }
            // Votes alone decide this round. The next acquire attempt chooses its coordinator anew.
            Some(Word::Failed(_) | Word::Refused(_)) if !self.polls => {
                self.phase = Phase::All;
                self.ask_others(deadline)
            }
            Some(Word::Gone | Word::Failed(_) | Word::Refused(_) | Word::None) | None => {
                self.give_up(Outcome::Gone)
            }
        }
    }

    /// Asks all servers but the coordinator to vote. The acquisition does not join a queue in which
    /// it does not wait yet.
    pub(super) fn ask_others(&mut self, deadline: Instant) -> Next {
        let others: PerNode<_> = (0..self.seats.len())
            .filter(|node| Some(*node) != self.line)
            .collect();
        Next::Send(
            others
                .into_iter()
                .map(|node| self.count(node, IfBusy::Refuse, deadline))
                .collect(),
        )
    }

    pub(super) fn next_of_all(&mut self, deadline: Instant, now: Instant) -> Next {
        let (votes, awaited) = (self.votes().count(), self.awaited());
        let line = self.line_word().cloned();
        if votes >= self.majority() {
            let majority_at = *self.majority_at.get_or_insert(now);
            return match line {
                Some(Word::Awaited) => {
                    let until = majority_at + grace(majority_at - self.since);
                    if now < until {
                        Next::Wait(Some(until))
                    } else {
                        self.won(now)
                    }
                }
                Some(Word::InLine { .. } | Word::Refused(AcquireReply::Busy { .. })) => {
                    self.free_but_for_line(now)
                }
                _ => self.won(now),
            };
        }
        if votes + awaited >= self.majority() || matches!(line, Some(Word::Awaited)) {
            return Next::Wait(None);
        }
        self.was_free = None;
        match line {
            Some(Word::Vote) if self.if_busy == IfBusy::Queue && self.is_beaten() => {
                self.phase = Phase::Head;
                let refused =
                    |seat: &Seat| matches!(seat.word, Word::Refused(AcquireReply::Busy { .. }));
                let again: PerNode<_> = (0..self.seats.len())
                    .filter(|node| refused(&self.seats[*node]))
                    .collect();
                Next::Send(
                    again
                        .into_iter()
                        .map(|node| self.ask(node, IfBusy::Queue, deadline))
                        .collect(),
                )
            }
            Some(Word::InLine { .. }) => self.yield_to_line(now),
            _ if self.is_beaten() => {
                let reply = self.refusal();
                self.give_up(Outcome::Refused(reply))
            }
            _ => self.give_up(Outcome::Unreachable),
        }
    }

    pub(super) fn next_at_head(&mut self, now: Instant) -> Next {
        let (votes, awaited) = (self.votes().count(), self.awaited());
        if votes >= self.majority() {
            return self.won(now);
        }
        if votes + awaited >= self.majority() {
            return Next::Wait(None);
        }
        if !self.is_beaten() {
            // The votes are kept: the campaign may go on with them, or the caller abandons them.
            return self.over(Outcome::Unreachable);
        }
        let since = *self.headless_since.get_or_insert(now);
        // While no other client can have a majority, one of them has to give up its votes.
        let waits = self
            .seats
            .iter()
            .filter(|seat| seat.standing == Standing::InLine)
            .count();
        let patience = if waits >= self.majority() {
            self.patience.beaten
        } else {
            self.patience.split
        };
        match (since + patience).checked_duration_since(now) {
            Some(left) if !left.is_zero() && (votes > 0 || waits > 0) => {
                // Some of the votes for others may expire earlier.
                let holder_ttl = self.free_in().map_or(left, |ends| ends.min(left));
                self.over(Outcome::InLine {
                    holder_ttl: Some(holder_ttl),
                })
            }
            _ => self.give_up(Outcome::Gone),
        }
    }

    pub(super) fn next_of_writing(
        &mut self,
        fence: FencingToken,
        now: Instant,
        beyond: Beyond<'_>,
    ) -> Next {
        let (agreed, awaited) = (self.agreed(fence), self.awaited());
        if agreed >= self.majority() {
            return self.agree(fence, now);
        }
        if agreed + awaited >= self.majority() {
            return Next::Wait(None);
        }
        // Others have taken the number or a larger one. The new number is larger than all that the
        // voting servers know.
        match self.votes().map(|vote| vote.end).max() {
            Some(end)
                if self.hold.mode != Mode::Exclusive && self.votes().count() >= self.majority() =>
            {
                self.agree(beyond(end), now)
            }
            _ => self.give_up(Outcome::Unreachable),
        }
    }

    /// Asks the other servers after the coordinator has granted the lock. Where another client
    /// holds it, the acquisition waits in the queue of that server.
    pub(super) fn become_head(&mut self, deadline: Instant) -> Next {
        self.phase = Phase::Head;
        let line = self.line;
        let others: PerNode<_> = (0..self.seats.len())
            .filter(|node| Some(*node) != line)
            .collect();
        Next::Send(
            others
                .into_iter()
                .map(|node| self.recount(node, deadline))
                .collect(),
        )
    }

    /// Continues after a majority has voted.
    pub(super) fn won(&mut self, now: Instant) -> Next {
        let largest = self.votes().map(|vote| vote.fence).max();
        // A repeated grant keeps its fencing token or gets a larger one.
        let Some(fence) = largest.max(self.fence) else {
            return self.give_up(Outcome::Unreachable);
        };
        self.agree(fence, now)
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
    fn is_for(&self, vote: &Vote, fence: FencingToken) -> bool {
        // A majority has to know every number that is handed out.
        let is_known = vote.end >= fence.later(self.reserved_left());
        #[cfg(test)]
        let is_known = is_known || self.broken == Some(Broken::NoWriteBack);
        let is_given = vote.fence == fence || self.hold.mode == Mode::Exclusive;
        #[cfg(test)]
        let is_given = is_given
            || matches!(
                self.broken,
                Some(Broken::NoWriteBack | Broken::CountsWhatOthersHave)
            );
        is_known && is_given
    }

    fn agreed(&self, fence: FencingToken) -> usize {
        self.votes().filter(|vote| self.is_for(vote, fence)).count()
    }

    /// Grants the lock with this fencing token, or writes it back to voters with another number.
    fn agree(&mut self, fence: FencingToken, now: Instant) -> Next {
        let is_for = |vote: &Vote| self.is_for(vote, fence);
        let agreed = nth_largest(
            self.votes().filter(is_for).map(|vote| vote.until),
            self.majority(),
        );
        let kept = nth_largest(self.votes().map(|vote| vote.until), self.majority());
        match (agreed, kept) {
            (Some(until), _) if until > now => return self.granted(fence, until),
            (None, Some(until)) if until > now => {}
            _ => return self.give_up(Outcome::Unreachable),
        }
        self.phase = Phase::Writing(fence);
        let end = fence.later(self.reserved_left());
        let others = |node: &usize| {
            self.seats[*node]
                .vote()
                .is_some_and(|vote| !self.is_for(&vote, fence))
        };
        let others: PerNode<_> = (0..self.seats.len()).filter(others).collect();
        others
            .iter()
            .for_each(|node| self.seats[*node].word = Word::Awaited);
        Next::Send(
            others
                .into_iter()
                .map(|node| (node, Say::Raise(end)))
                .collect(),
        )
    }

    pub(super) fn granted(&mut self, fence: FencingToken, until: Instant) -> Next {
        let reserved = self.reserved_left();
        self.fence = Some(fence);
        self.headless_since = None;
        self.over(Outcome::Granted {
            fence,
            until,
            reserved,
        })
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
    pub(super) fn is_beaten(&self) -> bool {
        let answers = |seat: &&Seat| {
            matches!(
                seat.word,
                Word::Vote | Word::InLine { .. } | Word::Refused(_) | Word::Gone
            )
        };
        self.seats.iter().filter(answers).count() >= self.majority()
    }

    /// The reply to a refused request. A reason that the caller can act on takes precedence.
    pub(super) fn refusal(&self) -> AcquireReply {
        let (mut busy, mut has_waiters, mut late, mut unfit) =
            (false, false, false, PerNode::new());
        for seat in &self.seats {
            match seat.word {
                Word::Refused(
                    reply @ (AcquireReply::ForeignKey(_) | AcquireReply::ModeMismatch),
                ) => unfit.push(reply),
                Word::Refused(AcquireReply::Busy {
                    has_waiters: waited_for,
                    ..
                }) => {
                    (busy, has_waiters) = (true, has_waiters || waited_for);
                }
                Word::InLine { .. } => busy = true,
                Word::Refused(AcquireReply::Late) => late = true,
                _ => {}
            }
        }
        // A minority of servers with unfit data does not affect the others.
        if unfit.len() > self.seats.len() - self.majority() {
            return unfit[0];
        }
        if !busy && late {
            return AcquireReply::Late;
        }
        AcquireReply::Busy {
            holder_ttl: self.free_in(),
            has_waiters,
        }
    }

    /// The time until enough of the votes for others have expired for a majority, if none is
    /// released earlier. `None` if it is unknown.
    fn free_in(&self) -> Option<Duration> {
        let ttl = |seat: &Seat| match seat.word {
            Word::Refused(AcquireReply::Busy { holder_ttl, .. })
            | Word::InLine { holder_ttl, .. } => Some(holder_ttl),
            _ => None,
        };
        let mut ttls: PerNode<Option<Duration>> = self.seats.iter().filter_map(ttl).collect();
        ttls.sort_by_key(|ttl| ttl.unwrap_or(Duration::MAX));
        let missing = self.majority().saturating_sub(self.votes().count()).max(1);
        ttls.get(missing - 1).copied().flatten()
    }

    /// The vote of the coordinator for another acquisition, according to its reply in this round.
    fn obstacle(&self, now: Instant) -> Option<Obstacle> {
        let seat = &self.seats[self.line?];
        let (counter, holder_ttl) = match seat.word {
            Word::InLine {
                counter,
                holder_ttl,
            } => (counter, holder_ttl),
            Word::Refused(AcquireReply::Busy { holder_ttl, .. }) => (None, holder_ttl),
            _ => return None,
        };
        // The server read its clock at some time between the request and the reply.
        let ends = holder_ttl.map(|ttl| (seat.as_of.unwrap_or(now) + ttl, now + ttl));
        Some(Obstacle { counter, ends })
    }

    /// Whether the coordinator has not handed off the lock since the last check. If it has, the
    /// queue makes progress, and the next check is postponed.
    fn stands_still(&mut self, now: Instant) -> bool {
        let obstacle = self.obstacle(now);
        let before = std::mem::replace(&mut self.obstacle, obstacle);
        let stands_still = before
            .zip(obstacle)
            .is_some_and(|(before, obstacle)| before.may_be(&obstacle, self.hold.mode));
        if !stands_still {
            self.was_free = None;
            self.look_pause = self.patience.line;
            self.look_at = now + self.look_pause;
        }
        stands_still
    }

    /// Handles a majority of votes that lacks the coordinator's. The client with the coordinator's
    /// vote is about to ask the other servers and takes precedence, or it has died. So the campaign
    /// waits for it once, for as long as a hand-off takes.
    fn free_but_for_line(&mut self, now: Instant) -> Next {
        let obstacle = self.obstacle(now);
        let before = self.was_free.take();
        if let (Some(before), Some(obstacle)) = (before, obstacle)
            && before.may_be(&obstacle, self.hold.mode)
        {
            return self.won(now);
        }
        if before.is_some() {
            return self.yield_to_line(now);
        }
        let pause = match self.line_word() {
            // A waiter takes precedence over a request that does not wait.
            Some(Word::Refused(AcquireReply::Busy {
                has_waiters: true, ..
            })) => return self.yield_to_line(now),
            // Leaves time for a second check.
            _ if self.if_busy == IfBusy::Refuse => self
                .patience
                .split
                .min(self.answer_by.saturating_duration_since(now) / 3),
            // A writer may be in front. If it is alive it polls in the meantime.
            _ if self.hold.mode == Mode::Shared => self.patience.line * 3,
            _ => self.patience.split,
        };
        let look_at = now + pause;
        let next = self.yield_to_line(now);
        (self.was_free, self.look_at) = (obstacle, look_at);
        match next {
            Next::Done(Outcome::InLine { holder_ttl }) => self.waits_in_line(holder_ttl, now),
            Next::Done(Outcome::Refused(_)) if now < look_at && !self.then_queues => {
                self.phase = Phase::Aside(look_at);
                Next::Pause(look_at)
            }
            next => next,
        }
    }

    /// Waits in the coordinator's queue. The next poll is due in time for the next check, and soon
    /// in any case: otherwise a hand-off at the coordinator would go unnoticed.
    fn waits_in_line(&mut self, holder_ttl: Option<Duration>, now: Instant) -> Next {
        let again_in = self
            .look_at
            .saturating_duration_since(now)
            .min(self.patience.line);
        let holder_ttl = holder_ttl.map_or(again_in, |ttl| ttl.min(again_in));
        self.over(Outcome::InLine {
            holder_ttl: Some(holder_ttl),
        })
    }

    /// Abandons the votes of the other servers and waits in the coordinator's queue. Without an
    /// entry in that queue the request is refused.
    pub(super) fn yield_to_line(&mut self, now: Instant) -> Next {
        self.stands_still(now);
        let word = self.line_word().cloned();
        let waits = self
            .line
            .filter(|line| self.seats[*line].standing == Standing::InLine);
        let refusal = self.refusal();
        for node in (0..self.seats.len()).filter(|node| Some(*node) != waits) {
            self.leave(node);
        }
        match (word, waits) {
            (Some(Word::InLine { holder_ttl, .. }), Some(_)) => self.waits_in_line(holder_ttl, now),
            (_, Some(_)) => self.waits_in_line(None, now),
            (_, None) => self.over(Outcome::Refused(refusal)),
        }
    }

    pub(super) fn give_up(&mut self, outcome: Outcome) -> Next {
        self.leave_all();
        self.over(outcome)
    }

    /// The reply of each server, for an error message.
    pub(crate) fn complaints(&self) -> impl Iterator<Item = (usize, String)> + '_ {
        self.seats.iter().enumerate().map(|(node, seat)| {
            let said = match &seat.word {
                Word::None => "was not asked".to_owned(),
                Word::Awaited => "has not answered yet".to_owned(),
                Word::Vote => "granted it".to_owned(),
                Word::InLine { .. } | Word::Refused(AcquireReply::Busy { .. }) => {
                    "granted it to another client".to_owned()
                }
                Word::Refused(AcquireReply::Late) => "received the request too late".to_owned(),
                Word::Refused(_) => "holds other data under the key of the lock".to_owned(),
                Word::Gone => "no longer knows the request".to_owned(),
                Word::Failed(error) => error.to_string(),
            };
            (node, said)
        })
    }

    /// The errors among the replies.
    pub(crate) fn errors(&self) -> impl Iterator<Item = &StoreError> {
        self.seats.iter().filter_map(|seat| match &seat.word {
            Word::Failed(error) => Some(error),
            _ => None,
        })
    }
}
