//! Messages of the attribute for a function with one mistake.

use std::process::Command;

/// The compiler version of the `.stderr` files. Other versions word their own part differently; the
/// unit tests of lock-macros check the attribute's own messages on every compiler.
const WORDED_BY: &str = "rustc 1.95.";

#[test]
fn every_mistake_on_a_locked_function_says_what_to_write() {
    let version = Command::new(std::env::var("RUSTC").unwrap_or("rustc".into()))
        .arg("--version")
        .output()
        .unwrap();
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    if !version.starts_with(WORDED_BY) {
        eprintln!(
            "not compared: the messages were written down with {WORDED_BY}x, this is {version}"
        );
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*.rs");
}
