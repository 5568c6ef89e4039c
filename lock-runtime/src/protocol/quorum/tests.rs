//! Scenarios that random schedules have found, each reduced to a few steps.

use std::time::Duration;

use tokio::time::Instant;

use super::{Cx, Output, Reply, Send, ServerReply, ServerRequest, Session, Step};
use crate::{
    fence::FencingToken,
    key::LockKey,
    spec::Mode,
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, RenewReply, Renewal, StoreError,
        Token,
    },
};

const LEASE: Duration = Duration::from_secs(30);

fn visit<T>(
    session: &mut Session,
    now: Instant,
    visit: impl FnOnce(&mut Session, &mut Cx<'_>) -> T,
) -> (T, Output) {
    let mut fraction = || 0.5;
    let mut cx = Cx::new(now, 1, &mut fraction);
    let result = visit(session, &mut cx);
    (result, cx.out)
}

/// Two of three servers hold the lock, and it is queued at the third, where it is granted without
/// the client's knowledge. The renewal abandons that queue entry in order to ask for a vote. Even
/// if the abandonment is late and the old alias is renewed there, it must not count.
#[test]
fn renewal_of_an_abandoned_alias_does_not_count() {
    let (now, key) = (Instant::now(), LockKey::new("a").unwrap());
    let mut session = Session::new(["a", "b", "c"].map(String::from));
    let hold = Hold::new(key, Mode::Exclusive, Token::random());
    let request = KeyRequest {
        if_busy: IfBusy::Queue,
        ..KeyRequest::new(hold.clone(), LEASE, now + LEASE)
    };
    let (id, out) = visit(&mut session, now, |session, cx| {
        session.acquire(&request, cx)
    });
    let coordinator = out.sends[0].ticket.server;
    let grant = Grant::new(FencingToken::new(7).unwrap(), LEASE);
    let mut queued_at = None;
    for send in out.sends {
        let server = send.ticket.server;
        let is_queued = server != coordinator && queued_at.is_none();
        let reply = if is_queued {
            queued_at = Some(server);
            AcquireReply::Queued {
                counter: None,
                holder_ttl: Some(LEASE),
            }
        } else {
            AcquireReply::Granted(grant)
        };
        let reply = Ok(ServerReply::Acquire(reply));
        visit(&mut session, now, |session, cx| {
            session.replied(send.ticket, reply, cx);
        });
    }
    let (step, _) = visit(&mut session, now, |session, cx| session.step(id, cx));
    assert!(
        matches!(
            step,
            Step::Done(Ok(Reply::Acquire(AcquireReply::Granted(_))), _)
        ),
        "{step:?}"
    );

    let renewals = [Renewal::new(hold, LEASE)];
    let (id, out) = visit(&mut session, now, |session, cx| {
        session.renew(&renewals, cx)
    });
    assert_eq!(out.abandonments.len(), 1);
    assert!(matches!(
        out.background[..],
        [Send {
            request: ServerRequest::Acquire(..),
            ..
        }]
    ));
    for send in out.sends {
        let server = send.ticket.server;
        let reply = if server == coordinator || Some(server) == queued_at {
            Ok(ServerReply::Renew(vec![Ok(RenewReply::Renewed {
                ttl: LEASE,
            })]))
        } else {
            Err(StoreError::timed_out(LEASE))
        };
        visit(&mut session, now, |session, cx| {
            session.replied(send.ticket, reply, cx);
        });
    }
    let (step, _) = visit(&mut session, now, |session, cx| session.step(id, cx));
    let Step::Done(Ok(Reply::Renew(replies)), _) = step else {
        panic!("{step:?}")
    };
    assert!(replies[0].is_err(), "{replies:?}");
}

/// The reply to a poll arrives after its request is over: the server no longer knows the alias as
/// it was polled. A duplicate of the conversion that followed may have made it a reader, so it is
/// abandoned at once. The release that follows does not know it any more.
#[test]
fn an_alias_that_is_gone_is_abandoned_without_a_further_step() {
    let (now, key) = (Instant::now(), LockKey::new("a").unwrap());
    let mut session = Session::new(["a", "b", "c"].map(String::from));
    let hold = Hold::new(key, Mode::Exclusive, Token::random());
    let request = KeyRequest {
        if_busy: IfBusy::Queue,
        ..KeyRequest::new(hold.clone(), LEASE, now + LEASE)
    };
    let (id, out) = visit(&mut session, now, |session, cx| {
        session.acquire(&request, cx)
    });
    let coordinator = out.sends[0].ticket.server;
    let grant = Grant::new(FencingToken::new(7).unwrap(), LEASE);
    let queued = AcquireReply::Queued {
        counter: None,
        holder_ttl: Some(LEASE),
    };
    let busy = AcquireReply::Busy {
        holder_ttl: Some(LEASE),
        has_waiters: false,
    };
    let replies = |session: &mut Session, send: Send, reply| {
        let replied = visit(session, now, |session, cx| {
            session.replied(send.ticket, Ok(reply), cx);
        });
        replied.1.abandonments.len()
    };
    for send in out.sends {
        let is_coordinator = send.ticket.server == coordinator;
        let reply = if is_coordinator { queued } else { busy };
        replies(&mut session, send, ServerReply::Acquire(reply));
    }
    visit(&mut session, now, |session, cx| session.step(id, cx));
    assert!(session.pushed(coordinator, hold.token, grant));

    // The coordinator holds the lock, and the other two queue the alias.
    let (id, out) = visit(&mut session, now, |session, cx| session.poll(&hold, cx));
    let mut aliases = Vec::new();
    for send in out.sends {
        let reply = match &send.request {
            ServerRequest::Acquire(request, _) => {
                aliases.push((send.ticket.server, request.hold.token));
                ServerReply::Acquire(queued)
            }
            _ => ServerReply::Renew(vec![Ok(RenewReply::Renewed { ttl: LEASE })]),
        };
        replies(&mut session, send, reply);
    }
    visit(&mut session, now, |session, cx| session.step(id, cx));
    let (server, alias) = aliases[0];
    assert!(session.pushed(server, alias, grant));

    // One more of them grants it. The reply of the last one is late.
    let (id, out) = visit(&mut session, now, |session, cx| session.poll(&hold, cx));
    let (late, timely): (Vec<_>, Vec<_>) =
        (out.sends.into_iter()).partition(|send| matches!(send.request, ServerRequest::Poll(_)));
    for send in timely {
        let renewed = ServerReply::Renew(vec![Ok(RenewReply::Renewed { ttl: LEASE })]);
        replies(&mut session, send, renewed);
    }
    visit(&mut session, now, |session, cx| session.step(id, cx));
    let [late] = late.try_into().unwrap();
    let gone = ServerReply::Poll(PollReply::Gone);
    assert_eq!(replies(&mut session, late, gone), 1);
}

/// A server grants the lock from its queue, and the push message is lost. Its vote counts once it
/// was renewed, so the next renewal must not abandon it to ask for another one.
#[test]
fn a_vote_that_was_renewed_is_not_abandoned() {
    let (now, key) = (Instant::now(), LockKey::new("a").unwrap());
    let mut session = Session::new(["a", "b", "c"].map(String::from));
    let hold = Hold::new(key, Mode::Exclusive, Token::random());
    let request = KeyRequest {
        if_busy: IfBusy::Queue,
        ..KeyRequest::new(hold.clone(), LEASE, now + LEASE)
    };
    let (id, out) = visit(&mut session, now, |session, cx| {
        session.acquire(&request, cx)
    });
    let grant = Grant::new(FencingToken::new(7).unwrap(), LEASE);
    let mut sends = out.sends.into_iter();
    for send in sends.by_ref().take(2) {
        visit(&mut session, now, |session, cx| {
            let reply = ServerReply::Acquire(AcquireReply::Granted(grant));
            session.replied(send.ticket, Ok(reply), cx);
        });
    }
    let late = sends.next().unwrap();
    visit(&mut session, now, |session, cx| session.step(id, cx));

    let (renewals, later) = ([Renewal::new(hold, LEASE)], now + LEASE / 3);
    let (_, out) = visit(&mut session, later, |session, cx| {
        session.renew(&renewals, cx)
    });
    let queued = ServerReply::Acquire(AcquireReply::Queued {
        counter: None,
        holder_ttl: Some(LEASE),
    });
    visit(&mut session, later, |session, cx| {
        session.replied(late.ticket, Ok(queued), cx);
    });
    assert_eq!(out.sends.len(), 3);
    for send in out.sends {
        visit(&mut session, later, |session, cx| {
            let reply = ServerReply::Renew(vec![Ok(RenewReply::Renewed { ttl: LEASE })]);
            session.replied(send.ticket, Ok(reply), cx);
        });
    }

    let (_, out) = visit(&mut session, later, |session, cx| {
        session.renew(&renewals, cx)
    });
    assert_eq!((out.sends.len(), out.abandonments.len()), (3, 0));
}
