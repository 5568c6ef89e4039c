//! The program without a store. The tests with stores are in the package `lock-tests`, which builds
//! the program by way of this test, with the features that all tests have.

use std::process::Command;

#[test]
fn help_names_every_command() {
    let program = Command::new(env!("CARGO_BIN_EXE_lockctl"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8(program.stdout).unwrap();
    for command in ["ls", "inspect", "revoke", "doctor", "run"] {
        assert!(help.contains(&format!("\n  {command} ")), "{help}");
    }
}
