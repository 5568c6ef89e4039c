//! Small scopes, in all their schedules: a few requests, in every order of all messages, wake-ups
//! and timers. Time passes while messages are in flight as often as a scope allows.

use std::{fmt, time::Duration};

use super::{
    Broken,
    checker::Wrong,
    explore::from_environment,
    process::{Arrival, Ending},
    schedule::{self, Schedule},
    search::{Faults, Search},
    world::World,
};
use crate::{
    protocol::Mutation,
    request::spec::{Mode, Terms, Wait},
};

const LEASE: Duration = Duration::from_secs(1);
/// The time between two arrivals that are not at the same time.
const LATER: Duration = Duration::from_millis(20);

/// A few requests, and the faults of their network.
#[derive(Clone)]
struct Scope {
    /// The time of each request.
    arrivals: Vec<(Duration, Arrival)>,
    faults: Faults,
    depth: usize,
}

impl Scope {
    /// A request of each of these processes, all at once. Each holds the lock for an instant.
    fn of(processes: &[usize]) -> Self {
        let terms = Terms::plain(Mode::Exclusive, LEASE, Wait::AtMost(LEASE * 60));
        let arrival = |process: &usize| schedule::arrival(*process, terms, Duration::ZERO);
        let arrivals = processes.iter().map(arrival);
        Self {
            arrivals: arrivals.map(|arrival| (Duration::ZERO, arrival)).collect(),
            faults: Faults::default(),
            depth: usize::MAX,
        }
    }

    /// The same requests, each some time after the one before.
    fn one_by_one(mut self) -> Self {
        for ((when, _), number) in self.arrivals.iter_mut().zip(0..) {
            *when = LATER * number;
        }
        self
    }

    /// The request with this number is different.
    fn with(mut self, number: usize, change: impl FnOnce(&mut Arrival)) -> Self {
        change(&mut self.arrivals[number].1);
        self
    }

    fn faults(mut self, delays: usize, lost: usize, doubled: usize) -> Self {
        self.faults = Faults {
            delays,
            lost,
            doubled,
        };
        self
    }

    /// Only the first choices are made in every way. `LOCK_EXPLORER_DEPTH` adds to their number.
    fn with_depth(mut self, depth: usize) -> Self {
        self.depth = depth + from_environment("LOCK_EXPLORER_DEPTH").unwrap_or(0) as usize;
        self
    }

    fn world(&self, search: Search, mutation: Option<Mutation>, is_traced: bool) -> World {
        let schedule = Schedule::perfect(self.arrivals.iter().cloned(), LEASE);
        let broken = mutation.map(Broken::Client);
        World::searched(schedule, search, broken, is_traced)
    }

    /// The number of requests that are served in every schedule.
    fn served(&self) -> u32 {
        let patient = self.arrivals.iter().filter(|(_, arrival)| {
            arrival.cancel_after.is_none() && arrival.terms.wait != Wait::No
        });
        patient.count() as u32
    }

    /// Runs every schedule. Returns the violation of the first one that has one, with its history.
    fn search(&self, mutation: Option<Mutation>, only: Option<Wrong>) -> Result<String, String> {
        let (mut search, mut schedules) = (Search::new(self.faults, self.depth), 0_usize);
        loop {
            let mut world = self.world(search, mutation, false);
            let mut outcome = world.run(only).map_err(|violation| violation.to_string());
            let Some(mut made) = world.net.search.take() else {
                panic!("the search is in use");
            };
            if !made.is_pruned {
                schedules += 1;
                let served: u32 = world.clients.iter().map(|it| it.process.served).sum();
                if outcome.is_ok() && only.is_none() && served < self.served() {
                    outcome = Err(format!("{served} requests were served"));
                }
            }
            if let Err(violation) = outcome {
                made.restart();
                let mut world = self.world(made, mutation, true);
                drop(world.run(only));
                let history = world.history();
                return Err(format!("schedule {schedules}\n{history}{violation}"));
            }
            if !made.advance() {
                let scope = if made.is_cut { "some" } else { "all" };
                return Ok(format!("{schedules} schedules, {scope} of them"));
            }
            search = made;
        }
    }

    /// Runs every schedule, and prints their number. It is shown with `--nocapture`.
    #[track_caller]
    fn is_sound(&self) {
        match self.search(None, None) {
            Ok(explored) => println!("{self}: {explored}"),
            Err(violation) => panic!("{self}: {violation}"),
        }
    }

    /// Runs schedules until one violates an invariant.
    #[track_caller]
    fn finds(&self, mutation: Mutation, wrong: Wrong) {
        match self.search(Some(mutation), Some(wrong)) {
            Ok(explored) => panic!("{mutation:?} in {self}: nothing found, {explored}"),
            Err(violation) => println!("{mutation:?} in {self}: {violation}"),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let processes = self.arrivals.iter().map(|(_, arrival)| arrival.process);
        write!(f, "{:?} {:?}", processes.collect::<Vec<_>>(), self.faults)
    }
}

/// Two requests, in two processes and in one, and the number of choices that are made in every way.
const PAIRS: [([usize; 2], usize); 2] = [([0, 1], 18), ([0, 0], 10)];

#[test]
fn two_requests_in_every_order() {
    for (pair, depth) in PAIRS {
        Scope::of(&pair).is_sound();
        let late = Scope::of(&pair).faults(1, 0, 0);
        late.clone().one_by_one().with_depth(depth).is_sound();
        late.with_depth(depth.min(12)).is_sound();
    }
}

#[test]
fn a_request_that_is_cancelled_or_dropped_in_every_order() {
    let changes: [fn(&mut Arrival); 3] = [
        |arrival| arrival.cancel_after = Some(Duration::ZERO),
        |arrival| arrival.ending = Ending::Drop,
        |arrival| arrival.ending = Ending::DropRelease(Duration::ZERO),
    ];
    for (pair, depth) in PAIRS {
        for (change, number) in changes.into_iter().flat_map(|it| [(it, 0), (it, 1)]) {
            let scope = Scope::of(&pair).with(number, change);
            scope.with_depth(depth).is_sound();
        }
    }
}

#[test]
fn a_message_that_is_lost_or_doubled_in_every_order() {
    for (pair, depth) in PAIRS {
        let faults = [(1, 0, depth + 3), (0, 1, depth.min(14))];
        for (lost, doubled, depth) in faults {
            let scope = Scope::of(&pair).faults(0, lost, doubled);
            scope.with_depth(depth).is_sound();
        }
    }
}

#[test]
fn three_requests_in_every_order() {
    Scope::of(&[0, 1, 2]).with_depth(16).is_sound();
    Scope::of(&[0, 0, 1]).with_depth(12).is_sound();
}

#[test]
fn two_keys_in_every_order() {
    let both = |arrival: &mut Arrival| {
        arrival.keys = vec![0, 1];
        arrival.terms.wait = Wait::No;
    };
    let other = |arrival: &mut Arrival| arrival.keys = vec![1];
    for (pair, depth) in PAIRS {
        for scope in [
            Scope::of(&pair).with(1, other),
            Scope::of(&pair).with(0, both),
            Scope::of(&pair).with(0, both).with(1, other),
        ] {
            scope.with_depth(depth).is_sound();
        }
    }
    let three = Scope::of(&[0, 1, 2]).with(0, both).with(1, other);
    three.with_depth(10).is_sound();
}

#[test]
fn the_search_finds_rules_that_are_switched_off() {
    let (apart, together) = (Scope::of(&[0, 1]), Scope::of(&[0, 0]));
    together.finds(Mutation::WakesNoHead, Wrong::Asleep);
    let apart = apart.faults(1, 0, 0);
    let late = apart.clone().one_by_one().with_depth(6);
    late.finds(Mutation::CountsFromReply, Wrong::NotHeld);
    late.finds(Mutation::AbandonsOnce, Wrong::Orphan);
    let soon = apart.with_depth(9);
    soon.finds(Mutation::CountsFromPush, Wrong::NotHeld);
}

/// A lock comes back to a process for a waiter that leaves at the same time. The next one renews
/// nothing, so it cannot take the lock over.
#[test]
fn a_lock_that_comes_back_for_a_waiter_that_leaves() {
    let scope = Scope::of(&[0, 0, 0, 0])
        .one_by_one()
        .with(0, |arrival| arrival.hold_for = LATER * 4)
        .with(2, |arrival| arrival.cancel_after = Some(LATER * 2))
        .with(3, |arrival| arrival.terms.renew = false)
        .with_depth(9);
    scope.is_sound();
    scope.finds(Mutation::WakesNoOtherHead, Wrong::Asleep);
}
