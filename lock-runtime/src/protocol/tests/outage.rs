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
