//! Judges histories of storms: `cargo run --release -p lock-tests-model --bin judge -- FILE...`

use std::{collections::BTreeMap, env, error::Error, fs, process::ExitCode};

use lock_tests_model::history::{Mode, Operation, judge};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let (mut all, mut rejected) = (0, 0);
    for path in env::args_os().skip(1) {
        let mut locks: BTreeMap<(String, bool), Vec<Operation>> = BTreeMap::new();
        for line in fs::read_to_string(&path)?.lines() {
            let operation: Operation = serde_json::from_str(line)?;
            let lock = (operation.key.clone(), operation.mode == Mode::Permit);
            locks.entry(lock).or_default().push(operation);
        }
        for ((key, permits), operations) in locks {
            let (parts, wrong) = judge(&operations);
            all += operations.len();
            rejected += wrong.len();
            println!(
                "{}: {key} (permits: {permits}): {} operations: {} of {parts} parts are not linearizable",
                path.display(),
                operations.len(),
                wrong.len()
            );
            for fence in &wrong {
                println!("  the holds from the fencing token {fence} on");
            }
        }
    }
    println!("{all} operations judged, {rejected} parts are not linearizable");
    Ok(ExitCode::from(u8::from(all == 0 || rejected > 0)))
}
