//! One client: its process, and its calls to a single store, or the session of its store and the
//! calls to a majority of servers.

use std::{collections::BTreeMap, mem::take, slice::from_ref, time::Duration};

use super::{
    clock::Clock,
    link::{Calling, Link},
    message::{self, Call, introduces},
    network::{Conn, Event, Network},
    process::{self, Began, Message, Process, Who},
    records,
    server::MICROS,
};
use crate::{
    protocol::{
        Request,
        majority::{LONGEST_CALL, MajorityCx, MajoritySession, Progress, Reply, RequestId},
    },
    shell::time::Instant,
    store::{Hold, PollReply, RevokeScope, StoreError, StoreEvent, Token},
};

/// An event in a client. A second number distinguishes the current wait from earlier ones.
#[derive(Clone, Debug)]
pub(super) enum Input {
    /// An event of the process.
    Process(process::Event),
    /// A reply reaches the sender of the request.
    Replied(Conn, Call, message::Reply),
    Pushed(Conn, StoreEvent),
    /// A message that a store of records has sent at this time. Its times are those of a clock.
    Message(Instant, StoreEvent),
    /// The client notices the end of a connection.
    Broken(Conn),
    /// A call cannot be sent.
    Failed(Call, StoreError),
    /// The time-out of an attempt to connect.
    Attempt(Conn),
    Redial(usize),
    /// The next step of a request to the session.
    Request(RequestId, u32),
    /// The calls that a finished request has left are no longer awaited.
    Forget(RequestId),
    /// The time-out of a call.
    Call(Call, Duration),
}

/// A request to the session of the store.
#[derive(Default)]
struct Asked {
    /// The call of the process that it belongs to. `None` if the session began it.
    call: Option<u32>,
    plan: u32,
    /// The acquisition that it polls, until a call is made for it.
    polls: Option<Hold>,
}

/// The votes for a lock that the process holds or has held.
#[derive(Clone)]
pub(super) struct Votes {
    /// When the grant reached the process, in true time.
    pub(super) since: Instant,
    /// All aliases that it has had so far, each with its server.
    pub(super) aliases: Vec<(usize, Token)>,
}

pub(super) struct Client {
    pub(super) who: Who,
    pub(super) clock: Clock,
    /// The difference between its clock and the true time, in microseconds.
    pub(super) ahead: i64,
    pub(super) process: Process,
    /// The way to a single store.
    direct: Option<Conn>,
    pub(super) session: MajoritySession,
    /// Its list of servers begins with this one, and so do those of all clients unless they
    /// disagree on the coordinator.
    shift: usize,
    /// The requests to the session.
    asked: BTreeMap<RequestId, Asked>,
    pub(super) links: Vec<Link>,
    pub(super) calls: BTreeMap<Call, Calling>,
    votes: BTreeMap<Token, Votes>,
    /// The process has received the latest event about data that the store has lost.
    pub(super) is_warned: bool,
    /// The events that wait for the client while it is paused.
    pub(super) stopped: Option<Vec<Input>>,
}

impl Client {
    /// A client of a single store or of a majority of servers.
    pub(super) fn new(net: &mut Network, who: Who, clock: Clock, ahead: i64) -> Self {
        let servers = net.schedule.servers.len();
        Self {
            who,
            clock,
            ahead,
            process: Process::new(net, who),
            direct: net.is_single.then(|| net.connect(who, 0)),
            session: MajoritySession::new((0..servers).map(|server| format!("s{server}"))),
            shift: who.process * net.schedule.shift % servers,
            asked: BTreeMap::new(),
            links: (0..servers).map(|_| Link::default()).collect(),
            calls: BTreeMap::new(),
            votes: BTreeMap::new(),
            is_warned: true,
            stopped: None,
        }
    }

    /// The time of its monotonic clock.
    pub(super) fn now(&self, net: &Network) -> Instant {
        self.clock.at(net.now)
    }

    pub(super) fn at(&self, net: &mut Network, local: Instant, input: Input) {
        net.at(self.clock.when(local), Event::InClient(self.who, input));
    }

    /// The time of its wall clock, in microseconds since 1970.
    fn micros(&self, net: &Network) -> u64 {
        (MICROS + (net.now - net.start).as_micros() as u64).saturating_add_signed(self.ahead)
    }

    pub(super) fn handle(&mut self, net: &mut Network, input: Input) {
        match input {
            Input::Process(event) => self.happens(net, event),
            Input::Replied(conn, call, reply) => self.replied(net, conn, call, reply),
            Input::Message(sent, mut event) => {
                records::read_late(&mut event, net.now - sent);
                self.happens(net, process::Event::FromStore(event));
            }
            Input::Pushed(conn, event) => self.pushed(net, conn, &event),
            Input::Broken(conn) => self.broken(net, conn),
            Input::Failed(call, error) => self.failed(net, call, error),
            Input::Attempt(conn) => self.attempt_over(net, conn),
            Input::Redial(server) => self.dial(net, server, true),
            Input::Request(id, plan) => {
                if self.asked.get(&id).is_some_and(|asked| asked.plan == plan) {
                    self.advance(net, id);
                }
            }
            Input::Forget(id) => {
                for call in
                    self.calls_of(|call| call.send.ticket.id == id && call.send.timeout.is_none())
                {
                    self.drop_call(net, call);
                }
            }
            Input::Call(call, timeout) => {
                if let Some(calling) = self.drop_call(net, call) {
                    self.replied_to(net, call, calling, Err(StoreError::timed_out(timeout)));
                }
            }
        }
    }

    /// Visits the session, and performs its output.
    fn visit<T>(
        &mut self,
        net: &mut Network,
        visit: impl FnOnce(&mut MajoritySession, &mut MajorityCx<'_>) -> T,
    ) -> T {
        let (now, micros, mutation) = (self.now(net), self.micros(net), net.of_majority());
        let mut fraction = || net.dice.fraction();
        let mut cx = MajorityCx::new(now, micros, &mut fraction);
        cx.mutation = mutation;
        let result = visit(&mut self.session, &mut cx);
        let out = cx.out;
        for id in out.ends {
            self.asked.insert(id, Asked::default());
            self.advance(net, id);
        }
        for mut send in out.background.into_iter().chain(out.sends) {
            send.ticket.server = self.there(send.ticket.server);
            self.call(net, send);
        }
        result
    }

    /// Advances a request whose reply is awaited.
    fn advance(&mut self, net: &mut Network, id: RequestId) {
        if !self.asked.contains_key(&id) {
            return;
        }
        let step = self.visit(net, |session, cx| session.step(id, cx));
        if self.has_calls(id)
            && let Some(asked) = self.asked.get_mut(&id)
        {
            asked.polls = None;
        }
        match step {
            Progress::Wait(until) => {
                if let (Some(until), Some(asked)) = (until, self.asked.get_mut(&id)) {
                    asked.plan += 1;
                    let plan = asked.plan;
                    self.at(net, until, Input::Request(id, plan));
                }
            }
            Progress::Done(reply, _) => {
                let asked = self.forget(net, id).unwrap_or_default();
                if let (Some(hold), Ok(Reply::Poll(PollReply::Granted(grant)))) =
                    (&asked.polls, &reply)
                    && let Some(round) = self.session.round(hold.token)
                    && !round.lasts(grant.ttl)
                {
                    (net.look, net.short) = (true, Some(hold.token));
                }
                match (asked.call, reply) {
                    (None, Ok(Reply::NotAbandoned(server, hold, _))) => {
                        net.leave(self.who, self.there(server), hold);
                    }
                    (None, _) => {}
                    (Some(call), reply) => {
                        self.happens(net, process::Event::Replied(call, reply.ok()));
                    }
                }
            }
        }
    }

    /// Handles an event in the process, and performs its effects.
    fn happens(&mut self, net: &mut Network, event: process::Event) {
        self.is_warned |= matches!(event, process::Event::FromStore(StoreEvent::Disconnected));
        let now = self.now(net);
        self.process.happens(now, event);
        self.perform(net);
    }

    pub(super) fn perform(&mut self, net: &mut Network) {
        let out = take(&mut self.process.out);
        for line in out.log {
            net.say(|_| format!("{}: {line}", self.who));
        }
        if self.direct.is_some() {
            let now = self.now(net);
            for hold in out.given_up {
                // Another ending of the token may go on.
                if self.process.session.knows(hold.token, now) {
                    net.excused.push((0, hold.token));
                } else {
                    net.leave(self.who, 0, hold);
                }
            }
        }
        for (token, since) in out.lost {
            net.look = true;
            net.lost.push((self.who, token, self.clock.when(since)));
        }
        net.contended.extend(out.contended);
        net.asked.extend(out.asked);
        net.completed.extend(out.completed);
        (net.taken).extend(out.taken.into_iter().map(|held| (self.who, held)));
        (net.converts).extend(out.converts.into_iter().map(|held| (self.who, held)));
        for (when, event) in out.timers {
            self.at(net, when, Input::Process(event));
        }
        for began in out.began {
            net.look = true;
            let (since, aliases) = (net.now, Vec::new());
            let votes = self.votes.entry(began.hold.token);
            votes.or_insert(Votes { since, aliases });
            let asked_at = self.clock.when(began.asked_at);
            net.began.push((self.who, Began { asked_at, ..began }));
        }
        // The futures of calls that the process no longer awaits are dropped.
        let is_dropped = |asked: &Asked| {
            asked
                .call
                .is_some_and(|call| !self.process.calls.contains_key(&call))
        };
        let dropped = self.asked.iter().filter(|(_, asked)| is_dropped(asked));
        let dropped: Vec<_> = dropped.map(|(id, _)| *id).collect();
        for id in dropped {
            self.session.cancel(id, self.clock.at(net.now));
            self.forget(net, id);
        }
        for (call, message) in out.sent {
            for token in introduces(&message) {
                net.introduce(token, self.who);
            }
            match self.direct {
                Some(conn) => net.send(conn, call, message::Request::Direct(message)),
                None => self.ask(net, call, &message),
            }
        }
        if let Some(wrong) = out.wrong {
            net.wrong.get_or_insert(wrong);
        }
        if let Some(unextended) = out.unextended {
            net.unextended.get_or_insert(unextended);
        }
    }

    /// Begins the request of a call of the process.
    fn ask(&mut self, net: &mut Network, call: u32, message: &Message) {
        let id = self.visit(net, |session, cx| match message {
            Message::All(requests) => session.acquire_all(requests, cx),
            Message::Revoke(key, kind) => session.revoke(key, *kind, RevokeScope::Leased, cx),
            Message::One(Request::Acquire(request)) => session.acquire(request, cx),
            Message::One(Request::Poll(hold)) => session.poll(hold, cx),
            Message::One(Request::Renew(renewal)) => session.renew(from_ref(renewal), cx),
            Message::One(Request::Release(release)) => session.release(release, cx),
            Message::One(Request::Abandon(hold)) => session.abandon(hold, cx),
            Message::One(Request::Convert(hold)) => session.convert(hold, cx),
        });
        let polls = match message {
            Message::One(Request::Poll(hold)) if !self.has_calls(id) => Some(hold.clone()),
            _ => None,
        };
        let (call, plan) = (Some(call), 0);
        self.asked.insert(id, Asked { call, plan, polls });
        // The request may be decided without a reply.
        self.at(net, self.now(net), Input::Request(id, 0));
    }

    /// Whether replies to calls of this request are awaited.
    fn has_calls(&self, id: RequestId) -> bool {
        let mut calls = self.calls.values();
        calls.any(|call| call.send.ticket.id == id)
    }

    /// Ends a request. Its calls complete in the background.
    fn forget(&mut self, net: &mut Network, id: RequestId) -> Option<Asked> {
        self.at(net, self.now(net) + LONGEST_CALL, Input::Forget(id));
        self.asked.remove(&id)
    }

    /// Handles the end of a call.
    pub(super) fn done(&mut self, net: &mut Network, id: Call, result: Result<Reply, StoreError>) {
        if let Some(call) = self.calls.remove(&id) {
            self.replied_to(net, id, call, result);
        }
    }

    fn replied_to(
        &mut self,
        net: &mut Network,
        id: Call,
        call: Calling,
        result: Result<Reply, StoreError>,
    ) {
        if let Err(error) = &result {
            net.say(|_| format!("{} #{id} failed: {error}", self.who));
        }
        let mut ticket = call.send.ticket;
        let request = ticket.id;
        ticket.server = self.here(ticket.server);
        self.visit(net, |session, cx| session.replied(ticket, result, cx));
        self.advance(net, request);
    }

    /// Handles a grant that a server has pushed.
    fn pushed(&mut self, net: &mut Network, conn: Conn, event: &StoreEvent) {
        net.say(|net| format!("{} receives {}", self.who, net.show_event(event)));
        let server = net.connections[conn].server;
        let server = self.here(server);
        if let StoreEvent::Granted { hold, grant } = event
            && self.session.pushed(server, hold, *grant)
        {
            self.free_in(net, Duration::ZERO, hold);
        }
    }

    /// Handles the loss of an established connection, and with it of push messages.
    pub(super) fn disconnected(&mut self, net: &mut Network, server: usize) {
        let mut waiting = self.session.waiting_at(self.here(server));
        waiting.sort_by_key(|hold| net.origin(hold.token).map(|origin| origin.at));
        let now = Duration::ZERO;
        waiting.iter().for_each(|hold| self.free_in(net, now, hold));
    }

    fn free_in(&mut self, net: &mut Network, ttl: Duration, hold: &Hold) {
        let event = StoreEvent::FreeIn {
            key: hold.key.clone(),
            kind: hold.mode.kind(),
            ttl,
        };
        self.happens(net, process::Event::FromStore(event));
    }

    /// The place of a server in the list of this client.
    fn here(&self, server: usize) -> usize {
        (server + self.links.len() - self.shift) % self.links.len()
    }

    /// The server with this place in the list of this client.
    fn there(&self, place: usize) -> usize {
        (place + self.shift) % self.links.len()
    }

    /// Whether this client knows that the server may know the token, and takes care of it.
    pub(super) fn owns(&self, net: &Network, server: usize, token: Token) -> bool {
        let releases =
            |call: &Calling| call.send.ticket.server == server && call.send.ticket.releases(token);
        if self.direct.is_some() {
            // A client that was paused has yet to handle the events of its pause.
            let is_awake = self.stopped.is_none()
                && net
                    .paused_until
                    .is_none_or(|at| at + Duration::from_millis(1) < net.now);
            let now = if is_awake { self.now(net) } else { net.start };
            return self.process.session.knows(token, now);
        }
        self.session.owns(self.here(server), token) || self.calls.values().any(releases)
    }

    /// The names under which a majority holds a lock for this client, unless they are not known.
    pub(super) fn votes(&mut self, hold: &Hold) -> Option<Votes> {
        let round = self.session.round(hold.token)?;
        let votes = self.votes.get_mut(&hold.token)?;
        // An alias is replaced when its server no longer knows it.
        let (shift, servers) = (self.shift, self.links.len());
        let known = round.known();
        let known = known.map(|(index, alias)| ((index + shift) % servers, alias));
        let fresh = known.filter(|known| !votes.aliases.contains(known));
        let fresh: Vec<_> = fresh.collect();
        votes.aliases.extend(fresh);
        Some(votes.clone())
    }

    /// Describes the state that is left in the client, or returns `None` if there is none.
    pub(super) fn unrest(&mut self, net: &Network) -> Option<String> {
        // The round of a release that was given up stays until its votes have expired.
        let later = self.clock.at(net.now + net.schedule.longest_lease);
        let (rounds, requests) = self.session.rest(later);
        let rounds: Vec<_> = rounds.into_iter().map(|token| net.name(token)).collect();
        let left = self.process.session.rest();
        let is_at_rest = left.is_none() && requests == 0 && rounds.is_empty();
        (!is_at_rest).then(|| format!("{left:?}, {requests} requests, rounds {rounds:?}"))
    }
}
