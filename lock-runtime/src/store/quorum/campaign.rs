//! One acquisition at several servers, as its client sees it. Decides only; it is told the time and the replies.
//!
//! Only votes count: a majority of the servers must hold the lock for this one. One of the servers, the *line node*, keeps
//! order besides: who wants to wait stands in its line, and who is handed the lock there asks the others. So those who want
//! the same lock do not split the votes, as long as they can talk to the line node; where they cannot, votes decide alone, and
//! whoever gets no majority gives up all it has after a while of its own.

mod message;
mod seat;
mod verdict;

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

pub(crate) use self::message::{Calls, Heard, Left, Next, Outcome, Patience, PerNode, Say};
use self::seat::{Obstacle, Seat, Standing, Vote, Word};
use super::majority::majority;
use crate::{
    acquire::STRAGGLE,
    fence::FencingToken,
    spec::Mode,
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, RaiseReply, RenewReply,
        StoreError, Token,
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The line node alone was asked.
    Line,
    /// All were asked at once.
    All,
    /// A majority has voted, and the line node for another acquisition: all are asked once more at
    /// that time.
    Aside(Instant),
    /// The line node holds it for us, and the others were asked.
    Head,
    /// A fencing token is being written to those that have another number.
    Writing(FencingToken),
    Over,
}

/// One acquisition.
#[derive(Debug)]
pub(crate) struct Campaign {
    hold: Hold,
    was_writer: bool,
    lease: Duration,
    longest_lease: Duration,
    closed: bool,
    /// So many fencing tokens are reserved behind that of the grant.
    spare: u32,
    seats: PerNode<Seat>,
    /// So many names of seats were given up.
    names: u16,
    /// A number that tells the replies of this round from those of earlier ones.
    round: u32,
    line: Option<usize>,
    if_busy: IfBusy,
    /// A refusal is followed by a request that queues.
    then_queues: bool,
    /// It was in line before this round.
    polls: bool,
    phase: Phase,
    /// When this round began.
    since: Instant,
    /// When it had a majority without a word of the line node.
    majority_at: Option<Instant>,
    /// The line node's vote for another acquisition, as it was at the last look.
    obstacle: Option<Obstacle>,
    /// The same, when a majority was free all the same.
    was_free: Option<Obstacle>,
    /// When to look at the other servers, as long as the line node's vote stays the same, and how
    /// long after that again.
    look_at: Instant,
    look_pause: Duration,
    /// The caller waits no longer.
    answer_by: Instant,
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
    /// 28: a reader counts a server whose number was as large before, as a writer may.
    CountsWhatOthersHave,
    /// Half of the servers is enough.
    MajorityOffByOne,
    /// 29: who has voted in an earlier round, and does not answer in this one, counts as well.
    AddsUpRounds,
    /// 1: the reply to an acquire is believed whose name was given up.
    BelievesTheAbandoned,
}

/// Somebody in line asks the others as well, though the line node has not let it in, so long after it did so last: the line node
/// may be held up by a client that holds nothing else. It does so
/// sooner while the lock is not given on there.
const LOOKS_ROUND_EVERY: Duration = Duration::from_millis(700);

/// How long a majority waits for the line node's word, at least; else for as long as the majority took.
const SHORTEST_GRACE: Duration = Duration::from_micros(300);

/// How long the line node is waited for, once a majority took so long to answer.
pub(super) fn grace(took: Duration) -> Duration {
    took.max(SHORTEST_GRACE)
}

impl Campaign {
    /// An acquisition that nobody was asked for yet.
    pub(crate) fn new(
        request: &KeyRequest,
        nodes: usize,
        patience: Patience,
        now: Instant,
    ) -> Self {
        let KeyRequest {
            hold, lease, spare, ..
        } = request.clone();
        Self {
            seats: (0..nodes).map(|_| Seat::new(hold.token)).collect(),
            names: 0,
            round: 0,
            hold,
            was_writer: false,
            lease,
            longest_lease: lease,
            closed: false,
            // A reader's fencing token is one number.
            spare: if request.hold.mode == Mode::Exclusive {
                spare
            } else {
                0
            },
            polls: false,
            line: None,
            if_busy: IfBusy::Refuse,
            then_queues: request.then_queues,
            phase: Phase::Over,
            since: now,
            majority_at: None,
            obstacle: None,
            was_free: None,
            look_at: now,
            look_pause: patience.line,
            answer_by: now,
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

    /// The longest lease that was asked for: whatever a server holds ends by then.
    pub(crate) fn longest_lease(&self) -> Duration {
        self.longest_lease
    }

    /// The lease is extended.
    pub(crate) fn extends(&mut self, lease: Duration) {
        self.longest_lease = self.longest_lease.max(lease);
    }

    /// It is being given back: no vote is asked for any more (PROTOCOL 13).
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    pub(crate) fn spare(&self) -> u32 {
        self.spare
    }

    /// The largest number that a server has given to it, before it has a fencing token.
    pub(crate) fn drawn(&self) -> Option<FencingToken> {
        let of_seat = |seat: &Seat| match seat.standing {
            Standing::Holds(vote) => Some(vote.fence),
            _ => seat.pushed.map(|grant| grant.fence),
        };
        self.seats
            .iter()
            .filter_map(of_seat)
            .max()
            .filter(|_| self.fence.is_none())
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
        matches!(seat.standing, Standing::Holds(_)).then_some(seat.token)
    }

    /// The names under which a server may know it.
    pub(crate) fn known(&self) -> impl Iterator<Item = (usize, Token)> + '_ {
        let seats = self.seats.iter().enumerate();
        seats
            .filter(|(_, seat)| seat.standing != Standing::Outside)
            .map(|(node, seat)| (node, seat.token))
    }

    /// All names under which a server may know it, as they are before they are given up.
    pub(crate) fn all_known(&self) -> PerNode<Left> {
        let left = |(node, seat): (usize, &Seat)| {
            let lingers = !matches!(seat.standing, Standing::Holds(_));
            let known = seat.standing != Standing::Outside;
            known.then_some(Left {
                node,
                token: seat.token,
                straggler_until: seat.straggler_until,
                lingers,
            })
        };
        self.seats.iter().enumerate().filter_map(left).collect()
    }

    /// A writer is about to become a reader.
    pub(crate) fn converts(&mut self) {
        self.was_writer = true;
        self.hold.mode = Mode::Shared;
    }

    /// Servers have made the writer a reader, asked at `sent`. The round that begins finds it a
    /// fencing token.
    pub(crate) fn converted(&mut self, grants: &[(usize, Grant)], sent: Instant, now: Instant) {
        self.begin_round(now);
        self.phase = Phase::Head;
        for (node, grant) in grants {
            let seat = &mut self.seats[*node];
            seat.standing = Standing::Holds(Vote::new(*grant, sent));
            seat.as_of = Some(sent);
            seat.word = Word::Vote;
        }
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
        self.answer_by = deadline.checked_sub(STRAGGLE).unwrap_or(deadline);
        match line {
            Some(line) if contended && if_busy == IfBusy::Queue => {
                self.phase = Phase::Line;
                [self.ask(line, IfBusy::Queue, deadline)]
                    .into_iter()
                    .collect()
            }
            _ => self.ask_all(deadline, now),
        }
    }

    fn ask_all(&mut self, deadline: Instant, now: Instant) -> Calls {
        self.phase = Phase::All;
        self.asked_all_at = now;
        let (line, if_busy) = (self.line, self.if_busy);
        // The line node first: its word is waited for.
        let others = (0..self.seats.len()).filter(|node| Some(*node) != line);
        let order: PerNode<_> = line.into_iter().chain(others).collect();
        let how = |node| {
            if Some(node) == line {
                if_busy
            } else {
                IfBusy::Refuse
            }
        };
        order
            .into_iter()
            .map(|node| self.ask(node, how(node), deadline))
            .collect()
    }

    /// How is it doing?
    pub(crate) fn poll(&mut self, deadline: Instant, now: Instant) -> Calls {
        self.begin_round(now);
        self.polls = true;
        let waits_in = self
            .line
            .filter(|line| self.seats[*line].standing == Standing::InLine);
        if self.fence.is_none()
            && let Some(line) = waits_in
            && self.seats[line].pushed.is_none()
        {
            self.phase = Phase::Line;
            self.seats[line].word = Word::Awaited;
            return [(line, Say::Poll(self.seats[line].token))]
                .into_iter()
                .collect();
        }
        self.phase = Phase::Head;
        (0..self.seats.len())
            .map(|node| self.recount(node, deadline))
            .collect()
    }

    /// Asks for the votes that are missing, once it is held: servers that come back vote for it again, or one after the other
    /// would be lost with every restart.
    pub(crate) fn heal(&mut self, deadline: Instant) -> Calls {
        let is_held = self.fence.is_some() && self.phase == Phase::Over && !self.closed;
        let missing = |seat: &Seat| matches!(seat.standing, Standing::Outside | Standing::InLine);
        let missing: PerNode<_> = (0..self.seats.len())
            .filter(|node| is_held && missing(&self.seats[*node]))
            .collect();
        let heal = |node| {
            // A holder waits in no line.
            self.leave(node);
            self.ask(node, IfBusy::Refuse, deadline)
        };
        missing.into_iter().map(heal).collect()
    }

    /// What a server is asked by one who is at the head of the line.
    fn recount(&mut self, node: usize, deadline: Instant) -> (usize, Say) {
        self.count(node, IfBusy::Queue, deadline)
    }

    /// Asks a server how it stands, or to vote. What it is known to keep is not asked for: a refusal would not take it away.
    fn count(&mut self, node: usize, if_busy: IfBusy, deadline: Instant) -> (usize, Say) {
        let seat = &mut self.seats[node];
        let say = match seat.standing {
            Standing::Holds(_) => Say::Renew(seat.token),
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
        for seat in &mut self.seats {
            seat.word = Word::None;
        }
    }

    /// What waits in the line of a server.
    pub(crate) fn waits_at(&self, node: usize) -> Option<Hold> {
        let waits = self.fence.is_none() && self.seats[node].standing == Standing::InLine;
        waits.then(|| self.hold.clone())
    }

    /// A server pushed a grant. It is asked whether that is so; `false` if nobody waits for it.
    pub(crate) fn pushed(&mut self, node: usize, token: Token, grant: Grant) -> bool {
        let seat = &mut self.seats[node];
        let waits =
            seat.token == token && matches!(seat.standing, Standing::Asked | Standing::InLine);
        if waits {
            seat.pushed = Some(grant);
        }
        waits
    }

    /// A server's answer to what was said to it at `sent`, in the round of that number, under the name `token`.
    pub(crate) fn heard(
        &mut self,
        node: usize,
        token: Token,
        round: u32,
        heard: Heard,
        sent: Instant,
    ) {
        let is_of_this_round = round == self.round;
        let seat = &mut self.seats[node];
        #[cfg(test)]
        let (token, is_of_this_round) = if self.broken == Some(Broken::BelievesTheAbandoned) {
            (seat.token, true)
        } else {
            (token, is_of_this_round)
        };
        // Where it stands is told by the latest question. A number that was raised stays raised.
        let is_outdated =
            seat.as_of.is_some_and(|as_of| sent < as_of) && !matches!(heard, Heard::Raise(..));
        if seat.token != token || is_outdated {
            return;
        }
        let held = |grant: Grant| Standing::Holds(Vote::new(grant, sent));
        let (standing, word) = match heard {
            Heard::Acquire(AcquireReply::Granted(grant))
            | Heard::Poll(PollReply::Granted(grant)) => (held(grant), Word::Vote),
            Heard::Acquire(AcquireReply::Queued {
                counter,
                holder_ttl,
            })
            | Heard::Poll(PollReply::Queued {
                counter,
                holder_ttl,
            }) => (
                Standing::InLine,
                Word::InLine {
                    counter,
                    holder_ttl,
                },
            ),
            Heard::Acquire(reply) => (Standing::Outside, Word::Refused(reply)),
            // The push was an old one: it waits as before.
            Heard::Renew(RenewReply::Gone) if seat.standing == Standing::InLine => (
                Standing::InLine,
                Word::InLine {
                    counter: None,
                    holder_ttl: None,
                },
            ),
            Heard::Poll(PollReply::Gone) | Heard::Renew(RenewReply::Gone) => {
                (Standing::Outside, Word::Gone)
            }
            Heard::Renew(RenewReply::Renewed { ttl }) => match (seat.standing, seat.pushed) {
                (Standing::Holds(vote), _) => (
                    Standing::Holds(Vote {
                        until: sent + ttl,
                        ..vote
                    }),
                    Word::Vote,
                ),
                (_, Some(pushed)) => (held(Grant { ttl, ..pushed }), Word::Vote),
                // Without a fencing token it is no grant yet; the next question brings one.
                (standing, None) => (standing, Word::None),
            },
            Heard::Raise(number, reply) => {
                let Standing::Holds(vote) = &mut seat.standing else {
                    return;
                };
                let latest = match reply {
                    RaiseReply::Raised => number,
                    RaiseReply::NotRaised { latest } => latest,
                };
                vote.end = vote.end.max(latest);
                // A writer's own number begins its block, which ends with what was raised.
                if reply == RaiseReply::Raised && self.hold.mode != Mode::Exclusive {
                    vote.fence = vote.fence.max(number);
                }
                // It was not asked for another number meanwhile.
                if is_of_this_round && matches!(seat.word, Word::Awaited) {
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
            self.left.push(Left {
                node,
                token,
                straggler_until,
                lingers: true,
            });
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
            && let Standing::Holds(vote) = &mut seat.standing
        {
            vote.until = self.since + self.lease;
            seat.word = Word::Vote;
        }
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
        let lingers = !matches!(seat.standing, Standing::Holds(_));
        self.left.push(Left {
            node,
            token: seat.token,
            straggler_until: seat.straggler_until,
            lingers,
        });
        let word = std::mem::replace(&mut seat.word, Word::None);
        let token = self.fresh_name();
        self.seats[node] = Seat {
            word,
            ..Seat::new(token)
        };
    }
}
