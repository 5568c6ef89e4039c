//! One client: its process, the session of its store, and its calls to the servers.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::{
    Broken,
    clock::Clock,
    link::{Calling, Link},
    message::Call,
    server::MICROS,
    sim::{Began, Event, Sim, Timer, Who},
};
use crate::{
    key::LockKey,
    protocol::{
        self, Mutation, Request, WaiterLimits,
        quorum::{Cx, LONGEST_CALL, Reply, RequestId, ServerReply, Session, Step},
    },
    sim::{
        dice::Dice,
        process::{self, Message, Process, StoreReply},
        say,
    },
    store::{
        AcquireReply, Grant, Hold, PollReply, ReleaseReply, RenewReply, RevokeScope, StoreError,
        StoreEvent, Token,
    },
};

/// The origin of a request to the session of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    /// A call of the process.
    Process(u32),
    Session,
}

struct Asked {
    asker: Asker,
    plan: u32,
}

/// The votes for a lock that the process holds or has held.
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
    pub(super) session: Session,
    /// The requests to the session.
    asked: BTreeMap<RequestId, Asked>,
    pub(super) links: Vec<Link>,
    pub(super) calls: BTreeMap<Call, Calling>,
    pub(super) process: Process,
    pub(super) votes: BTreeMap<Token, Votes>,
    /// The events that wait for the client while it is paused.
    pub(super) stopped: Option<Vec<Event>>,
}

impl Client {
    pub(super) fn new(
        who: Who,
        clock: Clock,
        ahead: i64,
        servers: usize,
        keys: &[LockKey],
        seed: u64,
        is_traced: bool,
    ) -> Self {
        let limits = WaiterLimits {
            per_key: usize::MAX,
            in_all: usize::MAX,
        };
        let one = process::Who {
            process: who.client,
            life: who.life,
        };
        let process = Process::new(
            one,
            keys,
            Dice::new(seed),
            limits,
            None::<Mutation>,
            is_traced,
        );
        Self {
            who,
            clock,
            ahead,
            session: Session::new((0..servers).map(|server| format!("s{server}"))),
            asked: BTreeMap::new(),
            links: (0..servers).map(|_| Link::default()).collect(),
            calls: BTreeMap::new(),
            process,
            votes: BTreeMap::new(),
            stopped: None,
        }
    }

    /// The time of its monotonic clock.
    pub(super) fn now(&self, sim: &Sim) -> Instant {
        self.clock.at(sim.now)
    }

    pub(super) fn timer_at(&self, sim: &mut Sim, local: Instant, timer: Timer) {
        sim.at(self.clock.when(local), Event::Timer(self.who, timer));
    }

    /// The time of its wall clock, in microseconds since 1970.
    fn micros(&self, sim: &Sim) -> u64 {
        (MICROS + (sim.now - sim.start).as_micros() as u64).saturating_add_signed(self.ahead)
    }

    /// Visits the session, and performs its output.
    fn visit<T>(&mut self, sim: &mut Sim, visit: impl FnOnce(&mut Session, &mut Cx<'_>) -> T) -> T {
        let (now, micros, mutation) = (self.now(sim), self.micros(sim), sim.mutation());
        let mut fraction = || sim.dice.fraction();
        let mut cx = Cx::new(now, micros, &mut fraction);
        cx.mutation = mutation;
        let result = visit(&mut self.session, &mut cx);
        let out = cx.out;
        for id in out.abandonments {
            self.await_reply(id, Asker::Session);
            self.advance(sim, id);
        }
        for send in out.background.into_iter().chain(out.sends) {
            self.call(sim, send);
        }
        result
    }

    fn await_reply(&mut self, id: RequestId, asker: Asker) {
        self.asked.insert(id, Asked { asker, plan: 0 });
    }

    /// Begins a request to the session.
    fn ask(
        &mut self,
        sim: &mut Sim,
        asker: Asker,
        begin: impl FnOnce(&mut Session, &mut Cx<'_>) -> RequestId,
    ) {
        let id = self.visit(sim, begin);
        self.await_reply(id, asker);
        // The request may be decided without a reply.
        self.timer_at(sim, self.now(sim), Timer::Request(id, 0));
    }

    /// Advances a request whose reply is awaited.
    fn advance(&mut self, sim: &mut Sim, id: RequestId) {
        if !self.asked.contains_key(&id) {
            return;
        }
        let step = self.visit(sim, |session, cx| session.step(id, cx));
        match step {
            Step::Wait(until) => {
                if let (Some(until), Some(asked)) = (until, self.asked.get_mut(&id)) {
                    asked.plan += 1;
                    let plan = asked.plan;
                    self.timer_at(sim, until, Timer::Request(id, plan));
                }
            }
            Step::Done(reply, _) => {
                let Some(Asked { asker, .. }) = self.asked.remove(&id) else {
                    return;
                };
                self.timer_at(sim, self.now(sim) + LONGEST_CALL, Timer::Forget(id));
                match (asker, reply) {
                    (Asker::Process(call), reply) => {
                        let reply = reply.ok().and_then(|reply| answer(sim, reply));
                        self.happens(sim, process::Event::Replied(call, reply));
                    }
                    (Asker::Session, Ok(Reply::NotAbandoned(_, hold, _))) => {
                        let name = sim.name(hold.token);
                        say!(sim, "{} leaves {name} to its lease", self.who);
                        sim.excuse(hold.token);
                    }
                    (Asker::Session, _) => {}
                }
            }
        }
    }

    /// Handles an event in the process, and performs its effects.
    pub(super) fn happens(&mut self, sim: &mut Sim, event: process::Event) {
        let now = self.now(sim);
        self.process.happens(now, event);
        self.perform(sim);
    }

    pub(super) fn perform(&mut self, sim: &mut Sim) {
        let out = self.process.take_out();
        for line in out.log {
            say!(sim, "{}: {line}", self.who);
        }
        for (when, event) in out.timers {
            self.timer_at(sim, when, Timer::Process(Box::new(event)));
        }
        for began in out.began {
            sim.look = true;
            let votes = Votes {
                since: sim.now,
                aliases: Vec::new(),
            };
            self.votes.entry(began.hold.token).or_insert(votes);
            sim.began.push(Began {
                hold: began.hold,
                fence: began.fence,
                asked_at: self.clock.when(began.asked_at),
            });
        }
        // The futures of calls that the process no longer awaits are dropped.
        let dropped: Vec<_> = self
            .asked
            .iter()
            .filter(|(_, asked)| {
                matches!(asked.asker, Asker::Process(call) if !self.process.awaits(call))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in dropped {
            self.drop_request(sim, id);
        }
        for (call, message, _) in out.sent {
            self.send(sim, call, message);
        }
        if let Some(wrong) = self.process.wrong.take() {
            sim.wrong.get_or_insert(wrong);
        }
    }

    /// Begins the request of a call of the process.
    fn send(&mut self, sim: &mut Sim, call: u32, message: Message) {
        let asker = Asker::Process(call);
        match message {
            Message::All(requests) => {
                for request in &requests {
                    sim.introduce(request.hold.token, self.who);
                }
                self.ask(sim, asker, |session, cx| session.acquire_all(&requests, cx));
            }
            Message::Revoke(key, kind) => self.ask(sim, asker, |session, cx| {
                session.revoke(&key, kind, RevokeScope::Leased, cx)
            }),
            Message::One(Request::Acquire(request)) => {
                sim.introduce(request.hold.token, self.who);
                self.ask(sim, asker, |session, cx| session.acquire(&request, cx));
            }
            Message::One(Request::Poll(hold)) => {
                self.ask(sim, asker, |session, cx| session.poll(&hold, cx));
            }
            Message::One(Request::Renew(renewal)) => {
                let renewals = [renewal];
                self.ask(sim, asker, |session, cx| session.renew(&renewals, cx));
            }
            Message::One(Request::Release(release)) => {
                if let Some(next) = release.next {
                    sim.introduce(next.token, self.who);
                }
                self.ask(sim, asker, |session, cx| session.release(&release, cx));
            }
            Message::One(Request::Abandon(hold)) => {
                self.ask(sim, asker, |session, cx| session.abandon(&hold, cx));
            }
            Message::One(Request::Convert(hold)) => {
                self.ask(sim, asker, |session, cx| session.convert(&hold, cx));
            }
        }
    }

    /// Drops the future of a request. Its calls complete in the background.
    fn drop_request(&mut self, sim: &mut Sim, id: RequestId) {
        if self.asked.remove(&id).is_some() {
            self.session.cancel(id, self.clock.at(sim.now));
            self.timer_at(sim, self.now(sim) + LONGEST_CALL, Timer::Forget(id));
        }
    }

    /// Handles the end of a call.
    pub(super) fn done(
        &mut self,
        sim: &mut Sim,
        id: Call,
        result: Result<ServerReply, StoreError>,
    ) {
        if let Some(call) = self.calls.remove(&id) {
            self.replied_to(sim, id, call, result);
        }
    }

    fn replied_to(
        &mut self,
        sim: &mut Sim,
        id: Call,
        call: Calling,
        result: Result<ServerReply, StoreError>,
    ) {
        if let Err(error) = &result {
            say!(sim, "{} #{id} failed: {error}", self.who);
        }
        let request = call.ticket.id;
        self.visit(sim, |session, cx| session.replied(call.ticket, result, cx));
        self.advance(sim, request);
    }

    pub(super) fn timer(&mut self, sim: &mut Sim, timer: Timer) {
        match timer {
            Timer::Attempt(conn) => self.attempt_over(sim, conn),
            Timer::Redial(server, conn) => self.redial(sim, server, conn),
            Timer::Request(id, plan) => {
                if self.asked.get(&id).is_some_and(|asked| asked.plan == plan) {
                    self.advance(sim, id);
                }
            }
            Timer::Forget(id) => {
                let calls = self.calls.iter();
                let calls = calls.filter(|(_, call)| call.ticket.id == id && !call.is_limited);
                let calls: Vec<_> = calls.map(|(call, _)| *call).collect();
                calls
                    .into_iter()
                    .for_each(|call| drop(self.drop_call(sim, call)));
            }
            Timer::Call(call, timeout) => {
                if let Some(calling) = self.drop_call(sim, call) {
                    self.replied_to(sim, call, calling, Err(StoreError::timed_out(timeout)));
                }
            }
            Timer::Process(event) => self.happens(sim, *event),
        }
    }

    /// Handles a grant that a server has pushed.
    pub(super) fn pushed(&mut self, sim: &mut Sim, server: usize, hold: &Hold, grant: Grant) {
        let name = sim.name(hold.token);
        say!(sim, "{} receives a push for {name}", self.who);
        if self.session.pushed(server, hold.token, grant) {
            self.free_now(sim, hold);
        }
    }

    /// Handles the loss of an established connection, and with it of push messages.
    pub(super) fn disconnected(&mut self, sim: &mut Sim, server: usize) {
        let mut waiting = self.session.waiting_at(server);
        waiting.sort_by_key(|hold| sim.introduced_at(hold.token));
        waiting.iter().for_each(|hold| self.free_now(sim, hold));
    }

    fn free_now(&mut self, sim: &mut Sim, hold: &Hold) {
        let event = StoreEvent::FreeIn {
            key: hold.key.clone(),
            kind: hold.mode.kind(),
            ttl: Duration::ZERO,
        };
        self.happens(sim, process::Event::FromStore(event));
    }

    /// Whether this client knows that the server may know the alias, and takes care of it.
    pub(super) fn owns(&self, server: usize, token: Token) -> bool {
        let releases = |call: &Calling| call.ticket.server == server && call.ticket.releases(token);
        self.session.owns(server, token) || self.calls.values().any(releases)
    }

    /// Describes the state that is left in the client, or returns `None` if there is none.
    pub(super) fn unrest(&mut self, sim: &Sim) -> Option<String> {
        let (rounds, requests) = self.session.rest(self.clock.at(sim.now));
        let rounds: Vec<_> = rounds.into_iter().map(|token| sim.name(token)).collect();
        let left = self.process.session.rest();
        (left.is_some() || requests + rounds.len() > 0)
            .then(|| format!("{left:?}, {requests} requests, rounds {rounds:?}"))
    }
}

/// Compensates for the allowance for clock drift where that rule is switched off, so that the lease
/// is valid for the whole `ttl`.
fn undrifted(sim: &Sim, ttl: Duration) -> Duration {
    if sim.is_broken(Broken::NoDrift) {
        (ttl + Duration::from_millis(2)).mul_f64(1.0 / 0.99)
    } else {
        ttl
    }
}

/// The reply of the store, as the process receives it.
fn answer(sim: &Sim, reply: Reply) -> Option<StoreReply> {
    use protocol::Reply as One;
    let grant = |grant: Grant| Grant {
        ttl: undrifted(sim, grant.ttl),
        ..grant
    };
    let one = match reply {
        Reply::Acquire(AcquireReply::Granted(it)) => One::Acquire(AcquireReply::Granted(grant(it))),
        Reply::Acquire(reply) => One::Acquire(reply),
        Reply::Poll(PollReply::Granted(it)) => One::Poll(PollReply::Granted(grant(it))),
        Reply::Poll(reply) => One::Poll(reply),
        Reply::Renew(mut replies) => match replies.pop()?.ok()? {
            RenewReply::Renewed { ttl } => One::Renew(RenewReply::Renewed {
                ttl: undrifted(sim, ttl),
            }),
            RenewReply::Gone => One::Renew(RenewReply::Gone),
        },
        Reply::Release(ReleaseReply::Passed(it)) => One::Release(ReleaseReply::Passed(grant(it))),
        Reply::Release(reply) => One::Release(reply),
        Reply::Convert(reply) => One::Convert(reply),
        Reply::Abandoned => One::Abandoned,
        Reply::AcquireAll(reply) => return Some(StoreReply::All(reply)),
        Reply::Revoke(reply) => return Some(StoreReply::Revoke(reply)),
        Reply::NotAbandoned(..) | Reply::Inspect(_) => return None,
    };
    Some(StoreReply::One(one))
}
