//! Random schedules by the thousand: clean ones, and with a rule switched off.

use std::fmt;

use super::{Broken, checker::Wrong, schedule::Stores, world::World};

/// The number of times that a search begins elsewhere.
const STARTS: u64 = 4;
/// Where the rarest violations were seen, to find them sooner.
const SEEN: [u64; 3] = [13_270, 1_000_160, 1_002_900];
/// The schedules from each of them.
const NEAR: u64 = 20;
/// The number of schedules of an exploration, unless the environment sets another one.
const SCHEDULES: u64 = 20_000;
/// The same for a store of records, whose rules are those of a single store.
const SCHEDULES_OF_RECORDS: u64 = 5_000;
/// The same with scripts: each takes as long as several without.
const SCHEDULES_OF_SCRIPTS: u64 = 800;

/// A broken invariant.
pub(super) struct Violation {
    pub(super) wrong: Wrong,
    pub(super) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.wrong, self.what)
    }
}

pub(super) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs one half of the schedules, so that two cores can share the work. Panics with the history of
/// the first one that violates an invariant.
pub(super) fn explore_half(stores: Stores, half: u64) {
    match from_environment("LOCK_EXPLORER_SEED") {
        Some(seed) if seed % 2 == half => show(stores, seed),
        Some(_) => {}
        None => {
            let schedules = from_environment("LOCK_EXPLORER_SCHEDULES").unwrap_or(match stores {
                Stores::Records => SCHEDULES_OF_RECORDS,
                Stores::Scripts | Stores::ScriptsOfMajority => SCHEDULES_OF_SCRIPTS,
                Stores::One | Stores::Majority => SCHEDULES,
            });
            let first = from_environment("LOCK_EXPLORER_FIRST").unwrap_or(0);
            for seed in (first..first + schedules).filter(|seed| seed % 2 == half) {
                if World::random(stores, seed, None, false).run(None).is_err() {
                    show(stores, seed);
                }
            }
        }
    }
}

/// Prints the history of a schedule.
fn show(stores: Stores, seed: u64) {
    let mut run = World::random(stores, seed, None, true);
    let outcome = run.run(None);
    let history = run.history();
    match outcome {
        Ok(()) => println!("seed {seed}\n{history}"),
        Err(violation) => {
            panic!("seed {seed}\n{history}{violation}\nLOCK_EXPLORER_SEED={seed} reproduces it")
        }
    }
}

/// Explores with a rule switched off until a violation of this kind occurs. Returns its seed.
fn first(broken: Broken, wrong: Wrong, offset: u64, count: u64) -> Option<u64> {
    let violates = |seed: &u64| {
        let mut run = World::random(broken.stores(), *seed, Some(broken), false);
        run.run(Some(wrong)).is_err()
    };
    (offset..offset + count).find(violates)
}

/// Panics unless a schedule shows the violation that a rule prevents.
pub(super) fn is_found(broken: Broken, wrong: Wrong) {
    // Shown with `--nocapture`. The number of schedules that it takes, from several starts.
    if let Some(starts) = from_environment("LOCK_EXPLORER_STARTS") {
        let counts = (0..starts).filter_map(|start| {
            let offset = start * 1_000_000;
            first(broken, wrong, offset, SCHEDULES).map(|seed| seed - offset + 1)
        });
        let mut counts: Vec<_> = counts.collect();
        counts.sort_unstable();
        let (found, median) = (counts.len(), counts.get(counts.len() / 2));
        println!("{broken:?}: found from {found} of {starts} starts, median {median:?}");
    }
    let near = SEEN.map(|seed| (seed, NEAR));
    // The rarest violations take more schedules than the others.
    let starts = (0..STARTS).map(|start| (start * 1_000_000, SCHEDULES));
    let mut starts = near.into_iter().chain(starts);
    let Some(seed) = starts.find_map(|(offset, count)| first(broken, wrong, offset, count)) else {
        panic!("{broken:?}: nothing found from {STARTS} starts of {SCHEDULES} schedules")
    };
    let mut run = World::random(broken.stores(), seed, Some(broken), true);
    if let Err(violation) = run.run(Some(wrong)) {
        let history = run.history();
        println!("{broken:?} with seed {seed}: {violation}\n{history}");
    }
}

/// Tests that each rule that is switched off is found by its violation.
macro_rules! found {
    ($($name:ident: $broken:expr => $wrong:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $crate::sim::explore::is_found($broken, Wrong::$wrong);
            }
        )*
    };
}
pub(super) use found;
