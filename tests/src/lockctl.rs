//! The program `lockctl`, built once for each process of tests.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// Returns the path of `lockctl`, after building it.
///
/// # Panics
/// When it does not compile, with the output of Cargo.
pub fn lockctl() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
        // Cargo describes the package of a test to it. Build scripts that read the same variables
        // would run again, and half of the dependencies would be compiled anew.
        let described = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let described = described
            .filter(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"));
        let mut cargo = Command::new(env!("CARGO"));
        for name in described {
            cargo.env_remove(name);
        }
        let excluded = std::env::var("LOCK_TESTS_EXCLUDED").unwrap_or_default();
        let built = cargo
            // As `tests/run.sh` builds the tests: another set of features would be compiled anew.
            // Without a test of this package, its dependencies do not count.
            .args([
                "test",
                "--quiet",
                "--locked",
                "--workspace",
                "--all-features",
            ])
            .args(excluded.split_whitespace())
            .args(["--no-run", "--test=help", "--test=operators"])
            .args(["--message-format=json", "--manifest-path", manifest])
            .output()
            .expect("cargo has built this test as well");
        let errors = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "lockctl does not compile: {errors}");
        let messages = String::from_utf8_lossy(&built.stdout);
        let mut messages = messages.lines().filter_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).ok()?;
            let is_program = message["target"]["name"] == "lockctl";
            let path = message["executable"].as_str().map(PathBuf::from);
            path.filter(|_| is_program)
        });
        messages.next().expect("cargo names the executable")
    })
}
