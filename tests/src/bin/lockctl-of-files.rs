//! `lockctl` for the store of the guide, as a third party would have it.

use std::process::ExitCode;

use lock_tests::files::open_files;

fn main() -> ExitCode {
    lockctl::run_with(|builder| builder.scheme("files", open_files))
}
