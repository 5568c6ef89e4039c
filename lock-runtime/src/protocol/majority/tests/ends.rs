//! Releases, and the aliases that are ended.

use super::*;

fn released() -> Reply {
    Reply::Release(ReleaseReply::Released)
}

fn not_held() -> Reply {
    Reply::Release(ReleaseReply::NotHeld)
}

fn is_released(step: &Progress, reply: ReleaseReply) -> bool {
    matches!(step, Progress::Done(Ok(Reply::Release(it)), _) if *it == reply)
}

/// The first calls end the aliases before the next request of the caller meets them.
#[test]
fn an_abandonment_awaits_its_first_calls_for_the_time_of_a_server() {
    let mut client = Client::granted(Mode::Exclusive);
    let hold = client.hold.clone();
    let (id, _) = client.visit(|session, cx| session.abandon(&hold, cx));
    let (step, _) = client.step(id);
    let until = client.now + MILLI * 200;
    assert!(
        matches!(step, Progress::Done(Ok(Reply::Abandoned), Some(at)) if at == until),
        "{step:?}"
    );
}

/// A server that has not executed the conversion holds a writer, and another one a reader.
#[test]
fn only_a_reader_that_was_a_writer_is_ended_in_both_modes() {
    for (mode, converts, ends) in [
        (Mode::Exclusive, false, 3),
        (Mode::Shared, false, 3),
        (Mode::Exclusive, true, 6),
    ] {
        let mut client = Client::granted(mode);
        if converts {
            client.convert();
        }
        let hold = client.hold.clone();
        let (_, out) = client.visit(|session, cx| session.abandon(&hold, cx));
        assert_eq!(out.ends.len(), ends, "{mode:?} {converts}");
    }
}

/// A vote whose reservation is over is ended like any other.
#[test]
fn a_reservation_that_has_ended_is_not_released_again() {
    let keep_for = Duration::from_secs(1);
    for (passed, is_over) in [(keep_for - MILLI, false), (keep_for, true)] {
        let mut client = Client::granted(Mode::Exclusive);
        let (_, mut out) = client.release(Some(keep_for));
        client.now += passed;
        let ends = client.fail(out.sends.remove(0)).ends;
        let [ending] = ends[..] else {
            panic!("{ends:?}")
        };
        let call = client.step(ending).1.sends.pop().expect("a call");
        match call.request {
            ServerRequest::Release(release) if !is_over => {
                assert_eq!(release.keep_for, Some(MILLI));
            }
            ServerRequest::Abandon(_) if is_over => {}
            request => panic!("{request:?}"),
        }
    }
}

/// An alias in the queue may be granted the lock after its release.
#[test]
fn only_a_vote_that_may_be_known_after_its_release_is_ended() {
    for (is_queued, reply, ends) in [
        (false, released(), 0),
        (false, not_held(), 0),
        (true, released(), 0),
        (true, not_held(), 1),
    ] {
        let last = if is_queued { QUEUED } else { granted() };
        let mut client = Client::granted_but(Mode::Exclusive, &last);
        let known = client.session.round(client.hold.token).unwrap().known();
        assert_eq!(known.count(), 3);
        let (_, mut out) = client.release(None);
        let is_other = |send: &Send| {
            let round = client.session.round(client.hold.token).unwrap();
            round.held_at(send.ticket.server).is_none() == is_queued
        };
        let at = out.sends.iter().position(is_other).expect("the last one");
        let out = client.reply(out.sends.remove(at), reply.clone());
        assert_eq!(out.ends.len(), ends, "{is_queued} {reply:?}");
    }
}

/// A waiter of this process may be next in its queue.
#[test]
fn a_release_awaits_the_coordinator_for_as_long_as_the_majority_took() {
    let mut client = Client::granted(Mode::Exclusive);
    let coordinator = (client.session).coordinator(&client.hold.key, client.now);
    let (id, out) = client.release(None);
    client.now += MILLI * 10;
    for send in out.sends {
        if Some(send.ticket.server) != coordinator {
            client.reply(send, released());
        }
    }
    let (step, _) = client.step(id);
    client.now += MILLI * 10;
    assert!(
        matches!(step, Progress::Wait(Some(until)) if until == client.now),
        "{step:?}"
    );
    let (step, _) = client.step(id);
    assert!(is_released(&step, ReleaseReply::Released), "{step:?}");
}

#[test]
fn a_lock_that_no_majority_holds_was_not_held() {
    for held in 0..=3 {
        let mut client = Client::granted(Mode::Exclusive);
        let (id, out) = client.release(None);
        for (number, send) in out.sends.into_iter().enumerate() {
            let is_held = number < held;
            client.reply(send, if is_held { released() } else { not_held() });
        }
        let reply = match held {
            2.. => ReleaseReply::Released,
            _ => ReleaseReply::NotHeld,
        };
        let (step, _) = client.step(id);
        assert!(is_released(&step, reply), "{held}: {step:?}");
    }
}

/// Its caller may never repeat it, and its votes end with their leases.
#[test]
fn a_release_that_is_given_up_is_forgotten_after_a_lease() {
    let mut client = Client::granted(Mode::Exclusive);
    let (id, _) = client.release(None);
    client.session.cancel(id, client.now);
    for (passed, left) in [(LEASE, 1), (LEASE + MILLI, 0)] {
        let (tokens, requests) = client.session.rest(client.now + passed);
        assert_eq!((tokens.len(), requests), (left, 0), "after {passed:?}");
    }
}

/// A message may be late, or come from any program that may publish.
#[test]
fn a_message_about_another_alias_or_after_the_release_is_ignored() {
    for is_released in [false, true] {
        let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
        let coordinator = sends[0].ticket.server;
        for send in sends {
            client.reply(send, QUEUED);
        }
        client.step(id);
        let token = client.hold.token;
        assert!(!client.is_polled_after(coordinator, token.alias(9), grant()));
        if is_released {
            client.release(None);
        }
        let polls = client.is_polled_after(coordinator, token, grant());
        assert_eq!(polls, !is_released);
    }
}
