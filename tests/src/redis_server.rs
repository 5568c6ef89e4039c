//! Real `redis-server` processes on loopback ports of their own, which always end with the test process.
//!
//! ```no_run
//! # async fn example() {
//! use lock_tests::{RedisServer, shared_server, unique};
//!
//! // Its own server, for a test that stops, kills or fills it.
//! let server = RedisServer::builder().password("secret").start().await;
//! server.command(&["SET", "colour", "blue"]).await;
//! server.stop();
//!
//! // A key of its own on the server of everybody, for all other tests.
//! let shared = shared_server().await;
//! shared.command(&["SET", &unique("colour"), "red"]).await;
//! # }
//! ```

mod tls;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{AsyncConnectionConfig, Client, FromRedisValue, RedisResult, Value, aio::MultiplexedConnection};
use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};
use url::Url;

pub use self::tls::Identity;
use self::tls::Tls;
use crate::{
    ports::free_port,
    supervised::{Log, Supervised},
};

/// How long a server may take to answer its first PING, and a command to be answered.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks at something that tells nobody when it changes.
const POLL: Duration = Duration::from_millis(5);

/// The one server of this process for tests that neither stop it nor change its settings; started by the first caller.
/// Every test takes key names of its own from [`unique`].
pub async fn shared_server() -> &'static RedisServer {
    static SHARED: OnceCell<RedisServer> = OnceCell::const_new();
    SHARED.get_or_init(RedisServer::start).await
}

/// `name` with an ending that nobody else has on the shared server.
pub fn unique(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{name}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A real `redis-server` without persistence; killed when dropped, and when this process ends in whatever way.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    settings: Builder,
    /// `None` after [`kill`](Self::kill). A std mutex: it is held for a signal, never across an await.
    process: Mutex<Option<Supervised>>,
}

impl RedisServer {
    /// A server with default settings on a free port, ready for commands.
    ///
    /// # Panics
    /// When it does not answer within ten seconds, with the server's log.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// A server with settings of its own.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// `redis://[:password@]127.0.0.1:port`, as the default user.
    pub fn url(&self) -> String {
        url("", self.settings.password.as_deref(), self.port)
    }

    /// The same for a user made by [`Builder::user`].
    pub fn url_as(&self, user: &str, password: &str) -> String {
        url(user, Some(password), self.port)
    }

    /// The port it listens on, the same for its whole life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The process id of the server itself.
    ///
    /// # Panics
    /// When it was killed.
    pub fn pid(&self) -> u32 {
        self.process().as_ref().map(Supervised::pid).expect("the server was killed")
    }

    /// What the running server has printed so far; empty when it was killed.
    pub fn log(&self) -> String {
        self.process().as_ref().map(|process| process.log().borrow().text.clone()).unwrap_or_default()
    }

    /// SIGSTOP: the server keeps its port and its connections and answers nothing. The system still accepts new
    /// connections for it, and what is sent is executed after [`resume`](Self::resume).
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT: goes on after [`stop`](Self::stop).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL, also for a stopped server; returns when it is gone and its port is closed. Its data is lost.
    pub fn kill(&self) {
        let process = self.process().take();
        drop(process);
    }

    /// Kills it if it still runs, and starts it again on the same port, with the same settings and no data.
    ///
    /// # Panics
    /// When it does not answer within ten seconds, with the server's log.
    pub async fn restart_empty(&self) {
        self.kill();
        let deadline = Instant::now() + PATIENCE;
        let process = loop {
            match self.settings.launch(self.port).await {
                Ok(process) => break process,
                Err(Failure::PortTaken(_)) if Instant::now() < deadline => sleep(POLL).await,
                Err(failure) => failure.panic(self.port),
            }
        };
        *self.process() = Some(process);
        self.wait_for_primary().await;
    }

    /// Sends one command over a connection of its own, as the default user, and returns the reply (RESP2).
    ///
    /// ```no_run
    /// # async fn example(server: lock_tests::RedisServer) {
    /// use redis::Value;
    /// assert_eq!(server.command(&["EXISTS", "lock:{stock}"]).await, Value::Int(0));
    /// # }
    /// ```
    ///
    /// # Panics
    /// When the reply is an error, or does not come within ten seconds (as that of a stopped server).
    pub async fn command(&self, command: &[&str]) -> Value {
        self.query(command).await
    }

    /// The same with the reply converted to what the caller expects.
    ///
    /// # Panics
    /// As [`command`](Self::command), and when the reply is something else.
    pub async fn query<T: FromRedisValue>(&self, command: &[&str]) -> T {
        match self.try_command(command).await.and_then(|value| Ok(redis::from_redis_value(value)?)) {
            Ok(reply) => reply,
            Err(error) => panic!("{}: {error}", command.join(" ")),
        }
    }

    /// The same for a command that may be refused.
    pub async fn try_command(&self, command: &[&str]) -> RedisResult<Value> {
        let Some((name, arguments)) = command.split_first() else { panic!("a command has a name") };
        redis::cmd(name).arg(arguments).query_async(&mut self.connection().await?).await
    }

    /// All keys that match `pattern` (as in KEYS), sorted.
    pub async fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.query(&["KEYS", pattern]).await;
        keys.sort();
        keys
    }

    /// A connection of the caller's own, as the default user, whose replies may take ten seconds.
    pub async fn connection(&self) -> RedisResult<MultiplexedConnection> {
        connect(&self.url()).await
    }

    fn process(&self) -> MutexGuard<'_, Option<Supervised>> {
        // Nothing is half done when a holder panics, and a failed test must still end its servers.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self, signal: Signal) {
        let mut process = self.process();
        let process = process.as_mut().expect("the server was killed");
        if let Err(error) = process.signal(signal) {
            panic!("signal {signal:?} to the server: {error}; its log:\n{}", process.log().borrow().text);
        }
    }

    /// A replica is of use when it has its primary's data; until then it would answer as an empty server.
    async fn wait_for_primary(&self) {
        if self.settings.primary.is_none() {
            return;
        }
        let deadline = Instant::now() + PATIENCE;
        while !self.query::<String>(&["INFO", "replication"]).await.contains("master_link_status:up") {
            assert!(Instant::now() < deadline, "the replica finds no primary; its log:\n{}", self.log());
            sleep(POLL).await;
        }
    }
}

/// Settings of a [`RedisServer`] to be started.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    args: Vec<String>,
    password: Option<String>,
    primary: Option<Primary>,
    tls: Option<Tls>,
}

#[derive(Clone, Debug)]
struct Primary {
    port: u16,
    password: Option<String>,
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

    /// Asks everybody for this password; [`RedisServer::url`] has it.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self.arg("--requirepass", password)
    }

    /// Another user with the given ACL rules, for example `"~lock:* &* +@all"`; [`RedisServer::url_as`] has a URL for it.
    #[must_use]
    pub fn user(self, name: &str, password: &str, rules: &str) -> Self {
        self.args(["--user", name, "on", &format!(">{password}")]).args(rules.split_whitespace())
    }

    /// Makes it a replica of `primary`; [`start`](Self::start) then waits until it has the primary's data.
    #[must_use]
    pub fn replica_of(mut self, primary: &RedisServer) -> Self {
        self.primary = Some(Primary { port: primary.port, password: primary.settings.password.clone() });
        self
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    /// When it does not answer within ten seconds, with the server's log.
    pub async fn start(mut self) -> RedisServer {
        let mut attempts = 20;
        let (port, process) = loop {
            let port = free_port();
            if let Some(tls) = &mut self.tls {
                tls.port = free_port();
            }
            attempts -= 1;
            match self.launch(port).await {
                Ok(process) => break (port, process),
                // Someone bound it between our look and the server's.
                Err(Failure::PortTaken(_)) if attempts > 0 => {}
                Err(failure) => failure.panic(port),
            }
        };
        let server = RedisServer { port, settings: self, process: Mutex::new(Some(process)) };
        server.wait_for_primary().await;
        server
    }

    async fn launch(&self, port: u16) -> Result<Supervised, Failure> {
        let directory = tempfile::Builder::new().prefix("lock-tests-redis-").tempdir()?;
        let command = self.command_line(port, directory.path())?;
        // From here on the supervisor removes the directory, because it also does so when this process is killed.
        let process = Supervised::spawn(directory.path(), command.iter().map(String::as_str))?;
        let _ = directory.keep();

        let mut log = process.log();
        let ready = |log: &Log| log.ended || log.text.contains("Ready to accept connections");
        let ready = timeout(PATIENCE, log.wait_for(ready)).await.is_ok_and(|log| log.is_ok_and(|log| !log.ended));
        if ready && timeout(PATIENCE, ping(port)).await.is_ok_and(|answer| answer.is_ok()) {
            return Ok(process);
        }
        let text = log.borrow().text.clone();
        Err(if text.contains("Address already in use") { Failure::PortTaken(text) } else { Failure::Other(text) })
    }

    fn command_line(&self, port: u16, directory: &Path) -> io::Result<Vec<String>> {
        let (port, dir) = (port.to_string(), directory.display().to_string());
        let mut words = vec!["redis-server", "--port", &port, "--bind", "127.0.0.1", "--dir", &dir];
        // A primary waits five seconds for more replicas before it sends its data, if it isn't told otherwise.
        words.extend(["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]);
        let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        if let Some(tls) = &self.tls {
            words.extend(tls.options(directory)?);
        }
        // Behind ours, so that a caller's own setting wins.
        words.extend_from_slice(&self.args);
        if let Some(primary) = &self.primary {
            words.extend(["--replicaof".to_owned(), "127.0.0.1".to_owned(), primary.port.to_string()]);
            if let Some(password) = &primary.password {
                words.extend(["--masterauth".to_owned(), password.clone()]);
            }
        }
        // The line we wait for must be printed, and to us.
        words.extend(["--loglevel", "notice", "--logfile", ""].map(str::to_owned));
        Ok(words)
    }
}

/// Why a server did not start; each with what it printed.
enum Failure {
    PortTaken(String),
    Other(String),
}

impl Failure {
    fn panic(self, port: u16) -> ! {
        let (Self::PortTaken(log) | Self::Other(log)) = self;
        panic!("redis-server did not start on port {port} (tests/run.sh installs it where it is missing):\n{log}")
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Other(error.to_string())
    }
}

/// Any reply will do: a server that asks for a password is ready too.
async fn ping(port: u16) -> io::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?);
    stream.write_all(b"PING\r\n").await?;
    let mut reply = String::new();
    match stream.read_line(&mut reply).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

fn url(user: &str, password: Option<&str>, port: u16) -> String {
    let mut url = Url::parse("redis://127.0.0.1").expect("a valid URL");
    // These fail for URLs without a host only.
    let _ = url.set_port(Some(port));
    let _ = url.set_username(user);
    let _ = url.set_password(password);
    url.into()
}

/// Shared with the fixtures that talk to a server by its URL.
pub(crate) async fn connect(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        // On a busy machine the crate's half second would fail a test that has nothing to do with time.
        .set_response_timeout(Some(PATIENCE));
    Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}
