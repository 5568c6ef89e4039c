//! A store that does not answer, and answers again.

use super::*;

/// The circuit breaker is open: each waiter learns it from a call of its own, at once.
#[test]
fn an_outage_ends_the_waits_of_a_queue_one_after_another() {
    let mut bench = Bench::new();
    let (first, token) = bench.head();
    waits(&bench.reply(first, queued(Some(7))));
    let behind = [bench.behind(&WRITER), bench.behind(&WRITER)];
    bench.event(&StoreEvent::Disconnected);
    bench.now += ASK_WITHIN;
    polls(&bench.resume(first));
    for id in [first, behind[0], behind[1]] {
        let error = StoreError::timed_out(MILLI).with_unsent(true);
        let error = error.ending_waits(true);
        let step = bench.input(|session, cx| session.replied(id, Err(error), cx));
        let is_refused =
            matches!(&step, Step::Done(Err(Refused::Store(error))) if error.ends_waits());
        assert!(is_refused, "{step:?}");
        if id != behind[1] {
            let next = if id == first { behind[0] } else { behind[1] };
            assert!(bench.woken.contains(&next));
            polls(&bench.resume(next));
        }
    }
    // The store may still have the queue entry.
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    // A request that does not wait makes no second attempt.
    let (id, _) = bench.asks_for(&writer(|it| it.wait = Wait::No));
    let error = StoreError::timed_out(MILLI).ending_waits(true);
    let step = bench.input(|session, cx| session.replied(id, Err(error), cx));
    assert!(
        matches!(step, Step::Done(Err(Refused::Store(_)))),
        "{step:?}"
    );
}

#[test]
fn heads_that_got_no_reply_ask_soon_after_an_outage() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    for _ in 0..20 {
        let next = waits(&bench.no_reply(id));
        bench.now = next;
        asks(&bench.resume(id));
    }
    let next = waits(&bench.no_reply(id));
    assert!(next > bench.now + ASK_WITHIN);
    bench.event(&StoreEvent::Reconnected);
    assert!(waits(&bench.resume(id)) <= bench.now + ASK_WITHIN);
}

#[test]
fn attempt_that_was_not_sent_is_not_abandoned() {
    let mut bench = Bench::new();
    for terms in [WRITER, writer(|it| it.wait = Wait::No)] {
        let (id, token) = bench.asks_for(&terms);
        let unsent = StoreError::timed_out(MILLI).with_unsent(true);
        let step = bench.input(|session, cx| session.replied(id, Err(unsent), cx));
        assert_eq!(bench.endings(), []);
        if let Step::Wait(at) = step {
            bench.now = at;
            assert!(token != asks(&bench.resume(id)));
        }
        bench.cancel(id);
        bench.endings();
    }
}

/// The clock of a store may stand still while it does not answer.
#[test]
fn a_hold_is_ended_as_soon_as_the_store_answers_again_also_after_its_lease() {
    let minute = Duration::from_secs(60);
    for (outage, is_ended) in [
        (LEASE / 2, true),
        (LEASE + minute / 2, true),
        (LEASE + minute * 2, false),
    ] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let token = bench.token_of(held);
        let (release, _) = bench.releases(held).unwrap();
        let unknown =
            bench.input(|session, cx| session.release_replied(release, Err(silent()), cx));
        assert!(matches!(unknown, Err(ReleaseError::Unknown(_))));
        for _ in 0..outage.as_millis() / 100 {
            bench.now += MILLI * 100;
            if let Some((job, _)) = bench.due_job() {
                bench.job_reply(job, Err(silent()));
            }
        }
        bench.event(&StoreEvent::Reconnected);
        bench.now += ASK_WITHIN;
        let expected = is_ended.then_some(Ended::Released(token));
        assert_eq!(bench.endings(), Vec::from_iter(expected), "{outage:?}");
    }
}

#[test]
fn only_an_ending_that_has_failed_is_repeated_as_soon_as_the_store_answers_again() {
    for has_failed in [false, true] {
        let mut bench = Bench::new();
        let (id, token) = bench.head();
        bench.cancel(id);
        let (job, _) = bench.due_job().unwrap();
        let answer = if has_failed {
            Err(silent())
        } else {
            Ok(Reply::Abandoned)
        };
        bench.job_reply(job, answer);
        bench.event(&StoreEvent::Reconnected);
        // At half of the spread.
        bench.now += ASK_WITHIN / 2;
        let expected = has_failed.then_some(Ended::Abandoned(token));
        assert_eq!(bench.endings(), Vec::from_iter(expected));
        // The time at which it was due before has no meaning any more.
        bench.now += ASK_WITHIN;
        assert_eq!(bench.endings(), []);
    }
}

/// A request that does not wait makes another attempt if the store was not silent for a whole call.
#[test]
fn a_second_attempt_is_made_before_the_time_of_one_call_is_over() {
    let terms = writer(|it| it.wait = Wait::No);
    for (left, is_repeated) in [(MILLI, true), (Duration::ZERO, false)] {
        let mut bench = Bench::new();
        let (id, token) = bench.asks_for(&terms);
        bench.now += terms.call_timeout() - left;
        match bench.no_reply(id) {
            step @ Step::Call(_) => {
                assert!(is_repeated);
                assert_ne!(asks(&step), token);
            }
            step => {
                assert!(!is_repeated, "{step:?}");
                assert!(matches!(step, Step::Done(Err(Refused::Store(_)))));
            }
        }
    }
}

/// The time-out of a call that the end of the wait has cut short says nothing.
#[test]
fn a_wait_ends_with_the_latest_error_that_says_something() {
    let read_only = || StoreError::new(StoreErrorKind::ReadOnly, "a replica");
    let full = || StoreError::new(StoreErrorKind::Full, "no memory");
    let (early, late) = (LEASE / 2, LEASE);
    for (error, at, is_shown) in [
        (silent(), early, true),
        (silent(), late, false),
        (full(), early, true),
        (full(), late, true),
    ] {
        let mut bench = Bench::new();
        let (began, kind) = (bench.now, error.kind());
        let (id, _) = bench.head();
        let step = bench.input(|session, cx| session.replied(id, Err(read_only()), cx));
        bench.now = waits(&step);
        asks(&bench.resume(id));
        bench.now = began + at;
        let mut step = bench.input(|session, cx| session.replied(id, Err(error), cx));
        if at == early {
            waits(&step);
            bench.now = began + late;
            step = bench.resume(id);
        }
        match step {
            Step::Done(Err(Refused::TimedOut(Refusal::Unavailable(last)))) => {
                let expected = if is_shown { kind } else { read_only().kind() };
                assert_eq!(last.kind(), expected, "{at:?}");
            }
            step => panic!("{step:?}"),
        }
    }
}

/// If the store did not reply to those that wait, it is unknown whether the lock is held, unless
/// this process holds it.
#[test]
fn a_request_beside_waiters_without_a_reply_is_refused_by_a_lock_that_excludes_it() {
    let permits = Mode::Permits(std::num::NonZeroU32::MIN);
    let (writes, reads) = (Mode::Exclusive, Mode::Shared);
    let (own, other) = (key(), named("other"));
    for (held, is_over, wanted, excludes) in [
        (None, false, writes, false),
        (Some((&own, writes)), false, writes, true),
        (Some((&own, writes)), false, reads, true),
        (Some((&own, reads)), false, writes, true),
        (Some((&own, reads)), false, reads, false),
        (Some((&own, writes)), true, writes, false),
        (Some((&own, writes)), false, permits, false),
        (Some((&own, permits)), false, writes, false),
        (Some((&other, writes)), false, writes, false),
    ] {
        let mut bench = Bench::new();
        if let Some((key, mode)) = held {
            bench.holds_in(key, mode, LEASE);
        }
        if is_over {
            bench.now += LEASE;
        }
        let (id, _) = bench.asks_for(&Terms::plain(wanted, LEASE, Wait::AtMost(LEASE)));
        if wanted != Mode::Exclusive {
            asks(&bench.no_reply(id));
        }
        waits(&bench.no_reply(id));
        let reason = format!("{wanted:?} beside {held:?}, {is_over}");
        match bench.begin(&Terms::plain(wanted, LEASE, Wait::No)) {
            Err(Refused::Contended(_)) => assert!(excludes, "{reason}"),
            Err(Refused::Store(_)) => assert!(!excludes, "{reason}"),
            begun => panic!("{reason}: {begun:?}"),
        }
    }
}
