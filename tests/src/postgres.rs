//! Real PostgreSQL servers, each with its own data on its own loopback port, that always end with
//! the test process.
//!
//! ```no_run
//! # async fn example() {
//! use lock_tests::{PostgresServer, postgres, shared_postgres};
//!
//! // Its own server, for a test that stops, kills or configures it.
//! let server = PostgresServer::builder().setting("max_connections", "20").start().await;
//! let client = server.connect().await;
//! client.batch_execute("create table colour (name text)").await.unwrap();
//! server.kill();
//! server.restart().await;
//!
//! // A database on the shared server, for all other tests.
//! let url = shared_postgres().await.new_database().await;
//! let client = postgres::connect(&url).await;
//! # }
//! ```

mod builder;
mod installation;
mod pooler;

use std::{
    net::{Ipv4Addr, TcpStream},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};
use tokio_postgres::{Client, Error, NoTls};
use url::Url;

pub use self::{builder::Builder, pooler::PgBouncer};
use self::{builder::Failure, installation::Installation};
use crate::{
    redis_server::{POLL, unique},
    supervised::Supervised,
};

/// Time limit for a start, with the recovery after a crash, and for a connection.
const PATIENCE: Duration = Duration::from_secs(30);

/// Server shared by all tests of this process that neither stop it nor change its settings; the
/// first caller starts it. Every test has a [`new_database`](PostgresServer::new_database).
pub async fn shared_postgres() -> &'static PostgresServer {
    static SHARED: OnceCell<PostgresServer> = OnceCell::const_new();
    SHARED
        .get_or_init(|| {
            PostgresServer::builder()
                .in_memory()
                .setting("max_connections", "500")
                .start()
        })
        .await
}

/// A connection to the database that a URL names. It ends with the client, or with the runtime.
///
/// # Panics
/// When the server refuses it, or does not answer within 30 s.
pub async fn connect(url: &str) -> Client {
    let connecting = timeout(PATIENCE, try_connect(url)).await;
    let connecting = connecting.unwrap_or_else(|_| panic!("{url}: no answer"));
    connecting.unwrap_or_else(|error| panic!("{url}: {error:?}"))
}

/// The same, without a time limit.
///
/// # Errors
/// When the server refuses it.
pub async fn try_connect(url: &str) -> Result<Client, Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    // Its error is that of the queries.
    tokio::spawn(async { drop(connection.await) });
    Ok(client)
}

/// Limits the size of the files that a backend may write, as a full disk does. `None` ends that.
///
/// # Panics
/// When there is no such process, or no program `prlimit`.
pub fn limit_files(backend: i32, bytes: Option<u64>) {
    let limited = Installation::find().and_then(|it| it.limit_files(backend, bytes));
    limited.unwrap_or_else(|error| panic!("prlimit of {backend}: {error}"));
}

/// A real PostgreSQL server, killed when it is dropped or when this process ends in any way.
#[derive(Debug)]
pub struct PostgresServer {
    port: u16,
    settings: Builder,
    /// A std mutex: it is held for signals and for the end of processes, never across an await.
    state: Mutex<State>,
    /// The data, removed after the end of the server.
    directory: Supervised,
}

#[derive(Debug)]
struct State {
    /// `None` after [`PostgresServer::kill`].
    process: Option<Supervised>,
    stopped: bool,
}

impl PostgresServer {
    /// A server with default settings, which keeps its data on disk, ready for connections.
    ///
    /// # Panics
    /// When it is not ready within 30 s, with the server's log.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Settings for a server to be started.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// `postgres://postgres[:password]@127.0.0.1:port/postgres`, as the superuser.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// The same for another database.
    pub fn url_of(&self, database: &str) -> String {
        url(
            "postgres",
            self.settings.password.as_deref(),
            self.port,
            database,
        )
    }

    /// The same for another user, which a test has created.
    pub fn url_as(&self, user: &str, password: &str, database: &str) -> String {
        url(user, Some(password), self.port, database)
    }

    /// The port that the server listens on, the same for its whole life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the postmaster.
    ///
    /// # Panics
    /// When it was killed.
    pub fn pid(&self) -> u32 {
        let state = self.state();
        let process = state.process.as_ref().expect("the server was killed");
        process.pid()
    }

    /// Neither killed nor stopped.
    pub fn is_running(&self) -> bool {
        let state = self.state();
        state.process.is_some() && !state.stopped
    }

    /// Output of the running server so far; empty when it was killed.
    pub fn log(&self) -> String {
        let state = self.state();
        state
            .process
            .as_ref()
            .map_or_else(String::new, Supervised::output)
    }

    /// A connection as the superuser to the database `postgres`.
    ///
    /// # Panics
    /// When the server does not answer within 30 s.
    pub async fn connect(&self) -> Client {
        connect(&self.url()).await
    }

    /// Creates an empty database with a unique name, and returns its URL.
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub async fn new_database(&self) -> String {
        let name = unique("test");
        let create = format!("create database \"{name}\"");
        let created = self.connect().await.batch_execute(&create).await;
        created.unwrap_or_else(|error| panic!("{create}: {error:?}"));
        self.url_of(&name)
    }

    /// The certificate, in PEM, of the authority that has signed the server's.
    ///
    /// # Panics
    /// When the server was built without TLS.
    pub fn ca_pem(&self) -> &str {
        let certificates = self.settings.certificates.as_ref();
        &certificates.expect("the server was built with `tls`").ca
    }

    /// Refuses connections over TLS from now on, after the handshake.
    ///
    /// # Panics
    /// When the server does not accept its new settings.
    pub async fn reject_tls(&self, admin: &Client) {
        let row = admin.query_one("show hba_file", &[]).await;
        let path: String = row
            .unwrap_or_else(|error| panic!("hba_file: {error:?}"))
            .get(0);
        let rules =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let rules = format!("hostssl all all all reject\n{rules}");
        std::fs::write(&path, rules).unwrap_or_else(|error| panic!("{path}: {error}"));
        let reloaded = admin.batch_execute("select pg_reload_conf()").await;
        reloaded.unwrap_or_else(|error| panic!("pg_reload_conf: {error:?}"));
    }

    /// Makes a standby the primary.
    ///
    /// # Panics
    /// When it is no standby.
    pub async fn promote(&self) {
        let promoted = self.connect().await;
        let promoted = promoted.query_one("select pg_promote()", &[]).await;
        let promoted = promoted.unwrap_or_else(|error| panic!("pg_promote: {error:?}"));
        assert!(promoted.get::<_, bool>(0), "it is still a standby");
    }

    /// Stops the process that writes asynchronous commits to the log.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn stop_wal_writer(&self) {
        let query = "select pid from pg_stat_activity where backend_type = 'walwriter'";
        let until = Instant::now() + PATIENCE;
        let connection = self.connect().await;
        let row = loop {
            let row = connection.query_opt(query, &[]).await;
            match row.unwrap_or_else(|error| panic!("{query}: {error:?}")) {
                Some(row) => break row,
                // The postmaster begins it after the first connections are accepted.
                None => assert!(Instant::now() < until, "there is no WAL writer"),
            }
            sleep(Duration::from_millis(10)).await;
        };
        let pid = Pid::from_raw(row.get::<_, i32>(0)).expect("a process id");
        let stopped = kill_process(pid, Signal::STOP);
        stopped.unwrap_or_else(|error| panic!("SIGSTOP to the WAL writer: {error}"));
    }

    /// SIGSTOP to the postmaster and to all of its backends: the server keeps its port, its
    /// connections and the locks of its transactions, but sends no replies.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        self.state().stopped = true;
    }

    /// SIGCONT: continues after [`stop`](Self::stop).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
        self.state().stopped = false;
    }

    /// SIGKILL to the postmaster and to all of its backends, also stopped ones, as if the machine
    /// had crashed; returns when all have ended and the port is closed. The data are kept.
    pub fn kill(&self) {
        let mut state = self.state();
        state.stopped = false;
        let Some(process) = state.process.take() else {
            return;
        };
        let log = process.output();
        if let Err(error) = process.kill_keeping_directory() {
            panic!("SIGKILL to the server: {error}; its log:\n{log}");
        }
        // A process that ends closes its output before its port.
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills the server if it still runs, and starts it again on the same port, with the same
    /// settings and its data. It recovers: no commit with a reply is lost, unless it was
    /// asynchronous.
    ///
    /// # Panics
    /// When the server is not ready within 30 s, with its log.
    pub async fn restart(&self) {
        self.kill();
        let deadline = Instant::now() + PATIENCE;
        let process = loop {
            match self
                .settings
                .launch(self.port, self.directory.directory())
                .await
            {
                Ok(process) => break process,
                Err(Failure::PortTaken(_)) if Instant::now() < deadline => sleep(POLL).await,
                Err(failure) => panic!("{}", failure.into_error(self.port)),
            }
        };
        self.state().process = Some(process);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent even when a holder has panicked, and a failed test must still end
        // its servers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self, signal: Signal) {
        let mut state = self.state();
        let process = state.process.as_mut().expect("the server was killed");
        if let Err(error) = process.signal_tree(signal) {
            let log = process.output();
            panic!("signal {signal:?} to the server: {error}; its log:\n{log}");
        }
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // Its supervisor would not wait for the backends.
        if let Some(process) = self.state().process.take() {
            let _ = process.kill_keeping_directory();
        }
    }
}

fn url(user: &str, password: Option<&str>, port: u16, database: &str) -> String {
    let mut url = Url::parse("postgres://127.0.0.1").expect("a valid URL");
    // These fail for URLs without a host only.
    let _ = url.set_port(Some(port));
    let _ = url.set_username(user);
    let _ = url.set_password(password);
    url.set_path(database);
    url.into()
}
