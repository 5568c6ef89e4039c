//! `lockctl` for the stores of lock-runtime.

use std::process::ExitCode;

fn main() -> ExitCode {
    lockctl::run_with(|builder| builder)
}
