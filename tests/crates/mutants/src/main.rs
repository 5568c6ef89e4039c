//! Mutants of the code that decides about locks, each behind a switch of one build: a run of the
//! tests costs seconds for each, and a build for each would cost minutes.
//!
//! `tests/run.sh --mutants DIRECTORY` plants them in a copy of the repository below the directory,
//! and runs for each the tests that reach it. What no test notices is printed, except the mutants
//! in `equivalent.tsv`, each with the reason for which no test can notice it. The outcomes are kept
//! in the directory: another run goes on there.

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
    fs::create_dir_all(&arguments.directory)?;
    let directory = fs::canonicalize(&arguments.directory)?;
    let copy = Copy::plant(&directory, &PLACES)?;
    let equivalent = equivalent()?;
    let path = directory.join("outcomes.tsv");
    let mut noticed = find::read(&path)?;
    let mut outcomes = OpenOptions::new().append(true).create(true).open(&path)?;
    let stages: Vec<&Stage> = (STAGES.iter())
        .filter(|stage| {
            arguments
                .stage
                .as_ref()
                .is_none_or(|name| name == stage.name)
        })
        .collect();
    ensure!(!stages.is_empty(), "there is no such stage");
    for stage in stages {
        let left: Vec<usize> = (copy.planted.iter().copied())
            .filter(|&number| {
                let mutant = &copy.mutants[number];
                mutant.file.contains(&arguments.file)
                    && !noticed.contains(mutant)
                    && !equivalent.contains_key(&key(mutant))
            })
            .collect();
        println!("{}: {} mutants", stage.name, left.len());
        stage.run(&copy, &left, arguments.seconds, |number, outcome| {
            let mutant = &copy.mutants[number];
            if let Outcome::Noticed(by) = outcome {
                writeln!(outcomes, "{mutant}\t{}\t{by}", stage.name)?;
                noticed.insert(mutant.clone());
            }
            Ok(())
        })?;
    }
    let mut unknown: HashSet<_> = equivalent.keys().cloned().collect();
    let mut left = 0;
    for &number in &copy.planted {
        let mutant = &copy.mutants[number];
        let known = unknown.remove(&key(mutant)) || equivalent.contains_key(&key(mutant));
        if !known && !noticed.contains(mutant) && mutant.file.contains(&arguments.file) {
            println!("{mutant}");
            left += 1;
        }
    }
    for (file, function, what) in unknown {
        println!("equivalent.tsv names no mutant: {file}\t{function}\t{what}");
    }
    println!(
        "{} mutants, {} noticed, {left} left",
        copy.planted.len(),
        noticed.len()
    );
    Ok(())
}

/// A mutant without its line, which changes often.
type Key = (String, String, String);

fn key(mutant: &Mutant) -> Key {
    (
        mutant.file.clone(),
        mutant.function.clone(),
        mutant.what.clone(),
    )
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
