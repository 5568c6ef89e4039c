//! Settings and start of a server.

use std::{fs, io, net::Ipv4Addr, path::Path, sync::Mutex};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::timeout,
};

use super::{PATIENCE, RedisServer, State, tls::Tls};
use crate::{
    ServerClock,
    ports::free_port,
    supervised::{Files, Log, Supervised},
};

const CONFIG: &str = "redis.conf";
/// Files in which a server keeps its identity across a restart: its settings, with later changes
/// (by Sentinels, for example), and its view of the cluster.
pub(super) const OWN_FILES: [&str; 2] = [CONFIG, "nodes.conf"];

/// Settings of a [`RedisServer`] to be started.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    args: Vec<String>,
    pub(super) password: Option<String>,
    pub(super) primary: Option<Primary>,
    pub(super) tls: Option<Tls>,
    pub(super) first_command: Vec<String>,
    pub(super) bus: Option<u16>,
    clock: Option<ServerClock>,
    role: Role,
}

#[derive(Clone, Debug)]
pub(super) struct Primary {
    port: u16,
    password: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Role {
    #[default]
    Server,
    /// A server whose settings are in a file.
    WithFile,
    Sentinel,
}

impl Builder {
    /// An option of `redis-server` with one value: `.arg("--maxmemory", "1mb")`.
    #[must_use]
    pub fn arg(self, name: &str, value: &str) -> Self {
        self.args([name, value])
    }

    /// Options of `redis-server` word by word, for one with several values.
    #[must_use]
    pub fn args<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Self {
        self.args.extend(words.into_iter().map(str::to_owned));
        self
    }

    /// Requires this password from all clients; [`RedisServer::url`] includes it.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self.arg("--requirepass", password)
    }

    /// Adds a user with the given ACL rules, for example `"~lock:* &* +@all"`;
    /// [`RedisServer::url_as`] returns a URL for it.
    #[must_use]
    pub fn user(self, name: &str, password: &str, rules: &str) -> Self {
        self.args(["--user", name, "on", &format!(">{password}")])
            .args(rules.split_whitespace())
    }

    /// Makes it use a clock that the test sets.
    #[must_use]
    pub fn clock(mut self, clock: &ServerClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Makes it a replica of `primary`; [`start`](Self::start) then waits until it has the
    /// primary's data.
    #[must_use]
    pub fn replica_of(mut self, primary: &RedisServer) -> Self {
        self.primary = Some(Primary {
            port: primary.port,
            password: primary.settings.password.clone(),
        });
        self
    }

    /// Makes it a node of a cluster, with a separate port for the bus.
    #[must_use]
    pub(crate) fn cluster_node(mut self) -> Self {
        self.bus = Some(0);
        self.arg("--cluster-enabled", "yes")
    }

    /// Keeps the settings in a file, where changes by Sentinels are permanent.
    #[must_use]
    pub(crate) fn with_config_file(mut self) -> Self {
        self.role = Role::WithFile;
        self
    }

    /// Sends this command after each start, before any client connects; for settings that are not
    /// available as options.
    #[must_use]
    pub(crate) fn first_command(mut self, words: &[&str]) -> Self {
        self.first_command = words.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Makes it a Sentinel; its options are `--sentinel <directive> ...`.
    #[must_use]
    pub(crate) fn sentinel(mut self) -> Self {
        self.role = Role::Sentinel;
        self
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    /// When the server does not answer within ten seconds, with its log.
    pub async fn start(mut self) -> RedisServer {
        let mut attempts = 20;
        let (port, process) = loop {
            let port = free_port();
            if let Some(tls) = &mut self.tls {
                tls.port = free_port();
            }
            if let Some(bus) = &mut self.bus {
                *bus = free_port();
            }
            attempts -= 1;
            match self.launch(port, &Files::default()).await {
                Ok(process) => break (port, process),
                // Another process bound the port between our check and the server's.
                Err(Failure::PortTaken(_)) if attempts > 0 => {}
                Err(failure) => failure.panic(port),
            }
        };
        let state = State {
            process: Some(process),
            ..State::default()
        };
        let server = RedisServer {
            port,
            settings: self,
            state: Mutex::new(state),
        };
        server.prepare().await;
        server
    }

    /// Starts `count` servers at once, independent of each other. Those with TLS share one
    /// authority.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub async fn start_all(self, count: usize) -> Vec<RedisServer> {
        join_all((0..count).map(|_| self.clone().start())).await
    }

    /// Starts a process, with `files` in its directory.
    pub(super) async fn launch(&self, port: u16, files: &Files) -> Result<Supervised, Failure> {
        let directory = tempfile::Builder::new()
            .prefix("lock-tests-redis-")
            .tempdir()?;
        files.write_to(directory.path())?;
        let clock = self.clock.iter().flat_map(ServerClock::command);
        let command: Vec<_> = clock
            .chain(self.command_line(port, directory.path())?)
            .collect();
        // From here on the supervisor removes the directory, because it also does so when this
        // process is killed.
        let process = Supervised::spawn(directory.path(), command.iter().map(String::as_str))?;
        let _ = directory.keep();

        let line = if self.role == Role::Sentinel {
            "Sentinel ID is"
        } else {
            "Ready to accept connections"
        };
        let mut log = process.log();
        let ready = |log: &Log| log.ended || log.text.contains(line);
        let ready = timeout(PATIENCE, log.wait_for(ready))
            .await
            .is_ok_and(|log| log.is_ok_and(|log| !log.ended));
        if ready
            && timeout(PATIENCE, ping(port))
                .await
                .is_ok_and(|answer| answer.is_ok())
        {
            return Ok(process);
        }
        let text = log.borrow().text.clone();
        Err(if text.contains("Address already in use") {
            Failure::PortTaken(text)
        } else {
            Failure::Other(text)
        })
    }

    fn command_line(&self, port: u16, directory: &Path) -> io::Result<Vec<String>> {
        if self.role == Role::Server {
            return Ok([
                vec!["redis-server".to_owned()],
                self.options(port, directory)?,
            ]
            .concat());
        }
        let file = directory.join(CONFIG);
        // A file from an earlier process has all settings, including later changes.
        if !file.exists() {
            fs::write(&file, config(&self.options(port, directory)?))?;
        } else if let Some(tls) = &self.tls {
            tls.options(directory)?;
        }
        let mut words = vec!["redis-server".to_owned(), file.display().to_string()];
        if self.role == Role::Sentinel {
            words.push("--sentinel".to_owned());
        }
        Ok(words)
    }

    fn options(&self, port: u16, directory: &Path) -> io::Result<Vec<String>> {
        let (port, dir) = (port.to_string(), directory.display().to_string());
        let mut words = vec!["--port", &port, "--bind", "127.0.0.1", "--dir", &dir];
        if self.role != Role::Sentinel {
            // Synchronization goes by way of a file: otherwise a primary waits five seconds for
            // more replicas before it sends its data, and sends no later write before the replica's
            // first ACK, up to a second after the replica reports that its link is up.
            words.extend([
                "--save",
                "",
                "--appendonly",
                "no",
                "--repl-diskless-sync",
                "no",
            ]);
        }
        let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        if let Some(tls) = &self.tls {
            words.extend(tls.options(directory)?);
        }
        if let Some(bus) = self.bus {
            words.extend(["--cluster-port".to_owned(), bus.to_string()]);
        }
        // After these, so that a caller's own setting takes precedence.
        words.extend_from_slice(&self.args);
        if let Some(primary) = &self.primary {
            words.extend([
                "--replicaof".to_owned(),
                "127.0.0.1".to_owned(),
                primary.port.to_string(),
            ]);
            if let Some(password) = &primary.password {
                words.extend(["--masterauth".to_owned(), password.clone()]);
            }
        }
        // The line that marks the start must be logged, and to standard output.
        words.extend(["--loglevel", "notice", "--logfile", ""].map(str::to_owned));
        Ok(words)
    }
}

/// The same options as lines of a file.
fn config(options: &[String]) -> String {
    let mut text = String::new();
    for word in options {
        match word.strip_prefix("--") {
            Some(option) => text.extend(["\n", option]),
            None => text.extend([
                " \"",
                &word.replace('\\', r"\\").replace('"', r#"\""#),
                "\"",
            ]),
        }
    }
    text + "\n"
}

/// Failure of a start, with the output of the server.
pub(super) enum Failure {
    PortTaken(String),
    Other(String),
}

impl Failure {
    pub(super) fn panic(self, port: u16) -> ! {
        let (Self::PortTaken(log) | Self::Other(log)) = self;
        panic!(
            "redis-server did not start on port {port} (tests/run.sh installs it where it is missing):\n{log}"
        )
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Other(error.to_string())
    }
}

/// Waits for any reply: a server that asks for a password is ready too.
async fn ping(port: u16) -> io::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?);
    stream.write_all(b"PING\r\n").await?;
    let mut reply = String::new();
    match stream.read_line(&mut reply).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}
