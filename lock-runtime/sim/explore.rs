//! Random schedules by the thousand: clean ones, and with a rule switched off.

use std::fmt::{self, Debug};

/// The number of schedules of an exploration, unless the environment sets another one.
const SCHEDULES: u64 = 20_000;

/// A broken invariant of the kind `W`.
pub(super) struct Violation<W> {
    pub(super) wrong: W,
    pub(super) what: String,
}

impl<W: Debug> fmt::Display for Violation<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.wrong, self.what)
    }
}

/// A run of one schedule.
pub(super) trait Run: Sized {
    /// A rule that can be switched off.
    type Mutation: Copy + Debug;
    /// The kinds of violations.
    type Wrong: Copy + Debug;

    fn random(seed: u64, mutation: Option<Self::Mutation>, is_traced: bool) -> Self;

    /// Runs until there are no more events. With `only`, looks for violations of that kind alone.
    fn run(&mut self, only: Option<Self::Wrong>) -> Result<(), Violation<Self::Wrong>>;

    fn history(&mut self) -> String;
}

pub(super) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs one half of the schedules, so that two cores can share the work. Panics with the history of
/// the first one that violates an invariant.
pub(super) fn explore_half<R: Run>(half: u64) {
    match from_environment("LOCK_EXPLORER_SEED") {
        Some(seed) if seed % 2 == half => show::<R>(seed),
        Some(_) => {}
        None => {
            let schedules = from_environment("LOCK_EXPLORER_SCHEDULES").unwrap_or(SCHEDULES);
            for seed in (0..schedules).filter(|seed| seed % 2 == half) {
                if R::random(seed, None, false).run(None).is_err() {
                    show::<R>(seed);
                }
            }
        }
    }
}

/// Prints the history of a schedule.
fn show<R: Run>(seed: u64) {
    let mut run = R::random(seed, None, true);
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
fn first<R: Run>(mutation: R::Mutation, wrong: R::Wrong, offset: u64) -> Option<u64> {
    let violates = |seed: &u64| {
        let mut run = R::random(*seed, Some(mutation), false);
        run.run(Some(wrong)).is_err()
    };
    (offset..offset + SCHEDULES).find(violates)
}

/// Panics unless a schedule shows the violation that a rule prevents.
pub(super) fn is_found<R: Run>(mutation: R::Mutation, wrong: R::Wrong) {
    let Some(seed) = first::<R>(mutation, wrong, 0) else {
        panic!("{mutation:?}: nothing found in {SCHEDULES} schedules")
    };
    // Shown with `--nocapture`.
    let mut run = R::random(seed, Some(mutation), true);
    let violation = run.run(Some(wrong)).err();
    let violation = violation.map_or_else(String::new, |violation| violation.to_string());
    let history = run.history();
    println!("{mutation:?} with seed {seed}: {violation}\n{history}");
    // The number of schedules that it takes, from several starts.
    if let Some(starts) = from_environment("LOCK_EXPLORER_STARTS") {
        let counts = (0..starts).filter_map(|start| {
            let offset = start * 1_000_000;
            first::<R>(mutation, wrong, offset).map(|seed| seed - offset + 1)
        });
        let mut counts: Vec<_> = counts.collect();
        counts.sort_unstable();
        let (found, median) = (counts.len(), counts.get(counts.len() / 2));
        println!("{mutation:?}: found from {found} of {starts} starts, median {median:?}");
    }
}

/// Tests that each rule that is switched off is found by its violation.
macro_rules! found {
    ($($name:ident: $mutation:expr => $wrong:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $crate::sim::explore::is_found::<World>($mutation, Wrong::$wrong);
            }
        )*
    };
}
pub(super) use found;
