//! Votes that the previous holder passes on.

use super::*;
use crate::store::{Heir, NextHolder, RaiseReply};

const MAJORITY: usize = 2;

fn fence(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn polled(number: u64) -> Reply {
    Reply::Poll(PollReply::Granted(Grant::new(fence(number), LEASE)))
}

fn next() -> Heir {
    Heir::new(NextHolder::new(Token::random(), LEASE, 0), None)
}

fn released(is_released: bool) -> Reply {
    Reply::Release(match is_released {
        true => ReleaseReply::Released,
        false => ReleaseReply::NotHeld,
    })
}

impl Client {
    /// A client in the coordinator's queue, and its servers, the coordinator first.
    fn queued() -> (Self, [usize; 3]) {
        let (mut client, id, sends) = Self::acquire(Mode::Exclusive);
        let coordinator = client
            .session
            .coordinator(&client.hold.key, client.now)
            .unwrap();
        for send in sends {
            let is_coordinator = send.ticket.server == coordinator;
            client.reply(send, if is_coordinator { QUEUED } else { BUSY });
        }
        client.step(id);
        let others = (0..3).filter(|server| *server != coordinator);
        let servers: Vec<_> = [coordinator].into_iter().chain(others).collect();
        (client, servers.try_into().unwrap())
    }

    /// Applies the push message of a server that has passed its vote on to the name.
    fn passed(&mut self, server: usize, number: u64, next: Option<Heir>) -> (bool, Output) {
        self.granted(server, number, true, next)
    }

    fn granted(
        &mut self,
        server: usize,
        number: u64,
        is_named: bool,
        next: Option<Heir>,
    ) -> (bool, Output) {
        self.announced(server, Grant::new(fence(number), LEASE), is_named, next)
    }

    fn passed_for(&mut self, server: usize, number: u64, lease: Duration) -> (bool, Output) {
        self.announced(server, Grant::new(fence(number), lease), true, None)
    }

    fn announced(
        &mut self,
        server: usize,
        grant: Grant,
        is_named: bool,
        next: Option<Heir>,
    ) -> (bool, Output) {
        let event = StoreEvent::Granted {
            hold: self.hold.clone(),
            grant,
            is_named,
            next,
        };
        let (pause, out) = self.visit(|session, cx| session.pushed(server, &event, cx));
        (pause == Some(Duration::ZERO), out)
    }

    /// Polls, and expects a grant without a call.
    fn wins(&mut self) -> Grant {
        let (id, sends) = self.poll();
        assert!(sends.is_empty(), "{sends:?}");
        match self.step(id).0 {
            Step::Done(Ok(Reply::Acquire(_)), _) => panic!("a poll is answered as a poll"),
            Step::Done(Ok(Reply::Poll(PollReply::Granted(grant))), _) => grant,
            step => panic!("{step:?}"),
        }
    }

    fn releases(&mut self) -> Vec<Send> {
        let release = Release::new(self.hold.clone());
        self.visit(|session, cx| session.release(&release, cx))
            .1
            .sends
    }
}

#[test]
fn an_heir_holds_the_lock_by_push_messages_alone() {
    let (mut client, [coordinator, one, _]) = Client::queued();
    assert!(!client.passed(one, 9, None).0, "that is no majority");
    assert!(client.passed(coordinator, 9, None).0);
    let grant = client.wins();
    assert_eq!(grant.fence, fence(9));
    assert!(grant.ttl < Duration::from_secs(3), "{grant:?}");
}

/// The coordinator has granted the lock by itself, so no other server can have passed a vote on:
/// the message of one is forged.
#[test]
fn a_grant_of_the_coordinator_and_a_forged_message_are_no_majority() {
    for is_first in [true, false] {
        let (mut client, [coordinator, one, _]) = Client::queued();
        if is_first {
            client.passed(one, 9, None);
        }
        assert!(client.granted(coordinator, 9, false, None).0);
        if !is_first {
            client.passed(one, 9, None);
        }
        let (_, sends) = client.poll();
        assert!(!sends.is_empty());
    }
}

/// The message of the coordinator is missing. The others are enough once the client polls.
#[test]
fn an_heir_needs_no_message_of_the_coordinator() {
    let (mut client, [_, one, other]) = Client::queued();
    assert!(!client.passed(one, 9, None).0);
    assert!(!client.passed(other, 9, None).0, "it is on its way");
    client.wins();
}

/// One of them may be forged, so that its server does not know the number.
#[test]
fn an_heir_whose_numbers_differ_asks_the_servers() {
    for larger in [7, 9] {
        let (mut client, [coordinator, one, other]) = Client::queued();
        client.passed(one, larger, None);
        client.passed(coordinator, 8, None);
        let (_, sends) = client.poll();
        assert_eq!(sends.len(), 3, "{sends:?}");

        let (mut client, [coordinator_again, ..]) = Client::queued();
        client.passed(one, larger, None);
        client.passed(coordinator_again, 8, None);
        assert!(client.passed(other, 8, None).0);
        assert_eq!(client.wins().fence, fence(8));
        assert_eq!(coordinator, coordinator_again);
    }
}

/// A forged message has named the heir to its holder with a short lease.
#[test]
fn a_vote_that_was_passed_on_for_a_moment_is_no_vote() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    for server in [one, other] {
        client.passed_for(server, 9, Duration::from_millis(1));
    }
    client.passed(coordinator, 9, None);
    let (_, sends) = client.poll();
    assert_eq!(sends.len(), 3, "{sends:?}");
}

/// A push message that was delayed for longer than the vote lasts is no vote.
#[test]
fn a_late_push_message_is_no_vote() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    client.now += Duration::from_secs(3);
    client.passed(one, 9, None);
    client.passed(other, 9, None);
    assert!(client.passed(coordinator, 9, None).0);
    let (_, sends) = client.poll();
    assert_eq!(sends.len(), 3, "all servers are asked: {sends:?}");
    let mut acquires = sends.iter().filter_map(|send| match &send.request {
        ServerRequest::Acquire(request, _) => Some(request.hold.token),
        _ => None,
    });
    let name = client.hold.token;
    assert!(
        acquires.all(|token| token == name),
        "they may hold it for the name"
    );
}

/// With less time than a renewal may take, the lock would be lost at once.
#[test]
fn votes_that_end_before_a_renewal_is_answered_are_no_grant() {
    let (mut client, [coordinator, one, _]) = Client::queued();
    // 68 ms before the end of the votes.
    client.now += Duration::from_millis(2_900);
    client.passed(one, 9, None);
    client.passed(coordinator, 9, None);
    let (_, sends) = client.poll();
    assert_eq!(sends.len(), 3, "all servers are asked: {sends:?}");
}

/// The reply to a poll was sent before the server granted the lock, and comes after the push
/// message.
#[test]
fn a_poll_that_a_push_message_has_overtaken_takes_no_vote_away() {
    let (mut client, [coordinator, one, _]) = Client::queued();
    let (_, mut sends) = client.poll();
    let overtaken = sends.pop().expect("a poll");
    assert_eq!(overtaken.ticket.server, coordinator);
    client.now += Duration::from_millis(1);
    client.passed(one, 9, None);
    client.passed(coordinator, 9, None);
    client.wins();
    let (counter, holder_ttl) = (None, Some(LEASE));
    let queued = PollReply::Queued {
        counter,
        holder_ttl,
    };
    client.reply(overtaken, Reply::Poll(queued));
    let round = client.session.round(client.hold.token).expect("it is held");
    assert!(round.held_at(coordinator).is_some());
    let (_, out) = client.renew();
    let mut renewed: Vec<_> = out.sends.iter().map(|send| send.ticket.server).collect();
    renewed.retain(|server| [coordinator, one].contains(server));
    assert_eq!(renewed.len(), MAJORITY, "{:?}", out.sends);
}

/// A server may have granted the lock to others and to the name again, with a number that the
/// client does not know.
#[test]
fn a_renewal_lengthens_no_vote_that_may_have_ended() {
    let ended = Some(Mutation::RenewsEnded);
    for (mutation, after, lasts) in [(None, 2, true), (None, 40, false), (ended, 40, true)] {
        let (mut client, [coordinator, one, _]) = Client::queued();
        client.mutation = mutation;
        client.passed(one, 9, None);
        client.passed(coordinator, 9, None);
        client.wins();
        client.now += Duration::from_secs(after);
        let (id, out) = client.renew();
        for send in out.sends {
            client.reply_held(send);
        }
        let (step, _) = client.step(id);
        let Step::Done(Ok(Reply::Renew(replies)), _) = step else {
            panic!("{step:?}")
        };
        let [Ok(reply)] = replies[..] else {
            panic!("{replies:?}")
        };
        let is_renewed = reply != RenewReply::Gone;
        assert_eq!(is_renewed, lasts, "{mutation:?} after {after} s");
    }
}

#[test]
fn a_release_names_the_next_waiter_to_all_servers() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    let next = next();
    client.passed(one, 9, None);
    client.passed(coordinator, 9, Some(next.clone()));
    client.wins();
    let sends = client.releases();
    assert_eq!(sends.len(), 3);
    for send in &sends {
        let ServerRequest::HandOff(release, hand_off) = &send.request else {
            panic!("{send:?}")
        };
        assert_eq!(release.hold, client.hold);
        assert_eq!(hand_off.heir, next);
        assert!(hand_off.proposal > fence(9));
        let is_coordinator = send.ticket.server == coordinator;
        assert_eq!(hand_off.is_coordinator, is_coordinator);
    }
    // The message of the third server comes before the reply to the release, which shows that it
    // was executed after that.
    let (_, out) = client.passed(other, 9, None);
    assert!(out.abandonments.is_empty());
    for send in sends {
        assert!(client.reply(send, released(true)).abandonments.is_empty());
    }
    let (_, out) = client.passed(other, 9, None);
    assert!(out.abandonments.is_empty(), "a copy of the message");
    let (_, out) = client.passed(other, 10, None);
    assert_eq!(out.abandonments.len(), 1, "it was named once more");
}

#[test]
fn a_vote_that_comes_after_the_release_is_abandoned() {
    for message_is_first in [true, false] {
        let (mut client, [coordinator, one, other]) = Client::queued();
        client.passed(one, 9, None);
        client.passed(coordinator, 9, Some(next()));
        client.wins();
        let sends = client.releases();
        let mut abandoned = 0;
        let mut message = |client: &mut Client| {
            abandoned += client.passed(other, 9, None).1.abandonments.len();
        };
        if message_is_first {
            message(&mut client);
        }
        let mut by_reply = 0;
        for send in sends {
            let is_released = send.ticket.server != other;
            let out = client.reply(send, released(is_released));
            by_reply += out.abandonments.len();
        }
        if !message_is_first {
            message(&mut client);
        }
        assert_eq!(abandoned + by_reply, 1, "message first: {message_is_first}");
    }
}

/// A server is asked for its vote under the name when the release begins. Its message is not about
/// the vote that is released, as an acquire is granted in a reply.
#[test]
fn a_vote_that_is_passed_on_while_the_server_is_asked_is_abandoned() {
    for message_is_first in [true, false] {
        let (mut client, [coordinator, one, other]) = Client::queued();
        let token = client.hold.token;
        assert!(client.is_polled_after(coordinator, token, grant()));
        let (id, sends) = client.poll();
        for send in sends {
            let server = send.ticket.server;
            if server != other {
                if server == one {
                    client.reply(send, granted());
                } else {
                    client.reply_held(send);
                }
            }
        }
        let (step, _) = client.step(id);
        assert!(matches!(step, Step::Done(Ok(_), _)), "{step:?}");
        let sends = client.releases();
        assert_eq!(sends.len(), 3);
        if !message_is_first {
            for send in sends {
                client.reply(send, released(true));
            }
        }
        let (_, out) = client.passed(other, grant().fence.number(), None);
        assert_eq!(out.abandonments.len(), 1, "first: {message_is_first}");
    }
}

#[test]
fn a_holder_that_learned_of_the_next_waiter_long_ago_names_none() {
    let (mut client, [coordinator, one, _]) = Client::queued();
    client.passed(one, 9, None);
    client.passed(coordinator, 9, Some(next()));
    client.wins();
    client.now += Duration::from_secs(1);
    let sends = client.releases();
    assert_eq!(sends.len(), MAJORITY, "only where it holds the lock");
    let is_plain = |send: &Send| matches!(send.request, ServerRequest::Release(_));
    assert!(sends.iter().all(is_plain), "{sends:?}");
}

#[test]
fn the_votes_for_a_waiter_that_has_left_are_abandoned() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    client.passed(one, 9, None);
    let hold = client.hold.clone();
    let (_, out) = client.visit(|session, cx| session.abandon(&hold, cx));
    assert_eq!(out.abandonments.len(), 2, "the queue entry and the vote");
    for server in [coordinator, other] {
        let (_, out) = client.passed(server, 9, None);
        assert_eq!(out.abandonments.len(), 1);
    }
    // That of another client.
    let another = Hold::new(hold.key, Mode::Exclusive, Token::random());
    client.hold = another;
    assert!(client.passed(one, 9, None).1.abandonments.is_empty());
}

/// The coordinator queues the acquisition after its release, and reports it to the holder.
#[test]
fn the_votes_for_an_alias_that_is_queued_after_its_release_are_abandoned() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let [coordinator, one] = [0, 1].map(|index| sends[index].ticket.server);
    for send in sends {
        if send.ticket.server != coordinator {
            client.reply(send, granted());
        }
    }
    client.step(id);
    client.now += Duration::from_secs(1);
    client.step(id);
    for send in client.releases() {
        if send.ticket.server != coordinator {
            client.reply(send, released(true));
        }
    }
    let hold = client.hold.clone();
    client.visit(|session, cx| session.abandon(&hold, cx));
    assert!(client.session.round(hold.token).is_none());
    assert_eq!(client.passed(one, 9, None).1.abandonments.len(), 1);
}

/// The numbers of a server lag behind those of the others.
#[test]
fn the_vote_of_a_server_that_lags_is_abandoned_after_its_release() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    client.passed(one, 9, None);
    client.passed(coordinator, 9, Some(next()));
    client.wins();
    for send in client.releases() {
        client.reply(send, released(true));
    }
    assert!(client.passed(other, 5, None).1.abandonments.is_empty());
    assert_eq!(client.passed(other, 6, None).1.abandonments.len(), 1);
}

/// The coordinator no longer knows the waiter, which is named all the same.
#[test]
fn the_votes_for_a_waiter_that_is_gone_are_abandoned() {
    let (mut client, [_, one, _]) = Client::queued();
    let (_, sends) = client.poll();
    for send in sends {
        client.reply(send, Reply::Poll(PollReply::Gone));
    }
    assert_eq!(client.passed(one, 9, None).1.abandonments.len(), 1);
}

#[test]
fn the_late_vote_of_the_coordinator_is_kept() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    client.passed(one, 9, None);
    client.passed(other, 9, None);
    client.wins();
    assert!(!client.passed(coordinator, 9, Some(next())).0, "it is held");
    let (_, out) = client.renew();
    assert!(out.abandonments.is_empty() && out.background.is_empty());
    let is_named = |send: &Send| matches!(send.request, ServerRequest::HandOff(..));
    assert!(client.releases().iter().all(is_named));
}

/// A waiter of more than three seconds asks the servers, each under the alias that is named.
#[test]
fn a_waiter_of_long_standing_asks_under_its_name() {
    let (mut client, [coordinator, ..]) = Client::queued();
    client.now += Duration::from_secs(4);
    assert!(client.passed(coordinator, 9, None).0);
    let (_, sends) = client.poll();
    assert_eq!(sends.len(), 3);
    for send in sends {
        let token = match send.request {
            ServerRequest::Acquire(request, _) => request.hold.token,
            ServerRequest::Poll(hold) => hold.token,
            request => panic!("{request:?}"),
        };
        assert_eq!(token, client.hold.token);
    }
}

#[test]
fn a_waiter_counts_no_vote_that_was_revoked() {
    let (mut client, [coordinator, one, _]) = Client::queued();
    client.passed(one, 9, None);
    client.passed(coordinator, 9, None);
    let token = client.hold.token;
    let (_, out) = client.visit(|session, cx| session.revoked(one, token, cx));
    assert_eq!(out.abandonments.len(), 1);
    let (_, sends) = client.poll();
    assert_eq!(sends.len(), 3, "all servers are asked");
}

/// A server passes its vote on before it executes the acquire.
#[test]
fn an_acquire_that_may_follow_the_release_of_a_passed_vote_is_abandoned() {
    let (mut client, [coordinator, one, other]) = Client::queued();
    client.now += Duration::from_secs(3);
    client.passed(one, 9, None);
    client.passed(coordinator, 9, None);
    let (id, sends) = client.poll();
    for send in sends {
        let server = send.ticket.server;
        if server == coordinator {
            client.reply_held(send);
        } else if server == other {
            client.reply(send, granted());
        }
    }
    client.step(id);
    for send in client.releases() {
        let is_asked = send.ticket.server == one;
        let out = client.reply(send, released(true));
        assert_eq!(out.abandonments.len(), usize::from(is_asked));
    }
}

/// A server that has granted the lock in a reply is said to have granted it with another number.
#[test]
fn a_forged_number_of_a_vote_is_written_to_its_server_too() {
    let (mut client, id, sends) = Client::acquire(Mode::Exclusive);
    let coordinator = client
        .session
        .coordinator(&client.hold.key, client.now)
        .unwrap();
    let (of_coordinator, others): (Vec<_>, Vec<_>) = sends
        .into_iter()
        .partition(|send| send.ticket.server == coordinator);
    for send in of_coordinator {
        client.reply(send, granted());
    }
    let forged = grant().fence.number() + 1000;
    client.granted(coordinator, forged, false, None);
    for send in others.into_iter().take(1) {
        client.reply(send, granted());
    }
    let (_, out) = client.step(id);
    let mut raised = Vec::new();
    for send in out.sends {
        match send.request {
            ServerRequest::Poll(_) => client.reply(send, polled(grant().fence.number())),
            ServerRequest::Raise(_, _, number) => {
                raised.push(number);
                client.reply(send, Reply::Raise(number, RaiseReply::Raised))
            }
            _ => panic!("{send:?}"),
        };
    }
    // The server that was polled is raised afterwards.
    raised.extend(client.raises(id));
    assert_eq!(raised, [fence(forged); 2]);
}

/// The coordinator has granted the lock with a number that is larger than that of the previous
/// holder. A message behind the true one states a small number, and the other server lags.
#[test]
fn a_forged_small_number_hides_no_larger_one_of_its_server() {
    let (mut client, [coordinator, one, _]) = Client::queued();
    client.granted(coordinator, 101, false, None);
    client.granted(coordinator, 1, false, None);
    let (id, sends) = client.poll();
    for send in sends {
        let server = send.ticket.server;
        if server == coordinator {
            assert!(matches!(send.request, ServerRequest::Poll(_)), "{send:?}");
            client.reply(send, polled(101));
        } else if server == one {
            client.reply(send, granted());
        }
    }
    assert_eq!(client.raises(id), [fence(101)]);
}

/// A message for an alias that was not issued yet is forged. The abandonment of that alias may be
/// executed after a server has granted it a vote that counts.
#[test]
fn a_message_for_an_alias_that_was_not_issued_abandons_nothing() {
    let (mut client, [_, one, other]) = Client::queued();
    let name = client.hold.token;
    let forged = |client: &mut Client, number| {
        client.hold.token = name.alias(number);
        client.granted(one, 9, true, None).1.abandonments.len()
    };
    for number in 4..=u16::MAX {
        assert_eq!(forged(&mut client, number), 0, "{number}");
    }
    let of_the_other = u16::try_from(other).unwrap() + 1;
    assert_eq!(forged(&mut client, of_the_other), 1);
}

/// A message for an alias that was issued and has not been sent uses it up. The aliases are not
/// used up by messages, as an abandoned one would be issued again.
#[test]
fn messages_do_not_use_up_the_aliases() {
    let (mut client, [_, one, _]) = Client::queued();
    let name = client.hold.token;
    let mut abandoned = 0;
    for number in (0..=u16::MAX).chain(0..=u16::MAX) {
        client.hold.token = name.alias(number);
        abandoned += client.granted(one, 9, false, None).1.abandonments.len();
    }
    assert!((5_000..40_000).contains(&abandoned), "{abandoned}");
}

/// The coordinator no longer knows the name, and the next one has not been sent yet. Another server
/// may grant it a vote that counts before it executes the abandonment.
#[test]
fn a_message_for_the_next_name_abandons_nothing_before_it_is_sent() {
    let nameless = || {
        let (mut client, [coordinator, one, _]) = Client::queued();
        client.granted(coordinator, 9, false, None);
        let (id, sends) = client.poll();
        for send in sends {
            let is_coordinator = send.ticket.server == coordinator;
            let gone = Reply::Poll(PollReply::Gone);
            client.reply(send, if is_coordinator { gone } else { QUEUED });
        }
        client.step(id);
        (client, coordinator, one)
    };
    let (mut client, coordinator, _) = nameless();
    let (_, sends) = client.poll();
    let asked = sends.iter().find(|it| it.ticket.server == coordinator);
    let Some(ServerRequest::Acquire(request, _)) = asked.map(|it| &it.request) else {
        panic!("{sends:?}")
    };
    let number = client.hold.token.number_of(request.hold.token);
    let (mut client, _, one) = nameless();
    client.hold.token = client.hold.token.alias(number);
    let (_, out) = client.granted(one, 9, true, None);
    assert_eq!(out.abandonments.len(), 0);
}
