//! A run: clients, the servers, and the clock that drives them.

use std::{mem::take, time::Duration};

use super::{
    Broken,
    checker::{Checker, Wrong},
    client::{Client, Input},
    clock::Clock,
    dice::Dice,
    explore::Violation,
    message::Request,
    network::{Conn, Connection, Event, Network},
    process::{self, Who},
    schedule::{Action, Schedule, Stores},
    search::{Actor, Move, Search},
    server::Server,
};
use crate::{
    protocol::{AcquireId, Mutation, NO_DRIFT, majority::ServerRequest},
    shell::time::Instant,
    store::StoreEvent,
};

/// The number of events after which a run counts as endless.
const MOST_EVENTS: usize = 500_000;

pub(super) struct World {
    pub(super) net: Network,
    servers: Vec<Server>,
    pub(super) clients: Vec<Client>,
    checker: Checker,
    /// Set at the end of the faults: the time by which every waiter must be served.
    served_by: Option<Instant>,
    /// Whether waiting tasks are checked after every event.
    checks_sleepers: bool,
}

impl World {
    pub(super) fn random(
        stores: Stores,
        seed: u64,
        broken: Option<Broken>,
        is_traced: bool,
    ) -> Self {
        let mut dice = Dice::new(seed);
        let schedule = match stores {
            Stores::One => Schedule::of_one(&mut dice),
            Stores::Scripts => Schedule::of_one(&mut dice).on_redis(),
            Stores::Records => Schedule::of_records(&mut dice),
            Stores::Majority => Schedule::of_majority(&mut dice),
            Stores::ScriptsOfMajority => Schedule::of_majority(&mut dice).on_redis(),
        };
        let is_single = schedule.servers.len() == 1;
        // Without a throw, so that the other schedules stay what they are.
        let schedule = match is_single && seed % 8 == 7 {
            true => schedule.retaining(seed / 8),
            false => schedule,
        };
        let mut world = Self::new(schedule, dice, broken, is_traced);
        world.checks_sleepers = matches!(stores, Stores::One | Stores::Scripts)
            && (seed.is_multiple_of(6) || broken == Some(Broken::Client(Mutation::WakesNoHead)));
        world
    }

    /// A run whose choices are made by `search`.
    pub(super) fn searched(
        schedule: Schedule,
        search: Search,
        broken: Option<Broken>,
        is_traced: bool,
    ) -> Self {
        let mut world = Self::new(schedule, Dice::steady(0), broken, is_traced);
        world.checks_sleepers = true;
        world.net.search = Some(search);
        world
    }

    pub(super) fn new(
        mut schedule: Schedule,
        dice: Dice,
        broken: Option<Broken>,
        is_traced: bool,
    ) -> Self {
        let actions = take(&mut schedule.actions);
        let (servers, clients) = (schedule.servers.clone(), schedule.clients.clone());
        let mut net = Network::new(schedule, dice, broken, is_traced);
        net.say(|net| {
            let (lease, rates) = (net.schedule.longest_lease, net.schedule.rates);
            format!("servers {servers:?}, clients {clients:?}, {lease:?}, {rates:?}")
        });
        for (when, action) in actions {
            net.after(when, Event::Action(action));
        }
        let server = |(number, (fast, ahead))| Server::new(&net, number, fast, ahead);
        let servers = servers.into_iter().enumerate().map(server).collect();
        let client = |(process, (fast, ahead))| {
            let clock = Clock::new(net.start, fast);
            Client::new(&mut net, Who { process, life: 0 }, clock, ahead)
        };
        let clients = clients.into_iter().enumerate().map(client).collect();
        Self {
            servers,
            clients,
            checker: Checker::default(),
            served_by: None,
            checks_sleepers: false,
            net,
        }
    }

    /// Runs until there are no more events. With `only`, looks for violations of that kind alone.
    pub(super) fn run(&mut self, only: Option<Wrong>) -> Result<(), Violation> {
        self.checker.only = only;
        NO_DRIFT.set(self.net.is_broken(Broken::NoDrift));
        for _ in 0..MOST_EVENTS {
            let Some((when, event)) = self.next() else {
                return self.end();
            };
            self.net.now = self.net.now.max(when);
            match event {
                Event::AtServer(conn, call, request) => self.at_server(conn, call, request),
                Event::InClient(who, input) => self.in_client(who, input),
                Event::Action(action) => self.act(action),
            }
            // A store that has lost its data may refuse anything.
            let has_lost = self.net.is_single && self.servers[0].lost_data_at.is_some();
            if let Some(wrong) = self.net.wrong.take().filter(|_| !has_lost) {
                self.checker.report(Wrong::Refusal, || wrong);
            }
            if let Some(unextended) = self.net.unextended.take() {
                self.checker.report(Wrong::Unextended, || unextended);
            }
            if take(&mut self.net.look) || self.net.is_single {
                let (net, clients) = (&mut self.net, &mut self.clients);
                self.checker.look(net, clients, &self.servers);
            }
            if self.checks_sleepers {
                self.check_sleepers();
            }
            if self.served_by.is_some_and(|by| self.net.now > by) {
                self.served_by = None;
                self.check_waiters();
            }
            if let Some(violation) = self.checker.found.take() {
                return Err(violation);
            }
        }
        let (wrong, what) = (Wrong::Stuck, "the run does not end".into());
        Err(Violation { wrong, what })
    }

    pub(super) fn history(&mut self) -> String {
        self.net.history.take().unwrap_or_default()
    }

    /// Removes the next event.
    fn next(&mut self) -> Option<(Instant, Event)> {
        let (net, clients) = (&mut self.net, &self.clients);
        let Some(search) = &mut net.search else {
            let ((when, _), event) = net.events.pop_first()?;
            return Some((when, *event));
        };
        let now = net.now;
        net.events.retain(|(when, _), event| match &**event {
            Event::InClient(who, Input::Process(event)) => {
                !clients[who.process].process.ignores(event, now.max(*when))
            }
            _ => true,
        });
        let (mut moves, mut wait, mut only_messages) = (Vec::new(), None, true);
        for ((when, number), event) in &net.events {
            let id = (*when - net.start, *number);
            if *when > now {
                wait = Some(Move::new(id, Actor::All));
                break;
            }
            let (actor, is_message) = match &**event {
                Event::AtServer(..) => (Actor::Store, true),
                Event::InClient(who, Input::Process(event)) => {
                    (Actor::Process(who.process), event.is_message())
                }
                Event::Action(Action::Process(process, _)) => (Actor::Process(*process), false),
                Event::InClient(..) | Event::Action(_) => (Actor::All, false),
            };
            only_messages &= is_message;
            moves.push(Move::new(id, actor));
        }
        // Messages may be slow, but tasks run at once.
        let wait = wait.filter(|_| only_messages);
        let (when, number) = search.choose(moves, wait)?;
        let when = net.start + when;
        Some((when, *net.events.remove(&(when, number))?))
    }

    fn check_waiters(&mut self) {
        for Client { who, process, .. } in &self.clients {
            if process.is_waiting() {
                let waits = || format!("a request of {who} still waits");
                self.checker.report(Wrong::Stuck, waits);
            }
        }
    }

    fn check_sleepers(&mut self) {
        // The deferred events of a client that was paused arrive within this time.
        let soon = self.net.now + Duration::from_micros(200);
        let due = self.net.events.range(..=(soon, u64::MAX));
        let due = due.filter_map(|(_, event)| match &**event {
            Event::InClient(who, Input::Process(event)) => Some((*who, event.wakes()?)),
            _ => None,
        });
        let due: Vec<(Who, AcquireId)> = due.collect();
        let running = self.clients.iter().filter(|it| it.stopped.is_none());
        for Client { who, process, .. } in running {
            let is_due = |id| due.contains(&(*who, id));
            if let Some(overslept) = process.overslept(self.net.now, is_due) {
                self.checker.report(Wrong::Asleep, || overslept);
            }
        }
    }

    /// Checks the state at the end of the run.
    fn end(&mut self) -> Result<(), Violation> {
        if self.net.search.as_ref().is_some_and(|it| it.is_pruned) {
            return Ok(());
        }
        self.check_waiters();
        for number in 0..self.servers.len() {
            self.check_owners(number, Wrong::Leak);
        }
        for client in &mut self.clients {
            if let Some(left) = client.unrest(&self.net) {
                let left = || format!("{} has left: {left}", client.who);
                self.checker.report(Wrong::Leak, left);
            }
        }
        self.checker.found.take().map_or(Ok(()), Err)
    }

    fn check_owners(&mut self, number: usize, wrong: Wrong) {
        let server = (number, &self.servers[number]);
        self.checker.owners(&self.net, &self.clients, server, wrong);
    }

    fn at_server(&mut self, conn: Conn, call: u32, request: Request) {
        let net = &mut self.net;
        let &Connection { who, life, .. } = &net.connections[conn];
        let number = net.connections[conn].server;
        let server = &mut self.servers[number];
        if server.stalls_until > net.now {
            // Afterwards a single store executes everything in any order.
            let longest = Duration::from_millis(if net.is_single { 2 } else { 0 });
            let when = server.stalls_until + net.dice.up_to(longest);
            return net.at(when, Event::AtServer(conn, call, request));
        }
        let stands = life.map_or(matches!(request, Request::Greet), |it| it == server.life);
        if !server.up || !stands {
            // The connection is refused.
            let broken = Event::InClient(who, Input::Broken(conn));
            return net.after(Duration::from_micros(200), broken);
        }
        net.say(|net| {
            let request = net.show(&request);
            format!("  s{number} executes #{call} of {who}: {request}")
        });
        server.execute(net, conn, call, &request);
        // A vote or queue entry without an owner does harm once another request meets it.
        if let Request::Direct(_) | Request::Call(ServerRequest::Acquire(_), _) = request {
            self.check_owners(number, Wrong::Orphan);
        }
    }

    /// Handles an event in this life of a client. It is deferred if the client is paused.
    fn in_client(&mut self, who: Who, input: Input) {
        let client = &mut self.clients[who.process];
        if client.who != who {
            return;
        }
        match &mut client.stopped {
            Some(stopped) => stopped.push(input),
            None => client.handle(&mut self.net, input),
        }
    }

    fn act(&mut self, action: Action) {
        self.net.say(|_| format!("{action:?}"));
        let net = &mut self.net;
        match action {
            Action::Process(process, event) => {
                if matches!(event, process::Event::DriverDies) {
                    net.trouble(process, net.now + Duration::from_millis(10));
                }
                let who = self.clients[process].who;
                self.in_client(who, Input::Process(event));
            }
            Action::Crash(process) => self.crash(process),
            Action::Stop(process, pause) => {
                self.clients[process].stopped.get_or_insert_default();
                net.after(pause, Event::Action(Action::Continue(process)));
            }
            Action::Continue(process) => self.go_on(process),
            Action::Jump(process, ahead) => {
                net.trouble(process, net.now);
                self.clients[process].ahead = ahead;
            }
            Action::Restart(server, pause, left) if self.servers[server].up => {
                net.trouble_all(net.now + pause);
                self.servers[server].crash(net);
                net.after(pause, Event::Action(Action::Start(server, left)));
            }
            Action::Start(server, left) if !self.servers[server].up => {
                self.servers[server].start(net, left);
                net.look = true;
            }
            Action::Restart(..) | Action::Start(..) => {}
            Action::Flush(server) => self.flush(server),
            Action::Undo => self.undo(),
            Action::Save(server) => self.servers[server].save(),
            Action::Stall(server, pause) => {
                self.servers[server].stalls_until = net.now + pause;
                net.trouble_all(net.now + pause + Duration::from_millis(5));
            }
            Action::Part(process, server, pause) => {
                net.parted.push((process, server, net.now + pause));
            }
            Action::Quiet => self.quiet(),
        }
    }

    /// A server loses its data. With them, a single store loses all connections.
    fn flush(&mut self, server: usize) {
        self.net.trouble_all(self.net.now);
        self.servers[server].flush(&self.net);
        // The checker takes note of the votes before they are given up.
        self.net.look = true;
        if self.net.is_single {
            self.disconnect();
        }
    }

    /// A store of records crashes, and all connections break.
    fn undo(&mut self) {
        self.net.trouble_all(self.net.now);
        self.servers[0].undo(&mut self.net);
        self.disconnect();
    }

    fn disconnect(&mut self) {
        let net = &mut self.net;
        for client in &mut self.clients {
            client.is_warned = false;
            let input = Input::Process(process::Event::FromStore(StoreEvent::Disconnected));
            let pause = net.dice.up_to(Duration::from_millis(1));
            net.after(pause, Event::InClient(client.who, input));
        }
    }

    fn crash(&mut self, process: usize) {
        let client = &self.clients[process];
        let life = client.who.life + 1;
        let who = Who { process, life };
        let next = Client::new(&mut self.net, who, client.clock, client.ahead);
        let mut dead = std::mem::replace(&mut self.clients[process], next);
        self.checker.crashed(&self.net, &mut dead);
        // The arrivals of a paused client go to its next life.
        for input in dead.stopped.into_iter().flatten() {
            if let Input::Process(process::Event::Arrive(_)) = input {
                self.net.at(self.net.now, Event::InClient(who, input));
            }
        }
    }

    /// Delivers the deferred events of a paused client, in any order.
    fn go_on(&mut self, process: usize) {
        let client = &mut self.clients[process];
        if client.stopped.is_some() {
            self.net.paused_until = Some(self.net.now);
            self.net
                .trouble(process, self.net.now + Duration::from_millis(1));
        }
        for input in client.stopped.take().into_iter().flatten() {
            let pause = self.net.dice.up_to(Duration::from_micros(100));
            self.net.after(pause, Event::InClient(client.who, input));
        }
    }

    /// Ends the faults. From now on every request waits long enough, and no lock is held for long.
    fn quiet(&mut self) {
        let bound = self.net.schedule.bound;
        self.net.is_quiet = true;
        for server in &mut self.servers {
            server.stalls_until = self.net.now;
        }
        for number in 0..self.clients.len() {
            self.go_on(number);
            let client = &mut self.clients[number];
            let now = client.now(&self.net);
            client.process.quiet(now, bound * 2);
            client.perform(&mut self.net);
        }
        self.served_by = Some(self.net.now + bound);
    }
}
