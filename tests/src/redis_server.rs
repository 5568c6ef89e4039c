//! Real `redis-server` processes, each on its own loopback port, that always end with the test
//! process.
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
//! // A unique key on the shared server, for all other tests.
//! let shared = shared_server().await;
//! shared.command(&["SET", &unique("colour"), "red"]).await;
//! # }
//! ```

mod builder;
mod snapshot;
mod tls;

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, FromRedisValue, RedisResult, Value, aio::MultiplexedConnection,
};
use rustix::process::Signal;
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep},
};
use url::Url;

use self::builder::Failure;
pub use self::{builder::Builder, snapshot::Snapshot};
pub use crate::certificates::Identity;
use crate::supervised::{Files, Supervised};

/// Time limit for a server's first reply to PING, and for the reply to a command.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Interval between checks of a state that sends no notification.
pub(crate) const POLL: Duration = Duration::from_millis(5);

/// Server shared by all tests of this process that neither stop it nor change its settings; the
/// first caller starts it. Every test takes its key names from [`unique`].
pub async fn shared_server() -> &'static RedisServer {
    static SHARED: OnceCell<RedisServer> = OnceCell::const_new();
    SHARED.get_or_init(RedisServer::start).await
}

/// Five servers, independent of each other, for tests that neither stop them nor change their
/// settings.
pub async fn shared_five() -> &'static [RedisServer] {
    static SHARED: OnceCell<Vec<RedisServer>> = OnceCell::const_new();
    SHARED
        .get_or_init(|| RedisServer::builder().start_all(5))
        .await
}

/// `name` with a suffix that makes it unique on the shared server.
pub fn unique(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!(
        "{name}-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    )
}

/// Fields `ends` of which a loop from the first to the last position would not end, or not soon.
pub const ENDLESS_QUEUES: [&str; 5] = [
    "1 9000000000000 1",
    "1 9000000000000 9000000000000",
    "9007199254740991 9007199254740993 2",
    "9007199254740992 9007199254740992 1",
    "1 99999999999999999999999999999999 1",
];

/// A real `redis-server` without persistence, killed when it is dropped or when this process ends
/// in any way.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    settings: Builder,
    /// A std mutex: it is held for a signal and for the end of a process, never across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` after [`RedisServer::kill`].
    process: Option<Supervised>,
    stopped: bool,
    /// Files kept of the last process, if it was killed.
    kept: Files,
}

impl RedisServer {
    /// A server with default settings on a free port, ready for commands.
    ///
    /// # Panics
    /// When it does not answer within ten seconds, with the server's log.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Settings for a server to be started.
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

    /// The port that the server listens on, the same for its whole life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port of the cluster bus.
    ///
    /// # Panics
    /// When the server is not a node of a cluster.
    pub fn bus_port(&self) -> u16 {
        self.settings.bus.expect("the node of a cluster")
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
        self.state()
            .process
            .as_ref()
            .map(Supervised::pid)
            .expect("the server was killed")
    }

    /// Neither killed nor stopped.
    pub fn is_running(&self) -> bool {
        let state = self.state();
        state.process.is_some() && !state.stopped
    }

    /// Output of the running server so far; empty when it was killed.
    pub fn log(&self) -> String {
        self.state()
            .process
            .as_ref()
            .map(|process| process.log().borrow().text.clone())
            .unwrap_or_default()
    }

    /// SIGSTOP: the server keeps its port and its connections but sends no replies. The system
    /// still accepts new connections for it, and the server executes the received commands after
    /// [`resume`](Self::resume).
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        self.state().stopped = true;
    }

    /// SIGCONT: continues after [`stop`](Self::stop).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
        self.state().stopped = false;
    }

    /// SIGKILL, also for a stopped server; returns when the process is gone and its port is closed.
    /// The data are lost. The files that make it a node of a cluster or a Sentinel are kept, as on
    /// a disk.
    pub fn kill(&self) {
        self.kill_keeping(&[]);
    }

    /// The same, and keeps these of its files too.
    fn kill_keeping(&self, files: &[&'static str]) {
        let mut state = self.state();
        state.stopped = false;
        if let Some(process) = state.process.take() {
            state.kept = process.kill_and_read(&[&builder::OWN_FILES, files].concat());
        }
    }

    /// Kills the server if it still runs, and starts it again on the same port, with the same
    /// settings and no data.
    ///
    /// # Panics
    /// When the server does not answer within ten seconds, with its log.
    pub async fn restart_empty(&self) {
        self.kill();
        self.start_again(None).await;
    }

    /// Starts a server that was killed, with these data.
    async fn start_again(&self, data: Option<&Snapshot>) {
        let mut files = self.state().kept.clone();
        if let Some(data) = data {
            files.add(snapshot::FILE, data.as_bytes());
        }
        let deadline = Instant::now() + PATIENCE;
        let process = loop {
            match self.settings.launch(self.port, &files).await {
                Ok(process) => break process,
                Err(Failure::PortTaken(_)) if Instant::now() < deadline => sleep(POLL).await,
                Err(failure) => failure.panic(self.port),
            }
        };
        self.state().process = Some(process);
        self.prepare().await;
    }

    /// Sends one command over a new connection, as the default user, and returns the reply (RESP2).
    ///
    /// ```no_run
    /// # async fn example(server: lock_tests::RedisServer) {
    /// use redis::Value;
    /// assert_eq!(server.command(&["EXISTS", "lock:{stock}"]).await, Value::Int(0));
    /// # }
    /// ```
    ///
    /// # Panics
    /// When the reply is an error, or does not come within ten seconds (as from a stopped server).
    pub async fn command(&self, command: &[&str]) -> Value {
        self.query(command).await
    }

    /// The same, with the reply converted to the type that the caller expects.
    ///
    /// # Panics
    /// As [`command`](Self::command), and when the reply is something else.
    pub async fn query<T: FromRedisValue>(&self, command: &[&str]) -> T {
        match self
            .try_command(command)
            .await
            .and_then(|value| Ok(redis::from_redis_value(value)?))
        {
            Ok(reply) => reply,
            Err(error) if error.is_io_error() => {
                panic!("{}: {error}; its log:\n{}", command.join(" "), self.log())
            }
            Err(error) => panic!("{}: {error}", command.join(" ")),
        }
    }

    /// The same for a command that may be refused.
    pub async fn try_command(&self, command: &[&str]) -> RedisResult<Value> {
        let Some((name, arguments)) = command.split_first() else {
            panic!("a command has a name")
        };
        redis::cmd(name)
            .arg(arguments)
            .query_async(&mut self.connection().await?)
            .await
    }

    /// The lines of `CLIENT LIST` about connections of the library, which use RESP3. Those of
    /// [`command`](Self::command) use RESP2, and an earlier one may not be closed yet.
    ///
    /// # Panics
    /// As [`command`](Self::command).
    pub async fn clients(&self) -> Vec<String> {
        let list: String = self.query(&["CLIENT", "LIST"]).await;
        let ours = list.lines().filter(|line| line.contains(" resp=3"));
        ours.map(str::to_owned).collect()
    }

    /// All keys that match `pattern` (as in KEYS), sorted.
    pub async fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.query(&["KEYS", pattern]).await;
        keys.sort();
        keys
    }

    /// A connection for the caller alone, as the default user, with a response time-out of ten
    /// seconds.
    pub async fn connection(&self) -> RedisResult<MultiplexedConnection> {
        connect(&self.url()).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent even when a holder has panicked, and a failed test must still end
        // its servers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self, signal: Signal) {
        let mut state = self.state();
        let process = state.process.as_mut().expect("the server was killed");
        if let Err(error) = process.signal(signal) {
            panic!(
                "signal {signal:?} to the server: {error}; its log:\n{}",
                process.log().borrow().text
            );
        }
    }

    /// Completes the start once the server answers.
    async fn prepare(&self) {
        if !self.settings.first_command.is_empty() {
            let words: Vec<_> = self
                .settings
                .first_command
                .iter()
                .map(String::as_str)
                .collect();
            self.command(&words).await;
        }
        // A replica is of use when it has its primary's data; until then it answers as an empty
        // server.
        if self.settings.primary.is_none() {
            return;
        }
        let deadline = Instant::now() + PATIENCE;
        while !self
            .query::<String>(&["INFO", "replication"])
            .await
            .contains("master_link_status:up")
        {
            assert!(
                Instant::now() < deadline,
                "the replica finds no primary; its log:\n{}",
                self.log()
            );
            sleep(POLL).await;
        }
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

/// Shared with the fixtures that connect to a server by its URL.
pub(crate) async fn connect(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        // On a busy machine the crate's default of half a second would fail tests that do not
        // depend on time.
        .set_response_timeout(Some(PATIENCE));
    Client::open(url)?
        .get_multiplexed_async_connection_with_config(&config)
        .await
}
