//! A run of an example, and its output.

use std::{
    process::{Command, Output},
    sync::{Mutex, PoisonError},
};

/// Runs an example to its end.
pub(crate) fn tell(story: &str, options: &[&str]) -> Output {
    // One at a time, because each of them keeps all processors busy, and its requests wait only
    // for fractions of a second.
    static RUNNING: Mutex<()> = Mutex::new(());
    let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new(story)
        .args(options)
        .output()
        .expect("the example is built");
    assert!(
        !output.stdout.is_empty(),
        "no output: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Returns the last line of a successful run.
pub(crate) fn last_line(output: &Output) -> String {
    let (out, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}{error}");
    out.lines().last().unwrap_or_default().to_owned()
}

/// Runs a sale that is over soon, and returns the last line of its output.
pub(crate) fn sale(options: &[&str]) -> String {
    let options = [&SALE[..], options].concat();
    last_line(&tell(env!("CARGO_BIN_EXE_flash-sale"), &options))
}

/// Checks that such a sale without a lock oversells.
pub(crate) fn oversells(options: &[&str]) {
    let line = sale(&[options, &["--no-lock"]].concat());
    assert!(
        line.contains(" errors=0 ") && !line.contains(" oversold=0 "),
        "{line}"
    );
}

const SALE: [&str; 6] = [
    "--requests",
    "2000",
    "--concurrency",
    "100",
    "--stock",
    "1000",
];
/// The last line of that sale, up to its duration.
pub(crate) const EXACT: &str =
    "requests=2000 sold=1000 oversold=0 errors=0 leftover_keys=0 seconds=";

/// Checks that `flash-sale` refuses each of these options, with an error that contains the text.
pub(crate) fn mistakes(mistakes: &[(&[&str], &str)]) {
    for (options, text) in mistakes {
        let output = Command::new(env!("CARGO_BIN_EXE_flash-sale"))
            .args(*options)
            .output()
            .expect("the example is built");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(text),
            "{options:?}: {error}"
        );
    }
}
