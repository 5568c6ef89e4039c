//! Random schedules by the thousand: clean ones, and with a rule switched off.

use std::fmt;

use super::{Broken, checker::Wrong, schedule::Stores, world::World};

/// The number of times that a search begins elsewhere.
const STARTS: u64 = 4;
/// The number of schedules from each start.
const SEARCHED: u64 = 20_000;
/// Where the rarest violations were seen, to find them sooner.
const SEEN: [u64; 3] = [13_270, 1_000_160, 1_002_900];
/// The schedules from each of them.
const NEAR: u64 = 20;
/// The number of schedules of an exploration, unless the environment sets another one.
const SCHEDULES: u64 = 6_000;
/// The same for a store of records, whose rules are those of a single store.
const SCHEDULES_OF_RECORDS: u64 = 2_000;
/// The same with scripts: each takes as long as several without.
const SCHEDULES_OF_SCRIPTS: u64 = 400;

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

/// Panics unless a schedule shows the violation that a rule prevents. One was `seen` with this
/// seed.
pub(super) fn is_found(broken: Broken, wrong: Wrong, seen: Option<u64>) {
    // Shown with `--nocapture`. The number of schedules that it takes, from several starts.
    if let Some(starts) = from_environment("LOCK_EXPLORER_STARTS") {
        let counts = (0..starts).filter_map(|start| {
            let offset = start * 1_000_000;
            first(broken, wrong, offset, SEARCHED).map(|seed| seed - offset + 1)
        });
        let mut counts: Vec<_> = counts.collect();
        counts.sort_unstable();
        let (found, median) = (counts.len(), counts.get(counts.len() / 2));
        println!("{broken:?}: found from {found} of {starts} starts, median {median:?}");
    }
    let near = seen.into_iter().chain(SEEN).map(|seed| (seed, NEAR));
    // The rarest violations take more schedules than the others.
    let starts = (0..STARTS).map(|start| (start * 1_000_000, SEARCHED));
    let mut starts = near.chain(starts);
    let Some(seed) = starts.find_map(|(offset, count)| first(broken, wrong, offset, count)) else {
        panic!("{broken:?}: nothing found from {STARTS} starts of {SEARCHED} schedules")
    };
    let mut run = World::random(broken.stores(), seed, Some(broken), true);
    if let Err(violation) = run.run(Some(wrong)) {
        let history = run.history();
        println!("{broken:?} with seed {seed}: {violation}\n{history}");
    }
}

/// Tests that each rule that is switched off is found by its violation, sooner with the seed that
/// has shown it.
macro_rules! found {
    ($($name:ident: $broken:expr => $wrong:ident $((seen at $seen:literal))?,)*) => {
        $(
            #[test]
            fn $name() {
                let seen = None::<u64>$(.or(Some($seen)))?;
                $crate::sim::explore::is_found($broken, Wrong::$wrong, seen);
            }
        )*
    };
}
pub(super) use found;
