//! One acquisition at several servers, as its client sees it. This is a state machine without I/O:
//! it is given the time and the replies.
//!
//! Only votes count: a majority of the servers must hold the lock for this acquisition. One of the
//! servers, the *coordinator*, also keeps the wait queue: waiters queue there, and a waiter to
//! which the coordinator hands off the lock asks the other servers. So clients that want the same
//! lock do not split the votes as long as they can reach the coordinator. If they cannot, votes
//! alone decide, and a client without a majority gives up its votes after a randomized time.
//!
//! At each server the acquisition goes by a token of its own, its *alias* there. All aliases share
//! the stem of the acquisition's token. An abandoned alias is never used again.

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
    /// Only the coordinator was asked.
    Line,
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
pub(crate) struct Campaign {
    hold: Hold,
    was_writer: bool,
    lease: Duration,
    longest_lease: Duration,
    closed: bool,
    /// The number of fencing tokens to reserve after that of the grant.
    reserved: u32,
    seats: PerNode<Seat>,
    /// The number of aliases used so far, beyond the first.
    names: u16,
    /// The number of this round. It distinguishes its replies from those of earlier rounds.
    round: u32,
    line: Option<usize>,
    if_busy: IfBusy,
    /// The caller follows a refusal with a request that queues.
    then_queues: bool,
    /// The acquisition was in the queue before this round.
    polls: bool,
    phase: Phase,
    /// The start of this round.
    since: Instant,
    /// When this round reached a majority; the coordinator's reply may be outstanding.
    majority_at: Option<Instant>,
    /// The coordinator's vote for another acquisition, as of the last check.
    obstacle: Option<Obstacle>,
    /// The same as of a check in which a majority was free nevertheless.
    was_free: Option<Obstacle>,
    /// When to check the other servers if the coordinator's vote stays the same, and the pause
    /// until the check after that.
    look_at: Instant,
    look_pause: Duration,
    /// The end of the caller's wait.
    answer_by: Instant,
    patience: Patience,
    /// The time since when the acquisition has had no majority at the head of the queue.
    headless_since: Option<Instant>,
    /// When all servers were asked last.
    asked_all_at: Instant,
    fence: Option<FencingToken>,
    /// A reader that has its fencing token polls again: others may have received larger tokens
    /// since, so the reply carries a new one.
    redraws: bool,
    left: SmallVec<[Left; 5]>,
    /// A rule that is switched off.
    #[cfg(test)]
    pub(crate) broken: Option<Broken>,
}

/// A rule of the protocol that is switched off.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// PROTOCOL 28: the largest fencing token is not written back.
    NoWriteBack,
    /// PROTOCOL 28: a reader, like a writer, counts servers whose counters have passed the number.
    CountsWhatOthersHave,
    /// Half of the servers are enough.
    MajorityOffByOne,
    /// PROTOCOL 29: the vote of a server from an earlier round counts even if the server does not
    /// reply in this round.
    AddsUpRounds,
    /// PROTOCOL 1: the reply to an acquire is applied although its alias was abandoned.
    BelievesTheAbandoned,
}

/// The pause after which a waiter in the coordinator's queue also asks the other servers, although
/// the coordinator has not admitted it: the coordinator may be held up by a client that has no
/// other vote. The waiter asks earlier if the coordinator does not hand off the lock.
const LOOKS_ROUND_EVERY: Duration = Duration::from_millis(700);

/// The shortest time for which a majority waits for the coordinator's reply.
const SHORTEST_GRACE: Duration = Duration::from_micros(300);

/// How long to wait for the coordinator's reply, once a majority has replied after `took`.
pub(super) fn grace(took: Duration) -> Duration {
    took.max(SHORTEST_GRACE)
}

impl Campaign {
    /// Creates an acquisition that has not asked any server yet.
    pub(crate) fn new(
        request: &KeyRequest,
        nodes: usize,
        patience: Patience,
        now: Instant,
    ) -> Self {
        let KeyRequest {
            hold,
            lease,
            reserved,
            ..
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
            // A reader has a single fencing token.
            reserved: if request.hold.mode == Mode::Exclusive {
                reserved
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
            redraws: false,
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

    /// The longest lease requested so far: everything that a server holds expires within it.
    pub(crate) fn longest_lease(&self) -> Duration {
        self.longest_lease
    }

    /// Records the extension of the lease.
    pub(crate) fn extends(&mut self, lease: Duration) {
        self.longest_lease = self.longest_lease.max(lease);
    }

    /// Marks the start of the release: no more votes are requested (PROTOCOL 13).
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    pub(crate) fn reserved(&self) -> u32 {
        self.reserved
    }

    /// The largest number given to this acquisition, while it has no fencing token yet.
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

    /// The index of the coordinator.
    pub(crate) fn line(&self) -> Option<usize> {
        self.line
    }

    /// The number of the current round, which every request of the round carries.
    pub(crate) fn round(&self) -> u32 {
        self.round
    }

    /// The alias at a server that holds the lock for this acquisition.
    pub(crate) fn held_at(&self, node: usize) -> Option<Token> {
        let seat = &self.seats[node];
        matches!(seat.standing, Standing::Holds(_)).then_some(seat.token)
    }

    /// The aliases that the servers may know.
    pub(crate) fn known(&self) -> impl Iterator<Item = (usize, Token)> + '_ {
        let seats = self.seats.iter().enumerate();
        seats
            .filter(|(_, seat)| seat.standing != Standing::Outside)
            .map(|(node, seat)| (node, seat.token))
    }

    /// All aliases that the servers may know, in the form in which they are abandoned.
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

    /// Makes this acquisition a reader, before the servers convert it.
    pub(crate) fn converts(&mut self) {
        self.was_writer = true;
        self.hold.mode = Mode::Shared;
    }

    /// Records the servers that have converted the writer to a reader, on requests sent at `sent`.
    /// Begins the round that determines its fencing token.
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

    /// Whether this reader was a writer. If so, it still is one at a server that has not
    /// executed the conversion.
    pub(crate) fn was_writer(&self) -> bool {
        self.was_writer
    }

    /// Takes the aliases that are to be abandoned.
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

    /// Begins the first round. If `line` is given, this server is the coordinator; it is asked
    /// alone if the lock is `contended` and the request queues.
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
        // The coordinator first, as its reply is awaited.
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

    /// Begins a round that polls: the coordinator alone while the acquisition waits in its queue,
    /// otherwise all servers.
    pub(crate) fn poll(&mut self, deadline: Instant, now: Instant) -> Calls {
        self.begin_round(now);
        self.polls = true;
        self.redraws = self.hold.mode == Mode::Shared;
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

    /// Requests the missing votes of a held lock. A restarted server votes for the lock again;
    /// otherwise one restart after another would cost the majority.
    pub(crate) fn heal(&mut self, deadline: Instant) -> Calls {
        let is_held = self.fence.is_some() && self.phase == Phase::Over && !self.closed;
        let missing = |seat: &Seat| matches!(seat.standing, Standing::Outside | Standing::InLine);
        let missing: PerNode<_> = (0..self.seats.len())
            .filter(|node| is_held && missing(&self.seats[*node]))
            .collect();
        let heal = |node| {
            // A holder must not stay in a wait queue.
            self.leave(node);
            self.ask(node, IfBusy::Refuse, deadline)
        };
        missing.into_iter().map(heal).collect()
    }

    /// The request to a server from the head of the queue.
    fn recount(&mut self, node: usize, deadline: Instant) -> (usize, Say) {
        self.count(node, IfBusy::Queue, deadline)
    }

    /// Builds the request that queries the state at a server, or asks for its vote. A server
    /// that is known to hold or queue the alias is not sent an acquire: a refusal would not
    /// remove the alias.
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
            // The outcome of the previous acquire is unknown, so its alias is not used again.
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

    /// The acquisition, if it waits in the queue of this server.
    pub(crate) fn waits_at(&self, node: usize) -> Option<Hold> {
        let waits = self.fence.is_none() && self.seats[node].standing == Standing::InLine;
        waits.then(|| self.hold.clone())
    }

    /// Records a grant that a server has pushed, to be verified by the next request. Returns
    /// `false` if this campaign does not wait for it.
    pub(crate) fn pushed(&mut self, node: usize, token: Token, grant: Grant) -> bool {
        let seat = &mut self.seats[node];
        let waits =
            seat.token == token && matches!(seat.standing, Standing::Asked | Standing::InLine);
        if waits {
            seat.pushed = Some(grant);
        }
        waits
    }

    /// Applies the reply of a server to the request sent at `sent`, in the round with this number,
    /// under the alias `token`.
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
        // The latest request determines the state at the server, so replies to earlier ones are
        // outdated. A raised number stays raised.
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
            // The notification was outdated: the acquisition still waits.
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
                // Without a fencing token it is not a grant yet. The next request obtains one.
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
                // A writer's own number begins its block; the raised number ends it.
                if reply == RaiseReply::Raised && self.hold.mode != Mode::Exclusive {
                    vote.fence = vote.fence.max(number);
                }
                // A server is not sent another number while its reply is awaited.
                if is_of_this_round && matches!(seat.word, Word::Awaited) {
                    seat.word = Word::Vote;
                }
                return;
            }
            Heard::Failed(error) => {
                // An unsent acquire leaves nothing behind, but the server keeps its earlier state.
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
        // A reply that arrives after its round updates the state of the server, but is no vote.
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
            // The alias was used at this server, so it must not be used again (PROTOCOL 9).
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

    /// Stops waiting for the servers that have not replied yet, and returns them.
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

    /// Abandons all aliases.
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
