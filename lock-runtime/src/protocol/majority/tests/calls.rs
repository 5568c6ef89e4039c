//! The calls to the servers: their time, and the servers that are left out.

use super::*;
use crate::store::AcquireAllReply;

/// The time of a call of a lock with a long lease, and of a server in an exchange.
const CALL: Duration = Duration::from_millis(500);
const SERVER: Duration = Duration::from_millis(200);

fn deadline(send: &Send) -> Instant {
    match &send.request {
        ServerRequest::Acquire(request) => request.deadline,
        request => panic!("{request:?}"),
    }
}

fn servers(sends: &[Send]) -> Vec<usize> {
    let mut servers: Vec<_> = sends.iter().map(|send| send.ticket.server).collect();
    servers.sort_unstable();
    servers
}

/// Begins requests for two locks, whose caller waits for this time.
fn two_locks(client: &mut Client, wait: Duration) -> (RequestId, Vec<Send>) {
    let deadline = client.now + wait + STRAGGLE;
    let request = |name| {
        let hold = Hold::new(
            LockKey::new(name).unwrap(),
            Mode::Exclusive,
            Token::random(),
        );
        KeyRequest::new(hold, LEASE, deadline)
    };
    let requests = ["b", "c"].map(request);
    let (id, out) = client.visit(|session, cx| session.acquire_all(&requests, cx));
    (id, out.sends)
}

#[test]
fn the_release_of_a_vote_has_the_time_of_a_call() {
    for (lease, timeout) in [(30_000, 500), (600, 100), (100, 50)] {
        let (mut client, ..) = Client::acquire(Mode::Exclusive);
        client.ask(MILLI * lease, LEASE);
        let (_, out) = client.release(None);
        assert_eq!(out.sends.len(), 3);
        for send in out.sends {
            assert_eq!(send.timeout, Some(MILLI * timeout), "lease {lease} ms");
        }
    }
}

/// The caller of several locks waits for all of them.
#[test]
fn each_of_several_locks_has_the_time_of_a_call() {
    let (mut client, ..) = Client::acquire(Mode::Exclusive);
    let (_, sends) = two_locks(&mut client, LEASE);
    assert_eq!(sends.len(), 3);
    for send in sends {
        assert_eq!(deadline(&send), client.now + CALL + STRAGGLE);
    }
}

/// The last one begins if exactly that is left.
#[test]
fn none_of_several_locks_is_begun_without_the_time_of_a_call() {
    for (wait, begins) in [(CALL, true), (CALL - Duration::from_nanos(1), false)] {
        let (mut client, ..) = Client::acquire(Mode::Exclusive);
        let (id, sends) = two_locks(&mut client, wait);
        for send in sends {
            client.reply(send, granted());
        }
        let (step, out) = client.step(id);
        if begins {
            assert!(matches!(step, Progress::Wait(_)), "{step:?}");
            assert_eq!(out.sends.len(), 3);
            for send in out.sends {
                client.reply(send, granted());
            }
            let (step, _) = client.step(id);
            let Progress::Done(Ok(Reply::AcquireAll(AcquireAllReply::Granted(grants))), _) = step
            else {
                panic!("{step:?}")
            };
            assert_eq!(grants.len(), 2);
        } else {
            assert!(
                matches!(&step, Progress::Done(Err(error), _) if error.is_out_of_turn()),
                "{step:?}"
            );
            assert_eq!(out.ends.len(), 3);
        }
    }
}

/// The caller's wait is nearly over when the coordinator votes.
#[test]
fn servers_that_are_asked_last_have_their_whole_time() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    for send in sends {
        client.reply(send, BUSY);
    }
    client.step(id);
    let (id, sends) = client.ask(LEASE, MILLI * 50);
    let [coordinator] = sends.try_into().unwrap();
    client.now += MILLI * 40;
    client.reply(coordinator, granted());
    let (_, out) = client.step(id);
    assert_eq!(out.sends.len(), 2);
    for send in out.sends {
        assert_eq!(deadline(&send), client.now + SERVER + STRAGGLE);
    }
}

#[test]
fn a_majority_that_is_silent_counts_as_slow() {
    let (mut client, id, mut sends) = Client::acquire(Mode::Exclusive);
    client.reply(sends.remove(0), granted());
    let before = client.session.round_trip;
    client.now += SERVER;
    let (step, _) = client.step(id);
    assert!(matches!(step, Progress::Done(Err(_), _)), "{step:?}");
    assert!(client.session.round_trip > before * 10);
}

/// The caller gets its reply before its own time-out.
#[test]
fn a_slow_server_has_no_more_than_two_thirds_of_a_call() {
    let (mut client, ..) = Client::acquire(Mode::Exclusive);
    client.session.round_trip = LEASE;
    let (id, _) = client.ask(LEASE, LEASE);
    let (step, _) = client.step(id);
    assert!(
        matches!(step, Progress::Wait(Some(until)) if until == client.now + CALL * 2 / 3),
        "{step:?}"
    );
}

#[test]
fn a_silent_server_is_left_out_while_a_majority_is_well() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let mut all = servers(&sends);
    let mut sends = sends.into_iter();
    let coordinator = sends.next().unwrap();
    let (well, silent) = (sends.next().unwrap(), sends.next().unwrap());
    let silent_server = silent.ticket.server;
    client.reply(coordinator, granted());
    client.reply(well, granted());
    client.fail(silent);
    client.step(id);
    let (_, sends) = client.ask(LEASE, LEASE);
    all.retain(|server| *server != silent_server);
    assert_eq!(servers(&sends), all);
    // One that is connected again is asked again.
    client.session.reconnected(silent_server);
    let (_, sends) = client.ask(LEASE, LEASE);
    assert_eq!(sends.len(), 3);
    // Without a majority that is well, none is left out.
    for send in sends.into_iter().skip(1) {
        client.fail(send);
    }
    assert_eq!(client.ask(LEASE, LEASE).1.len(), 3);
}

/// So the next request asks its coordinator alone.
#[test]
fn a_lock_that_was_waited_for_is_contended() {
    let mut client = Client::granted(Mode::Exclusive);
    assert_eq!(client.ask(LEASE, LEASE).1.len(), 3);

    let (mut client, id, sends) = Client::granted_by_coordinator(Mode::Exclusive);
    // Longer than the first replies count.
    client.now += Duration::from_secs(1);
    for send in sends {
        if let ServerRequest::Acquire(_) = &send.request {
            client.reply(send, granted());
        } else {
            client.reply_held(send);
        }
    }
    let (step, _) = client.step(id);
    assert!(
        matches!(
            step,
            Progress::Done(Ok(Reply::Poll(PollReply::Granted(_))), _)
        ),
        "{step:?}"
    );
    assert_eq!(client.ask(LEASE, LEASE).1.len(), 1);
}

/// They are sent again if they are silent, so a decision without one says nothing about it.
#[test]
fn a_server_that_a_renewal_does_not_wait_for_is_not_left_out() {
    let mut client = Client::granted(Mode::Exclusive);
    let (id, out) = client.renew();
    for send in out.sends.into_iter().take(2) {
        client.reply(send, renewed());
    }
    let (step, _) = client.step(id);
    assert!(
        matches!(step, Progress::Done(Ok(Reply::Renew(_)), _)),
        "{step:?}"
    );
    assert_eq!(client.ask(LEASE, LEASE).1.len(), 3);
}

/// Rule 13: it would be a vote without an owner.
#[test]
fn a_vote_is_missing_only_while_the_lock_is_held() {
    let missing = |client: &mut Client| client.renew().1.background.len();
    let mut held = Client::granted_but(Mode::Exclusive, &BUSY);
    assert_eq!(missing(&mut held), 1);

    let mut released = Client::granted_but(Mode::Exclusive, &BUSY);
    released.release(None);
    assert_eq!(missing(&mut released), 0);

    let (mut waiting, id, sends) = Client::acquire(Mode::Exclusive);
    for (send, reply) in sends.into_iter().zip([QUEUED, BUSY, BUSY]) {
        waiting.reply(send, reply);
    }
    waiting.step(id);
    assert_eq!(missing(&mut waiting), 0);
}
