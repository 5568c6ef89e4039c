//! Any function with any key string compiles under the attribute to the right key, or is refused.
//!
//! A case is a random function: names, patterns of arguments, key strings, values. It is compiled
//! twice, each time in one program with all other cases. The first program formats the key with
//! `format!`, which defines the meaning of the string. The second has the attribute, and has to run
//! the body under that key, or to be refused: where the first one was refused, and where the
//! documentation of the attribute requires it.
//!
//! `LOCK_TESTS_CASES` is the number of cases, and `LOCK_TESTS_SEED` their seed. A case that fails
//! is reduced and printed with its seed, as a program that compiles by itself.

mod cases;
mod model;
mod project;
mod source;
mod written;

use std::{collections::BTreeMap, fmt::Write as _, str::FromStr};

use proptest::{
    strategy::{Strategy as _, ValueTree as _},
    test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner},
};

use self::{
    cases::Case,
    model::Expected,
    project::{Complaint, Program, Project},
    written::Written,
};

const CASES: usize = 200;
const SUPPORT: &str = include_str!("property/support.rs");

fn variable<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

#[test]
fn any_key_string_compiles_to_the_right_key_or_is_refused() {
    let seed: u64 = variable("LOCK_TESTS_SEED", 0);
    let count = variable("LOCK_TESTS_CASES", CASES);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let project = runtime.block_on(Project::new(SUPPORT));

    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    // Each step of the reduction runs the compiler twice.
    let config = Config {
        failure_persistence: None,
        max_shrink_time: 60_000,
        ..Config::default()
    };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let cases = cases::case();
    let mut trees: Vec<_> = (0..count)
        .map(|_| cases.new_tree(&mut runner).unwrap())
        .collect();

    let written: Vec<Written> = trees.iter().map(|tree| tree.current().written()).collect();
    let judged = runtime.block_on(judged(&project, &written));
    let mut tally: BTreeMap<&str, usize> = BTreeMap::new();
    for verdict in &judged {
        *tally
            .entry(verdict.as_ref().map_or("failed", |kind| kind))
            .or_default() += 1;
    }
    println!("seed {seed}, {count} cases: {tally:?}");
    let Some(first) = judged.iter().position(Result::is_err) else {
        // A test of refused cases alone would prove nothing.
        assert!(tally.get(RIGHT) >= Some(&(count / 4)), "{tally:?}");
        return;
    };

    let mut story = format!("seed {seed}:\n");
    for (number, verdict) in judged.iter().enumerate() {
        if let Err(complaint) = verdict {
            let _ = writeln!(
                story,
                "case {number}: {complaint}\n{}",
                written[number].locked(&[]).0
            );
        }
    }
    let smaller = runner.run_one(trees.swap_remove(first), |case: Case| {
        let mut verdicts = runtime.block_on(self::judged(&project, &[case.written()]));
        verdicts.remove(0).map(drop).map_err(TestCaseError::fail)
    });
    if let Err(TestError::Fail(complaint, case)) = smaller {
        let _ = writeln!(
            story,
            "case {first}, made smaller: {complaint}\n{}",
            alone(&case.written())
        );
    }
    panic!("{story}");
}

const RIGHT: &str = "run under the right key";

/// The outcome of each case: its kind if it is right, and otherwise the failure.
async fn judged(project: &Project, cases: &[Written]) -> Vec<Result<&'static str, String>> {
    let numbered = || cases.iter().enumerate();
    let files = numbered()
        .map(|(number, case)| (number, case.reference()))
        .collect();
    let mut reference = project.run(Program::Reference, &files).await;
    let expected: Vec<Result<Expected, String>> = numbered()
        .map(|(number, case)| {
            match (
                reference.refused.remove(&number),
                reference.printed.get(&number),
            ) {
                (Some(complaints), _) => model::of_refused(case, &complaints),
                (None, Some(printed)) => Ok(model::of_printed(case, printed)),
                (None, None) => Err("the reference has printed nothing".into()),
            }
        })
        .collect();

    let locked: Vec<_> = cases
        .iter()
        .zip(&expected)
        .map(|(case, expected)| match expected {
            Ok(Expected::Runs { keys, .. }) => case.locked(keys),
            _ => case.locked(&[]),
        })
        .collect();
    let files = locked
        .iter()
        .map(|(source, _)| source.clone())
        .enumerate()
        .collect();
    let found = project.run(Program::Locked, &files).await;
    let verdict = |number: usize, expected: Result<Expected, String>| {
        let expected = expected?;
        match (found.refused.get(&number), found.printed.get(&number)) {
            (Some(complaints), _) => refused(&expected, complaints, &locked[number].1),
            (None, Some(printed)) => ran(&expected, printed, &cases[number]),
            (None, None) => Err("has printed nothing".into()),
        }
        .map_err(|complaint| format!("{complaint}\nexpected: {expected:?}"))
    };
    expected
        .into_iter()
        .enumerate()
        .map(|(number, expected)| verdict(number, expected))
        .collect()
}

fn refused(
    expected: &Expected,
    complaints: &[Complaint],
    attribute: &std::ops::Range<usize>,
) -> Result<&'static str, String> {
    let rendered: String = complaints
        .iter()
        .map(|complaint| complaint.rendered.as_str())
        .collect();
    let codes = match expected {
        Expected::Refused { codes } => codes,
        _ => return Err(format!("is right, and was refused:\n{rendered}")),
    };
    let inside = |place: &std::ops::Range<usize>| {
        attribute.start <= place.start && place.end <= attribute.end
    };
    for complaint in complaints {
        if complaint
            .code
            .as_ref()
            .is_some_and(|code| !codes.contains(code))
        {
            return Err(format!(
                "was refused by the compiler, in code that was not written by hand:\n{rendered}"
            ));
        }
        if !complaint.places.iter().all(inside) {
            return Err(format!(
                "was refused, but not in its attribute:\n{rendered}"
            ));
        }
        if complaint.message.contains("panicked") {
            return Err(format!("made the attribute panic:\n{rendered}"));
        }
    }
    Ok(
        if complaints.iter().all(|complaint| complaint.code.is_none()) {
            "refused"
        } else {
            "refused as `format!` refuses them"
        },
    )
}

fn ran(
    expected: &Expected,
    printed: &[(char, String)],
    case: &Written,
) -> Result<&'static str, String> {
    let (keys, arguments) = match expected {
        Expected::Runs { keys, arguments } => (keys, arguments),
        Expected::InvalidKey if printed == [('!', "InvalidKey".to_owned())] => {
            return Ok("given `InvalidKey`");
        }
        _ => return Err(format!("was not refused: {printed:?}")),
    };
    let mut right: Vec<(char, String)> = keys.iter().map(|_| ('h', "true".to_owned())).collect();
    if case.guard.is_some() {
        // The first key in the order of acquisition.
        right.extend(keys.iter().min().map(|key| ('g', key.clone())));
    }
    right.extend(arguments.iter().map(|text| ('a', text.clone())));
    if *printed == right {
        Ok(RIGHT)
    } else {
        Err(format!("runs, but has printed {printed:?}"))
    }
}

/// The case as a program of its own.
fn alone(case: &Written) -> String {
    format!(
        "mod case {{\n{}}}\n\nfn main() {{\n    support::run(&[(\"case\", case::KEYS, case::call_of_the_case)]);\n}}\n\nmod support {{\n{SUPPORT}}}\n",
        case.locked(&[]).0
    )
}
