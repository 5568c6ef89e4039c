//! What comes of the answers so far: who has won, who yields to whom, who is asked next.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    super::majority::nth_largest,
    Calls, Campaign, LOOKS_ROUND_EVERY, Next, Outcome, PerNode, Phase, Say, grace,
    seat::{Seat, Standing, Word},
};
use crate::{
    fence::FencingToken,
    store::{AcquireReply, IfBusy, StoreError},
};

impl Campaign {
    pub(super) fn votes(&self) -> usize {
        self.seats.iter().filter_map(Seat::vote).count()
    }

    pub(super) fn awaited(&self) -> usize {
        self.seats.iter().filter(|seat| matches!(seat.word, Word::Awaited)).count()
    }

    /// What is to be done now.
    pub(crate) fn next(&mut self, deadline: Instant, now: Instant) -> Next {
        match self.phase {
            Phase::Line => self.next_in_line(deadline, now),
            Phase::All => self.next_of_all(deadline, now),
            Phase::Head => self.next_at_head(now),
            Phase::Writing { fence, end, until } => self.next_of_writing(fence, end, until, now),
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
            Some(Word::InLine(_)) if now - self.asked_all_at >= LOOKS_ROUND_EVERY => {
                self.phase = Phase::All;
                self.overrules_line = true;
                self.asked_all_at = now;
                self.ask_others(deadline)
            }
            Some(Word::InLine(holder_ttl)) => self.over(Outcome::InLine { holder_ttl }),
            Some(Word::Refused(reply @ AcquireReply::Busy { .. })) => self.give_up(Outcome::Refused(reply)),
            // Votes alone decide; the next question goes by another line.
            Some(Word::Failed(_) | Word::Refused(_)) if !self.polls => {
                self.phase = Phase::All;
                self.ask_others(deadline)
            }
            Some(Word::Gone | Word::Failed(_) | Word::Refused(_) | Word::None) | None => self.give_up(Outcome::Gone),
        }
    }

    /// All but the line node are to vote, without standing in line where they do not yet.
    pub(super) fn ask_others(&mut self, deadline: Instant) -> Next {
        let others: PerNode<_> = (0..self.seats.len()).filter(|node| Some(*node) != self.line).collect();
        Next::Send(others.into_iter().map(|node| self.count(node, IfBusy::Refuse, deadline)).collect())
    }

    pub(super) fn next_of_all(&mut self, deadline: Instant, now: Instant) -> Next {
        let (votes, awaited) = (self.votes(), self.awaited());
        let line = if self.overrules_line { None } else { self.line_word().cloned() };
        if votes >= self.majority() {
            let majority_at = *self.majority_at.get_or_insert(now);
            return match line {
                Some(Word::Awaited) => {
                    let until = majority_at + grace(majority_at - self.since);
                    if now < until { Next::Wait(Some(until)) } else { self.won(now) }
                }
                // Somebody is about to have it: those who wait have their turn.
                Some(Word::InLine(_) | Word::Refused(AcquireReply::Busy { .. })) => self.yield_to_line(),
                _ => self.won(now),
            };
        }
        if votes + awaited >= self.majority() || matches!(line, Some(Word::Awaited)) {
            return Next::Wait(None);
        }
        match line {
            Some(Word::Vote) if self.if_busy == IfBusy::Queue && self.is_beaten() => {
                self.phase = Phase::Head;
                let refused = |seat: &Seat| matches!(seat.word, Word::Refused(AcquireReply::Busy { .. }));
                let again: PerNode<_> = (0..self.seats.len()).filter(|node| refused(&self.seats[*node])).collect();
                Next::Send(again.into_iter().map(|node| self.ask(node, IfBusy::Queue, deadline)).collect())
            }
            Some(Word::InLine(_)) => self.yield_to_line(),
            _ if self.overrules_line => self.yield_to_line(),
            _ if self.is_beaten() => {
                let reply = self.refusal();
                self.give_up(Outcome::Refused(reply))
            }
            _ => self.give_up(Outcome::Unreachable),
        }
    }

    pub(super) fn next_at_head(&mut self, now: Instant) -> Next {
        let (votes, awaited) = (self.votes(), self.awaited());
        if votes >= self.majority() {
            return self.won(now);
        }
        if votes + awaited >= self.majority() {
            return Next::Wait(None);
        }
        if !self.is_beaten() {
            // With what it has it may go on; who asks gives it up if it likes.
            return self.over(Outcome::Unreachable);
        }
        let since = *self.headless_since.get_or_insert(now);
        // As long as nobody else can have a majority, somebody has to step back.
        let waits = self.seats.iter().filter(|seat| seat.standing == Standing::InLine).count();
        let patience = if waits >= self.majority() { self.patience.beaten } else { self.patience.split };
        match (since + patience).checked_duration_since(now) {
            Some(left) if !left.is_zero() && (votes > 0 || waits > 0) => {
                self.over(Outcome::InLine { holder_ttl: Some(left) })
            }
            _ => self.give_up(Outcome::Gone),
        }
    }

    pub(super) fn next_of_writing(
        &mut self,
        fence: FencingToken,
        end: FencingToken,
        until: Instant,
        now: Instant,
    ) -> Next {
        let written = self.seats.iter().filter_map(Seat::vote).filter(|vote| vote.end >= end).count();
        if written >= self.majority() {
            return if until > now { self.granted(fence, until) } else { self.give_up(Outcome::Unreachable) };
        }
        if written + self.awaited() >= self.majority() { Next::Wait(None) } else { self.give_up(Outcome::Unreachable) }
    }

    /// The line node holds it for us: the others are asked, and those that somebody else holds are waited for.
    pub(super) fn become_head(&mut self, deadline: Instant) -> Next {
        self.phase = Phase::Head;
        let line = self.line;
        let others: PerNode<_> = (0..self.seats.len()).filter(|node| Some(*node) != line).collect();
        Next::Send(others.into_iter().map(|node| self.recount(node, deadline)).collect())
    }

    /// A majority has voted.
    pub(super) fn won(&mut self, now: Instant) -> Next {
        let votes = || self.seats.iter().filter_map(Seat::vote);
        let until = nth_largest(votes().map(|vote| vote.until), self.majority());
        let largest = votes().map(|vote| vote.fence).max();
        let (Some(until), Some(largest)) = (until, largest) else { return self.give_up(Outcome::Unreachable) };
        if until <= now {
            return self.give_up(Outcome::Unreachable);
        }
        // It is told again, with the number that it was told with.
        let fence = self.fence.map_or(largest, |fence| fence.max(largest));
        // All that is given out has to be known to a majority.
        let end = fence.later(self.spare_left());
        let agreed = votes().filter(|vote| vote.end >= end).count() >= self.majority();
        #[cfg(test)]
        let agreed = agreed || self.broken == Some(super::Broken::NoWriteBack);
        if agreed {
            return self.granted(fence, until);
        }
        self.phase = Phase::Writing { fence, end, until };
        let mut calls = Calls::new();
        for (node, seat) in self.seats.iter_mut().enumerate() {
            if matches!(seat.standing, Standing::Holds(vote) if vote.end < end) {
                seat.word = Word::Awaited;
                calls.push((node, Say::Raise(end)));
            }
        }
        Next::Send(calls)
    }

    pub(super) fn granted(&mut self, fence: FencingToken, until: Instant) -> Next {
        let spare = self.spare_left();
        self.fence = Some(fence);
        self.headless_since = None;
        self.over(Outcome::Granted { fence, until, spare })
    }

    /// What is told again has been given out before.
    fn spare_left(&self) -> u32 {
        if self.fence.is_none() { self.spare } else { 0 }
    }

    pub(super) fn over(&mut self, outcome: Outcome) -> Next {
        self.phase = Phase::Over;
        Next::Done(outcome)
    }

    /// Have enough servers answered for a majority, and somebody else holds it, or has a claim?
    pub(super) fn is_beaten(&self) -> bool {
        let answers = |seat: &&Seat| matches!(seat.word, Word::Vote | Word::InLine(_) | Word::Refused(_) | Word::Gone);
        self.seats.iter().filter(answers).count() >= self.majority()
    }

    /// What to tell a request that is refused: what it can do something about comes first.
    pub(super) fn refusal(&self) -> AcquireReply {
        let mut ttls: PerNode<Option<Duration>> = PerNode::new();
        let (mut late, mut unfit) = (false, PerNode::new());
        for seat in &self.seats {
            match seat.word {
                Word::Refused(reply @ (AcquireReply::ForeignKey | AcquireReply::ModeMismatch)) => unfit.push(reply),
                Word::Refused(AcquireReply::Busy { holder_ttl }) | Word::InLine(holder_ttl) => ttls.push(holder_ttl),
                Word::Refused(AcquireReply::Late) => late = true,
                _ => {}
            }
        }
        // Of one server it is that server's affair.
        if unfit.len() > self.seats.len() - self.majority() {
            return unfit[0];
        }
        if ttls.is_empty() && late {
            return AcquireReply::Late;
        }
        // Those that end first leave a majority when so many have ended that the votes suffice.
        ttls.sort_by_key(|ttl| ttl.unwrap_or(Duration::MAX));
        let missing = self.majority().saturating_sub(self.votes()).max(1);
        AcquireReply::Busy { holder_ttl: ttls.get(missing - 1).copied().flatten() }
    }

    /// Gives up what the other servers hold, and waits in the line node's line; or, without a place there, is refused.
    pub(super) fn yield_to_line(&mut self) -> Next {
        let word = self.line_word().cloned();
        let waits = self.line.filter(|line| self.seats[*line].standing == Standing::InLine);
        let refusal = self.refusal();
        for node in (0..self.seats.len()).filter(|node| Some(*node) != waits) {
            self.leave(node);
        }
        match (word, waits) {
            (Some(Word::InLine(holder_ttl)), Some(_)) => self.over(Outcome::InLine { holder_ttl }),
            (_, Some(_)) => self.over(Outcome::InLine { holder_ttl: None }),
            (_, None) => self.over(Outcome::Refused(refusal)),
        }
    }

    pub(super) fn give_up(&mut self, outcome: Outcome) -> Next {
        self.leave_all();
        self.over(outcome)
    }

    /// What each server has said, for an error.
    pub(crate) fn complaints(&self) -> impl Iterator<Item = (usize, String)> + '_ {
        self.seats.iter().enumerate().map(|(node, seat)| {
            let said = match &seat.word {
                Word::None => "was not asked".to_owned(),
                Word::Awaited => "has not answered yet".to_owned(),
                Word::Vote => "granted it".to_owned(),
                Word::InLine(_) | Word::Refused(AcquireReply::Busy { .. }) => "is held by somebody else".to_owned(),
                Word::Refused(AcquireReply::Late) => "came to it too late".to_owned(),
                Word::Refused(_) => "holds something else under that name".to_owned(),
                Word::Gone => "does not know it any more".to_owned(),
                Word::Failed(error) => error.to_string(),
            };
            (node, said)
        })
    }

    /// The errors among them.
    pub(crate) fn errors(&self) -> impl Iterator<Item = &StoreError> {
        self.seats.iter().filter_map(|seat| match &seat.word {
            Word::Failed(error) => Some(error),
            _ => None,
        })
    }
}
