//! The votes of one exchange: which count, and the replies to the caller.

use super::*;
use crate::store::KeyPart;

/// One more server must know the largest number.
#[test]
fn a_writer_awaits_the_server_that_is_to_know_its_number() {
    let (mut case, others) = Case::at_the_head();
    case.hears(others, |server| match server {
        1 | 2 => granted_as(9),
        _ => silent(),
    });
    let calls = case.asks();
    case.awaits_replies();
    assert_eq!(case.raised(calls, |_| RaiseReply::Raised), [(0, 9)]);
    assert_eq!(case.is_granted().0, 9);
}

/// A server votes with a smaller number while the largest one is written to others, one of which
/// fails. So at most two servers will know the number.
#[test]
fn a_writer_whose_number_no_majority_can_know_gives_up_at_once() {
    let mut case = Case::of(Mode::Exclusive, MILLI, |_| {});
    let calls = case.begins(false);
    let (first, last) = split(calls, &[0, 1, 2]);
    case.hears(first, of_first(1, || granted_as(9), || granted_as(8)));
    let raising = case.asks();
    assert_eq!(raising.len(), 2, "{raising:?}");
    case.hears(last, of_first(4, || granted_as(7), silent));
    let (name, exchange) = (case.round.states[1].token, case.round.exchange);
    case.replied(1, name, exchange, silent(), case.now);
    case.is_unreachable();
}

/// Numbers of votes that have ended are not written to other servers.
#[test]
fn votes_with_different_numbers_whose_leases_are_over_raise_nothing() {
    let (mut case, others) = Case::at_the_head();
    case.hears(others, |server| granted_as(7 + server as u64));
    case.now += LEASE;
    case.is_unreachable();
}

/// No other writer gets them while the lock is held; another reader may.
#[test]
fn only_a_writer_reserves_fencing_tokens() {
    for (mode, reserved) in [(Mode::Exclusive, 4), (Mode::Shared, 0)] {
        let mut case = Case::of(mode, MILLI, |request| request.reserved = 4);
        assert_eq!(case.round.reserved, reserved);
        let calls = case.begins(false);
        let grant = Grant::new(FencingToken::new(7).unwrap(), LEASE).reserved(reserved);
        case.hears(calls, |_| {
            ServerAnswer::Acquire(AcquireReply::Granted(grant))
        });
        let next = case.next();
        assert!(
            matches!(next, Next::Done(Outcome::Granted(fence, _, left))
                if fence == grant.fence && left == reserved),
            "{next:?}"
        );
    }
}

/// Other data under the key is the reason if no majority is without it, and a late request if no
/// server holds the lock for another client.
#[test]
fn a_refusal_names_the_reason_that_the_caller_can_act_on() {
    const FOREIGN: AcquireReply = AcquireReply::ForeignKey(KeyPart::Lock);
    const LATE: AcquireReply = AcquireReply::Late;
    for (number, reply, others, outcome) in [
        (3, FOREIGN, BUSY, FOREIGN),
        (2, FOREIGN, BUSY, BUSY),
        (5, LATE, LATE, LATE),
        (2, LATE, BUSY, BUSY),
    ] {
        let mut case = Case::of(Mode::Exclusive, MILLI, |_| {});
        let calls = case.begins(false);
        case.hears(calls, |server| {
            let reply = if server < number { &reply } else { &others };
            ServerAnswer::Acquire(reply.clone())
        });
        let next = case.next();
        assert!(
            matches!(&next, Next::Done(Outcome::Refused(refusal)) if *refusal == outcome),
            "{number} times {reply:?}: {next:?}"
        );
    }
}

#[test]
fn an_error_names_what_each_server_has_replied() {
    let mut case = Case::of(Mode::Exclusive, MILLI, |_| {});
    let calls = case.begins(false);
    let (answered, _) = split(calls, &[0, 1, 2, 3]);
    case.hears(answered, |server| match server {
        0 => busy(),
        1 => ServerAnswer::Acquire(AcquireReply::Late),
        2 => ServerAnswer::Acquire(AcquireReply::ForeignKey(KeyPart::Lock)),
        _ => granted(),
    });
    let complaints = [0, 1, 2, 3, 4].map(|server| case.round.complaint(server).unwrap());
    assert_eq!(
        complaints,
        [
            "granted it to another client",
            "received the request too late",
            "holds other data under the key of the lock",
            "granted it",
            "has not answered yet",
        ]
    );
}

/// The lock stays with its holder, so nothing larger was granted in between.
#[test]
fn a_writer_that_polls_keeps_its_number_for_a_later_end() {
    let (mut case, others) = Case::at_the_head();
    case.hears(others, |_| granted());
    assert_eq!(case.is_granted(), (7, case.now + LEASE));
    case.now += Duration::from_secs(10);
    let calls = case.polls();
    case.hears(calls, |_| renewed());
    assert_eq!(case.is_granted(), (7, case.now + LEASE));
}

/// Polls of the head of the queue, which has the coordinator's vote alone and waits at two servers.
/// Returns the requests to these two servers, and when they were sent.
fn polls_two(case: &mut Case) -> (Calls, Instant) {
    let (waiting, rest) = split(case.polls(), &[1, 2]);
    case.hears(rest, of_first(1, renewed, busy));
    (waiting, case.now)
}

/// A late reply shows the state of a server, but not whether it still replies (rule 29).
#[test]
fn a_reply_to_an_earlier_exchange_is_no_vote_and_no_failure() {
    for answer in [granted(), silent()] {
        let (mut case, others) = Case::at_the_head();
        case.hears(others, of_first(3, queued, busy));
        case.waits();
        let (late, sent) = polls_two(&mut case);
        let exchange = case.round.exchange;
        case.time_is_up();
        case.waits();
        case.now += MILLI * 10;
        polls_two(&mut case);
        case.hears_of(exchange, late, sent, |_| answer.clone());
        case.awaits_replies();
    }
}

/// The same of a raised number: the request ends before the reply, and the next one polls.
#[test]
fn a_number_that_was_raised_for_an_earlier_exchange_is_no_vote() {
    let (mut case, others) = Case::at_the_head();
    case.hears(others, |server| match server {
        1 | 2 => granted_as(9),
        _ => silent(),
    });
    let calls = case.asks();
    assert!(matches!(calls[..], [(0, Ask::Raise(_))]), "{calls:?}");
    let (name, exchange, sent) = (case.round.states[0].token, case.round.exchange, case.now);
    let calls = case.polls();
    let (_, others) = split(calls, &[0]);
    case.hears(others, of_first(3, renewed, silent));
    let number = FencingToken::new(9).unwrap();
    let answer = ServerAnswer::Raise(number, RaiseReply::Raised);
    case.replied(0, name, exchange, answer, sent);
    case.awaits_replies();
}

/// A server has queued the acquisition again since it had lost its data.
#[test]
fn a_reply_to_an_earlier_request_tells_nothing_about_the_server() {
    for is_late in [true, false] {
        let (mut case, others) = Case::at_the_head();
        case.hears(others, of_first(3, queued, busy));
        case.waits();
        let (late, sent) = polls_two(&mut case);
        let exchange = case.round.exchange;
        case.time_is_up();
        case.waits();
        case.now += MILLI * 10;
        let (timely, _) = polls_two(&mut case);
        case.hears(timely, |_| queued());
        let (exchange, sent) = if is_late {
            (exchange, sent)
        } else {
            (case.round.exchange, case.now)
        };
        case.hears_of(exchange, late, sent, |_| ServerAnswer::Gone);
        assert_eq!(case.round.take_abandoned().is_empty(), is_late);
    }
}
