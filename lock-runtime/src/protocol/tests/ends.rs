//! Releases and abandonments that are repeated until the store has confirmed them.

use super::*;

// Rule 1 of docs/PROTOCOL.md.
#[test]
fn a_token_without_a_reply_is_not_used_again() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    let at = waits(&bench.no_reply(id));
    let (job, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Abandon(hold) if hold.token == token));
    bench.push(Mode::Exclusive, token, 8);
    assert_eq!(bench.woken, [], "no waiter uses the token any more");
    assert_eq!(waits(&bench.resume(id)), at);
    // The store may have granted the lock after the abandonment.
    bench.job_reply(job, Ok(Reply::Abandoned));
    bench.now = at.max(bench.now + MILLI * 2);
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    assert_ne!(asks(&bench.resume(id)), token);
}

// Rule 8 of docs/PROTOCOL.md.
#[test]
fn an_abandonment_is_repeated_after_the_deadline_of_a_delayed_request() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    let deadline = bench.now + WRITER.call_timeout() + STRAGGLE;
    bench.no_reply(id);
    let (job, _) = bench.due_job().unwrap();
    bench.job_reply(job, Ok(Reply::Abandoned));
    bench.cancel(id);
    bench.now = deadline;
    assert_eq!(bench.endings(), []);
    bench.now += MILLI;
    let (job, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Abandon(hold) if hold.token == token));
    // The server has executed the delayed request by now.
    bench.job_reply(job, Ok(Reply::Abandoned));
    assert!(bench.session.rest().is_none());
}

/// The store has not granted the lock: a message was forged, and the token is in the wait queue.
#[test]
fn a_repeated_release_that_finds_nothing_is_followed_by_an_abandonment() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    bench.behind(&WRITER);
    let held = holds(bench.reply(holder, granted(1))).held;
    let own = bench.token_of(held);
    let (release, named) = bench.hands_back(held);
    let unknown = bench.input(|session, cx| session.release_replied(release, Err(silent()), cx));
    assert!(matches!(unknown, Err(ReleaseError::Unknown(_))));
    bench.now += Duration::from_secs(1);
    let (job, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Release(it) if it.hold.token == own));
    bench.job_reply(job, Ok(Reply::Release(ReleaseReply::NotHeld)));
    let endings = bench.endings();
    let expected = [own, named].map(Ended::Abandoned);
    assert_eq!(endings.len(), 2);
    assert!(
        expected.iter().all(|it| endings.contains(it)),
        "{endings:?}"
    );
}

/// The store keeps an extended lock for the longest lease that was requested.
#[test]
fn release_of_an_extended_lock_is_repeated_until_that_lease_is_over() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let hour = LEASE * 120;
    bench.extends(held, hour, true);
    bench.input(|session, cx| session.guard_dropped(held, cx));
    let began = bench.now;
    let mut calls = 0;
    while !bench.session.is_drained() {
        while let Some((job, _)) = bench.due_job() {
            calls += 1;
            bench.job_reply(job, Err(StoreError::timed_out(MILLI)));
        }
        bench.now += Duration::from_secs(1);
    }
    assert!(calls > 2);
    assert!(bench.now - began >= hour, "{:?}", bench.now - began);
}

#[test]
fn a_late_answer_to_a_call_that_was_repeated_ends_nothing_else() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    bench.behind(&WRITER);
    let held = bench.is_granted(holder, 5);
    let (release, next) = bench.hands_back(held);
    bench.input(|session, cx| session.release_dropped(release, cx));
    let (first, _) = bench.due_job().unwrap();
    // The driver's task does not run, and the keeper sends the call again.
    bench.now += Duration::from_secs(2);
    let overdue = bench.input(|session, cx| session.take_overdue(true, cx));
    let [(second, _)] = &overdue.jobs[..] else {
        panic!("{:?}", overdue.jobs)
    };
    let released = || Ok(Reply::Release(ReleaseReply::Released));
    bench.job_reply(*second, released());
    bench.job_reply(first, released());
    assert_eq!(bench.endings(), [Ended::Abandoned(next)]);
}

#[test]
fn endings_are_repeated_at_different_times_and_keep_no_client() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let token = bench.token_of(held);
    let (release, _) = bench.releases(held).unwrap();
    bench.release_reply(release, ReleaseReply::Released);
    bench.event(&StoreEvent::Disconnected);
    assert!(bench.session.is_drained() && bench.session.needs_driver());
    assert_eq!(bench.endings(), []);
    bench.now += ASK_WITHIN;
    assert_eq!(bench.endings(), [Ended::Released(token)]);
}

/// `min_hold` counts from the grant, and not from the release that reaches the store.
#[test]
fn a_repeated_release_reserves_what_is_left_of_min_hold() {
    let min_hold = LEASE / 2;
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(min_hold)));
    bench.now += MILLI * 400;
    let (held, since) = (bench.is_granted(id, 7), bench.now);
    bench.now += MILLI;
    let (release, first) = bench.releases(held).unwrap();
    assert_eq!(first.keep_for, Some(min_hold - MILLI));
    let unknown = bench.input(|session, cx| session.release_replied(release, Err(silent()), cx));
    assert!(matches!(unknown, Err(ReleaseError::Unknown(_))));
    for passed in [1, 7, 14, 20].map(Duration::from_secs) {
        bench.now = since + passed;
        let (job, call) = bench.due_job().unwrap();
        assert_eq!(keeps_for(&call), min_hold.checked_sub(passed));
        bench.job_reply(job, Err(silent()));
    }
}

/// Requests that are given up while their calls are in flight leave a token each, of which there is
/// a largest number, whatever kind of request they were.
#[test]
fn tokens_that_are_to_be_ended_are_limited() {
    let mut bench = Bench::new();
    let at_once = writer(|it| it.wait = Wait::No);
    for number in 0..UNENDED {
        let (id, step) = bench
            .begin_for(&named(&number.to_string()), &at_once)
            .unwrap();
        asks(&step);
        bench.cancel(id);
    }
    for terms in [&at_once, &WRITER, &READER] {
        let begun = bench.begin_for(&named("other"), terms);
        assert!(matches!(begun, Err(Refused::Unended)), "{begun:?}");
    }
    let (keys, times) = (["a", "b"].map(named), (bench.now, at_once.call_timeout()));
    let begun = bench.input(|session, cx| session.begin_all(&keys, &at_once, times, cx));
    assert!(matches!(begun, Err((0, Refused::Unended))), "{begun:?}");
    let (job, _) = bench.due_job().unwrap();
    let error = StoreError::new(StoreErrorKind::Forbidden, "no right");
    bench.job_reply(job, Err(error));
    bench.begin_for(&named("other"), &at_once).unwrap();
}

/// The end of a hold is not behind the ends of requests, of which a caller can cause any number.
#[test]
fn the_end_of_a_hold_goes_before_those_of_requests() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let given_up: Vec<_> = (0..3)
        .map(|number| {
            let (id, step) = bench
                .begin_for(&named(&number.to_string()), &WRITER)
                .unwrap();
            let token = asks(&step);
            bench.cancel(id);
            Ended::Abandoned(token)
        })
        .collect();
    bench.now += MILLI;
    let token = bench.session.held[held].hold.token;
    bench.input(|session, cx| session.guard_dropped(held, cx));
    let endings = bench.endings();
    assert_eq!(endings[0], Ended::Released(token));
    assert_eq!(endings[1..], given_up);
}

/// Nothing of it is left to reserve.
#[test]
fn a_lock_that_is_lost_at_the_end_of_its_min_hold_is_abandoned() {
    let mut bench = Bench::new();
    let (id, token) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE / 2)));
    let held = bench.is_granted(id, 7);
    bench.now += LEASE / 2;
    bench.input(|session, cx| session.lose(held, Loss::Expired, cx));
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

/// An abandonment, to be made for the first time at `now`.
fn abandonment(straggler_until: Option<Instant>, now: Instant) -> PendingEnd {
    let hold = Hold::new(key(), Mode::Exclusive, Token::random());
    PendingEnd::new(Ending::Abandon(hold), LEASE, straggler_until, now)
}

#[test]
fn an_ending_without_a_reply_is_given_up_once_the_lease_is_over() {
    let now = Instant::now();
    for (left, is_over) in [(MILLI, false), (Duration::ZERO, true)] {
        let mut pending = abandonment(None, now);
        let latest = pending.replied::<()>(Err(silent()), 0.5, now + LEASE - left);
        assert_eq!(matches!(latest, Latest::GaveUp(_)), is_over, "{latest:?}");
    }
}

#[test]
fn the_pause_before_an_ending_is_repeated_is_half_random() {
    let now = Instant::now();
    for (jitter, quarters) in [(0.0, 2), (0.5, 3), (1.0, 4)] {
        let mut pending = abandonment(None, now);
        pending.call(now);
        pending.replied::<()>(Err(silent()), jitter, now);
        assert_eq!(pending.due(), Some(now + FIRST_BACKOFF / 4 * quarters));
    }
}

/// A delayed request may be executed until its deadline (rule 8).
#[test]
fn an_abandonment_that_was_sent_at_the_deadline_is_repeated() {
    let now = Instant::now();
    let deadline = now + LEASE;
    for (sent, due) in [(deadline, Some(deadline + MILLI)), (deadline + MILLI, None)] {
        let mut pending = abandonment(Some(deadline), now);
        pending.call(sent);
        pending.replied(Ok(()), 0.5, sent);
        assert_eq!(pending.due(), due);
    }
}

#[test]
fn a_release_in_the_background_is_logged_once() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    bench.drops_guard(held);
    for _ in 0..2 {
        let (job, _) = bench.due_job().unwrap();
        bench.job_reply(job, Ok(Reply::Release(ReleaseReply::Released)));
        assert_eq!(bench.noted("Released"), 1, "{:?}", bench.notes);
        // It is repeated, as the store may have lost it.
        bench.event(&StoreEvent::Disconnected);
        bench.now += ASK_WITHIN;
    }
    bench.endings();
    let (id, _) = bench.head();
    bench.cancel(id);
    let (job, _) = bench.due_job().unwrap();
    bench.job_reply(job, Ok(Reply::Abandoned));
    assert_eq!(bench.noted("Released"), 1, "an abandonment is no release");
}
