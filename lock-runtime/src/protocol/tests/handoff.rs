//! Hand-offs, in the process and by the store.

mod retained;

use super::*;

#[test]
fn hand_off_goes_to_the_head_with_the_same_claim_only() {
    let mut bench = Bench::new();
    bench.gives_back(4, LEASE, "no request waits");
    let (reader, _) = bench.asks_for(&READER);
    asks(&bench.reply(reader, BUSY));
    let [first, second, third] = [(); 3].map(|()| bench.behind(&WRITER));
    bench.gives_back(4, LEASE, "a reader is at the head of the queue");
    bench.cancel(reader);
    bench.gives_back(4, LEASE * 2, "another lease");
    asks(&bench.resume(first));
    bench.woken.clear();

    let held = bench.holds(4, LEASE);
    let token = bench.token_of(held);
    assert!(bench.hands_off(held));
    assert_eq!(bench.woken, [first]);
    // The first waiter is cancelled: a hand-off that was not taken goes to the next one (rule 20).
    bench.endings();
    bench.cancel(first);
    assert!(!bench.endings().contains(&Ended::Released(token)));
    let granted = holds(bench.resume(second));
    let budget = bench.session.held[granted.held].budget;
    assert_eq!((granted.fence.number(), budget.unwrap().left), (10, 3));
    assert_eq!(bench.token_of(granted.held), token);

    // While the holder may hand off the lock, the head does not call the store.
    assert!(waits(&bench.resume(third)) > bench.now);
    assert!(bench.hands_off(granted.held));
    bench.cancel(third);
    // No waiter is left to take it.
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    assert!(bench.is_empty());
}

#[test]
fn release_without_a_hand_off_wakes_local_waiters() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let [first, second, third] = [(); 3].map(|()| bench.behind(&WRITER));
    let held = bench.is_granted(holder, 6);
    let reply = ReleaseReply::Queued {
        counter: fence(7),
        holder_ttl: Some(LEASE),
    };
    let token = bench.hands_back_to(first, held, reply);
    waits(&bench.resume(first));
    bench.gives_back(0, LEASE, "it is in the store's wait queue");
    bench.push(Mode::Exclusive, token, 8);
    let held = holds(bench.resume(first)).held;
    assert_eq!(bench.token_of(held), token);

    let token = bench.hands_back_to(second, held, ReleaseReply::Passed(grant(9)));
    let granted = holds(bench.resume(second));
    assert_eq!(granted.fence.number(), 9);
    assert_eq!(bench.token_of(granted.held), token);

    let token = bench.hands_back_to(third, granted.held, ReleaseReply::Released);
    // It makes its own attempt.
    assert_ne!(asks(&bench.resume(third)), token);
}

#[test]
fn hand_back_without_a_taker_makes_the_head_ask_at_once() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let renews = bench.behind(&WRITER);
    let held = bench.is_granted(holder, 6);
    let (release, token) = bench.hands_back(held);
    let next = bench.behind(&writer(|it| it.renew = false));
    bench.cancel(renews);
    waits(&bench.resume(next));
    bench.woken.clear();
    bench.release_reply(release, ReleaseReply::Passed(grant(7)));
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    assert_eq!(bench.woken, [next], "the head must be woken");
    assert_ne!(asks(&bench.resume(next)), token);
}

/// A holder hands a lock back for the only waiter. The waiter leaves, so the token is abandoned.
/// Another waiter arrives, and then the reply reports that the lock is held under that token.
/// Random schedules produce this about once in 200,000.
#[test]
fn a_lock_that_returns_under_an_abandoned_token_is_not_taken() {
    for mutation in [None, Some(Mutation::AcceptsAbandoned)] {
        let mut bench = Bench::with_limits(1, 2);
        bench.mutation = mutation;
        let (holder, _) = bench.head();
        let waiter = bench.behind(&WRITER);
        let held = holds(bench.reply(holder, granted(1))).held;
        let (release, token) = bench.hands_back(held);
        bench.cancel(waiter);
        // It has no other owner, so it is abandoned.
        assert!(bench.endings().contains(&Ended::Abandoned(token)));
        let (later, _) = bench.begin(&WRITER).unwrap();
        bench.release_reply(release, ReleaseReply::Passed(grant(1).reserved(32)));
        let is_given_back = bench.endings().contains(&Ended::Released(token));
        // The reply to the waiter's own request lets it take a hand-off.
        let step = bench.reply(later, BUSY);
        let is_taken = matches!(step, Step::Done(Ok(_)));
        assert_ne!(is_taken, is_given_back, "{step:?}");
        // The abandonment would free it while the next waiter holds it.
        assert_eq!(is_taken, mutation.is_some());
    }
}

/// The only waiter leaves while the task of a release, which has named its token, is no longer
/// polled. The release is ended in the background, as it may be executed after the abandonment.
#[test]
fn a_neglected_release_is_ended_once_its_waiter_has_left() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let waiter = bench.behind(&WRITER);
    let held = holds(bench.reply(holder, granted(1))).held;
    let own = bench.token_of(held);
    let (release, named) = bench.hands_back(held);
    bench.cancel(waiter);
    let (job, _) = bench.due_job().unwrap();
    bench.job_reply(job, Ok(Reply::Abandoned));
    bench.now += UNREPORTED - MILLI;
    assert_eq!(bench.endings(), []);
    assert!(bench.session.needs_driver());
    bench.now += MILLI;
    let (job, call) = bench.due_job().unwrap();
    assert!(
        matches!(call.request, Request::Release(it) if it.hold.token == own && it.next.is_none())
    );
    bench.job_reply(job, Ok(Reply::Release(ReleaseReply::Released)));
    assert_eq!(bench.endings(), [Ended::Abandoned(named)]);
    // Its task goes on after all. The first call may have released the lock, or the driver's.
    for (answer, is_known) in [
        (Ok(ReleaseReply::Released), true),
        (Ok(ReleaseReply::NotHeld), false),
        (Err(silent()), false),
    ] {
        let answer = answer.map(Reply::Release);
        let released = bench.input(|session, cx| session.release_replied(release, answer, cx));
        match released {
            Ok(Released::AtStore) => assert!(is_known),
            Err(ReleaseError::Unknown(_)) => assert!(!is_known),
            released => panic!("{released:?}"),
        }
    }
}

#[test]
fn hand_off_ends_once_the_store_may_have_lost_data() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let (waiter, _behind) = (bench.behind(&WRITER), bench.behind(&WRITER));
    let before = bench.now;
    let held = holds(bench.reply(holder, granted_with(6, 4))).held;
    let token = bench.token_of(held);
    waits(&bench.resume(waiter));
    assert!(bench.hands_off(held));
    bench.now += MILLI;
    bench.event(&StoreEvent::Disconnected);
    // The head has not taken it.
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    let held = bench.holds_as_of(before, 4, LEASE);
    let (release, token) = bench.hands_back(held);
    bench.event(&StoreEvent::Disconnected);
    bench.release_reply(release, ReleaseReply::Passed(grant(8).reserved(4)));
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    assert_ne!(asks(&bench.resume(waiter)), token);
    bench.now += MILLI;
    let held = bench.holds(4, LEASE);
    assert!(bench.hands_off(held), "reserved since");
}

#[test]
fn hand_offs_end_with_their_budget_or_their_validity() {
    let now = Instant::now();
    let lease = |ttl| Lease::granted(LEASE, true, now, ttl, 0.5);
    let hand_off = |lease, budget, now| {
        let hold = Hold::new(key(), Mode::Exclusive, Token::random());
        Handoff::new(hold, fence(9).unwrap(), lease, budget, now)
    };
    let budget = Budget::new(1, now, now);
    let once = hand_off(lease(LEASE), budget, now).unwrap();
    let (second, until) = (Duration::from_secs(1), budget.until);
    let waited = "other processes have waited long enough";
    for (ttl, budget, now, reason) in [
        (LEASE, once.budget, now, "no fencing token is left"),
        (LEASE, budget, until, waited),
        (second, budget, now, "too little is left of the lease"),
    ] {
        assert!(hand_off(lease(ttl), budget, now).is_none(), "{reason}");
    }
    assert_eq!(Budget::new(1000, now, now).left, MAX_HANDOFFS);
}

/// The next holder has asked for a shorter lease than the extended one.
#[test]
fn an_extended_lock_is_not_handed_off_locally() {
    for is_answered in [false, true] {
        let mut bench = Bench::new();
        let held = bench.holds(3, LEASE);
        bench.head();
        bench.extends(held, LEASE * 2, is_answered);
        assert!(!bench.hands_off(held), "{is_answered}");
    }
}

#[test]
fn a_reserved_lock_is_not_handed_off_locally() {
    for (min_hold, is_handed_off) in [(MILLI, true), (LEASE / 2, false)] {
        let mut bench = Bench::new();
        let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(min_hold)));
        bench.behind(&WRITER);
        let held = holds(bench.reply(id, granted_with(7, MAX_HANDOFFS))).held;
        bench.now += MILLI;
        let call = bench.releases(held);
        assert_eq!(call.is_none(), is_handed_off, "{min_hold:?}: {call:?}");
        let left = call.and_then(|(_, release)| release.keep_for);
        assert_eq!(left.is_none(), is_handed_off, "{left:?}");
    }
}

#[test]
fn a_hand_off_leaves_half_of_the_lease_of_a_grant_from_the_queue() {
    let now = Instant::now();
    let valid_for = LEASE - drift(LEASE);
    for (left, is_handed_off) in [(MILLI * 1500, true), (MILLI * 1499, false)] {
        let later = now + valid_for - left;
        let hold = Hold::new(key(), Mode::Exclusive, Token::random());
        let lease = Lease::granted(LEASE, true, now, LEASE, 0.5);
        let budget = Budget::new(1, now, later);
        let handoff = Handoff::new(hold, fence(9).unwrap(), lease, budget, later);
        assert_eq!(handoff.is_some(), is_handed_off, "{left:?}");
    }
}

/// With no more validity than a renewal may take, the lock would be lost at once.
#[test]
fn a_hand_off_that_is_taken_too_late_is_released() {
    for (left, is_taken) in [(MILLI, true), (Duration::ZERO, false)] {
        let mut bench = Bench::new();
        let held = bench.holds(4, LEASE);
        let token = bench.token_of(held);
        let valid_for = LEASE - drift(LEASE);
        let (waiter, _) = bench.head();
        waits(&bench.reply(waiter, BUSY));
        assert!(bench.hands_off(held));
        bench.now += valid_for - WRITER.call_timeout() - left;
        match bench.resume(waiter) {
            Step::Done(Ok(_)) => assert!(is_taken),
            step => {
                assert!(!is_taken);
                assert_ne!(asks(&step), token);
                assert_eq!(bench.endings(), [Ended::Released(token)]);
            }
        }
    }
}

/// The holder hands the lock off for a limited time only.
#[test]
fn the_head_asks_as_soon_as_the_lock_is_no_longer_handed_off() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let waiter = bench.behind(&WRITER);
    let held = holds(bench.reply(holder, granted_with(6, 4))).held;
    let until = bench.session.held[held].budget.unwrap().until;
    bench.now = until - MILLI;
    assert_eq!(waits(&bench.resume(waiter)), until);
    bench.now = until;
    asks(&bench.resume(waiter));
}

/// Only then are fencing tokens needed for hand-offs (rule 19).
#[test]
fn fencing_tokens_are_reserved_if_another_request_waits_that_takes_a_hand_off() {
    for (terms, waits_behind, reserved) in [
        (WRITER, false, 0),
        (WRITER, true, MAX_HANDOFFS),
        (writer(|it| it.strict_order = true), true, 0),
        (writer(|it| it.renew = false), true, 0),
    ] {
        let mut bench = Bench::new();
        let (id, step) = bench.begin(&terms).unwrap();
        assert_eq!(request(&step).reserved, 0);
        waits(&bench.reply(id, BUSY));
        if waits_behind {
            bench.behind(&terms);
        }
        bench.freed();
        let step = bench.resume(id);
        assert_eq!(request(&step).reserved, reserved, "{terms:?}");
    }
}

/// The task of a release that has named the token of the head is gone: the release may be executed
/// until its deadline, and the token would hold the lock without an owner.
#[test]
fn the_token_that_an_overdue_release_has_named_is_abandoned_twice() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let waiter = bench.behind(&WRITER);
    let held = bench.is_granted(holder, 6);
    let (_, named) = bench.hands_back(held);
    bench.now += UNREPORTED;
    assert_ne!(asks(&bench.resume(waiter)), named);
    let confirm_all = |bench: &mut Bench| {
        let mut abandoned = 0;
        while let Some((job, call)) = bench.due_job() {
            let reply = match call.request {
                Request::Abandon(hold) => {
                    abandoned += usize::from(hold.token == named);
                    Reply::Abandoned
                }
                _ => Reply::Release(ReleaseReply::Released),
            };
            bench.job_reply(job, Ok(reply));
        }
        abandoned
    };
    assert!(confirm_all(&mut bench) > 0);
    bench.now += STRAGGLE;
    assert_eq!(confirm_all(&mut bench), 0);
    bench.now += MILLI;
    assert_eq!(confirm_all(&mut bench), 1);
}

/// A release of another lock, which has not named the token, is left to its task.
#[test]
fn a_token_that_is_given_up_ends_no_release_of_another_lock() {
    let mut bench = Bench::new();
    let held = bench.holds_in(&named("other"), Mode::Exclusive, LEASE);
    let (release, _) = bench.releases(held).unwrap();
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(Some(7))));
    bench.cancel(id);
    bench.now += UNREPORTED;
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    bench.release_reply(release, ReleaseReply::Released);
}
