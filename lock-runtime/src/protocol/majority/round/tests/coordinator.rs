//! The coordinator: its queue, its votes for others, and rounds without it.

use super::*;

/// The round trip of fast servers. A waiter polls every 84 ms, and holds votes without a majority
/// for 30 ms.
const FAST: Duration = MILLI;
const POLL: Duration = Duration::from_millis(84);
const SPLIT: Duration = Duration::from_millis(30);

fn queues(request: &mut KeyRequest) {
    request.if_busy = IfBusy::Queue;
}

/// A writer that queues for a lock with fast servers.
fn waiter() -> Case {
    Case::of(Mode::Exclusive, FAST, queues)
}

/// A waiter whose request to the coordinator was granted. Returns the requests to the others.
fn head() -> (Case, Calls) {
    let mut case = waiter();
    let calls = case.begins(true);
    case.hears(calls, |_| granted());
    let others = case.asks();
    (case, others)
}

/// The holder renews its lease, so that only the fencing token shows that it is the same one.
#[test]
fn a_waiter_checks_the_other_servers_after_pauses_that_double() {
    let queued = |_| {
        ServerAnswer::Acquire(AcquireReply::Queued {
            counter: FencingToken::new(5),
            holder_ttl: Some(LEASE),
        })
    };
    let mut case = waiter();
    let (begun, calls) = (case.now, case.begins(true));
    case.hears(calls, queued);
    assert_eq!(case.waits(), POLL);
    for (millis, asks) in [
        (50, false),
        (84, true),
        (134, false),
        (251, false),
        (252, true),
        (587, false),
        (588, true),
        (1259, false),
        (1260, true),
        // The longest pause.
        (1959, false),
        (1960, true),
    ] {
        case.now = begun + MILLI * millis;
        let calls = case.polls();
        assert_eq!(calls.len(), 1, "after {millis} ms");
        case.hears(calls, queued);
        if asks {
            let others = case.asks();
            assert_eq!(others.len(), 4, "after {millis} ms");
            case.hears(others, |_| busy());
        }
        case.waits();
    }
}

/// Each poll finds another holder, whose lease ends later.
#[test]
fn a_waiter_in_a_queue_that_moves_checks_the_other_servers_every_700_ms() {
    let mut case = waiter();
    let (begun, calls) = (case.now, case.begins(true));
    case.hears(calls, |_| queued());
    case.waits();
    for millis in [84, 300, 600, 699] {
        case.now = begun + MILLI * millis;
        let calls = case.polls();
        case.hears(calls, |_| queued());
        case.waits();
    }
    case.now = begun + MILLI * 700;
    let calls = case.polls();
    case.hears(calls, |_| queued());
    assert_eq!(case.asks().len(), 4);
}

/// The other servers are free, and the coordinator holds the lock for a client that may be about to
/// ask them. A request that does not wait in its queue leaves the votes to that client, and asks
/// once more if it has the time.
#[test]
fn a_request_that_does_not_queue_steps_aside_once() {
    let second = Duration::from_secs(1);
    for (left, has_waiters, then_queues, pause) in [
        (second, false, false, Some(SPLIT)),
        (MILLI * 60, false, false, Some(MILLI * 20)),
        (Duration::ZERO, false, false, None),
        // A waiter is next.
        (second, true, false, None),
        // The caller joins the queue.
        (second, false, true, None),
    ] {
        let taken = |server| match server {
            0 => ServerAnswer::Acquire(AcquireReply::Busy {
                holder_ttl: None,
                has_waiters,
            }),
            _ => granted(),
        };
        let mut case = Case::of(Mode::Exclusive, FAST, |request| {
            request.deadline = request.deadline - LEASE + left;
            request.then_queues = then_queues;
        });
        let calls = case.begins(false);
        case.hears(calls, taken);
        let next = case.next();
        assert_eq!(case.round.take_abandoned().len(), 4);
        let Some(pause) = pause else {
            let is_refused = matches!(next, Next::Done(Outcome::Refused(_)));
            assert!(is_refused, "{left:?} {has_waiters} {then_queues}: {next:?}");
            continue;
        };
        let until = case.now + pause;
        assert!(matches!(next, Next::Pause(at) if at == until), "{next:?}");
        case.now = until - Duration::from_nanos(1);
        let next = case.next();
        assert!(matches!(next, Next::Pause(at) if at == until), "{next:?}");
        case.now = until;
        let calls = case.asks();
        assert_eq!(calls.len(), 5);
        case.hears(calls, taken);
        case.is_granted();
    }
}

/// The same for a waiter. In front of a reader a writer may wait, which polls in the meantime.
#[test]
fn a_waiter_yields_once_to_the_vote_of_its_coordinator() {
    for (mode, first_poll, pause) in [
        (Mode::Exclusive, SPLIT, SPLIT),
        (Mode::Shared, POLL, POLL * 3),
    ] {
        let mut case = Case::of(mode, FAST, queues);
        let (begun, calls) = (case.now, case.begins(false));
        case.hears(calls, of_first(1, queued, granted));
        assert_eq!(case.waits(), first_poll);
        for passed in [pause - MILLI, pause] {
            case.now = begun + passed;
            let calls = case.polls();
            assert_eq!(calls.len(), 1);
            case.hears(calls, |_| queued_for(LEASE - passed));
            if passed < pause {
                case.waits();
            }
        }
        let others = case.asks();
        case.hears(others, |_| granted());
        case.is_granted();
    }
}

/// A waiter would lose its place if it went on without the coordinator: its caller asks again.
#[test]
fn only_a_first_exchange_goes_on_without_its_coordinator() {
    for answer in [silent(), ServerAnswer::Acquire(AcquireReply::Late)] {
        let (mut case, calls) = Case::begun();
        case.hears(calls, |_| answer.clone());
        assert_eq!(case.asks().len(), 4);
    }
    let (mut case, calls) = Case::begun();
    case.hears(calls, |_| queued());
    case.waits();
    let calls = case.polls();
    case.hears(calls, |_| silent());
    case.is_gone();
}

/// The lock was not known to be contended, so the others were asked not to queue the request.
#[test]
fn a_waiter_with_the_vote_of_the_coordinator_queues_at_the_others() {
    let mut case = waiter();
    let calls = case.begins(false);
    case.hears(calls, of_first(1, granted, busy));
    let others = case.asks();
    let is_queued = |(_, ask): &(_, _)| matches!(ask, Ask::Acquire(_, IfBusy::Queue));
    assert!(
        others.len() == 4 && others.iter().all(is_queued),
        "{others:?}"
    );
}

/// Its grant and its queue come first, but it may be down.
#[test]
fn a_majority_awaits_the_coordinator_for_as_long_as_it_took_itself() {
    let mut case = waiter();
    let calls = case.begins(false);
    let sent = case.now;
    let (_, others) = split(calls, &[0]);
    case.now += MILLI * 10;
    case.hears_late(others, sent, |_| granted());
    let until = case.now + MILLI * 10;
    for now in [case.now, until - Duration::from_nanos(1)] {
        case.now = now;
        let next = case.next();
        assert!(
            matches!(next, Next::Wait(Some(at)) if at == until),
            "{next:?}"
        );
    }
    case.now = until;
    case.is_granted();
}

/// Two of the servers fail at once.
#[test]
fn a_request_without_a_chance_awaits_the_replies_that_show_whether_the_lock_is_held() {
    for is_held in [true, false] {
        let mut case = Case::of(Mode::Exclusive, FAST, |_| {});
        let calls = case.begins(false);
        let (first, last) = split(calls, &[0, 1, 2]);
        case.hears(first, of_first(1, busy, silent));
        case.awaits_replies();
        case.hears(last, |_| if is_held { busy() } else { silent() });
        if is_held {
            let next = case.next();
            assert!(matches!(next, Next::Done(Outcome::Refused(_))), "{next:?}");
        } else {
            case.is_unreachable();
        }
    }
}

/// The reply of a server to a request, as if it had kept its answer to the first one.
fn again(kept: &ServerAnswer) -> ServerAnswer {
    match kept {
        ServerAnswer::Acquire(AcquireReply::Granted(_)) => renewed(),
        kept => kept.clone(),
    }
}

/// Another client may have a majority if most servers queue this one. Otherwise the votes are
/// split, and one of the clients has to give up its own soon.
#[test]
fn the_head_of_the_queue_gives_up_its_votes_after_a_time() {
    for (voting, queueing, time) in [(2, 3, Duration::from_secs(1)), (2, 2, SPLIT), (1, 0, SPLIT)] {
        let says = |server| match server {
            _ if server < voting => granted(),
            _ if server < voting + queueing => queued(),
            _ => busy(),
        };
        let (mut case, others) = head();
        let begun = case.now;
        case.hears(others, says);
        assert_eq!(case.waits(), time, "{voting} {queueing}");
        for passed in [time - MILLI, time] {
            case.now = begun + passed;
            let calls = case.polls();
            case.hears(calls, |server| again(&says(server)));
            if passed < time {
                assert_eq!(case.waits(), MILLI, "{voting} {queueing}");
            }
        }
        case.is_gone();
    }
}

/// There is nothing to wait with.
#[test]
fn a_head_without_votes_and_queue_entries_is_gone() {
    let (mut case, others) = head();
    case.hears(others, |_| busy());
    case.waits();
    let calls = case.polls();
    case.hears(calls, |server| match server {
        0 => ServerAnswer::Renew(RenewReply::Gone),
        _ => busy(),
    });
    case.is_gone();
}

/// The votes of two servers that have not replied would be enough.
#[test]
fn the_head_of_the_queue_awaits_votes_that_may_make_a_majority() {
    let (mut case, others) = head();
    let (first, last) = split(others, &[1, 2]);
    case.hears(first, |_| queued());
    case.awaits_replies();
    case.hears(last, |_| granted());
    case.is_granted();
}
