//! A run: clients, the servers, and the clock that drives them.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Broken,
    checker::{Checker, Dead, Violation, Wrong},
    client::Client,
    clock::Clock,
    message::Request,
    schedule::{Action, Schedule},
    server::Server,
    sim::{Conn, Event, Sim, Who},
};
use crate::{
    key::LockKey,
    protocol::quorum::ServerRequest,
    sim::{dice::Dice, explore::Run, process, say},
};

/// The number of events after which a run counts as endless.
const MOST_EVENTS: usize = 200_000;

pub(super) struct World {
    pub(super) sim: Sim,
    servers: Vec<Server>,
    clients: Vec<Client>,
    checker: Checker,
    bound: Duration,
    /// Set at the end of the faults: the time by which every request must be served.
    served_by: Option<Instant>,
}

impl Run for World {
    type Mutation = Broken;
    type Wrong = Wrong;

    fn random(seed: u64, broken: Option<Broken>, traced: bool) -> Self {
        let mut dice = Dice::new(seed);
        let schedule = Schedule::random(&mut dice);
        Self::new(schedule, dice, broken, traced)
    }

    fn run(&mut self, only: Option<Wrong>) -> Result<(), Violation> {
        self.checker.only = only;
        for _ in 0..MOST_EVENTS {
            let Some(event) = self.sim.next() else {
                return self.end();
            };
            self.happens(event);
            if let Some(wrong) = self.sim.wrong.take() {
                self.checker.report(Wrong::Refusal, || wrong);
            }
            if std::mem::take(&mut self.sim.look) {
                self.checker
                    .look(&mut self.sim, &mut self.clients, &self.servers);
            }
            if self.served_by.is_some_and(|by| self.sim.now > by) {
                self.served_by = None;
                self.report_waiters();
            }
            if let Some(violation) = self.checker.found() {
                return Err(violation);
            }
        }
        Err(Violation {
            wrong: Wrong::Stuck,
            what: "the run does not end".into(),
        })
    }

    fn history(&mut self) -> String {
        self.sim.trace.take().unwrap_or_default()
    }
}

impl World {
    pub(super) fn new(
        schedule: Schedule,
        dice: Dice,
        broken: Option<Broken>,
        traced: bool,
    ) -> Self {
        let Schedule {
            servers,
            clients,
            locks,
            longest_lease,
            network,
            actions,
            bound,
        } = schedule;
        let mut sim = Sim::new(dice, network, broken, traced);
        sim.keys = ["a", "b"]
            .into_iter()
            .take(locks)
            .filter_map(|name| LockKey::new(name).ok())
            .collect();
        sim.longest_lease = longest_lease;
        say!(
            sim,
            "servers {servers:?}, clients {clients:?}, {longest_lease:?}, {network:?}"
        );
        for (when, action) in actions {
            sim.after(when, Event::Action(action));
        }
        let count = servers.len();
        let mut client = |(client, (fast, ahead)): (usize, (u32, i64))| {
            Client::new(
                Who { client, life: 0 },
                Clock::new(sim.start, fast),
                ahead,
                count,
                &sim.keys.clone(),
                sim.dice.below(usize::MAX) as u64,
                sim.trace.is_some(),
            )
        };
        let clients = clients.into_iter().enumerate().map(&mut client).collect();
        let server = |(number, (fast, ahead)): (usize, (u32, i64))| {
            Server::new(number, sim.start, fast, ahead)
        };
        let servers = servers.into_iter().enumerate().map(server).collect();
        Self {
            sim,
            servers,
            clients,
            checker: Checker::default(),
            bound,
            served_by: None,
        }
    }

    fn report_waiters(&mut self) {
        for client in &self.clients {
            if client.process.is_waiting() {
                self.checker.report(Wrong::Stuck, || {
                    format!("a request of {} still waits", client.who)
                });
            }
        }
    }

    /// Checks the state at the end of the run.
    fn end(&mut self) -> Result<(), Violation> {
        self.report_waiters();
        for (number, server) in self.servers.iter().enumerate() {
            self.checker
                .owners(&self.sim, &self.clients, number, server, true);
        }
        for client in &mut self.clients {
            if let Some(left) = client.unrest(&self.sim) {
                self.checker
                    .report(Wrong::Leak, || format!("{} has left: {left}", client.who));
            }
        }
        self.checker.found().map_or(Ok(()), Err)
    }

    /// Whether this life of the client is current and running. Defers the event if it is paused.
    fn running(&mut self, who: Who, event: impl FnOnce() -> Event) -> bool {
        let client = &mut self.clients[who.client];
        if client.who != who {
            return false;
        }
        if let Some(waiting) = &mut client.stopped {
            waiting.push(event());
            return false;
        }
        true
    }

    fn ends(&self, conn: Conn) -> (Who, usize) {
        let connection = &self.sim.connections[conn];
        (connection.who, connection.server)
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::AtServer(conn, call, request) => {
                let (_, number) = self.ends(conn);
                let (server, life) = (&mut self.servers[number], self.sim.connections[conn].life);
                if server.stalls_until > self.sim.now {
                    return self
                        .sim
                        .at(server.stalls_until, Event::AtServer(conn, call, request));
                }
                let stands = life.map_or(matches!(request, Request::Greet), |life| {
                    life == server.life
                });
                if !server.up || !stands {
                    // The connection is refused.
                    return self
                        .sim
                        .after(Duration::from_micros(200), Event::Broken(conn));
                }
                server.execute(&mut self.sim, conn, call, &request);
                // A vote or queue entry without an owner does harm once another request meets it.
                if let Request::Call(ServerRequest::Acquire(..), _) = request {
                    self.checker.owners(
                        &self.sim,
                        &self.clients,
                        number,
                        &self.servers[number],
                        false,
                    );
                }
            }
            Event::Replied(conn, call, reply) => {
                let (who, _) = self.ends(conn);
                if self.running(who, || Event::Replied(conn, call, reply.clone())) {
                    self.clients[who.client].replied(&mut self.sim, conn, call, reply);
                }
            }
            Event::Pushed(conn, hold, grant) => {
                let (who, server) = self.ends(conn);
                if self.running(who, || Event::Pushed(conn, hold.clone(), grant)) {
                    self.clients[who.client].pushed(&mut self.sim, server, &hold, grant);
                }
            }
            Event::Broken(conn) => {
                let (who, _) = self.ends(conn);
                if self.running(who, || Event::Broken(conn)) {
                    self.clients[who.client].broken(&mut self.sim, conn);
                }
            }
            Event::Failed(who, call, error) => {
                if self.running(who, || Event::Failed(who, call, error.clone())) {
                    self.clients[who.client].failed(&mut self.sim, call, error);
                }
            }
            Event::Timer(who, timer) => {
                if self.running(who, || Event::Timer(who, timer.clone())) {
                    self.clients[who.client].timer(&mut self.sim, timer);
                }
            }
            Event::Action(action) => self.act(action),
        }
    }

    fn act(&mut self, action: Action) {
        let sim = &mut self.sim;
        match action {
            Action::Arrive(arrival) => {
                let client = &mut self.clients[arrival.process];
                if let Some(waiting) = &mut client.stopped {
                    return waiting.push(Event::Action(Action::Arrive(arrival)));
                }
                client.happens(sim, process::Event::Arrive(*arrival));
            }
            Action::Crash(client) => self.crash(client),
            Action::Stop(client, pause) => {
                say!(sim, "{} is paused for {pause:?}", self.clients[client].who);
                self.clients[client].stopped.get_or_insert_default();
                sim.after(pause, Event::Action(Action::Continue(client)));
            }
            Action::Continue(client) => self.go_on(client),
            Action::Jump(client, ahead) => {
                say!(sim, "the clock of {} jumps", self.clients[client].who);
                self.clients[client].ahead = ahead;
            }
            Action::Restart(server, pause, left) => {
                if self.servers[server].up {
                    self.servers[server].crash(sim);
                    sim.after(pause, Event::Action(Action::Start(server, left)));
                }
            }
            Action::Start(server, left) => {
                if !self.servers[server].up {
                    self.servers[server].start(sim, left);
                }
            }
            Action::Flush(server) => self.servers[server].flush(sim),
            Action::Save(server) => {
                say!(sim, "s{server} saves its data");
                self.servers[server].save();
            }
            Action::Stall(server, pause) => {
                say!(sim, "s{server} stalls for {pause:?}");
                self.servers[server].stalls_until = sim.now + pause;
            }
            Action::Part(client, server, pause) => {
                say!(
                    sim,
                    "{} and s{server} cannot reach each other for {pause:?}",
                    self.clients[client].who
                );
                sim.parted.push((client, server, sim.now + pause));
            }
            Action::Quiet => self.quiet(),
        }
    }

    fn crash(&mut self, number: usize) {
        let client = &mut self.clients[number];
        let Who { life, .. } = client.who;
        say!(self.sim, "{} crashes", client.who);
        let who = Who {
            client: number,
            life: life + 1,
        };
        let next = Client::new(
            who,
            client.clock,
            client.ahead,
            self.servers.len(),
            &self.sim.keys,
            self.sim.dice.below(usize::MAX) as u64,
            self.sim.trace.is_some(),
        );
        let dead = std::mem::replace(client, next);
        let local = dead.now(&self.sim);
        let valid = dead.process.session.valid(local);
        self.checker.dead.extend(valid.map(|(_, hold, until)| Dead {
            hold: hold.clone(),
            until: dead.clock.when(until),
        }));
        // The arrivals of a paused client go to its next life.
        for event in dead.stopped.into_iter().flatten() {
            if let Event::Action(_) = event {
                self.sim.at(self.sim.now, event);
            }
        }
    }

    /// Delivers the deferred events of a paused client, in any order.
    fn go_on(&mut self, client: usize) {
        let Some(waiting) = self.clients[client].stopped.take() else {
            return;
        };
        say!(self.sim, "{} resumes", self.clients[client].who);
        for event in waiting {
            let pause = self.sim.dice.up_to(Duration::from_micros(100));
            self.sim.after(pause, event);
        }
    }

    /// Ends the faults. From now on every request waits long enough, and no lock is held for long.
    fn quiet(&mut self) {
        say!(self.sim, "no more faults");
        self.sim.quiet = true;
        for number in 0..self.servers.len() {
            self.servers[number].stalls_until = self.sim.now;
        }
        for number in 0..self.clients.len() {
            self.go_on(number);
            let client = &mut self.clients[number];
            let now = client.now(&self.sim);
            client.process.quiet(now, self.bound * 2);
            client.perform(&mut self.sim);
        }
        self.served_by = Some(self.sim.now + self.bound);
    }
}
