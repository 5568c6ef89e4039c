//! `lockctl`, as an operator or a script starts it.

mod commands;
mod faults;
mod schemes;
mod terminal;

use std::{ffi::OsStr, process::Stdio, time::Duration};

use lock_runtime::{LockClient, LockClientBuilder};
use lock_tests::{
    RedisServer, lockctl,
    place::{LONG, eventually},
};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::{Instant, sleep, timeout},
};

/// A server, and clients of it.
struct Store {
    server: RedisServer,
}

/// The end of a program.
#[derive(Debug)]
struct Ended {
    status: i32,
    output: String,
    errors: String,
}

impl Ended {
    fn json(&self) -> Value {
        serde_json::from_str(&self.output).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Store {
    async fn start() -> Self {
        // The first call builds it, and no lock is renewed meanwhile: it comes before all locks.
        lockctl();
        let server = RedisServer::builder().start().await;
        Self { server }
    }

    async fn client(&self) -> LockClient {
        self.client_of(LockClient::builder()).await
    }

    async fn client_of(&self, builder: LockClientBuilder) -> LockClient {
        builder.connect(&self.server.url()).await.unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = with_signals(lockctl());
        command
            .args(arguments)
            .env("LOCK_URL", self.server.url())
            .env_remove("NO_COLOR")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn ended(&self, arguments: &[&str]) -> Ended {
        ended(&mut self.command(arguments)).await
    }

    /// A program whose output is read line by line.
    fn running(&self, arguments: &[&str]) -> Running {
        spawned(&mut self.command(arguments))
    }

    async fn is_held(&self, key: &str) -> bool {
        !self
            .client()
            .await
            .inspect(key)
            .await
            .unwrap()
            .holders
            .is_empty()
    }
}

/// A program with default signals. It would inherit those that the process of the tests ignores, as
/// under nohup(1) or in the background of a script.
fn with_signals(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(program);
    command
}

fn spawned(command: &mut Command) -> Running {
    let mut process = command.spawn().unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    Running { process, lines }
}

async fn ended(command: &mut Command) -> Ended {
    let output = timeout(LONG, command.output()).await;
    let output = output.expect("it hangs").unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended {
        status: output.status.code().unwrap_or(-1),
        output: text(output.stdout),
        errors: text(output.stderr),
    }
}

struct Running {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    async fn line(&mut self) -> String {
        let line = timeout(LONG, self.lines.next_line()).await;
        line.expect("no line")
            .unwrap()
            .expect("its output has ended")
    }

    fn id(&self) -> u32 {
        self.process.id().expect("it runs")
    }

    /// The process that holds the lock.
    async fn keeper(&self) -> u32 {
        child_of(self.id(), "lockctl\0keep").await
    }

    /// The exit status, and standard error.
    async fn ended(mut self) -> (i32, String) {
        use tokio::io::AsyncReadExt as _;

        let status = timeout(LONG, self.process.wait()).await.expect("it hangs");
        let mut errors = String::new();
        let mut stderr = self.process.stderr.take().unwrap();
        // A process that the command has left behind may keep the pipe open.
        let read = stderr.read_to_string(&mut errors);
        let _ = timeout(Duration::from_secs(1), read).await;
        (status.unwrap().code().unwrap_or(-1), errors)
    }
}

async fn send(signal: &str, process: u32) {
    let sent = Command::new("kill")
        .args([format!("-{signal}"), process.to_string()])
        .status();
    assert!(sent.await.unwrap().success(), "{signal} {process}");
}

/// The child whose command line begins with these words, once it is there. A signal that comes
/// before does not reach it: a shell that is about to start a command may keep SIGINT for later.
async fn child_of(process: u32, words: &str) -> u32 {
    let path = format!("/proc/{process}/task/{process}/children");
    let words = format!("{words}\0");
    let child = || {
        let children = std::fs::read_to_string(&path).unwrap();
        let mut children = children.split_whitespace().map(|id| id.parse().unwrap());
        children.find(|id: &u32| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            line.starts_with(words.as_bytes())
        })
    };
    eventually("it has its child", || async { child().is_some() }).await;
    child().expect("it runs")
}

/// A field of /proc/PID/stat, from the state on.
fn stat(process: u32, field: usize) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let after_the_name = stat.rsplit(") ").next()?;
    let field = after_the_name.split_whitespace().nth(field)?;
    Some(field.to_owned())
}

/// The state as proc(5) names it, Z for a process that has ended.
fn state(process: u32) -> String {
    stat(process, 0).unwrap_or_else(|| "Z".to_owned())
}

fn is_running(process: u32) -> bool {
    state(process) != "Z"
}

async fn ends(process: u32) {
    let until = Instant::now() + LONG;
    while is_running(process) {
        assert!(Instant::now() < until, "{process} still runs");
        sleep(Duration::from_millis(10)).await;
    }
}
