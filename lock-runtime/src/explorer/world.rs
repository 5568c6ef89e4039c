//! A run: processes, the store between them, and the clock that drives them.

use super::{
    Broken,
    checker::{Checker, Violation, Wrong},
    dice::Dice,
    process::Process,
    schedule::{Action, Arrival, Schedule},
    server::Server,
    sim::{Event, Sim, Who, say},
};
use crate::key::LockKey;

/// The number of events after which a run counts as endless.
const MOST_EVENTS: usize = 100_000;

pub(super) struct World {
    pub(super) sim: Sim,
    server: Server,
    processes: Vec<Process>,
    arrivals: Vec<Arrival>,
    checker: Checker,
    bound: std::time::Duration,
    /// Set at the end of the faults: the time by which every waiter must be served.
    served_by: Option<tokio::time::Instant>,
}

impl World {
    pub(super) fn random(seed: u64, broken: Option<Broken>, traced: bool) -> Self {
        let mut dice = Dice::new(seed);
        let schedule = Schedule::random(&mut dice);
        Self::new(schedule, dice, broken, traced)
    }

    pub(super) fn new(
        schedule: Schedule,
        dice: Dice,
        broken: Option<Broken>,
        traced: bool,
    ) -> Self {
        let Schedule {
            processes,
            locks,
            network,
            arrivals,
            actions,
            bound,
        } = schedule;
        let names = ["a", "b", "c"].into_iter().take(locks);
        let keys = names.filter_map(|name| LockKey::new(name).ok()).collect();
        let mut sim = Sim::new(dice, network, keys, broken, traced);
        say!(sim, "{network:?}, {processes} processes");
        for (when, action) in actions {
            sim.after(when, Event::Action(action));
        }
        sim.served = vec![0; processes];
        let processes = (0..processes)
            .map(|process| Process::new(Who { process, life: 0 }, locks))
            .collect();
        Self {
            sim,
            server: Server::default(),
            processes,
            arrivals,
            checker: Checker::default(),
            bound,
            served_by: None,
        }
    }

    pub(super) fn trace(&mut self) -> String {
        self.sim.trace.take().unwrap_or_default()
    }

    /// Runs until there are no more events. With `only`, looks for violations of that kind alone.
    pub(super) fn run(&mut self, only: Option<Wrong>) -> Result<(), Violation> {
        self.checker.only = only;
        for _ in 0..MOST_EVENTS {
            let Some(event) = self.sim.next() else {
                return self.end();
            };
            self.happens(event);
            while let Some((who, waiter)) = self.sim.woken() {
                let process = &mut self.processes[who.process];
                if process.who == who {
                    process.woken(&mut self.sim, waiter);
                }
            }
            self.checker
                .look(&mut self.sim, &self.processes, &self.server);
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

    fn report_waiters(&mut self) {
        for process in &self.processes {
            if let Some(waiter) = process.waiters.keys().next() {
                self.checker.report(Wrong::Stuck, || {
                    format!("{} w{waiter} still waits", process.who)
                });
            }
        }
    }

    /// Checks the state at the end of the run.
    fn end(&mut self) -> Result<(), Violation> {
        self.report_waiters();
        self.checker
            .owners(&self.sim, &self.processes, &self.server, true);
        if let Some(process) = self.processes.iter().find(|process| !process.is_at_rest()) {
            self.checker.report(Wrong::Leak, || {
                format!("{} has something left to do", process.who)
            });
        }
        self.checker.found().map_or(Ok(()), Err)
    }

    /// Whether this life of the process is current and running. Defers the event if it is paused.
    fn running(&mut self, who: Who, event: impl FnOnce() -> Event) -> bool {
        let process = &mut self.processes[who.process];
        if process.who != who {
            return false;
        }
        if let Some(waiting) = &mut process.stopped {
            waiting.push(event());
            return false;
        }
        true
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::AtStore(who, call, request) => {
                if self.sim.store_stalls_until > self.sim.now {
                    let pause = self.sim.dice.up_to(std::time::Duration::from_millis(2));
                    let when = self.sim.store_stalls_until + pause;
                    return self.sim.at(when, Event::AtStore(who, call, request));
                }
                self.server.execute(&mut self.sim, who, call, &request);
                self.checker
                    .owners(&self.sim, &self.processes, &self.server, false);
            }
            Event::Replied(who, call, reply) => {
                if self.running(who, || Event::Replied(who, call, reply)) {
                    self.processes[who.process].answered(&mut self.sim, call, Some(reply));
                }
            }
            Event::Pushed(who, hold, grant) => {
                if self.running(who, || Event::Pushed(who, hold.clone(), grant)) {
                    self.processes[who.process].pushed(&mut self.sim, &hold, grant);
                }
            }
            Event::Timer(who, timer) => {
                if self.running(who, || Event::Timer(who, timer)) {
                    self.processes[who.process].timer(&mut self.sim, timer);
                }
            }
            Event::Action(action) => self.act(action),
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Arrive(number) => {
                let arrival = self.arrivals[number];
                let process = &mut self.processes[arrival.process];
                match &mut process.stopped {
                    Some(waiting) => waiting.push(Event::Action(action)),
                    None => process.arrive(&mut self.sim, arrival),
                }
            }
            Action::Crash(process) => self.crash(process),
            Action::Stop(process, pause) => {
                say!(
                    self.sim,
                    "{} is paused for {pause:?}",
                    self.processes[process].who
                );
                self.processes[process].stopped.get_or_insert_default();
                self.sim
                    .after(pause, Event::Action(Action::Continue(process)));
            }
            Action::Continue(process) => self.go_on(process),
            Action::Disconnect(process) => {
                if self.processes[process].stopped.is_none() {
                    say!(self.sim, "{} is disconnected", self.processes[process].who);
                    self.processes[process].disconnected(&mut self.sim);
                }
            }
            Action::Stall(pause) => {
                say!(self.sim, "the store stalls for {pause:?}");
                self.sim.store_stalls_until = self.sim.now + pause;
            }
            Action::Quiet => self.quiet(),
        }
    }

    fn crash(&mut self, process: usize) {
        let Who { life, .. } = self.processes[process].who;
        say!(self.sim, "{} crashes", self.processes[process].who);
        let next = Process::new(
            Who {
                process,
                life: life + 1,
            },
            self.sim.keys.len(),
        );
        let dead = std::mem::replace(&mut self.processes[process], next);
        self.checker.dead.extend(dead.holders.into_values());
        // The arrivals of a paused process go to its next life.
        for event in dead.stopped.into_iter().flatten() {
            if let Event::Action(_) = event {
                self.sim.at(self.sim.now, event);
            }
        }
    }

    /// Delivers the deferred events of a paused process, in any order.
    fn go_on(&mut self, process: usize) {
        let Some(waiting) = self.processes[process].stopped.take() else {
            return;
        };
        say!(self.sim, "{} resumes", self.processes[process].who);
        for event in waiting {
            let pause = self.sim.dice.up_to(std::time::Duration::from_micros(100));
            self.sim.after(pause, event);
        }
    }

    /// Ends the faults. From now on every waiter waits long enough, and no lock is held for long.
    fn quiet(&mut self) {
        say!(self.sim, "no more faults");
        self.sim.quiet = true;
        self.sim.store_stalls_until = self.sim.now;
        for process in 0..self.processes.len() {
            self.go_on(process);
            let process = &mut self.processes[process];
            for waiter in process.waiters.values_mut() {
                waiter.until = waiter.until.map(|until| until + self.bound * 2);
            }
            let done: Vec<_> = process.holders.keys().copied().collect();
            for holder in done {
                let done = Event::Timer(process.who, super::sim::Timer::Done(holder));
                self.sim.after(super::HOLD_AT_LAST, done);
            }
        }
        self.served_by = Some(self.sim.now + self.bound);
    }
}
