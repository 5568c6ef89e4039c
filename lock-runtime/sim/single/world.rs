//! A run: processes, the store behind a network, and the clock that drives them.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use tokio::time::Instant;

use super::{
    checker::{Checker, Violation, Wrong},
    schedule::{Action, Network, Schedule},
    search::{Actor, Move, Search},
    server::{Server, acquires, introduces},
};
use crate::{
    key::LockKey,
    protocol::{AcquireId, Mutation},
    sim::{
        dice::Dice,
        explore::Run,
        process::{self, Message, Process, StoreReply, Who},
    },
    store::{StoreEvent, Token},
};

/// The number of events after which a run counts as endless.
const MOST_EVENTS: usize = 200_000;

enum Event {
    /// A request reaches the store.
    AtStore(Who, u32, Message),
    InProcess(Who, process::Event),
    Action(Action),
}

pub(super) struct World {
    start: Instant,
    pub(super) now: Instant,
    events: BTreeMap<(Instant, u64), Event>,
    number: u64,
    dice: Dice,
    schedule: Schedule,
    keys: Vec<LockKey>,
    pub(super) processes: Vec<Process>,
    pub(super) server: Server,
    checker: Checker,
    /// The process of each token.
    owners: BTreeMap<Token, Who>,
    /// The processes that have not received the latest event about lost data.
    unwarned: Vec<Who>,
    store_stalls_until: Instant,
    is_quiet: bool,
    /// Set at the end of the faults: the time by which every waiter must be served.
    served_by: Option<Instant>,
    mutation: Option<Mutation>,
    /// Whether waiting tasks are checked after every event.
    checks_sleepers: bool,
    /// Makes all choices, in place of the dice.
    pub(super) search: Option<Search>,
    history: Option<String>,
}

impl Run for World {
    type Mutation = Mutation;
    type Wrong = Wrong;

    fn random(seed: u64, mutation: Option<Mutation>, is_traced: bool) -> Self {
        let mut dice = Dice::new(seed);
        let schedule = Schedule::random(&mut dice);
        let mut world = Self::new(schedule, dice, mutation, is_traced);
        world.checks_sleepers = seed.is_multiple_of(6) || mutation == Some(Mutation::WakesNoHead);
        world
    }

    fn run(&mut self, only: Option<Wrong>) -> Result<(), Violation> {
        self.checker.only = only;
        for _ in 0..MOST_EVENTS {
            let Some((when, event)) = self.next() else {
                return self.end();
            };
            self.now = self.now.max(when);
            self.happens(event);
            self.checker
                .holders(self.now, &self.processes, &self.server);
            if self.checks_sleepers {
                self.check_sleepers();
            }
            if self.served_by.is_some_and(|by| self.now > by) {
                self.served_by = None;
                self.check_waiters();
            }
            if let Some(violation) = self.checker.found() {
                return Err(violation);
            }
            if self.is_quiet && self.is_at_rest() {
                return self.end();
            }
        }
        Err(Violation {
            wrong: Wrong::Stuck,
            what: "the run does not end".into(),
        })
    }

    fn history(&mut self) -> String {
        self.history.take().unwrap_or_default()
    }
}

impl World {
    /// A run whose choices are made by `search`.
    pub(super) fn searched(
        schedule: Schedule,
        search: Search,
        mutation: Option<Mutation>,
        is_traced: bool,
    ) -> Self {
        let mut world = Self::new(schedule, Dice::steady(0), mutation, is_traced);
        world.checks_sleepers = true;
        world.search = Some(search);
        world
    }

    pub(super) fn new(
        schedule: Schedule,
        mut dice: Dice,
        mutation: Option<Mutation>,
        is_traced: bool,
    ) -> Self {
        let start = Instant::now();
        let names = ["a", "b", "c"].into_iter().take(schedule.locks);
        let keys: Vec<_> = names.filter_map(|name| LockKey::new(name).ok()).collect();
        let processes = (0..schedule.processes).map(|process| {
            let who = Who { process, life: 0 };
            Process::new(
                who,
                &keys,
                dice.fork(),
                schedule.limits,
                mutation,
                is_traced,
            )
        });
        let mut world = Self {
            start,
            now: start,
            events: BTreeMap::new(),
            number: 0,
            processes: processes.collect(),
            dice,
            keys,
            server: Server::default(),
            checker: Checker::default(),
            owners: BTreeMap::new(),
            unwarned: Vec::new(),
            store_stalls_until: start,
            is_quiet: false,
            served_by: None,
            mutation,
            checks_sleepers: false,
            search: None,
            history: is_traced.then(String::new),
            schedule,
        };
        let Network { .. } = world.schedule.network;
        world.say(|it| {
            format!(
                "{:?}, {} processes",
                it.schedule.network, it.schedule.processes
            )
        });
        for (when, action) in std::mem::take(&mut world.schedule.actions) {
            world.after(when, Event::Action(action));
        }
        world
    }

    fn say(&mut self, line: impl FnOnce(&Self) -> String) {
        if self.history.is_some() {
            let (at, line) = ((self.now - self.start).as_secs_f64() * 1e3, line(self));
            if let Some(history) = &mut self.history {
                // Writing to a string does not fail.
                let _ = writeln!(history, "{at:>10.3} ms  {line}");
            }
        }
    }

    fn at(&mut self, when: Instant, event: Event) {
        self.number += 1;
        self.events.insert((when.max(self.now), self.number), event);
    }

    fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    /// Returns after which times a message arrives: never, once or twice.
    fn delays(&mut self, late: usize) -> Vec<Duration> {
        let network = self.schedule.network;
        if self.is_quiet {
            return vec![Duration::from_micros(200)];
        }
        if let Some(search) = &mut self.search {
            return vec![Duration::ZERO; search.copies()];
        }
        if self.dice.chance(network.lost) {
            return Vec::new();
        }
        let longest = if self.dice.chance(late) {
            network.longest
        } else {
            Duration::from_millis(1)
        };
        let mut delays = vec![self.dice.up_to(longest)];
        if self.dice.chance(network.doubled) {
            delays.push(self.dice.up_to(network.longest));
        }
        delays
    }

    /// Removes the next event.
    fn next(&mut self) -> Option<(Instant, Event)> {
        let Some(search) = &mut self.search else {
            let ((when, _), event) = self.events.pop_first()?;
            return Some((when, event));
        };
        let (now, processes) = (self.now, &self.processes);
        self.events.retain(|(when, _), event| match event {
            Event::InProcess(who, event) => !processes[who.process].ignores(event, now.max(*when)),
            _ => true,
        });
        let (mut moves, mut wait, mut only_messages) = (Vec::new(), None, true);
        for ((when, number), event) in &self.events {
            let id = (*when - self.start, *number);
            if *when > now {
                wait = Some(Move::new(id, Actor::All));
                break;
            }
            let actor = match event {
                Event::AtStore(..) => Actor::Store,
                Event::InProcess(Who { process, .. }, _) => Actor::Process(*process),
                Event::Action(Action::Arrive(arrival)) => Actor::Process(arrival.process),
                Event::Action(_) => Actor::All,
            };
            only_messages &= match event {
                Event::AtStore(..) => true,
                Event::InProcess(_, event) => event.is_message(),
                Event::Action(_) => false,
            };
            moves.push(Move::new(id, actor));
        }
        // Messages may be slow, but tasks run at once.
        let wait = wait.filter(|_| only_messages);
        let (when, number) = search.choose(moves, wait)?;
        let when = self.start + when;
        Some((when, self.events.remove(&(when, number))?))
    }

    fn is_at_rest(&self) -> bool {
        self.processes.iter().all(Process::is_at_rest)
            && !self.events.values().any(|event| {
                matches!(
                    event,
                    Event::AtStore(..)
                        | Event::Action(_)
                        | Event::InProcess(_, process::Event::Arrive(_))
                )
            })
    }

    fn check_waiters(&mut self) {
        let waiting = self.processes.iter().find(|process| process.is_waiting());
        if let Some(process) = waiting {
            let who = process.who;
            self.checker
                .report(Wrong::Stuck, || format!("a request in {who:?} still waits"));
        }
    }

    fn check_sleepers(&mut self) {
        // The deferred events of a process that was paused arrive within this time.
        let soon = self.now + Duration::from_micros(200);
        let due = self.events.range(..=(soon, u64::MAX));
        let due: Vec<(Who, AcquireId)> = due
            .filter_map(|(_, event)| match event {
                Event::InProcess(who, process::Event::Timer(id, _) | process::Event::Woken(id)) => {
                    Some((*who, *id))
                }
                _ => None,
            })
            .collect();
        for process in &self.processes {
            if process.stopped.is_some() {
                continue;
            }
            let is_due = |id| due.contains(&(process.who, id));
            if let Some(overslept) = process.overslept(self.now, is_due) {
                self.checker.report(Wrong::Asleep, || overslept);
            }
        }
    }

    /// Checks the state at the end of the run.
    fn end(&mut self) -> Result<(), Violation> {
        if self.search.as_ref().is_some_and(|it| it.is_pruned) {
            return Ok(());
        }
        self.check_waiters();
        self.check_owners(Wrong::Leak);
        for process in &self.processes {
            if let Some(rest) = process.session.rest() {
                let who = process.who;
                self.checker
                    .report(Wrong::Leak, || format!("{who:?} has left {rest}"));
            }
        }
        self.checker.found().map_or(Ok(()), Err)
    }

    fn check_owners(&mut self, wrong: Wrong) {
        let (owners, processes) = (&self.owners, &self.processes);
        let owner = |token| {
            let who = *owners.get(&token)?;
            Some(&processes[who.process]).filter(|process| process.who == who)
        };
        self.checker
            .owners(self.now, &self.keys, &self.server, owner, wrong);
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::AtStore(who, call, message) => {
                if self.store_stalls_until > self.now {
                    let pause = self.dice.up_to(Duration::from_millis(2));
                    let when = self.store_stalls_until + pause;
                    return self.at(when, Event::AtStore(who, call, message));
                }
                self.at_store(who, call, &message);
                self.check_owners(Wrong::Orphan);
            }
            Event::InProcess(who, event) => self.in_process(who, event),
            Event::Action(action) => self.act(action),
        }
    }

    fn at_store(&mut self, who: Who, call: u32, message: &Message) {
        self.say(|_| format!("  store executes #{call} of {who:?}: {message:?}"));
        // A release that was executed for an excused token names another one.
        if let Message::One(crate::protocol::Request::Release(release)) = message
            && self.checker.excused.contains(&release.hold.token)
        {
            let next = release.next.map(|next| next.token);
            self.checker.excused.extend(next);
        }
        let executed = self.server.execute(message, self.mutation, self.now);
        // The events of a step are sent before its reply, and may arrive after it.
        for (token, event) in executed.events {
            if let StoreEvent::Revoked { token } = event {
                self.checker.revoked.push(token);
            }
            self.push(token, &event);
        }
        let reply: StoreReply = executed.reply;
        for delay in self.delays(self.schedule.network.late) {
            let replied = process::Event::Replied(call, Some(reply.clone()));
            self.after(delay, Event::InProcess(who, replied));
        }
    }

    /// Sends an event of the store to the process of a token, or to all.
    fn push(&mut self, token: Option<Token>, event: &StoreEvent) {
        self.say(|_| format!("    store pushes {event:?}"));
        let owner = token.map(|token| self.owners.get(&token).copied());
        let all: Vec<_> = self.processes.iter().map(|process| process.who).collect();
        let receivers = match owner {
            None => all,
            Some(owner) => owner.into_iter().collect(),
        };
        for who in receivers {
            for delay in self.delays(self.schedule.network.pushes_late) {
                let event = process::Event::FromStore(event.clone());
                self.after(delay, Event::InProcess(who, event));
            }
        }
    }

    fn in_process(&mut self, who: Who, event: process::Event) {
        let process = &mut self.processes[who.process];
        if process.who != who {
            return;
        }
        if let Some(stopped) = &mut process.stopped {
            stopped.push(event);
            return;
        }
        if let process::Event::FromStore(StoreEvent::Disconnected) = event {
            self.unwarned.retain(|unwarned| *unwarned != who);
        }
        process.happens(self.now, event);
        self.perform(who);
    }

    /// Performs the effects of a process.
    fn perform(&mut self, who: Who) {
        let process = &mut self.processes[who.process];
        let wrong = process.wrong.take();
        let out = process.take_out();
        for line in out.log {
            self.say(|_| format!("{}.{}: {line}", who.process, who.life));
        }
        for token in out.given_up {
            self.checker.excused.push(token);
        }
        for began in out.began {
            let is_warned = !self.unwarned.contains(&who);
            self.checker
                .began(&began, &self.server, is_warned, self.now);
        }
        for (when, event) in out.timers {
            self.at(when, Event::InProcess(who, event));
        }
        for (call, message, _) in out.sent {
            for token in introduces(&message) {
                self.owners.entry(token).or_insert(who);
            }
            let delays = self.delays(self.schedule.network.late);
            if delays.len() > 1 {
                let doubled = acquires(&message).into_iter().map(|hold| hold.token);
                self.checker.excused.extend(doubled);
            }
            self.say(|_| format!("    #{call} of {who:?} arrives after {delays:?}"));
            for delay in delays {
                self.after(delay, Event::AtStore(who, call, message.clone()));
            }
        }
        if let Some(wrong) = wrong.filter(|_| self.checker.data_lost_at.is_none()) {
            self.checker.report(Wrong::Refusal, || wrong);
        }
    }

    fn act(&mut self, action: Action) {
        self.say(|_| format!("{action:?}"));
        let event = match action {
            Action::Arrive(arrival) => {
                let process = arrival.process;
                (process, process::Event::Arrive(*arrival))
            }
            Action::Crash(process) => return self.crash(process),
            Action::Stop(process, pause) => {
                self.processes[process].stopped.get_or_insert_default();
                return self.after(pause, Event::Action(Action::Continue(process)));
            }
            Action::Continue(process) => return self.go_on(process),
            Action::Disconnect(process) => {
                let event = process::Event::FromStore(StoreEvent::Disconnected);
                (process, event)
            }
            Action::DriverDies(process) => (process, process::Event::DriverDies),
            Action::Shutdown(process) => (process, process::Event::Shutdown),
            Action::Revoke(process, key) => (process, process::Event::Revoke(key)),
            Action::Stall(pause) => {
                self.store_stalls_until = self.now + pause;
                return;
            }
            Action::Flush => {
                self.server.flush();
                self.checker.data_lost_at = Some(self.now);
                let all: Vec<_> = self.processes.iter().map(|process| process.who).collect();
                self.unwarned.clone_from(&all);
                for who in all {
                    let event = process::Event::FromStore(StoreEvent::Disconnected);
                    let pause = self.dice.up_to(Duration::from_millis(1));
                    self.after(pause, Event::InProcess(who, event));
                }
                return;
            }
            Action::Quiet => return self.quiet(),
        };
        let who = self.processes[event.0].who;
        self.in_process(who, event.1);
    }

    fn crash(&mut self, process: usize) {
        let Who { life, .. } = self.processes[process].who;
        let who = Who {
            process,
            life: life + 1,
        };
        let next = Process::new(
            who,
            &self.keys,
            self.dice.fork(),
            self.schedule.limits,
            self.mutation,
            self.history.is_some(),
        );
        let dead = std::mem::replace(&mut self.processes[process], next);
        self.checker.crashed(&dead, self.now);
        // The arrivals of a paused process go to its next life.
        for event in dead.stopped.into_iter().flatten() {
            if let process::Event::Arrive(_) = event {
                self.at(self.now, Event::InProcess(who, event));
            }
        }
    }

    /// Delivers the deferred events of a paused process, in any order.
    fn go_on(&mut self, process: usize) {
        let Some(stopped) = self.processes[process].stopped.take() else {
            return;
        };
        let who = self.processes[process].who;
        for event in stopped {
            let pause = self.dice.up_to(Duration::from_micros(100));
            self.after(pause, Event::InProcess(who, event));
        }
    }

    /// Ends the faults. From now on no lock is held for long.
    fn quiet(&mut self) {
        self.is_quiet = true;
        self.store_stalls_until = self.now;
        for process in 0..self.processes.len() {
            self.go_on(process);
            self.processes[process].quiet(self.now, self.schedule.bound * 2);
            self.perform(self.processes[process].who);
        }
        self.served_by = Some(self.now + self.schedule.bound);
    }
}
