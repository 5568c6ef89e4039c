//! Mutants of the code that decides about locks, each behind a switch of one build: a run of the
//! tests costs seconds for each, and a build for each would cost minutes.
//!
//! `tests/run.sh --mutants DIRECTORY` plants them in a copy of the repository below the directory,
//! and runs for each the tests that reach it. What no test notices is printed, except the mutants
//! in `equivalent.tsv`, each with the reason for which it behaves as the code does, or as well. The
//! outcomes are kept in the directory until the code changes: another run goes on there.

mod copy;
mod find;
mod run;

use std::{
    collections::{HashMap, HashSet},
    fs::{self, OpenOptions},
    io::Write as _,
    path::PathBuf,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;

use self::{
    copy::Copy,
    find::Mutant,
    run::{Outcome, STAGES, Stage},
};

/// The code that has mutants.
const PLACES: [&str; 10] = [
    "lock-runtime/src/guard/view.rs",
    "lock-runtime/src/protocol",
    "lock-runtime/src/shell/driver.rs",
    "lock-runtime/src/store/postgres/statements.rs",
    "lock-runtime/src/store/records",
    "lock-runtime/src/store/redis/script/groups.rs",
    "lock-runtime/src/store/table",
    "lock-tower/src/future.rs",
    "lock-tower/src/policies",
    "lock-tower/src/protocol/body.rs",
];

#[derive(Parser)]
struct Arguments {
    /// Directory for the copy, its build and the outcomes.
    directory: PathBuf,
    /// Only files whose path contains this.
    #[arg(long, default_value = "")]
    file: String,
    /// Only this stage, such as `unit`.
    #[arg(long)]
    stage: Option<String>,
    /// Time for the tests of one mutant in one stage, by the times that they took without one.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let stages: Vec<&Stage> = (STAGES.iter())
        .filter(|stage| (arguments.stage.as_ref()).is_none_or(|name| name == stage.name))
        .collect();
    ensure!(!stages.is_empty(), "there is no such stage");
    fs::create_dir_all(&arguments.directory)?;
    let copy = Copy::plant(&fs::canonicalize(&arguments.directory)?, &PLACES)?;
    let equivalent = equivalent()?;
    let path = copy.beside("outcomes.tsv");
    let mut outcomes = Outcomes::default();
    for line in fs::read_to_string(&path).unwrap_or_default().lines() {
        let (head, outcome) = line.rsplit_once('\t').context("an outcome")?;
        let (mutant, stage) = head.rsplit_once('\t').context("a stage")?;
        outcomes.add(mutant.parse()?, stage, outcome != UNNOTICED);
    }
    let mut file = OpenOptions::new().append(true).create(true).open(&path)?;
    let chosen: Vec<usize> = (copy.planted.iter().copied())
        .filter(|&number| copy.mutants[number].file.contains(&arguments.file))
        .collect();
    for stage in stages {
        let mut left = chosen.clone();
        left.retain(|&number| {
            let mutant = &copy.mutants[number];
            !outcomes.are_known(mutant, stage.name) && !equivalent.contains_key(&key(mutant))
        });
        println!("{}: {} mutants", stage.name, left.len());
        stage.run(&copy, &left, arguments.seconds, |number, outcome| {
            let mutant = &copy.mutants[number];
            let (is_noticed, text) = match outcome {
                Outcome::Noticed(by) => (true, by),
                Outcome::Unnoticed => (false, UNNOTICED.to_owned()),
                Outcome::Unreached => return Ok(()),
            };
            writeln!(file, "{mutant}\t{}\t{text}", stage.name)?;
            outcomes.add(mutant.clone(), stage.name, is_noticed);
            Ok(())
        })?;
    }
    let mut unknown: HashSet<_> = equivalent.keys().cloned().collect();
    let (mut noticed, mut left) = (0, 0);
    for mutant in chosen.iter().map(|&number| &copy.mutants[number]) {
        if unknown.remove(&key(mutant)) {
        } else if outcomes.noticed.contains(mutant) {
            noticed += 1;
        } else {
            println!("{mutant}");
            left += 1;
        }
    }
    for (file, function, what) in unknown
        .iter()
        .filter(|(file, ..)| file.contains(&arguments.file))
    {
        println!("equivalent.tsv names no mutant: {file}\t{function}\t{what}");
    }
    println!("{} mutants, {noticed} noticed, {left} left", chosen.len());
    Ok(())
}

const UNNOTICED: &str = "unnoticed";

#[derive(Default)]
struct Outcomes {
    noticed: HashSet<Mutant>,
    /// Mutants that a stage has not noticed.
    unnoticed: HashSet<(Mutant, String)>,
}

impl Outcomes {
    fn add(&mut self, mutant: Mutant, stage: &str, is_noticed: bool) {
        match is_noticed {
            true => self.noticed.insert(mutant),
            false => self.unnoticed.insert((mutant, stage.to_owned())),
        };
    }

    fn are_known(&self, mutant: &Mutant, stage: &str) -> bool {
        let of_stage = (mutant.clone(), stage.to_owned());
        self.noticed.contains(mutant) || self.unnoticed.contains(&of_stage)
    }
}

/// A mutant without its line, which changes often.
type Key = (String, String, String);

fn key(mutant: &Mutant) -> Key {
    let Mutant {
        file,
        function,
        what,
        ..
    } = mutant.clone();
    (file, function, what)
}

/// The mutants that no test can notice, with the reasons.
fn equivalent() -> Result<HashMap<Key, String>> {
    let lines = include_str!("../equivalent.tsv").lines();
    lines
        .map(|line| {
            let mut fields = line.split('\t').map(str::to_owned);
            let mut next = || {
                fields
                    .next()
                    .with_context(|| format!("four fields: {line}"))
            };
            Ok(((next()?, next()?, next()?), next()?))
        })
        .collect()
}
