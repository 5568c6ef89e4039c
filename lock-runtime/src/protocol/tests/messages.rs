//! Messages of the store: pushed grants and revocations.

use super::*;

// Rule 3.
#[test]
fn a_push_counts_only_if_it_is_newer_than_the_latest_reply() {
    let mut bench = Bench::new();
    let sent = bench.now;
    let (id, token) = bench.head();
    bench.push(Mode::Exclusive, token, 7);
    assert_eq!(bench.woken, [id]);
    waits(&bench.resume(id));
    bench.now += MILLI;
    let at = waits(&bench.reply(id, queued(Some(7))));
    let mut later = bench.clone();
    bench.push(Mode::Exclusive, token, 8);
    assert_eq!(bench.woken, [id, id]);
    let granted = holds(bench.resume(id));
    assert_eq!(bench.token_of(granted.held), token);
    assert_eq!(granted.fence.number(), 8);
    let valid_for = Grant::HANDOFF_LEASE - drift(Grant::HANDOFF_LEASE);
    assert_eq!(granted.valid_until, sent + valid_for);

    // A poll shows the counter beyond the grant.
    later.now = at;
    assert_eq!(polls(&later.resume(id)), token);
    later.push(Mode::Exclusive, token, 8);
    waits(&later.reply(id, polled_queued(8)));
    waits(&later.resume(id));
}

// Rule 4: the latest instant at which the token surely did not hold the lock.
#[test]
fn pushed_grant_counts_from_the_latest_queued_reply() {
    let second = Duration::from_secs(1);
    let mut bench = Bench::new();
    bench.now += second * 2;
    let latest = bench.now;
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(None)));
    // The reply to a request that was sent earlier arrives late.
    bench.now -= second;
    bench.input(|session, cx| session.free_in(LockKind::Lock, &key(), Duration::ZERO, cx));
    assert_eq!(polls(&bench.resume(id)), token);
    let reply = Reply::Poll(PollReply::Queued {
        counter: None,
        holder_ttl: None,
    });
    waits(&bench.reply(id, reply));
    bench.push(Mode::Exclusive, token, 8);
    let granted = holds(bench.resume(id));
    let valid_for = Grant::HANDOFF_LEASE - drift(Grant::HANDOFF_LEASE);
    assert_eq!(granted.valid_until, latest + valid_for);
}

#[test]
fn hand_off_of_a_revoked_lock_is_not_taken() {
    for by_event in [true, false] {
        let mut bench = Bench::new();
        let (head, _) = bench.head();
        waits(&bench.reply(head, BUSY));
        let held = bench.holds(4, LEASE);
        let token = bench.token_of(held);
        assert!(bench.hands_off(held));
        let revoked = bench.session.holders_of(LockKind::Lock, &key());
        assert_eq!(revoked, [token]);
        if by_event {
            bench.event(&StoreEvent::Revoked { token });
        } else {
            bench.input(|session, cx| session.revoked(LockKind::Lock, &key(), &revoked, cx));
        }
        assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
        assert!(token != asks(&bench.resume(head)));
    }
}

#[test]
fn a_grant_that_was_revoked_on_its_way_is_not_held() {
    let poll_granted = Reply::Poll(PollReply::Granted(grant(5)));
    let renewed = Reply::Renew(RenewReply::Renewed { ttl: LEASE });
    let unrenewed = writer(|it| it.renew = false);
    // The grant was pushed, and is to be confirmed, or is in a reply that arrives later.
    for (terms, is_queued, reply) in [
        (WRITER, false, granted(5)),
        (WRITER, true, poll_granted),
        (unrenewed, true, renewed),
    ] {
        let mut bench = Bench::new();
        let (id, token) = bench.asks_for(&terms);
        if is_queued {
            bench.now = waits(&bench.reply(id, queued(Some(4))));
            polls(&bench.resume(id));
        }
        if !terms.renew {
            bench.push(Mode::Exclusive, token, 5);
            let step = bench.resume(id);
            let is_renewal =
                matches!(&step, Step::Call(call) if matches!(call.request, Request::Renew(_)));
            assert!(is_renewal, "{step:?}");
        }
        bench.woken.clear();
        bench.event(&StoreEvent::Revoked { token });
        assert!(bench.endings().contains(&Ended::Abandoned(token)));
        if is_queued {
            assert_eq!(bench.woken, [id]);
        }
        let fresh = asks(&bench.reply(id, reply));
        assert!(fresh != token);
        bench.is_granted(id, 6);
    }
    // A request that does not wait finds the lock held.
    let mut bench = Bench::new();
    let (id, token) = bench.asks_for(&writer(|it| it.wait = Wait::No));
    bench.event(&StoreEvent::Revoked { token });
    let step = bench.reply(id, granted(5));
    let is_refused = matches!(step, Step::Done(Err(Refused::Contended(None))));
    assert!(is_refused, "{step:?}");
    assert!(bench.endings().contains(&Ended::Abandoned(token)));
}

#[test]
fn a_revocation_that_is_announced_again_ends_a_request_once() {
    let mut bench = Bench::new();
    let (_, token) = bench.asks_for(&WRITER);
    for _ in 0..100 {
        bench.event(&StoreEvent::Revoked { token });
    }
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

#[test]
fn a_pushed_grant_that_was_revoked_is_not_taken() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(Some(4))));
    bench.push(Mode::Exclusive, token, 5);
    bench.woken.clear();
    bench.event(&StoreEvent::Revoked { token });
    assert_eq!(bench.woken, [id]);
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    let fresh = asks(&bench.resume(id));
    assert!(fresh != token);
    // A message of the same grant that arrives once more is none for the fresh token.
    bench.push(Mode::Exclusive, token, 5);
    waits(&bench.resume(id));
    bench.is_granted(id, 6);
}

#[test]
fn a_writer_that_is_revoked_while_it_is_converted_is_no_reader() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let token = bench.token_of(held);
    bench.input(|session, cx| session.reserve(held, LEASE, cx));
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (conversion, _) = begun.unwrap();
    bench.event(&StoreEvent::Revoked { token });
    let reply = Ok(Reply::Convert(ConvertReply::Converted(grant(10))));
    let converted = bench.input(|session, cx| session.convert_replied(conversion, reply, cx));
    let is_lost = matches!(converted, Err(ConvertError::Lost(Loss::Revoked)));
    assert!(is_lost, "{converted:?}");
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

/// Each reply that a request waits shows that it has no older grant (rules 3 and 38).
#[test]
fn a_push_counts_only_if_it_is_newer_than_every_reply() {
    let second = Duration::from_secs(1);
    let mut bench = Bench::new();
    bench.now += second;
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(Some(5))));
    // The request that was sent earlier was executed later.
    bench.now -= second;
    bench.input(|session, cx| session.free_in(LockKind::Lock, &key(), Duration::ZERO, cx));
    assert_eq!(polls(&bench.resume(id)), token);
    waits(&bench.reply(id, polled_queued(7)));
    bench.push(Mode::Exclusive, token, 6);
    waits(&bench.resume(id));
}

/// Other programs may announce grants of the token for as long as they like.
#[test]
fn announced_grants_delay_neither_the_next_ending_nor_the_shutdown() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&WRITER);
    let held = bench.is_granted(id, 7);
    let token = bench.token_of(held);
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (id, _) = begun.unwrap();
    bench.input(|session, cx| session.convert_dropped(id, cx));
    let mut ended = Vec::new();
    for _ in 0..5 {
        let (job, call) = bench.due_job().unwrap();
        let Request::Abandon(hold) = call.request else {
            panic!("{call:?}");
        };
        let event = StoreEvent::granted(
            Hold::new(hold.key.clone(), Mode::Exclusive, token),
            grant(7),
        );
        for _ in 0..3 {
            bench.input(|session, cx| session.event(&event, cx));
        }
        ended.push(hold.mode);
        bench.job_reply(job, Ok(Reply::Abandoned));
        assert_eq!(bench.session.is_drained(), ended.len() > 1, "{ended:?}");
    }
    // Once the writer has ended, the reader comes first.
    assert_eq!(ended[..3], [Mode::Exclusive, Mode::Shared, Mode::Exclusive]);
}

/// The message about a grant from the queue comes after the lock was released, before the release
/// is executed.
#[test]
fn a_late_push_message_frees_no_lock_that_is_to_stay_reserved() {
    let half = LEASE / 2;
    for (min_hold, late, is_abandoned) in [
        (MILLI, Duration::ZERO, true),
        (LEASE, Duration::ZERO, false),
        // Until the very end of it.
        (half, half - 2 * MILLI, false),
        (half, half - MILLI, true),
    ] {
        let mut bench = Bench::new();
        let (id, token) = bench.asks_for(&writer(|it| it.min_hold = Some(min_hold)));
        let held = bench.is_granted(id, 7);
        bench.now += MILLI;
        let (release, _) = bench.releases(held).unwrap();
        let lost = Err(silent());
        let unknown = bench.input(|session, cx| session.release_replied(release, lost, cx));
        assert!(unknown.is_err());
        bench.now += late;
        bench.push(Mode::Exclusive, token, 7);
        let ended = bench.endings();
        assert_eq!(
            ended.contains(&Ended::Abandoned(token)),
            is_abandoned,
            "{ended:?}"
        );
    }
}

/// Other programs may be able to send any number of messages.
#[test]
fn grants_of_an_abandoned_token_add_one_abandonment() {
    // Rule 6.
    let mut bench = Bench::new();
    let (id, token) = bench.asks_for(&WRITER);
    let held = bench.is_granted(id, 7);
    bench.now += MILLI;
    let (release, _) = bench.releases(held).unwrap();
    let lost = Err(silent());
    let unknown = bench.input(|session, cx| session.release_replied(release, lost, cx));
    assert!(unknown.is_err());
    // Its release is in flight.
    bench.endings();
    for fence in 8..200 {
        bench.push(Mode::Exclusive, token, fence);
        // Another lock than that of the token.
        bench.push(Mode::Shared, token, fence);
    }
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

/// The driver has not sent the release yet, which may be executed before the grant.
#[test]
fn a_late_push_message_of_a_lock_that_is_to_be_released_adds_an_abandonment() {
    let mut bench = Bench::new();
    let (holder, token) = bench.head();
    bench.behind(&WRITER);
    let held = bench.is_granted(holder, 6);
    bench.drops_guard(held);
    // This one has nothing to do with any lock of the client.
    bench.push(Mode::Exclusive, Token::random(), 8);
    bench.push(Mode::Exclusive, token, 7);
    let ended = bench.endings();
    let expected = [Ended::Released(token), Ended::Abandoned(token)];
    assert_eq!(ended.len(), 2, "{ended:?}");
    assert!(expected.iter().all(|it| ended.contains(it)), "{ended:?}");
}

#[test]
fn a_lock_that_was_revoked_or_taken_is_not_released() {
    for (is_revoked, loss) in [(true, Loss::Revoked), (false, Loss::Taken)] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let token = bench.token_of(held);
        let (release, _) = bench.releases(held).unwrap();
        if is_revoked {
            bench.event(&StoreEvent::Revoked { token });
        }
        let reply = Ok(Reply::Release(ReleaseReply::NotHeld));
        let released = bench.input(|session, cx| session.release_replied(release, reply, cx));
        let is_lost = matches!(released, Err(ReleaseError::NotHeld(it)) if it == loss);
        assert!(is_lost, "{released:?}");
        let (job, _) = bench.due_job().unwrap();
        bench.job_reply(job, Ok(Reply::Abandoned));
        // What is repeated, as the store may have lost data, leaves nothing behind either.
        bench.event(&StoreEvent::Disconnected);
        bench.now += ASK_WITHIN;
        assert_eq!(bench.endings(), [Ended::Abandoned(token); 2]);
    }
}

#[test]
fn an_announcement_puts_no_poll_off() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    let polls_at = waits(&bench.reply(id, queued(Some(7))));
    let free_in = |bench: &mut Bench, ttl| {
        bench.input(|session, cx| session.free_in(LockKind::Lock, &key(), ttl, cx));
    };
    free_in(&mut bench, LEASE / 2);
    assert_eq!(waits(&bench.resume(id)), polls_at);
    free_in(&mut bench, MILLI * 99);
    assert_eq!(waits(&bench.resume(id)), bench.now + MILLI * 100);
}

/// A grant from the wait queue is short (rule 4): it is renewed soon, and before its use if that
/// may come too late.
#[test]
fn a_pushed_grant_is_confirmed_before_it_is_used_if_little_is_left_of_it() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(Some(7))));
    let valid_for = Grant::HANDOFF_LEASE - drift(Grant::HANDOFF_LEASE);
    bench.push(Mode::Exclusive, token, 8);
    let mut early = bench.clone();
    let held = holds(early.resume(id)).held;
    assert_eq!(early.renews_at(held), early.now + CONFIRM_WITHIN);
    for (left, is_enough) in [(MILLI, true), (Duration::ZERO, false)] {
        let mut bench = bench.clone();
        bench.now += valid_for - WRITER.call_timeout() - left;
        match bench.resume(id) {
            Step::Done(Ok(_)) => assert!(is_enough),
            Step::Call(call) => {
                assert!(!is_enough);
                assert!(matches!(call.request, Request::Renew(_)), "{call:?}");
            }
            step => panic!("{step:?}"),
        }
    }
}
