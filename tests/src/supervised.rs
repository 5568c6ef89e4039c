//! A child process that never outlives this one, however this one ends.
//!
//! A destructor does not run after SIGKILL, and Linux' parent-death signal needs unsafe code. So
//! the child runs under a small shell whose standard input is a pipe that only this process holds
//! open. When the pipe closes (this process dropped it or died), the shell kills the child with its
//! descendants, also stopped ones, and removes its directory.

mod files;
mod tree;

use std::{
    fmt,
    io::{self, BufRead, BufReader, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::watch;

pub(crate) use self::files::Files;

/// `$1` is the directory to remove at the end, the rest is the command.
///
/// - The child's output goes to standard error, so that standard output carries the child's pid
///   only.
/// - The shell closes its own copies of both: the end of standard error is then the end of the
///   child.
/// - It reads its input with a builtin and waits for the child last: until then the pid cannot be
///   reused. A line in its input means that the directory is kept.
/// - A tree is killed from the top: a stopped parent starts no more children, and the pids of those
///   that have ended are not reused before it has waited for them.
const SUPERVISOR: &str = r#"
dir=$1
shift
exec "$@" </dev/null >&2 &
child=$!
echo "$child"
trap '' HUP INT TERM
exec >/dev/null 2>&1
kill_tree() {
    kill -STOP "$1"
    for descendant in $(cat "/proc/$1/task/"*/children); do
        kill_tree "$descendant"
    done
    kill -KILL "$1"
}
while read -r _; do dir=; done
kill_tree "$child"
wait "$child"
[ -z "$dir" ] || rm -rf -- "$dir"
"#;

/// Output of a child so far, and whether the child has ended.
#[derive(Clone, Default)]
pub(crate) struct Log {
    pub(crate) text: String,
    pub(crate) ended: bool,
}

/// A running child under its supervisor; dropping it kills the child and waits for its end.
pub struct Supervised {
    supervisor: Child,
    child: Pid,
    directory: PathBuf,
    log: watch::Receiver<Log>,
}

impl Supervised {
    /// Runs `command` (the program and its arguments); takes over `directory`, which is removed at
    /// the end.
    ///
    /// # Errors
    /// If the supervising shell cannot be started.
    pub fn spawn<'a>(
        directory: &Path,
        command: impl IntoIterator<Item = &'a str>,
    ) -> io::Result<Self> {
        let mut supervisor = Command::new("sh")
            .args(["-c", SUPERVISOR, "supervisor"])
            .arg(directory)
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal reaches a whole process group, and the supervisor must survive
            // it.
            .process_group(0)
            .spawn()?;
        let (Some(stdout), Some(stderr)) = (supervisor.stdout.take(), supervisor.stderr.take())
        else {
            unreachable!("both were asked for as pipes just above");
        };
        let mut pid = String::new();
        BufReader::new(stdout).read_line(&mut pid)?;
        let child = pid.trim().parse().ok().and_then(Pid::from_raw);
        let child = child
            .ok_or_else(|| io::Error::other("the supervising shell did not start the child"))?;

        let (sender, log) = watch::channel(Log::default());
        thread::Builder::new()
            .name(format!("log of {child:?}"))
            .spawn(move || collect(stderr, &sender))?;
        Ok(Self {
            supervisor,
            child,
            directory: directory.to_owned(),
            log,
        })
    }

    /// The child's own process id, not the supervisor's.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_raw_nonzero().get().unsigned_abs()
    }

    /// The directory that is removed at the end.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The output of the child so far: standard output and standard error.
    pub fn output(&self) -> String {
        self.log.borrow().text.clone()
    }

    /// The output of the child, with its changes.
    pub(crate) fn log(&self) -> watch::Receiver<Log> {
        self.log.clone()
    }

    /// Sends `signal` to the child.
    pub(crate) fn signal(&mut self, signal: Signal) -> io::Result<()> {
        // While the supervisor runs it has not waited for the child, so the pid is still the
        // child's.
        match self.supervisor.try_wait()? {
            None => Ok(kill_process(self.child, signal)?),
            Some(status) => Err(io::Error::other(format!(
                "its supervisor has ended with {status}"
            ))),
        }
    }

    /// Kills the child, and returns the final content of those of `names` that exist.
    pub(crate) fn kill_and_read(mut self, names: &[&'static str]) -> Files {
        let _ = self.signal(Signal::KILL);
        // The child writes until it has ended, and the directory is gone once the supervisor has
        // ended.
        while !self.log.borrow().ended {
            thread::sleep(Duration::from_millis(1));
        }
        Files::read_from(&self.directory, names)
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        // `wait` closes the supervisor's input first, and then the supervisor kills the child.
        let _ = self.supervisor.wait();
    }
}

impl fmt::Debug for Supervised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervised")
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

/// Reads until the end in any case: a child whose pipe is full would block at its next line.
fn collect(output: impl Read, log: &watch::Sender<Log>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(output.read_until(b'\n', &mut line), Ok(1..)) {
        log.send_modify(|log| log.text.push_str(&String::from_utf8_lossy(&line)));
        line.clear();
    }
    log.send_modify(|log| log.ended = true);
}
