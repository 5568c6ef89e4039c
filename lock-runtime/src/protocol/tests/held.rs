//! Locks that are held: extensions, conversions, losses.

use super::*;

/// A renewal that was sent later is executed, or answered, before the extension (rule 41).
#[test]
fn an_extension_that_a_renewal_overtakes_is_valid() {
    let (second, length) = (Duration::from_secs(1), LEASE * 2);
    for is_extension_first in [false, true] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let sent = bench.now;
        bench
            .input(|session, cx| session.extend(held, length, cx))
            .unwrap();
        bench.now += second;
        let renewed = bench.now;
        bench.now += second;
        let extend = |bench: &mut Bench| {
            let reply = Ok(Reply::Renew(RenewReply::Renewed { ttl: length }));
            let extended = bench.input(|session, cx| session.extend_replied(held, reply, sent, cx));
            extended.unwrap();
        };
        let renew = |bench: &mut Bench| {
            let reply = Ok(RenewReply::Renewed { ttl: LEASE });
            bench.input(|session, cx| session.renewal_replied(held, reply, renewed, cx));
        };
        if is_extension_first {
            extend(&mut bench);
            renew(&mut bench);
        } else {
            renew(&mut bench);
            extend(&mut bench);
        }
        let valid_for = bench.session.held[held].validity(sent);
        assert_eq!(valid_for, length - drift(length), "{is_extension_first}");
    }
}

/// A loss that a guard may have reported stands.
#[test]
fn an_extension_is_no_success_once_the_lock_was_lost_or_released() {
    for is_released in [false, true] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let sent = bench.now;
        bench
            .input(|session, cx| session.extend(held, LEASE * 2, cx))
            .unwrap();
        if is_released {
            bench.releases(held).unwrap();
        } else {
            bench.now += LEASE;
        }
        let reply = Ok(Reply::Renew(RenewReply::Renewed { ttl: LEASE * 2 }));
        let extended = bench.input(|session, cx| session.extend_replied(held, reply, sent, cx));
        match (is_released, extended) {
            (true, Err(ExtendError::Released)) => {}
            (false, Err(ExtendError::Lost(Loss::Expired))) => {}
            (_, extended) => panic!("{is_released}: {extended:?}"),
        }
    }
}

/// `min_hold` counts for a lock whose downgrade has no reply, too.
#[test]
fn a_failed_downgrade_leaves_the_lock_reserved() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE)));
    let held = bench.is_granted(id, 7);
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (id, _) = begun.unwrap();
    bench.input(|session, cx| session.convert_dropped(id, cx));
    let mut modes = Vec::new();
    let token = loop {
        let (job, call) = bench.due_job().unwrap();
        let release = match call.request {
            Request::Release(release) => release,
            Request::Abandon(hold) => break hold.token,
            request => panic!("{request:?}"),
        };
        assert_eq!(release.keep_for, Some(LEASE));
        modes.push((release.hold.mode, release.hold.token));
        bench.job_reply(job, Ok(Reply::Release(ReleaseReply::NotHeld)));
    };
    // In the end it is in neither mode, and leaves the wait queue.
    let expected = [Mode::Exclusive, Mode::Shared].map(|mode| (mode, token));
    assert_eq!(modes, expected);
}

#[test]
fn a_failed_downgrade_reserves_what_is_left_of_min_hold() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE)));
    let held = bench.is_granted(id, 7);
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (id, _) = begun.unwrap();
    bench.input(|session, cx| session.convert_dropped(id, cx));
    for passed in [1, 2, 3].map(Duration::from_secs) {
        bench.now += Duration::from_secs(1);
        let (job, call) = bench.due_job().unwrap();
        assert_eq!(keeps_for(&call), Some(LEASE - passed));
        let is_lost = passed == Duration::from_secs(1);
        let reply = Reply::Release(ReleaseReply::NotHeld);
        bench.job_reply(job, if is_lost { Err(silent()) } else { Ok(reply) });
    }
    let (_, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Abandon(_)), "{call:?}");
    assert!(bench.due_job().is_none());
}

/// A lock that is lost by the holder's clock may be held at the store for longer.
#[test]
fn a_lost_lock_stays_reserved_unless_it_was_taken_away() {
    for (loss, keep_for) in [
        (Loss::Expired, Some(LEASE)),
        (Loss::MaxHold, Some(LEASE)),
        (Loss::Taken, None),
        (Loss::Revoked, None),
    ] {
        let mut bench = Bench::new();
        let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE)));
        let held = bench.is_granted(id, 7);
        bench.input(|session, cx| session.lose(held, loss, cx));
        let (_, call) = bench.due_job().unwrap();
        match call.request {
            Request::Release(release) => assert_eq!(release.keep_for, keep_for, "{loss:?}"),
            request => assert!(keep_for.is_none(), "{loss:?}: {request:?}"),
        }
    }
}

/// Several keys are reserved from the last grant on.
#[test]
fn a_lock_that_is_reserved_later_stays_so_from_then_on() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    bench.now += LEASE / 4;
    bench.input(|session, cx| session.reserve(held, LEASE / 2, cx));
    bench.now += MILLI;
    let (_, release) = bench.releases(held).unwrap();
    assert_eq!(release.keep_for, Some(LEASE / 2 - MILLI));
}

/// Rule 43.
#[test]
fn only_a_writer_that_was_not_entered_again_leaves_a_result() {
    for (mode, is_reentered, leaves) in [
        (Mode::Exclusive, false, true),
        (Mode::Exclusive, true, false),
        (Mode::Shared, false, false),
    ] {
        let mut bench = Bench::new();
        let held = bench.holds_in(&key(), mode, LEASE);
        if is_reentered {
            let entered = bench.input(|session, cx| session.reenter(held, cx));
            assert!(entered.unwrap());
        }
        let done = (Arc::from(b"one".to_vec()), LEASE);
        let step = bench.input(|session, cx| session.complete(held, done, cx));
        assert_eq!(step.is_some(), leaves, "{mode:?} {is_reentered}: {step:?}");
        if let Some(step) = step {
            let is_kept = matches!(&step, ReleaseStep::Call(_, it, _) if it.result.is_some());
            assert!(is_kept, "{step:?}");
        }
    }
}
