//! A machine that sleeps, for one process: its monotonic clock stands still while it is stopped.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::{Duration, Instant},
};

use tempfile::{NamedTempFile, TempDir};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/asleep.c");

/// The time for which a process was stopped, which its clock leaves out.
#[derive(Debug)]
pub(super) struct Asleep {
    nanos: NamedTempFile,
    total: Duration,
    since: Option<Instant>,
}

impl Asleep {
    /// The clock of a process that `command` is to start.
    pub(super) fn clock_of(command: &mut Command) -> Self {
        let nanos = NamedTempFile::new().expect("a temporary file");
        command
            .env("LD_PRELOAD", library())
            .env("LOCK_TESTS_ASLEEP", nanos.path());
        let asleep = Self {
            nanos,
            total: Duration::ZERO,
            since: None,
        };
        asleep.write();
        asleep
    }

    /// The process was stopped.
    pub(super) fn begin(&mut self) {
        self.since = Some(Instant::now());
    }

    /// The process is about to go on.
    pub(super) fn end(&mut self) {
        self.total += self.since.take().map_or(Duration::ZERO, |it| it.elapsed());
        self.write();
    }

    fn write(&self) {
        let nanos = i64::try_from(self.total.as_nanos()).expect("less than 292 years");
        let file: &File = self.nanos.as_file();
        file.write_all_at(&nanos.to_ne_bytes(), 0)
            .expect("room for eight bytes");
    }
}

/// Compiles the clock, once for all tests of the process.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = LIBRARY.get_or_init(|| {
        let directory = TempDir::new().expect("a temporary directory");
        let path = directory.path().join("asleep.so");
        let compiled = Command::new("cc")
            .args(["-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o"])
            .args([path.as_path(), Path::new(SOURCE)])
            .output()
            .expect("`cc`, a C compiler, which Rust needs as well: apt-get install gcc");
        let errors = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{SOURCE}: {errors}");
        (directory, path)
    });
    path
}
