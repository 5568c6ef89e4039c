//! One acquisition at several servers, as its client sees it. Decides only; it is told the time and the replies.
//!
//! Only votes count: a majority of the servers must hold the lock for this one. One of the servers, the *line node*, keeps
//! order besides: who wants to wait stands in its line, and who is handed the lock there asks the others. So those who want
//! the same lock do not split the votes, as long as they can talk to the line node; where they cannot, votes decide alone, and
//! whoever gets no majority gives up all it has after a while of its own.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::majority::{majority, nth_largest};
use crate::{
    fence::FencingToken,
    spec::Mode,
    store::{AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, RenewReply, StoreError, Token},
};

/// One for each server: five, mostly.
pub(crate) type PerNode<T> = SmallVec<[T; 5]>;

/// What is to be said to one of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    Acquire(Token, IfBusy),
    Poll(Token),
    Renew(Token),
    /// The next fencing token is to be larger than this.
    Raise(FencingToken),
}

/// What a server has said.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    Acquire(AcquireReply),
    Poll(PollReply),
    Renew(RenewReply),
    Raised,
    Failed(StoreError),
}

/// Something to say, and to whom.
pub(crate) type Calls = PerNode<(usize, Say)>;

/// What is to be done next.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is looked at where it is made")]
pub(crate) enum Next {
    Send(Calls),
    /// Wait for the next reply, at most until then.
    Wait(Option<Instant>),
    Done(Outcome),
}

/// What came of a question.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It is held until then, by a majority.
    Granted { fence: FencingToken, until: Instant, spare: u32 },
    /// It waits in line.
    InLine { holder_ttl: Option<Duration> },
    /// Somebody else has it, or it cannot be had.
    Refused(AcquireReply),
    /// It is neither held nor in line any more.
    Gone,
    /// Too few servers have answered; see [`Campaign::complaints`].
    Unreachable,
}

/// A name that is not used any more, and that a server may know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) node: usize,
    pub(crate) token: Token,
    /// A request for it may still be executed until then (PROTOCOL 8).
    pub(crate) straggler_until: Option<Instant>,
    /// It is not known to hold: it may stand in line.
    pub(crate) lingers: bool,
}

/// How long a campaign that has no majority keeps what it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Nobody else can have a majority either.
    pub(crate) split: Duration,
    /// Somebody else may.
    pub(crate) beaten: Duration,
}

impl Patience {
    /// Long enough for a release that is on its way to every server; and a different time for everybody, by a `jitter` in 0..1, so
    /// that of two who wait for each other one steps back first.
    pub(crate) fn new(round_trip: Duration, jitter: f64) -> Self {
        let split = round_trip * 10 + Duration::from_millis(20);
        Self { split: split.mul_f64(0.5 + jitter), beaten: Duration::from_secs(1).mul_f64(0.5 + jitter) }
    }
}

/// Where one server stands.
#[derive(Debug)]
struct Seat {
    /// The name of the acquisition there. It is another one after each time that it was given up (PROTOCOL 1).
    token: Token,
    standing: Standing,
    /// Told by the server, and not asked about yet.
    pushed: Option<Grant>,
    /// The deadline of an acquire whose reply has not come.
    straggler_until: Option<Instant>,
    /// When the request was sent whose reply this comes from.
    as_of: Option<Instant>,
    word: Word,
}

impl Seat {
    fn new(token: Token) -> Self {
        Self { token, standing: Standing::Outside, pushed: None, straggler_until: None, as_of: None, word: Word::None }
    }

    fn vote(&self) -> Option<(FencingToken, Instant)> {
        match (&self.word, self.standing) {
            (Word::Vote, Standing::Holds { fence, until }) => Some((fence, until)),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The server does not know the name.
    Outside,
    /// It may.
    Asked,
    InLine,
    Holds {
        fence: FencingToken,
        until: Instant,
    },
}

/// What a server has said in this round.
#[derive(Clone, Debug)]
enum Word {
    /// It was not asked.
    None,
    Awaited,
    /// It holds the lock for us.
    Vote,
    InLine(Option<Duration>),
    Refused(AcquireReply),
    Gone,
    Failed(StoreError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The line node alone was asked.
    Line,
    /// All were asked at once.
    All,
    /// The line node holds it for us, and the others were asked.
    Head,
    /// The largest fencing token is being written back.
    Writing(FencingToken, Instant),
    Over,
}

/// One acquisition.
#[derive(Debug)]
pub(crate) struct Campaign {
    hold: Hold,
    was_writer: bool,
    lease: Duration,
    /// So many fencing tokens are reserved behind that of the grant.
    spare: u32,
    seats: PerNode<Seat>,
    /// So many names of seats were given up.
    names: u16,
    /// A number that tells the replies of this round from those of earlier ones.
    round: u32,
    line: Option<usize>,
    if_busy: IfBusy,
    /// It was in line before this round.
    polls: bool,
    phase: Phase,
    /// When this round began.
    since: Instant,
    /// When it had a majority without a word of the line node.
    majority_at: Option<Instant>,
    /// The line node does not hold this one up any more.
    overrules_line: bool,
    patience: Patience,
    /// It has had no majority since then, though it is at the head of the line.
    headless_since: Option<Instant>,
    /// When all servers were asked last.
    asked_all_at: Instant,
    fence: Option<FencingToken>,
    left: SmallVec<[Left; 5]>,
    /// A rule that is switched off.
    #[cfg(test)]
    pub(crate) broken: Option<Broken>,
}

/// A rule of the protocol that is switched off.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// 28: the largest fencing token is not written back.
    NoWriteBack,
    /// Half of the servers is enough.
    MajorityOffByOne,
    /// 29: who has voted in an earlier round, and does not answer in this one, counts as well.
    AddsUpRounds,
    /// 1: the reply to an acquire is believed whose name was given up.
    BelievesTheAbandoned,
}

/// Somebody in line asks the others as well, though the line node has not let it in, so long after it did so last: the line node
/// may be held up by somebody who holds nothing else.
const LOOKS_ROUND_EVERY: Duration = Duration::from_millis(700);

/// How long a majority waits for the line node's word, at least; else for as long as the majority took.
const SHORTEST_GRACE: Duration = Duration::from_micros(300);

/// How long the line node is waited for, once a majority took so long to answer.
pub(super) fn grace(took: Duration) -> Duration {
    took.max(SHORTEST_GRACE)
}

impl Campaign {
    /// An acquisition that nobody was asked for yet.
    pub(crate) fn new(request: &KeyRequest, nodes: usize, patience: Patience, now: Instant) -> Self {
        let KeyRequest { hold, lease, spare, .. } = request.clone();
        Self {
            seats: (0..nodes).map(|_| Seat::new(hold.token)).collect(),
            names: 0,
            round: 0,
            hold,
            was_writer: false,
            lease,
            spare,
            polls: false,
            line: None,
            if_busy: IfBusy::Refuse,
            phase: Phase::Over,
            since: now,
            majority_at: None,
            overrules_line: false,
            patience,
            headless_since: None,
            asked_all_at: now,
            fence: None,
            left: SmallVec::new(),
            #[cfg(test)]
            broken: None,
        }
    }

    pub(crate) fn hold(&self) -> &Hold {
        &self.hold
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    pub(crate) fn spare(&self) -> u32 {
        self.spare
    }

    /// The server that keeps the order.
    pub(crate) fn line(&self) -> Option<usize> {
        self.line
    }

    /// The number of the present round, which goes with all that is said in it.
    pub(crate) fn round(&self) -> u32 {
        self.round
    }

    /// Its name at a server that holds it.
    pub(crate) fn held_at(&self, node: usize) -> Option<Token> {
        let seat = &self.seats[node];
        matches!(seat.standing, Standing::Holds { .. }).then_some(seat.token)
    }

    /// The names under which a server may know it.
    pub(crate) fn known(&self) -> impl Iterator<Item = (usize, Token)> + '_ {
        let seats = self.seats.iter().enumerate();
        seats.filter(|(_, seat)| seat.standing != Standing::Outside).map(|(node, seat)| (node, seat.token))
    }

    /// All names under which a server may know it, as they are before they are given up.
    pub(crate) fn all_known(&self) -> PerNode<Left> {
        let left = |(node, seat): (usize, &Seat)| {
            let lingers = !matches!(seat.standing, Standing::Holds { .. });
            let known = seat.standing != Standing::Outside;
            known.then_some(Left { node, token: seat.token, straggler_until: seat.straggler_until, lingers })
        };
        self.seats.iter().enumerate().filter_map(left).collect()
    }

    /// A writer is about to become a reader.
    pub(crate) fn converts(&mut self) {
        self.was_writer = true;
        self.hold.mode = Mode::Shared;
    }

    /// Was it a writer? Then it is one still at a server that has not heard of the change.
    pub(crate) fn was_writer(&self) -> bool {
        self.was_writer
    }

    /// Names that it has given up.
    pub(crate) fn take_left(&mut self) -> SmallVec<[Left; 5]> {
        std::mem::take(&mut self.left)
    }

    fn majority(&self) -> usize {
        #[cfg(test)]
        if self.broken == Some(Broken::MajorityOffByOne) {
            return majority(self.seats.len()) - 1;
        }
        majority(self.seats.len())
    }

    /// The first question. With `line`, that server keeps the order; and it alone is asked first if the lock is `contended`.
    pub(crate) fn acquire(
        &mut self,
        if_busy: IfBusy,
        line: Option<usize>,
        contended: bool,
        deadline: Instant,
        now: Instant,
    ) -> Calls {
        self.begin_round(now);
        self.polls = false;
        self.line = line;
        self.if_busy = if_busy;
        match line {
            Some(line) if contended && if_busy == IfBusy::Queue => {
                self.phase = Phase::Line;
                [self.ask(line, IfBusy::Queue, deadline)].into_iter().collect()
            }
            _ => {
                self.phase = Phase::All;
                self.asked_all_at = now;
                // The line node first: its word is waited for.
                let others = (0..self.seats.len()).filter(|node| Some(*node) != line);
                let order: PerNode<_> = line.into_iter().chain(others).collect();
                let how = |node| if Some(node) == line { if_busy } else { IfBusy::Refuse };
                order.into_iter().map(|node| self.ask(node, how(node), deadline)).collect()
            }
        }
    }

    /// How is it doing?
    pub(crate) fn poll(&mut self, deadline: Instant, now: Instant) -> Calls {
        self.begin_round(now);
        self.polls = true;
        let waits_in = self.line.filter(|line| self.seats[*line].standing == Standing::InLine);
        if self.fence.is_none()
            && let Some(line) = waits_in
            && self.seats[line].pushed.is_none()
        {
            self.phase = Phase::Line;
            self.seats[line].word = Word::Awaited;
            return [(line, Say::Poll(self.seats[line].token))].into_iter().collect();
        }
        self.phase = Phase::Head;
        (0..self.seats.len()).map(|node| self.recount(node, deadline)).collect()
    }

    /// Asks for the votes that are missing, once it is held: servers that come back vote for it again, or one after the other
    /// would be lost with every restart.
    pub(crate) fn heal(&mut self, deadline: Instant) -> Calls {
        let is_held = self.fence.is_some() && self.phase == Phase::Over;
        let missing = |seat: &Seat| seat.standing == Standing::Outside;
        let missing: PerNode<_> = (0..self.seats.len()).filter(|node| is_held && missing(&self.seats[*node])).collect();
        missing.into_iter().map(|node| self.ask(node, IfBusy::Refuse, deadline)).collect()
    }

    /// What a server is asked by one who is at the head of the line.
    fn recount(&mut self, node: usize, deadline: Instant) -> (usize, Say) {
        self.count(node, IfBusy::Queue, deadline)
    }

    /// Asks a server how it stands, or to vote. What it is known to keep is not asked for: a refusal would not take it away.
    fn count(&mut self, node: usize, if_busy: IfBusy, deadline: Instant) -> (usize, Say) {
        let seat = &mut self.seats[node];
        let say = match seat.standing {
            Standing::Holds { .. } => Say::Renew(seat.token),
            Standing::InLine if seat.pushed.is_some() => Say::Renew(seat.token),
            Standing::InLine => Say::Poll(seat.token),
            Standing::Outside | Standing::Asked => return self.ask(node, if_busy, deadline),
        };
        seat.word = Word::Awaited;
        (node, say)
    }

    fn ask(&mut self, node: usize, if_busy: IfBusy, deadline: Instant) -> (usize, Say) {
        if self.seats[node].standing == Standing::Asked {
            // Nobody knows what becomes of the first request, so it keeps its name for itself.
            self.leave(node);
        }
        let seat = &mut self.seats[node];
        seat.standing = Standing::Asked;
        seat.straggler_until = Some(deadline);
        seat.word = Word::Awaited;
        (node, Say::Acquire(seat.token, if_busy))
    }

    fn begin_round(&mut self, now: Instant) {
        self.round += 1;
        self.since = now;
        self.majority_at = None;
        self.overrules_line = false;
        for seat in &mut self.seats {
            seat.word = Word::None;
        }
    }

    /// A server pushed a grant. It is asked whether that is so; `false` if nobody waits for it.
    pub(crate) fn pushed(&mut self, node: usize, token: Token, grant: Grant) -> bool {
        let seat = &mut self.seats[node];
        let waits = seat.token == token && matches!(seat.standing, Standing::Asked | Standing::InLine);
        if waits {
            seat.pushed = Some(grant);
        }
        waits
    }

    /// A server's answer to what was said to it at `sent`, in the round of that number, under the name `token`.
    pub(crate) fn heard(&mut self, node: usize, token: Token, round: u32, heard: Heard, sent: Instant) {
        let is_of_this_round = round == self.round;
        let seat = &mut self.seats[node];
        #[cfg(test)]
        let (token, is_of_this_round) = if self.broken == Some(Broken::BelievesTheAbandoned) {
            (seat.token, true)
        } else {
            (token, is_of_this_round)
        };
        if seat.token != token || seat.as_of.is_some_and(|as_of| sent < as_of) {
            return;
        }
        let held = |grant: Grant| Standing::Holds { fence: grant.fence, until: sent + grant.ttl };
        let (standing, word) = match heard {
            Heard::Acquire(AcquireReply::Granted(grant)) | Heard::Poll(PollReply::Granted(grant)) => {
                (held(grant), Word::Vote)
            }
            Heard::Acquire(AcquireReply::Queued { holder_ttl, .. })
            | Heard::Poll(PollReply::Queued { holder_ttl, .. }) => (Standing::InLine, Word::InLine(holder_ttl)),
            Heard::Acquire(reply) => (Standing::Outside, Word::Refused(reply)),
            // The push was an old one: it waits as before.
            Heard::Renew(RenewReply::Gone) if seat.standing == Standing::InLine => {
                (Standing::InLine, Word::InLine(None))
            }
            Heard::Poll(PollReply::Gone) | Heard::Renew(RenewReply::Gone) => (Standing::Outside, Word::Gone),
            Heard::Renew(RenewReply::Renewed { ttl }) => match (seat.standing, seat.pushed) {
                (Standing::Holds { fence, .. }, _) => (held(Grant::new(fence, ttl)), Word::Vote),
                (_, Some(pushed)) => (held(Grant::new(pushed.fence, ttl)), Word::Vote),
                // Without a fencing token it is no grant yet; the next question brings one.
                (standing, None) => (standing, Word::None),
            },
            Heard::Raised => {
                if let (Standing::Holds { fence, .. }, Phase::Writing(largest, _)) = (&mut seat.standing, self.phase)
                    && is_of_this_round
                {
                    *fence = largest.max(*fence);
                    seat.word = Word::Vote;
                }
                return;
            }
            Heard::Failed(error) => {
                // What it knew before it may still know.
                if error.is_unsent() && seat.standing == Standing::Asked {
                    seat.standing = Standing::Outside;
                    seat.straggler_until = None;
                }
                if is_of_this_round && matches!(seat.word, Word::Awaited) {
                    self.failed(node, error);
                }
                return;
            }
        };
        // An answer that comes after its round tells where the server stands, but it does not vote.
        let counts = is_of_this_round && matches!(seat.word, Word::Awaited);
        seat.as_of = Some(sent);
        let straggler_until = seat.straggler_until.take();
        seat.pushed = None;
        seat.standing = standing;
        let is_gone = matches!(word, Word::Gone);
        if counts {
            seat.word = word;
        }
        if is_gone {
            // The name was used there, and must not be used again (PROTOCOL 9).
            self.left.push(Left { node, token, straggler_until, lingers: true });
            let name = self.fresh_name();
            self.seats[node].token = name;
        }
    }

    fn fresh_name(&mut self) -> Token {
        self.names = self.names.wrapping_add(1);
        self.hold.token.alias(self.names)
    }

    /// Those who have not answered by now are not waited for any more. They are returned.
    pub(crate) fn time_is_up(&mut self, error: &StoreError) -> PerNode<usize> {
        let mut silent = PerNode::new();
        for node in 0..self.seats.len() {
            if matches!(self.seats[node].word, Word::Awaited) {
                self.failed(node, error.clone());
                silent.push(node);
            }
        }
        silent
    }

    fn failed(&mut self, node: usize, error: StoreError) {
        let seat = &mut self.seats[node];
        seat.word = Word::Failed(error);
        #[cfg(test)]
        if self.broken == Some(Broken::AddsUpRounds)
            && let Standing::Holds { until, .. } = &mut seat.standing
        {
            *until = self.since + self.lease;
            seat.word = Word::Vote;
        }
    }

    fn votes(&self) -> usize {
        self.seats.iter().filter_map(Seat::vote).count()
    }

    fn awaited(&self) -> usize {
        self.seats.iter().filter(|seat| matches!(seat.word, Word::Awaited)).count()
    }

    /// What is to be done now.
    pub(crate) fn next(&mut self, deadline: Instant, now: Instant) -> Next {
        match self.phase {
            Phase::Line => self.next_in_line(deadline, now),
            Phase::All => self.next_of_all(deadline, now),
            Phase::Head => self.next_at_head(now),
            Phase::Writing(fence, until) => self.next_of_writing(fence, until, now),
            Phase::Over => self.over(Outcome::Gone),
        }
    }

    fn line_word(&self) -> Option<&Word> {
        self.line.map(|line| &self.seats[line].word)
    }

    fn next_in_line(&mut self, deadline: Instant, now: Instant) -> Next {
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
            Some(Word::Refused(reply)) => self.give_up(Outcome::Refused(reply)),
            // Votes alone decide; the next question goes by another line.
            Some(Word::Failed(_)) if !self.polls => {
                self.phase = Phase::All;
                self.ask_others(deadline)
            }
            Some(Word::Gone | Word::Failed(_) | Word::None) | None => self.give_up(Outcome::Gone),
        }
    }

    /// All but the line node are to vote, without standing in line where they do not yet.
    fn ask_others(&mut self, deadline: Instant) -> Next {
        let others: PerNode<_> = (0..self.seats.len()).filter(|node| Some(*node) != self.line).collect();
        Next::Send(others.into_iter().map(|node| self.count(node, IfBusy::Refuse, deadline)).collect())
    }

    fn next_of_all(&mut self, deadline: Instant, now: Instant) -> Next {
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

    fn next_at_head(&mut self, now: Instant) -> Next {
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

    fn next_of_writing(&mut self, fence: FencingToken, until: Instant, now: Instant) -> Next {
        let written = self.seats.iter().filter_map(Seat::vote).filter(|(held, _)| *held >= fence).count();
        if written >= self.majority() {
            return if until > now { self.granted(fence, until) } else { self.give_up(Outcome::Unreachable) };
        }
        if written + self.awaited() >= self.majority() { Next::Wait(None) } else { self.give_up(Outcome::Unreachable) }
    }

    /// The line node holds it for us: the others are asked, and those that somebody else holds are waited for.
    fn become_head(&mut self, deadline: Instant) -> Next {
        self.phase = Phase::Head;
        let line = self.line;
        let others: PerNode<_> = (0..self.seats.len()).filter(|node| Some(*node) != line).collect();
        Next::Send(others.into_iter().map(|node| self.recount(node, deadline)).collect())
    }

    /// A majority has voted.
    fn won(&mut self, now: Instant) -> Next {
        let votes = || self.seats.iter().filter_map(Seat::vote);
        let until = nth_largest(votes().map(|(_, until)| until), self.majority());
        let largest = votes().map(|(fence, _)| fence).max();
        let (Some(until), Some(largest)) = (until, largest) else { return self.give_up(Outcome::Unreachable) };
        if until <= now {
            return self.give_up(Outcome::Unreachable);
        }
        // It is told again, with the number that it was told with.
        let fence = self.fence.map_or(largest, |fence| fence.max(largest));
        let agreed = votes().filter(|(held, _)| *held >= fence).count() >= self.majority();
        #[cfg(test)]
        let agreed = agreed || self.broken == Some(Broken::NoWriteBack);
        if agreed {
            return self.granted(fence, until);
        }
        self.phase = Phase::Writing(fence, until);
        let mut calls = Calls::new();
        for (node, seat) in self.seats.iter_mut().enumerate() {
            if matches!(seat.standing, Standing::Holds { fence: held, .. } if held < fence) {
                seat.word = Word::Awaited;
                // All that are reserved are given out.
                calls.push((node, Say::Raise(fence.later(self.spare))));
            }
        }
        Next::Send(calls)
    }

    fn granted(&mut self, fence: FencingToken, until: Instant) -> Next {
        // What is told again has been given out before.
        let spare = if self.fence.is_none() { self.spare } else { 0 };
        self.fence = Some(fence);
        self.headless_since = None;
        self.over(Outcome::Granted { fence, until, spare })
    }

    fn over(&mut self, outcome: Outcome) -> Next {
        self.phase = Phase::Over;
        Next::Done(outcome)
    }

    /// Have enough servers answered for a majority, and somebody else holds it, or has a claim?
    fn is_beaten(&self) -> bool {
        let answers = |seat: &&Seat| matches!(seat.word, Word::Vote | Word::InLine(_) | Word::Refused(_) | Word::Gone);
        self.seats.iter().filter(answers).count() >= self.majority()
    }

    /// What to tell a request that is refused: what it can do something about comes first.
    fn refusal(&self) -> AcquireReply {
        let mut ttls: PerNode<Option<Duration>> = PerNode::new();
        let mut late = false;
        for seat in &self.seats {
            match seat.word {
                Word::Refused(reply @ (AcquireReply::ForeignKey | AcquireReply::ModeMismatch)) => return reply,
                Word::Refused(AcquireReply::Busy { holder_ttl }) | Word::InLine(holder_ttl) => ttls.push(holder_ttl),
                Word::Refused(AcquireReply::Late) => late = true,
                _ => {}
            }
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
    fn yield_to_line(&mut self) -> Next {
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

    fn give_up(&mut self, outcome: Outcome) -> Next {
        self.leave_all();
        self.over(outcome)
    }

    /// Gives up everything, under all its names.
    pub(crate) fn leave_all(&mut self) {
        (0..self.seats.len()).for_each(|node| self.leave(node));
    }

    fn leave(&mut self, node: usize) {
        let seat = &mut self.seats[node];
        if seat.standing == Standing::Outside {
            return;
        }
        let lingers = !matches!(seat.standing, Standing::Holds { .. });
        self.left.push(Left { node, token: seat.token, straggler_until: seat.straggler_until, lingers });
        let word = std::mem::replace(&mut seat.word, Word::None);
        let token = self.fresh_name();
        self.seats[node] = Seat { word, ..Seat::new(token) };
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
