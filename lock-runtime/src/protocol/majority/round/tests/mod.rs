//! Scenarios that random schedules have found, each reduced to a few steps.

mod coordinator;
mod votes;

use std::time::Duration;

use super::{super::MajorityCx, Ask, Calls, Next, Outcome, Round, ServerAnswer, TimeOuts};
use crate::{
    guard::fence::FencingToken,
    protocol::STRAGGLE,
    request::key::LockKey,
    request::spec::Mode,
    shell::time::Instant,
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, RaiseReply, RenewReply, StoreError, Token,
    },
};

const LEASE: Duration = Duration::from_secs(30);
const MILLI: Duration = Duration::from_millis(1);
const BUSY: AcquireReply = AcquireReply::Busy {
    holder_ttl: Some(LEASE),
    has_waiters: false,
};

/// A round at five servers that gets its replies at once.
struct Case {
    round: Round,
    now: Instant,
}

impl Case {
    /// Returns the request to the coordinator, which is the first server.
    fn begun() -> (Self, Calls) {
        let queues = |request: &mut KeyRequest| request.if_busy = IfBusy::Queue;
        let mut case = Self::of(Mode::Exclusive, LEASE, queues);
        let calls = case.begins(true);
        (case, calls)
    }

    /// A request of a lease's time that does not queue, edited, of a client that has measured this
    /// round trip.
    fn of(mode: Mode, round_trip: Duration, edit: impl FnOnce(&mut KeyRequest)) -> Self {
        let now = Instant::now();
        let hold = Hold::new(LockKey::new("a").unwrap(), mode, Token::random());
        let mut request = KeyRequest::new(hold, LEASE, now + LEASE + STRAGGLE);
        edit(&mut request);
        let round = Round::new(&request, 5, Some(0), TimeOuts::new(round_trip, 0.5), now);
        Self { round, now }
    }

    /// Asks all servers, or the coordinator alone if the request queues for a `contended` lock.
    fn begins(&mut self, contended: bool) -> Calls {
        self.round.acquire(contended, self.deadline(), self.now)
    }

    /// The coordinator votes for the acquisition. Returns the requests to the others.
    fn at_the_head() -> (Self, Calls) {
        let (mut case, calls) = Self::begun();
        case.hears(calls, |_| granted());
        let others = case.asks();
        (case, others)
    }

    /// The coordinator's message says that it has voted. Returns the requests to all servers.
    fn is_notified(&mut self) -> Calls {
        let grant = Grant::new(FencingToken::new(7).unwrap(), LEASE);
        let name = self.round.states[0].token;
        assert!(self.round.pushed(0, name, grant));
        self.polls()
    }

    fn deadline(&self) -> Instant {
        self.now + Duration::from_secs(1)
    }

    fn polls(&mut self) -> Calls {
        self.round.poll(self.deadline(), self.now)
    }

    /// Passes the reply of each server to the round.
    fn hears(&mut self, calls: Calls, says: impl Fn(usize) -> ServerAnswer) {
        self.hears_late(calls, self.now, says);
    }

    /// The same, of requests sent at `sent`.
    fn hears_late(&mut self, calls: Calls, sent: Instant, says: impl Fn(usize) -> ServerAnswer) {
        self.hears_of(self.round.exchange, calls, sent, says);
    }

    /// The same, of requests of the exchange with this number.
    fn hears_of(
        &mut self,
        exchange: u32,
        calls: Calls,
        sent: Instant,
        says: impl Fn(usize) -> ServerAnswer,
    ) {
        for (server, ask) in calls {
            let (Ask::Acquire(name, _) | Ask::Poll(name) | Ask::Renew(name)) = ask else {
                panic!("{ask:?}")
            };
            self.replied(server, name, exchange, says(server), sent);
        }
    }

    fn replied(
        &mut self,
        server: usize,
        name: Token,
        exchange: u32,
        answer: ServerAnswer,
        sent: Instant,
    ) {
        let mut fraction = || 0.5;
        let cx = MajorityCx::new(self.now, 1, &mut fraction);
        self.round
            .replied(server, name, exchange, answer, sent, &cx);
    }

    /// Ends the wait for the servers that have not replied.
    fn time_is_up(&mut self) {
        let mut fraction = || 0.5;
        let cx = MajorityCx::new(self.now, 1, &mut fraction);
        self.round.time_is_up(&StoreError::timed_out(LEASE), &cx);
    }

    /// Passes the reply of each server to a raised number to the round. Returns the numbers.
    fn raised(&mut self, calls: Calls, says: impl Fn(usize) -> RaiseReply) -> Vec<(usize, u64)> {
        let numbers = calls.into_iter().map(|(server, ask)| {
            let Ask::Raise(number) = ask else {
                panic!("{ask:?}")
            };
            let token = self.round.states[server].token;
            let answer = ServerAnswer::Raise(number, says(server));
            self.replied(server, token, self.round.exchange, answer, self.now);
            (server, u64::from(number))
        });
        numbers.collect()
    }

    fn next(&mut self) -> Next {
        let mut fraction = || 0.5;
        let (cx, deadline) = (MajorityCx::new(self.now, 1, &mut fraction), self.deadline());
        self.round.next(deadline, &|fence| fence.later(1), &cx)
    }

    fn asks(&mut self) -> Calls {
        match self.next() {
            Next::Send(calls) => calls,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn waits(&mut self) -> Duration {
        match self.next() {
            Next::Done(Outcome::Queued(ttl)) => ttl,
            next => panic!("{next:?}"),
        }
    }

    /// The fencing token and the end of the validity.
    #[track_caller]
    fn is_granted(&mut self) -> (u64, Instant) {
        match self.next() {
            Next::Done(Outcome::Granted(fence, until, _)) => (fence.number(), until),
            next => panic!("{next:?}"),
        }
    }

    #[track_caller]
    fn awaits_replies(&mut self) {
        let next = self.next();
        assert!(matches!(next, Next::Wait(None)), "{next:?}");
    }

    #[track_caller]
    fn is_unreachable(&mut self) {
        let next = self.next();
        assert!(matches!(next, Next::Done(Outcome::Unreachable)), "{next:?}");
    }

    #[track_caller]
    fn is_gone(&mut self) {
        let next = self.next();
        assert!(matches!(next, Next::Done(Outcome::Gone)), "{next:?}");
    }
}

/// The replies of servers of which the first ones say this, and the others that.
fn of_first(
    count: usize,
    says: impl Fn() -> ServerAnswer,
    others: impl Fn() -> ServerAnswer,
) -> impl Fn(usize) -> ServerAnswer {
    move |server| if server < count { says() } else { others() }
}

/// The calls to these servers, and the others.
fn split(calls: Calls, servers: &[usize]) -> (Calls, Calls) {
    (calls.into_iter()).partition(|(server, _)| servers.contains(server))
}

fn granted_as(number: u64) -> ServerAnswer {
    let fence = FencingToken::new(number).unwrap();
    ServerAnswer::Acquire(AcquireReply::Granted(Grant::new(fence, LEASE)))
}

fn granted() -> ServerAnswer {
    granted_as(7)
}

fn busy() -> ServerAnswer {
    ServerAnswer::Acquire(BUSY)
}

fn silent() -> ServerAnswer {
    ServerAnswer::Failed(StoreError::timed_out(LEASE))
}

fn renewed() -> ServerAnswer {
    ServerAnswer::Renew(RenewReply::Renewed { ttl: LEASE })
}

fn queued_for(holder_ttl: Duration) -> ServerAnswer {
    ServerAnswer::Acquire(AcquireReply::Queued {
        counter: None,
        holder_ttl: Some(holder_ttl),
    })
}

fn queued() -> ServerAnswer {
    queued_for(LEASE)
}

/// A process that is suspended between the replies and its next step holds nothing when it resumes.
#[test]
fn votes_whose_leases_are_over_grant_nothing() {
    for passed in [Duration::ZERO, LEASE] {
        let (mut case, others) = Case::at_the_head();
        case.hears(others, |_| granted());
        case.now += passed;
        let next = case.next();
        let is_granted = matches!(next, Next::Done(Outcome::Granted(..)));
        assert_eq!(is_granted, passed.is_zero(), "{next:?}");
    }
}

/// Two votes come after their exchange, and count once they are renewed: from the sending of the
/// renewal (rule 2).
#[test]
fn a_vote_that_is_renewed_before_the_grant_counts_from_the_request() {
    let (mut case, others) = Case::at_the_head();
    case.time_is_up();
    case.next();
    let granted_late = others.into_iter().filter(|(server, _)| *server < 3);
    case.hears(granted_late.collect(), |_| granted());
    let (calls, sent) = (case.polls(), case.now);
    case.now += Duration::from_millis(400);
    case.hears_late(calls, sent, |server| match server {
        0..3 => ServerAnswer::Renew(RenewReply::Renewed { ttl: LEASE }),
        _ => ServerAnswer::Failed(StoreError::timed_out(LEASE)),
    });
    let next = case.next();
    let Next::Done(Outcome::Granted(_, until, _)) = next else {
        panic!("{next:?}")
    };
    assert!(until <= sent + LEASE, "{:?} later", until - (sent + LEASE));
}

/// The coordinator votes for the acquisition, and the other servers hold the lock for another one
/// a moment longer.
#[test]
fn the_head_of_the_line_asks_again_when_the_votes_of_others_end() {
    let soon = Duration::from_millis(2);
    let (mut case, others) = Case::at_the_head();
    case.hears(others, |server| {
        queued_for(if server < 3 { soon } else { LEASE })
    });
    let next = case.next();
    // Two of them are needed for a majority.
    assert!(
        matches!(next, Next::Done(Outcome::Queued(ttl)) if ttl == soon),
        "{next:?}"
    );
}

/// A message that is forged or late has a waiter ask all servers out of turn. At its turn, the
/// others hold the lock for the previous holder a moment longer.
#[test]
fn a_waiter_that_has_asked_out_of_turn_keeps_its_turn() {
    let (mut case, calls) = Case::begun();
    case.hears(calls, |_| queued());
    case.waits();
    let calls = case.is_notified();
    case.hears(calls, |_| queued());
    case.waits();
    case.now += Duration::from_secs(10);
    let calls = case.polls();
    assert_eq!(calls.len(), 1);
    case.hears(calls, |_| queued());
    let calls = case.asks();
    case.hears(calls, |_| queued());
    case.waits();
    let calls = case.is_notified();
    case.hears(
        calls,
        |server| if server == 0 { granted() } else { queued() },
    );
    case.waits();
}

/// The head of the queue holds two of five servers and waits at the others. The coordinator
/// loses its data, so the acquisition is at the end of the queue there, and checks the other
/// servers after a while.
#[test]
fn a_check_of_the_other_servers_forgets_nothing_that_they_keep() {
    let (mut case, others) = Case::at_the_head();
    let replies = |server| if server == 1 { granted() } else { queued() };
    case.hears(others, replies);
    case.waits();

    let calls = case.polls();
    case.hears(calls, |server| match server {
        0 => ServerAnswer::Renew(RenewReply::Gone),
        1 => ServerAnswer::Renew(RenewReply::Renewed { ttl: LEASE }),
        _ => queued(),
    });
    // An alias that is gone is abandoned (rule 9).
    assert_eq!(case.round.take_abandoned().len(), 1);
    case.waits();
    let calls = case.polls();
    case.hears(calls, |server| {
        if server == 0 {
            queued()
        } else {
            ServerAnswer::Failed(StoreError::timed_out(LEASE))
        }
    });
    let next = case.next();
    assert!(matches!(next, Next::Done(Outcome::Unreachable)), "{next:?}");

    case.now += Duration::from_secs(1);
    let calls = case.polls();
    assert!(matches!(calls[..], [(0, Ask::Poll(_))]), "{calls:?}");
    case.hears(calls, |_| queued());
    let known: Vec<_> = case.round.known().collect();
    let calls = case.asks();
    // If they were sent an acquire that was refused or lost, they would be assumed to hold nothing.
    assert!(
        matches!(
            calls[..],
            [
                (1, Ask::Renew(_)),
                (2, Ask::Poll(_)),
                (3, Ask::Poll(_)),
                (4, Ask::Poll(_))
            ]
        ),
        "{calls:?}"
    );
    case.hears(calls, |_| {
        ServerAnswer::Failed(StoreError::timed_out(LEASE).with_unsent(true))
    });
    case.waits();
    let left = case.round.take_abandoned().into_iter();
    let left: Vec<_> = left.map(|left| (left.server, left.token)).collect();
    assert_eq!(
        left,
        known[1..],
        "all that is not in the queue is abandoned"
    );
}

/// A writer becomes a reader, and readers in the queue take the numbers that its servers are asked
/// to raise. One server replies later than the other.
#[test]
fn a_number_that_readers_have_taken_is_replaced_after_the_replies_of_a_majority() {
    let (mut case, others) = Case::at_the_head();
    case.hears(others, |_| granted());
    let next = case.next();
    assert!(matches!(next, Next::Done(Outcome::Granted(..))), "{next:?}");
    case.round.converts();
    let grants = [8, 9, 9].map(|number| Grant::new(FencingToken::new(number).unwrap(), LEASE));
    let grants: Vec<_> = (0..).zip(grants).collect();
    case.round.converted(&grants, case.now, case.now);
    let not_raised = |latest| RaiseReply::NotRaised {
        latest: FencingToken::new(latest).unwrap(),
    };

    let calls = case.asks();
    assert_eq!(case.raised(calls, |_| not_raised(9)), [(0, 9)]);
    let calls = case.asks();
    let (first, rest): (Calls, Calls) = calls.into_iter().partition(|(server, _)| *server == 0);
    assert_eq!(case.raised(first, |_| not_raised(10)), [(0, 10)]);
    let next = case.next();
    assert!(matches!(next, Next::Wait(None)), "{next:?}");
    let replies = |server| match server {
        1 => not_raised(11),
        _ => RaiseReply::Raised,
    };
    assert_eq!(case.raised(rest, replies), [(1, 10), (2, 10)]);
    let calls = case.asks();
    assert_eq!(
        case.raised(calls, |_| RaiseReply::Raised),
        [(0, 12), (1, 12), (2, 12)]
    );
    let next = case.next();
    assert!(
        matches!(next, Next::Done(Outcome::Granted(fence, ..)) if u64::from(fence) == 12),
        "{next:?}"
    );
}
