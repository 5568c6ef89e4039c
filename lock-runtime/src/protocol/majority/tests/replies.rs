//! The replies to the callers, and the state of an acquisition.

use super::*;
use crate::{
    protocol::held::lease::drift,
    request::spec::LockKind,
    store::{Inspection, StoreErrorKind},
};

/// The time in which a majority must reply.
const MAJORITY: Duration = Duration::from_millis(450);

fn converted(number: u64) -> Reply {
    let grant = Grant::new(FencingToken::new(number).unwrap(), LEASE);
    Reply::Convert(ConvertReply::Converted(grant))
}

/// The fencing token of a reader that was a writer.
#[track_caller]
fn number_of(step: Progress) -> u64 {
    match step {
        Progress::Done(Ok(Reply::Convert(ConvertReply::Converted(grant))), _) => {
            grant.fence.number()
        }
        step => panic!("{step:?}"),
    }
}

fn is_renewed(step: &Progress) -> bool {
    matches!(step, Progress::Done(Ok(Reply::Renew(replies)), _)
        if matches!(replies[..], [Ok(RenewReply::Renewed { .. })]))
}

/// The round of the first is over when it is advanced. The lock is still known, so that its caller
/// can end it.
#[test]
fn a_conversion_that_another_one_overtakes_is_an_error() {
    let mut client = Client::granted(Mode::Exclusive);
    let ((first, sent_first), (second, sent_second)) = (client.convert(), client.convert());
    for (send, number) in sent_first.sends.into_iter().zip([8, 9, 10]) {
        client.reply(send, converted(number));
    }
    assert!(!client.raises(first).is_empty());
    for send in sent_second.sends {
        client.reply(send, converted(20));
    }
    assert_eq!(number_of(client.step(second).0), 20);
    let (step, _) = client.step(first);
    assert!(matches!(step, Progress::Done(Err(_), _)), "{step:?}");
    client.hold.mode = Mode::Shared;
    assert_eq!(client.release(None).1.sends.len(), 3);
}

/// The replies to a renewal show that two servers have lost their data, and their aliases are
/// abandoned. A server may have executed that after the conversion (rule 1).
#[test]
fn a_conversion_of_abandoned_aliases_does_not_count() {
    for is_abandoned in [false, true] {
        let mut client = Client::granted(Mode::Exclusive);
        let (_, renewal) = client.renew();
        let (id, conversion) = client.convert();
        for send in renewal.sends.into_iter().take(2) {
            let gone = Reply::Renew(vec![Ok(RenewReply::Gone)]);
            let reply = if is_abandoned { gone } else { renewed() };
            client.reply(send, reply);
        }
        for send in conversion.sends {
            client.reply(send, converted(8));
        }
        let (step, _) = client.step(id);
        if is_abandoned {
            assert!(matches!(step, Progress::Done(Err(_), _)), "{step:?}");
        } else {
            assert_eq!(number_of(step), 8);
        }
    }
}

/// Two servers agree on a number. To write that of the third one to them would take another
/// exchange.
#[test]
fn a_reply_after_the_decision_changes_nothing() {
    let mut client = Client::granted(Mode::Exclusive);
    let (id, out) = client.convert();
    for (send, number) in out.sends.into_iter().zip([8, 8, 9]) {
        client.reply(send, converted(number));
    }
    assert_eq!(number_of(client.step(id).0), 8);
}

/// All that was granted before is given up.
#[test]
fn an_error_names_the_one_of_several_locks_that_no_majority_granted() {
    let (mut client, ..) = Client::acquire(Mode::Exclusive);
    let deadline = client.now + LEASE + STRAGGLE;
    let requests = ["b", "c"].map(|name| {
        let key = LockKey::new(name).unwrap();
        KeyRequest::new(
            Hold::new(key, Mode::Exclusive, Token::random()),
            LEASE,
            deadline,
        )
    });
    let (id, out) = client.visit(|session, cx| session.acquire_all(&requests, cx));
    for send in out.sends {
        client.reply(send, granted());
    }
    let (_, out) = client.step(id);
    for send in out.sends {
        client.fail(send);
    }
    let (step, out) = client.step(id);
    let is_of_second = matches!(&step, Progress::Done(Err(error), Some(until))
        if error.key() == Some(1) && *until > client.now);
    assert!(is_of_second, "{step:?}");
    assert_eq!(out.ends.len(), 6);
}

#[test]
fn an_inspection_needs_the_replies_of_a_majority() {
    for answered in 0..=2 {
        let (mut client, ..) = Client::acquire(Mode::Exclusive);
        let key = client.hold.key.clone();
        let (id, out) = client.visit(|session, cx| session.inspect(&key, LockKind::Lock, cx));
        for send in out.sends.into_iter().take(answered) {
            client.reply(send, Reply::Inspect(Inspection::default()));
        }
        client.now += MAJORITY;
        let (step, _) = client.step(id);
        let is_known = matches!(step, Progress::Done(Ok(Reply::Inspect(_)), _));
        assert_eq!(is_known, answered == 2, "{answered}: {step:?}");
    }
}

#[test]
fn a_renewal_without_a_majority_names_the_servers_without_a_reply() {
    let mut client = Client::granted(Mode::Exclusive);
    let (id, out) = client.renew();
    for send in out.sends {
        match send.ticket.server {
            0 => drop(client.reply(send, renewed())),
            1 => {
                let error = StoreError::new(StoreErrorKind::Unavailable, "is down");
                client.visit(|session, cx| session.replied(send.ticket, Err(error), cx));
            }
            _ => {}
        }
    }
    client.now += MAJORITY;
    let (step, _) = client.step(id);
    let Progress::Done(Ok(Reply::Renew(replies)), _) = step else {
        panic!("{step:?}")
    };
    assert_eq!(
        replies[0].as_ref().unwrap_err().to_string(),
        "2 of 3 servers are needed: a: has answered; b: is down; c: no answer within 450.0ms"
    );
}

/// An error of a majority is that of its servers: a caller acts on the kind, and on whether the
/// same call may succeed later.
#[test]
fn the_error_of_a_majority_is_what_its_servers_have_in_common() {
    use StoreErrorKind::{Forbidden, ForeignKey, Unauthenticated, Unavailable};
    let (client, ..) = Client::acquire(Mode::Exclusive);
    let error = |errors: [StoreError; 3]| client.session.too_few(|server| Err(&errors[server]));
    let of = |kind| StoreError::new(kind, "an error");
    for (kinds, common, is_transient) in [
        ([Unauthenticated; 3], Unauthenticated, false),
        ([Unauthenticated, Forbidden, ForeignKey], Unavailable, true),
        ([Unavailable; 3], Unavailable, true),
    ] {
        let error = error(kinds.map(of));
        assert_eq!(
            (error.kind(), error.is_transient()),
            (common, is_transient),
            "{kinds:?}"
        );
    }
    for count in 0..=3 {
        let first = |edit: fn(StoreError, bool) -> StoreError| {
            let errors = [0, 1, 2].map(|server| edit(of(Unauthenticated), server < count));
            error(errors)
        };
        assert_eq!(first(StoreError::passing).is_transient(), count > 0);
        assert_eq!(first(StoreError::with_unsent).is_unsent(), count == 3);
        // The others are no majority.
        assert_eq!(first(StoreError::ending_waits).ends_waits(), count >= 2);
    }
}

/// Another client cannot have held the lock since: its number would be larger.
#[test]
fn a_late_renewal_counts_for_votes_with_the_number_of_the_lock() {
    let mut client = Client::granted_but(Mode::Exclusive, &BUSY);
    let (id, out) = client.renew();
    client.now += LEASE;
    for send in out.sends {
        client.reply(send, renewed());
    }
    let (step, _) = client.step(id);
    assert!(is_renewed(&step), "{step:?}");
}

/// The validity ends by the drift of clocks before the lease.
#[test]
fn a_vote_with_a_larger_number_counts_until_the_validity_ends() {
    for (early, counts) in [(Duration::from_nanos(1), true), (Duration::ZERO, false)] {
        let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
        let [one, other, last] = sends.try_into().unwrap();
        let silent = other.ticket.server;
        let end = client.now + LEASE - drift(LEASE);
        client.reply(one, granted());
        client.reply(other, granted());
        client.step(id);
        let later = Grant::new(grant().fence.later(1), LEASE);
        client.reply(last, Reply::Acquire(AcquireReply::Granted(later)));
        let (id, out) = client.renew();
        client.now = end - early;
        for send in out.sends {
            if send.ticket.server != silent {
                client.reply(send, renewed());
            }
        }
        let (step, _) = client.step(id);
        assert_eq!(is_renewed(&step), counts, "{step:?}");
    }
}

/// The server queues the acquisition, and is sent a renewal of a vote that it may have given.
#[test]
fn a_renewal_of_an_alias_in_the_queue_ends_nothing() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let [first, second, late] = sends.try_into().unwrap();
    let queued_at = late.ticket.server;
    client.reply(first, granted());
    client.reply(second, granted());
    client.step(id);
    let (_, out) = client.renew();
    client.reply(late, QUEUED);
    let is_asked = |send: &&Send| send.ticket.server == queued_at;
    assert_eq!(out.sends.iter().filter(is_asked).count(), 1);
    for send in out.sends {
        let gone = Reply::Renew(vec![Ok(RenewReply::Gone)]);
        let is_queued = send.ticket.server == queued_at;
        let out = client.reply(send, if is_queued { gone } else { renewed() });
        assert!(out.ends.is_empty(), "{out:?}");
    }
}

/// A server that loses its connection may have lost the message of its grant.
#[test]
fn only_an_acquisition_without_the_lock_waits_in_a_queue() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let [coordinator, other] = [0, 1].map(|index| sends[index].ticket.server);
    for (send, reply) in sends.into_iter().zip([QUEUED, BUSY, BUSY]) {
        client.reply(send, reply);
    }
    client.step(id);
    let waiting = client.session.waiting_at(coordinator);
    assert_eq!(waiting.len(), 1);
    assert_eq!(waiting[0].token, client.hold.token);
    assert!(client.session.waiting_at(other).is_empty());

    let held = Client::granted_but(Mode::Exclusive, &QUEUED);
    for server in 0..3 {
        assert!(held.session.waiting_at(server).is_empty());
    }
}

/// A server may report the revocation of any of them.
#[test]
fn an_acquisition_is_found_by_each_of_its_aliases() {
    let (client, ..) = Client::acquire(Mode::Exclusive);
    let token = client.hold.token;
    let round = client.session.round(token.alias(9)).expect("a round");
    assert_eq!(round.hold.token, token);
    assert!(client.session.round(Token::random()).is_none());
}
