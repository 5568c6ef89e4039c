//! One client: its session, and its calls to the servers.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::{
    attempt::Attempt,
    clock::Clock,
    holder::Holder,
    link::{Calling, Link},
    message::Call,
    server::MICROS,
    sim::{Event, Sim, Timer, Who},
    user::User,
};
use crate::{
    explorer::sim::say,
    protocol::{
        Abandonment,
        quorum::{Cx, LONGEST_CALL, Reply, RequestId, ServerReply, Session, Step},
    },
    store::{Grant, Hold, StoreError, Token},
};

/// The origin of a request to the session.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asker {
    User(u32),
    Holder(u32),
    /// A release in the background.
    Release(u32),
    Attempt(u32),
    Session,
}

struct Asked {
    asker: Asker,
    sent: Instant,
    plan: u32,
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
    pub(super) users: BTreeMap<u32, User>,
    pub(super) holders: BTreeMap<u32, Holder>,
    pub(super) releases: BTreeMap<u32, Abandonment>,
    pub(super) attempts: BTreeMap<u32, Attempt>,
    /// The events that wait for the client while it is paused.
    pub(super) stopped: Option<Vec<Event>>,
}

impl Client {
    pub(super) fn new(who: Who, clock: Clock, ahead: i64, servers: usize) -> Self {
        Self {
            who,
            clock,
            ahead,
            session: Session::new((0..servers).map(|server| format!("s{server}"))),
            asked: BTreeMap::new(),
            links: (0..servers).map(|_| Link::default()).collect(),
            calls: BTreeMap::new(),
            users: BTreeMap::new(),
            holders: BTreeMap::new(),
            releases: BTreeMap::new(),
            attempts: BTreeMap::new(),
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
            self.await_reply(sim, id, Asker::Session);
            self.advance(sim, id);
        }
        for send in out.background.into_iter().chain(out.sends) {
            self.call(sim, send);
        }
        result
    }

    fn await_reply(&mut self, sim: &Sim, id: RequestId, asker: Asker) {
        let (sent, plan) = (self.now(sim), 0);
        self.asked.insert(id, Asked { asker, sent, plan });
    }

    /// Begins a request to the session.
    pub(super) fn ask(
        &mut self,
        sim: &mut Sim,
        asker: Asker,
        begin: impl FnOnce(&mut Session, &mut Cx<'_>) -> RequestId,
    ) -> RequestId {
        let id = self.visit(sim, begin);
        self.await_reply(sim, id, asker);
        // The request may be decided without a reply.
        self.timer_at(sim, self.now(sim), Timer::Request(id, 0));
        id
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
                let Some(Asked { asker, sent, .. }) = self.asked.remove(&id) else {
                    return;
                };
                self.timer_at(sim, self.now(sim) + LONGEST_CALL, Timer::Forget(id));
                match asker {
                    Asker::User(user) => self.user_answered(sim, user, id, sent, reply),
                    Asker::Holder(holder) => self.renewal_answered(sim, holder, sent, reply),
                    Asker::Release(number) => self.released(sim, number, reply),
                    Asker::Attempt(number) => self.attempted(sim, number, sent, reply),
                    Asker::Session => {
                        if let Ok(Reply::NotAbandoned(_, hold, _)) = reply {
                            let name = sim.name(hold.token);
                            say!(sim, "{} leaves {name} to its lease", self.who);
                            sim.excuse(hold.token);
                        }
                    }
                }
            }
        }
    }

    /// Drops the future of a request. Its calls complete in the background.
    pub(super) fn drop_request(&mut self, sim: &mut Sim, id: RequestId) {
        if self.asked.remove(&id).is_some() {
            self.session.cancel(id);
            self.timer_at(sim, self.now(sim) + LONGEST_CALL, Timer::Forget(id));
        }
    }

    /// Abandons all aliases of an acquisition.
    pub(super) fn abandon(&mut self, sim: &mut Sim, hold: &Hold) {
        say!(sim, "{} abandons {}", self.who, sim.name(hold.token));
        self.ask(sim, Asker::Session, |session, cx| session.abandon(hold, cx));
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
            Timer::User(user, wait) => self.wait_over(sim, user, wait),
            Timer::Cancel(user) => self.cancel(sim, user),
            Timer::Lease(holder, plan) => self.lease_due(sim, holder, plan),
            Timer::Done(holder) => self.holder_done(sim, holder),
            Timer::Renewal(holder, renewal) => self.renewal_over(sim, holder, renewal),
            Timer::Release(number) => self.release_again(sim, number),
            Timer::Attempted(number) => self.attempt_late(sim, number),
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
        let now = self.now(sim);
        self.call_waiting(sim, &hold.key, |line| line.ask_by(now));
    }

    /// Whether this client knows that the server may know the alias, and takes care of it.
    pub(super) fn owns(&self, server: usize, token: Token) -> bool {
        let releases = |call: &Calling| call.ticket.server == server && call.ticket.releases(token);
        self.session.owns(server, token) || self.calls.values().any(releases)
    }

    /// Describes the state that is left in the client, or returns `None` if there is none.
    pub(super) fn unrest(&self, sim: &Sim) -> Option<String> {
        let (rounds, requests) = self.session.rest();
        let rounds: Vec<_> = rounds.into_iter().map(|token| sim.name(token)).collect();
        let (users, holders) = (self.users.len(), self.holders.len());
        let (releases, attempts) = (self.releases.len(), self.attempts.len());
        let all = users + holders + releases + attempts + requests + rounds.len();
        (all > 0).then(|| {
            format!("{users} users, {holders} holders, {releases} releases, {attempts} attempts, {requests} requests, rounds {rounds:?}")
        })
    }
}
