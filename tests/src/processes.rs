//! Worker processes: a test starts `lock-worker` (src/bin/worker.rs) with a subcommand, exchanges
//! lines with it, stops it and kills it. A worker ends with its test, even if the test is killed.
//!
//! The test holds a [`Worker`]; inside the worker, [`Parent`] is the other end.
//!
//! ```text
//! // in a test; only a test binary knows the path
//! let mut worker = Worker::spawn(env!("CARGO_BIN_EXE_lock-worker"), &["idle"]);
//! assert_eq!(worker.line().await.as_deref(), Some("ready"));
//! assert!(worker.finish().await.success());
//! ```

mod asleep;
mod parent;

use std::os::unix::process::CommandExt;
use std::process::{Command as StdCommand, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use self::asleep::Asleep;
pub use parent::{ORPHANED, Parent};

/// A process that only wakes a stopped worker when the test process is gone, so that the worker
/// notices it too.
const WAKER: &str = r#"while read -r _; do :; done; kill -CONT "$1""#;

/// A running worker process; killed when dropped. It shares the test's standard error.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    pid: Pid,
    /// `None` after [`Worker::close_input`].
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
    waker: Option<std::process::Child>,
    asleep: Option<Asleep>,
}

impl Worker {
    /// Starts the worker binary at `path` with a subcommand and its options.
    ///
    /// # Panics
    /// When it cannot be started, or outside a tokio runtime.
    pub fn spawn(path: &str, args: &[&str]) -> Self {
        Self::start(StdCommand::new(path), args, None)
    }

    /// The same, on a machine that sleeps while the process is stopped: its monotonic clock stands
    /// still until it is resumed.
    ///
    /// # Panics
    /// As [`spawn`](Self::spawn), or without a C compiler.
    pub fn on_a_laptop(path: &str, args: &[&str]) -> Self {
        let mut command = StdCommand::new(path);
        let asleep = Asleep::clock_of(&mut command);
        Self::start(command, args, Some(asleep))
    }

    fn start(command: StdCommand, args: &[&str], asleep: Option<Asleep>) -> Self {
        let mut command = Command::from(command);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let pid = child
            .id()
            .and_then(|id| Pid::from_raw(id.cast_signed()))
            .expect("a child not yet waited for");
        let input = child.stdin.take();
        let output = child.stdout.take().expect("asked for as a pipe");
        Self {
            child,
            pid,
            input,
            output: BufReader::new(output).lines(),
            waker: None,
            asleep,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// The next line of its output; `None` when it has ended. Cancel safe.
    pub async fn line(&mut self) -> Option<String> {
        self.output
            .next_line()
            .await
            .expect("a worker's output is text")
    }

    /// All further lines of its output, until it ends.
    pub async fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(line) = self.line().await {
            lines.push(line);
        }
        lines
    }

    /// Sends it a line.
    ///
    /// # Panics
    /// When it has ended, or its input is closed.
    pub async fn say(&mut self, line: &str) {
        let input = self.input.as_mut().expect("the worker's input is closed");
        input
            .write_all(format!("{line}\n").as_bytes())
            .await
            .expect("the worker has ended");
    }

    /// Closes its input, as the order to finish, and waits for its end. Unread lines are lost; to
    /// have them, read [`lines`](Self::lines) after [`close_input`](Self::close_input).
    pub async fn finish(&mut self) -> ExitStatus {
        self.close_input();
        while self.line().await.is_some() {}
        self.child.wait().await.expect("waits for its own child")
    }

    /// Closes its input, as the order to finish; the worker ends five seconds later at the latest.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// SIGSTOP: the process pauses at any point, as under a debugger or on a frozen machine.
    pub fn stop(&mut self) {
        let waker = StdCommand::new("sh")
            .args(["-c", WAKER, "waker", &self.pid().to_string()])
            .stdin(Stdio::piped())
            // It must outlive this process by a moment, also when Ctrl-C in a terminal ends the
            // whole group.
            .process_group(0)
            .spawn();
        self.waker = Some(waker.expect("sh starts"));
        self.signal(Signal::STOP);
        self.asleep.iter_mut().for_each(Asleep::begin);
    }

    /// SIGCONT: continues after [`stop`](Self::stop).
    pub fn resume(&mut self) {
        self.asleep.iter_mut().for_each(Asleep::end);
        self.signal(Signal::CONT);
        self.dismiss_waker();
    }

    /// SIGKILL, and waits for the end.
    pub async fn kill(&mut self) -> ExitStatus {
        self.signal(Signal::KILL);
        self.child.wait().await.expect("waits for its own child")
    }

    fn signal(&self, signal: Signal) {
        // `id` is `None` once the child was waited for; only until then is the pid certain to be
        // its own.
        self.child.id().expect("the worker has ended");
        kill_process(self.pid, signal).expect("a signal to its own child");
    }

    fn dismiss_waker(&mut self) {
        if let Some(mut waker) = self.waker.take() {
            // `wait` closes its input first.
            let _ = waker.wait();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Before the waker, which would wake a stopped worker for a moment.
        let _ = self.child.start_kill();
        self.dismiss_waker();
    }
}
