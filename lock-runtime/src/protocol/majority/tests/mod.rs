//! Scenarios that random schedules have found, each reduced to a few steps.

mod calls;
mod ends;
mod replies;

use std::time::Duration;

use super::{
    MajorityCx, MajorityMutation, MajoritySession, Output, Progress, Reply, RequestId, Send,
    ServerRequest,
};
use crate::{
    guard::fence::FencingToken,
    protocol::{STRAGGLE, acquire::UNENDED},
    request::key::LockKey,
    request::spec::Mode,
    shell::time::Instant,
    store::{
        AcquireReply, ConvertReply, Grant, Hold, KeyRequest, PollReply, Release, ReleaseReply,
        RenewReply, Renewal, StoreError, Token,
    },
};

const LEASE: Duration = Duration::from_secs(30);
const MILLI: Duration = Duration::from_millis(1);
const QUEUED: Reply = Reply::Acquire(AcquireReply::Queued {
    counter: None,
    holder_ttl: Some(LEASE),
});

const BUSY: Reply = Reply::Acquire(AcquireReply::Busy {
    holder_ttl: Some(LEASE),
    has_waiters: false,
});

fn grant() -> Grant {
    Grant::new(FencingToken::new(7).unwrap(), LEASE)
}

fn granted() -> Reply {
    Reply::Acquire(AcquireReply::Granted(grant()))
}

fn renewed() -> Reply {
    Reply::Renew(vec![Ok(RenewReply::Renewed { ttl: LEASE })])
}

/// The client of three servers, and its acquisition.
struct Client {
    session: MajoritySession,
    now: Instant,
    hold: Hold,
    mutation: Option<MajorityMutation>,
}

impl Client {
    /// Begins an acquisition that queues. Returns its request and the calls to the servers; the
    /// first one is to the coordinator.
    fn acquire(mode: Mode) -> (Self, RequestId, Vec<Send>) {
        Self::acquire_within(mode, LEASE)
    }

    /// The same for a request that waits for this time.
    fn acquire_within(mode: Mode, wait: Duration) -> (Self, RequestId, Vec<Send>) {
        let mut client = Self {
            session: MajoritySession::new(["a", "b", "c"].map(String::from)),
            now: Instant::now(),
            hold: Hold::new(LockKey::new("a").unwrap(), mode, Token::random()),
            mutation: None,
        };
        let (id, sends) = client.ask(LEASE, wait);
        assert_eq!(sends.len(), 3);
        (client, id, sends)
    }

    /// Requests the lock under a fresh token.
    fn ask(&mut self, lease: Duration, wait: Duration) -> (RequestId, Vec<Send>) {
        self.hold.token = Token::random();
        let deadline = self.now + wait + STRAGGLE;
        let request = KeyRequest::new(self.hold.clone(), lease, deadline).queued();
        let (id, out) = self.visit(|session, cx| session.acquire(&request, cx));
        (id, out.sends)
    }

    /// Acquires the lock as far as the coordinator's queue, which then grants it. Returns the
    /// calls of the poll that follows, that to the coordinator first.
    fn granted_by_coordinator(mode: Mode) -> (Self, RequestId, Vec<Send>) {
        let (mut client, id, sends) = Self::acquire(mode);
        let coordinator = sends[0].ticket.server;
        for send in sends {
            let is_coordinator = send.ticket.server == coordinator;
            client.reply(send, if is_coordinator { QUEUED } else { BUSY });
        }
        client.step(id);
        let token = client.hold.token;
        assert!(client.is_polled_after(coordinator, token, grant()));
        let (id, mut sends) = client.poll();
        sends.sort_by_key(|send| send.ticket.server != coordinator);
        (client, id, sends)
    }

    fn visit<T>(
        &mut self,
        visit: impl FnOnce(&mut MajoritySession, &mut MajorityCx<'_>) -> T,
    ) -> (T, Output) {
        let mut fraction = || 0.5;
        let mut cx = MajorityCx::new(self.now, 1, &mut fraction);
        cx.mutation = self.mutation;
        let result = visit(&mut self.session, &mut cx);
        (result, cx.out)
    }

    /// Applies a push message. Returns whether the acquisition polls.
    fn is_polled_after(&mut self, server: usize, token: Token, grant: Grant) -> bool {
        let hold = self.hold.alias(token);
        self.session.pushed(server, &hold, grant)
    }

    fn reply(&mut self, send: Send, reply: Reply) -> Output {
        self.visit(|session, cx| session.replied(send.ticket, Ok(reply), cx))
            .1
    }

    /// Ends a call without a reply.
    fn fail(&mut self, send: Send) -> Output {
        let error = StoreError::timed_out(LEASE);
        self.visit(|session, cx| session.replied(send.ticket, Err(error), cx))
            .1
    }

    /// Begins an acquisition that all servers grant at once.
    fn granted(mode: Mode) -> Self {
        Self::granted_but(mode, &granted())
    }

    /// The same but for the last server, which gives this reply.
    fn granted_but(mode: Mode, last: &Reply) -> Self {
        let (mut client, id, sends) = Self::acquire(mode);
        let reply = [granted(), granted(), last.clone()];
        for (send, reply) in sends.into_iter().zip(reply) {
            client.reply(send, reply);
        }
        let (step, _) = client.step(id);
        let is_granted = matches!(
            step,
            Progress::Done(Ok(Reply::Acquire(AcquireReply::Granted(_))), _)
        );
        assert!(is_granted, "{step:?}");
        client
    }

    fn release(&mut self, keep_for: Option<Duration>) -> (RequestId, Output) {
        let release = Release::new(self.hold.clone()).keep_for(keep_for);
        self.visit(|session, cx| session.release(&release, cx))
    }

    fn convert(&mut self) -> (RequestId, Output) {
        let hold = self.hold.clone();
        self.visit(|session, cx| session.convert(&hold, cx))
    }

    fn step(&mut self, id: RequestId) -> (Progress, Output) {
        self.visit(|session, cx| session.step(id, cx))
    }

    /// Replies to a renewal or a poll that the server holds the lock for the alias.
    fn reply_held(&mut self, send: Send) {
        let reply = match &send.request {
            ServerRequest::Renew(_) => renewed(),
            ServerRequest::Poll(_) => Reply::Poll(PollReply::Granted(grant())),
            request => panic!("{request:?}"),
        };
        self.reply(send, reply);
    }

    /// Takes a step that raises the fencing token at some servers, and returns it for each of them.
    fn raises(&mut self, id: RequestId) -> Vec<FencingToken> {
        let (step, out) = self.step(id);
        assert!(!matches!(step, Progress::Done(..)), "{step:?}");
        let raised = out.sends.iter().map(|send| match &send.request {
            ServerRequest::Raise(_, _, fence) => *fence,
            request => panic!("{request:?}"),
        });
        raised.collect()
    }

    fn poll(&mut self) -> (RequestId, Vec<Send>) {
        let hold = self.hold.clone();
        let (id, out) = self.visit(|session, cx| session.poll(&hold, cx));
        (id, out.sends)
    }

    fn renew(&mut self) -> (RequestId, Output) {
        let renewals = [Renewal::new(self.hold.clone(), LEASE)];
        self.visit(|session, cx| session.renew(&renewals, cx))
    }
}

/// Two of three servers hold the lock, and it is queued at the third, where it is granted without
/// the client's knowledge. The renewal abandons that queue entry in order to ask for a vote. Even
/// if the abandonment is late and the old alias is renewed there, it must not count.
#[test]
fn renewal_of_an_abandoned_alias_does_not_count() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let [coordinator, queued_at] = [0, 1].map(|index| sends[index].ticket.server);
    for send in sends {
        let is_queued = send.ticket.server == queued_at;
        client.reply(send, if is_queued { QUEUED } else { granted() });
    }
    let (step, _) = client.step(id);
    let Progress::Done(Ok(Reply::Acquire(AcquireReply::Granted(_))), _) = step else {
        panic!("{step:?}")
    };

    let (id, out) = client.renew();
    assert_eq!(out.ends.len(), 1);
    let [asked] = &out.background[..] else {
        panic!("{out:?}")
    };
    assert!(matches!(asked.request, ServerRequest::Acquire(_)));
    for send in out.sends {
        let is_answered = [coordinator, queued_at].contains(&send.ticket.server);
        let silent = StoreError::timed_out(LEASE);
        let reply = is_answered.then(renewed).ok_or(silent);
        client.visit(|session, cx| session.replied(send.ticket, reply, cx));
    }
    let (step, _) = client.step(id);
    let Progress::Done(Ok(Reply::Renew(replies)), _) = step else {
        panic!("{step:?}")
    };
    assert!(replies[0].is_err(), "{replies:?}");
}

/// The reply to a poll arrives after its request is over: the server no longer knows the alias as
/// it was polled. A duplicate of the conversion that followed may have made it a reader, so it is
/// abandoned at once. The release that follows does not know it any more.
#[test]
fn an_alias_that_is_gone_is_abandoned_without_a_further_step() {
    // The coordinator holds the lock, and the other two queue the alias.
    let (mut client, id, sends) = Client::granted_by_coordinator(Mode::Exclusive);
    let mut aliases = Vec::new();
    for send in sends {
        if let ServerRequest::Acquire(request) = &send.request {
            aliases.push((send.ticket.server, request.hold.token));
            client.reply(send, QUEUED);
        } else {
            client.reply_held(send);
        }
    }
    client.step(id);
    let [(server, alias), (last, _)] = aliases[..] else {
        panic!("{aliases:?}")
    };
    assert!(client.is_polled_after(server, alias, grant()));

    // One more of them grants it. The reply of the last one is late.
    let (id, sends) = client.poll();
    let (late, timely): (Vec<_>, Vec<_>) =
        (sends.into_iter()).partition(|send| send.ticket.server == last);
    for send in timely {
        client.reply_held(send);
    }
    client.step(id);
    let [late] = late.try_into().unwrap();
    let out = client.reply(late, Reply::Poll(PollReply::Gone));
    assert_eq!(out.ends.len(), 1);
}

/// A majority has converted the writer, and no server answers the request that raises the fencing
/// token of the reader. Its caller, which knows whether the lock stays reserved, ends it.
#[test]
fn a_conversion_without_an_answer_leaves_the_end_to_its_caller() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    for send in sends {
        client.reply(send, granted());
    }
    client.step(id);
    let hold = client.hold.clone();
    let (id, out) = client.visit(|session, cx| session.convert(&hold, cx));
    for (later, send) in out.sends.into_iter().enumerate() {
        let converted = Grant::new(grant().fence.later(later as u32 + 1), LEASE);
        client.reply(send, Reply::Convert(ConvertReply::Converted(converted)));
    }
    assert!(!client.raises(id).is_empty());
    client.now += LEASE;
    let (step, out) = client.step(id);
    assert!(matches!(step, Progress::Done(Err(_), _)), "{step:?}");
    assert!(out.ends.is_empty(), "{out:?}");
    let release = Release::new(hold).keep_for(Some(LEASE));
    let (_, out) = client.visit(|session, cx| session.release(&release, cx));
    let reserves =
        |send: &Send| matches!(&send.request, ServerRequest::Release(it) if it.keep_for.is_some());
    assert!(
        out.sends.len() == 3 && out.sends.iter().all(reserves),
        "{out:?}"
    );
}

/// A server grants the lock from its queue, and the push message is lost. Its vote counts once it
/// was renewed, so the next renewal must not abandon it to ask for another one.
#[test]
fn a_vote_that_was_renewed_is_not_abandoned() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let [first, second, late] = sends.try_into().unwrap();
    client.reply(first, granted());
    client.reply(second, granted());
    client.step(id);

    client.now += LEASE / 3;
    let (_, out) = client.renew();
    client.reply(late, QUEUED);
    assert_eq!(out.sends.len(), 3);
    for send in out.sends {
        client.reply(send, renewed());
    }

    let (_, out) = client.renew();
    assert_eq!((out.sends.len(), out.ends.len()), (3, 0));
}

/// A reader has votes without a majority, and its wait ends. The next reader of the process
/// continues with its queue entry. Others may have received larger tokens before this reader came,
/// so the number of the old votes must not become its token.
#[test]
fn a_reader_that_polls_again_gets_a_new_number() {
    let (mut client, _, sends) = Client::granted_by_coordinator(Mode::Shared);
    let [coordinator, other, _] = sends.try_into().unwrap();
    client.reply_held(coordinator);
    client.reply(other, granted());
    // The request ends before it has taken its next step.

    let (id, sends) = client.poll();
    for send in sends {
        let holds = matches!(send.request, ServerRequest::Renew(_));
        client.reply(send, if holds { renewed() } else { QUEUED });
    }
    let raised = client.raises(id);
    assert!(raised.len() >= 2 && raised.iter().all(|fence| *fence > grant().fence));
}

/// A server has granted the lock from its queue to an earlier reader of the process. The number in
/// its message may be that of the earlier reader, so the server is polled, which draws another one.
#[test]
fn a_reader_takes_no_number_from_a_message() {
    let (mut client, id, sends) = Client::granted_by_coordinator(Mode::Shared);
    let coordinator = sends[0].ticket.server;
    // The coordinator's message was outdated, and all servers queue the reader.
    let mut aliases = Vec::new();
    for send in sends {
        let reply = match &send.request {
            ServerRequest::Acquire(request) => {
                aliases.push((send.ticket.server, request.hold.token));
                QUEUED
            }
            _ => QUEUED,
        };
        client.reply(send, reply);
    }
    client.step(id);

    let (id, sends) = client.poll();
    let [polled] = sends.try_into().unwrap();
    assert_eq!(polled.ticket.server, coordinator);
    let (server, alias) = aliases[0];
    let earlier = Grant::new(grant().fence.later(10), LEASE);
    assert!(client.is_polled_after(server, alias, earlier));
    client.reply(polled, Reply::Poll(PollReply::Granted(grant())));
    let (_, out) = client.step(id);
    let drawn = Grant::new(earlier.fence.later(1), LEASE);
    for send in out.sends {
        let reply = match &send.request {
            ServerRequest::Poll(_) if send.ticket.server == server => {
                Reply::Poll(PollReply::Granted(drawn))
            }
            _ => QUEUED,
        };
        client.reply(send, reply);
    }
    assert_eq!(client.raises(id), [drawn.fence]);
}

/// Any program that may publish can send as many messages as there are servers.
#[test]
fn messages_of_all_servers_grant_nothing() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (mut client, id, sends) = Client::acquire(mode);
        let alias = |send: &Send| match &send.request {
            ServerRequest::Acquire(request) => (send.ticket.server, request.hold.token),
            request => panic!("{request:?}"),
        };
        let aliases: Vec<_> = sends.iter().map(alias).collect();
        sends.into_iter().for_each(|send| {
            client.reply(send, QUEUED);
        });
        client.step(id);
        for (server, alias) in aliases {
            client.is_polled_after(server, alias, grant());
        }
        let (id, sends) = client.poll();
        assert_eq!(sends.len(), 3);
        for send in sends {
            client.reply(send, QUEUED);
        }
        let (step, _) = client.step(id);
        assert!(
            matches!(
                step,
                Progress::Done(Ok(Reply::Poll(PollReply::Queued { .. })), _)
            ),
            "{step:?}"
        );
    }
}

/// Two of three servers hold the lock. The acquire at the third one is executed after their votes
/// have ended, when another client may have held the lock in the meantime.
#[test]
fn renewal_by_a_server_that_votes_late_does_not_count() {
    for (is_late, is_known) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
        let [one, other, last] = sends.try_into().expect("three");
        let [one_server, last_server] = [&one, &last].map(|send| send.ticket.server);
        let mut last = Some(last);
        client.reply(one, granted());
        client.reply(other, granted());
        client.step(id);
        client.now += Duration::from_secs(1);
        client.step(id);
        let (id, out) = client.renew();
        if is_late {
            client.now += LEASE;
        }
        let is_renewal = |send: &Send| matches!(send.request, ServerRequest::Renew(_));
        let (renewals, _): (Vec<_>, Vec<_>) = out.sends.into_iter().partition(is_renewal);
        assert_eq!(renewals.len(), 3);
        for send in renewals {
            let server = send.ticket.server;
            if let Some(acquire) = last.take_if(|_| is_known && server == last_server) {
                let number = FencingToken::new(grant().fence.number() + 1).unwrap();
                let later = Grant::new(number, LEASE);
                client.reply(acquire, Reply::Acquire(AcquireReply::Granted(later)));
            }
            if server == one_server || server == last_server {
                client.reply(send, renewed());
            }
        }
        let is_renewed = matches!(client.step(id).0, Progress::Done(Ok(Reply::Renew(replies)), _)
            if matches!(replies[..], [Ok(RenewReply::Renewed { .. })]));
        assert_eq!(is_renewed, !is_late);
    }
}

/// The release of a vote that stays reserved is lost. It is repeated for the time that is left, and
/// the alias is abandoned after that.
#[test]
fn a_lost_release_of_a_reserved_vote_is_repeated() {
    let second = Duration::from_secs(1);
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    for send in sends {
        client.reply(send, granted());
    }
    client.step(id);
    let release = Release::new(client.hold.clone()).keep_for(Some(second * 10));
    let (_, out) = client.visit(|session, cx| session.release(&release, cx));
    let released = || Reply::Release(ReleaseReply::Released);
    let mut sends = out.sends;
    let lost = sends.remove(0);
    for send in sends {
        assert!(client.reply(send, released()).ends.is_empty());
    }
    client.now += second;
    let error = StoreError::timed_out(second);
    let (_, out) = client.visit(|session, cx| session.replied(lost.ticket, Err(error), cx));
    let [ending] = out.ends[..] else {
        panic!("{out:?}")
    };
    // The first repetition is lost as well, and the next one follows a second later.
    for left in [Some(9), Some(8), None] {
        let send = client.step(ending).1.sends.pop().expect("a call");
        match (&send.request, left) {
            (ServerRequest::Release(release), Some(left)) => {
                assert_eq!(release.keep_for, Some(second * left));
            }
            (ServerRequest::Abandon(_), None) => {}
            other => panic!("{other:?}"),
        }
        let reply = match left {
            Some(9) => Err(StoreError::timed_out(second)),
            Some(_) => Ok(released()),
            None => Ok(Reply::Abandoned),
        };
        client.visit(|session, cx| session.replied(send.ticket, reply, cx));
        client.now += second;
    }
    let (step, out) = client.step(ending);
    let is_over = matches!(step, Progress::Done(Ok(Reply::Abandoned), _));
    assert!(is_over && out.sends.is_empty(), "{step:?}");
}

/// The servers do not reply. They are taken for silent only if they had the full time for it.
#[test]
fn a_request_with_a_short_wait_opens_no_circuit_breaker() {
    let short = Duration::from_millis(10);
    for (wait, is_open) in [(short, false), (LEASE, true)] {
        let (mut client, id, _) = Client::acquire_within(Mode::Exclusive, wait);
        while let Progress::Wait(until) = client.step(id).0 {
            client.now = until.expect("it does not wait for ever");
        }
        let coordinator = client.session.coordinator(&client.hold.key, client.now);
        assert_eq!(coordinator.is_none(), is_open, "after {wait:?}");
    }
}

/// The servers take longer for a reply than a lock counts as contended if they are fast.
#[test]
fn slow_servers_find_a_lock_contended_for_longer() {
    let slow = Duration::from_millis(80);
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    client.now += slow;
    for send in sends {
        client.reply(send, granted());
    }
    client.step(id);
    client.now += LEASE;
    let (id, sends) = client.ask(LEASE, LEASE);
    for send in sends {
        client.reply(send, BUSY);
    }
    client.step(id);
    for (later, asked) in [(150, 1), (100, 3)] {
        client.now += Duration::from_millis(later);
        let (_, sends) = client.ask(LEASE, LEASE);
        assert_eq!(sends.len(), asked, "{later} ms later");
    }
}

/// An acquisition that is given up leaves a task for each server that does not answer.
#[test]
fn votes_that_are_to_be_ended_are_limited() {
    let (mut client, id, _) = Client::acquire(Mode::Exclusive);
    let held = client.hold.clone();
    while client.session.requests.len() < UNENDED {
        client.ask(LEASE, LEASE);
        let hold = client.hold.clone();
        let (ended, _) = client.visit(|session, cx| session.abandon(&hold, cx));
        client.step(ended);
    }
    // Exactly as many as the limit.
    for over in id + 1..=id + 3 {
        if client.session.requests.len() > UNENDED {
            client.session.cancel(over, client.now);
        }
    }
    assert_eq!(client.session.requests.len(), UNENDED);
    let (refused, sends) = client.ask(LEASE, LEASE);
    assert!(sends.is_empty());
    let step = client.step(refused).0;
    let is_unsent = matches!(&step, Progress::Done(Err(error), _) if error.is_unsent());
    assert!(is_unsent, "{step:?}");
    let request = KeyRequest::new(client.hold.clone(), LEASE, client.now + LEASE);
    let (refused, _) = client.visit(|session, cx| session.acquire_all(&[request], cx));
    let step = client.step(refused).0;
    assert!(matches!(step, Progress::Done(Err(_), _)), "{step:?}");
    // Those that have begun go on.
    client.step(id);
    let again = KeyRequest::new(held, LEASE, client.now + LEASE);
    let (again, _) = client.visit(|session, cx| session.acquire(&again, cx));
    let step = client.step(again).0;
    assert!(matches!(step, Progress::Wait(_)), "{step:?}");
}

/// A server that is late with its replies would be later with each repetition.
#[test]
fn abandonments_wait_for_a_late_server_whatever_the_lease() {
    let short = Duration::from_millis(300);
    let (mut client, ..) = Client::acquire(Mode::Exclusive);
    client.ask(short, LEASE);
    let hold = client.hold.clone();
    let (_, out) = client.visit(|session, cx| session.abandon(&hold, cx));
    assert_eq!(out.ends.len(), 3);
    for end in out.ends {
        let send = client.step(end).1.sends.pop().expect("a call");
        assert_eq!(send.timeout, Some(Duration::from_millis(500)));
    }
}
