//! A wall clock that a test sets, for the servers that it starts.
//!
//! A small library shifts the time of a server that preloads it, by the offset in a file that the
//! test writes, or stops it.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{FileExt, PermissionsExt},
    process::Command,
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;

/// The wall clock of servers. Clones are the same clock.
#[derive(Clone, Debug)]
pub struct ServerClock {
    offset: Arc<File>,
    directory: Arc<TempDir>,
}

impl ServerClock {
    /// A clock that shows the time of the machine.
    ///
    /// # Panics
    /// Without a C compiler.
    pub fn new() -> Self {
        Self::try_new().unwrap_or_else(|error| panic!("a clock for servers: {error}"))
    }

    fn try_new() -> io::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("lock-tests-clock-")
            // PostgreSQL runs as another user.
            .permissions(Permissions::from_mode(0o755))
            .tempdir()?;
        let source = directory.path().join("offset.c");
        fs::write(&source, include_str!("server_clock/offset.c"))?;
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-o"]);
        compile.arg(directory.path().join("offset.so")).arg(source);
        let output = compile.output()?;
        if !output.status.success() {
            return Err(io::Error::other(
                String::from_utf8_lossy(&output.stderr).into_owned(),
            ));
        }
        let offset = File::create(directory.path().join("offset"))?;
        offset.write_all_at(&[0; 2 * size_of::<i64>()], 0)?;
        Ok(Self {
            offset: Arc::new(offset),
            directory: Arc::new(directory),
        })
    }

    /// Sets the clock back to this time before that of the machine.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn set_back(&self, by: Duration) {
        self.write(0, -nanos(by));
    }

    /// Sets the clock to this time since 1970, at which it stands still.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn stop_at(&self, time: Duration) {
        self.write(size_of::<i64>() as u64, nanos(time));
    }

    fn write(&self, place: u64, nanos: i64) {
        let written = self.offset.write_all_at(&nanos.to_ne_bytes(), place);
        written.expect("the file of the clock");
    }

    /// The beginning of the command line of a server with this clock.
    pub(crate) fn command(&self) -> [String; 3] {
        let file = |name: &str| self.directory.path().join(name).display().to_string();
        [
            "env".to_owned(),
            format!("LD_PRELOAD={}", file("offset.so")),
            format!("LOCK_TESTS_CLOCK={}", file("offset")),
        ]
    }
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).expect("less than 292 years")
}

impl Default for ServerClock {
    fn default() -> Self {
        Self::new()
    }
}
