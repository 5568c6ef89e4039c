//! Real ZooKeeper ensembles on loopback, of one server or several, that always end with the test
//! process.
//!
//! ```no_run
//! # async fn example() {
//! use lock_tests::{ZooKeeperEnsemble, shared_zookeeper};
//!
//! // An ensemble for a test that stops, kills or configures it.
//! let ensemble = ZooKeeperEnsemble::builder().servers(3).start().await;
//! let leader = ensemble.leader().await;
//! ensemble.kill(leader);
//! ensemble.restart(leader).await;
//!
//! // One server, for all other tests.
//! shared_zookeeper().await.cli(&["create", "/colour", "blue"]).await;
//! # }
//! ```

use std::{
    fs, io,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};

use crate::{ports::free_port, redis_server::POLL, supervised::Supervised};

/// Time limit for a start, and for an election.
const PATIENCE: Duration = Duration::from_secs(60);
/// The package zookeeper of Debian. Its manifest names the other archives.
const ARCHIVE: &str = "/usr/share/java/zookeeper.jar";
/// The unit of the servers' time limits, in milliseconds.
const TICK: u32 = 500;

/// One server, shared by all tests of this process that neither stop it nor change its settings.
/// Every test has a namespace of its own.
pub async fn shared_zookeeper() -> &'static ZooKeeperEnsemble {
    static SHARED: OnceCell<ZooKeeperEnsemble> = OnceCell::const_new();
    SHARED.get_or_init(ZooKeeperEnsemble::start).await
}

/// Settings of a [`ZooKeeperEnsemble`] to be started.
#[derive(Clone, Debug)]
pub struct Builder {
    servers: usize,
    settings: Vec<String>,
}

impl Builder {
    /// Sets the number of servers, one by default.
    #[must_use]
    pub fn servers(self, servers: usize) -> Self {
        Self { servers, ..self }
    }

    /// Adds a line of the configuration: `.setting("maxClientCnxns=3")`.
    #[must_use]
    pub fn setting(mut self, setting: &str) -> Self {
        self.settings.push(setting.to_owned());
        self
    }

    /// Starts the servers and waits until they are ready.
    ///
    /// # Panics
    /// When ZooKeeper is not installed, or not ready within a minute, with the output of a server.
    pub async fn start(self) -> ZooKeeperEnsemble {
        self.try_start()
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts the servers and waits until they are ready.
    ///
    /// # Errors
    /// When ZooKeeper is not installed, or not ready within a minute, with the output of a server.
    pub async fn try_start(self) -> io::Result<ZooKeeperEnsemble> {
        let mut attempts = 10;
        loop {
            attempts -= 1;
            match self.launch().await {
                Ok(ensemble) => return Ok(ensemble),
                // Another process bound a port between our check and the server's.
                Err(log) if log.contains("Address already in use") && attempts > 0 => {}
                Err(log) => {
                    let message = format!("ZooKeeper did not start:\n{log}");
                    return Err(io::Error::other(message));
                }
            }
        }
    }

    async fn launch(&self) -> Result<ZooKeeperEnsemble, String> {
        if !Path::new(ARCHIVE).exists() {
            return Err(format!(
                "{ARCHIVE} is missing; `tests/run.sh --stores` installs zookeeper"
            ));
        }
        let servers: io::Result<Vec<_>> = (0..self.servers).map(|_| Server::new()).collect();
        let ensemble = ZooKeeperEnsemble {
            servers: servers.map_err(|error| error.to_string())?,
            settings: self.settings.clone(),
        };
        for index in 0..self.servers {
            let launched = ensemble.launch(index);
            launched.map_err(|error| error.to_string())?;
        }
        for index in 0..self.servers {
            ensemble.ready(index).await?;
        }
        Ok(ensemble)
    }
}

/// Real ZooKeeper servers, killed when it is dropped or when this process ends in any way.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    servers: Vec<Server>,
    settings: Vec<String>,
}

#[derive(Debug)]
struct Server {
    port: u16,
    /// For the replication and the election.
    peer_ports: [u16; 2],
    /// `None` after a kill. A std mutex: it is never held across an await.
    process: Mutex<Option<Supervised>>,
    /// The data, removed at the end.
    directory: Supervised,
}

impl Server {
    fn new() -> io::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("lock-tests-zookeeper-")
            .tempdir()?;
        // A process that does nothing: its supervisor removes the directory.
        let held = Supervised::spawn(directory.path(), ["sleep", "infinity"])?;
        let _ = directory.keep();
        Ok(Self {
            port: free_port(),
            peer_ports: [free_port(), free_port()],
            process: Mutex::default(),
            directory: held,
        })
    }

    fn process(&self) -> MutexGuard<'_, Option<Supervised>> {
        // A failed test must still end its servers.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the server says of itself; empty if it does not answer.
    async fn state(&self) -> String {
        let ask = async {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
            stream.write_all(b"srvr").await?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await?;
            Ok::<_, io::Error>(reply)
        };
        let asked = timeout(Duration::from_secs(1), ask).await;
        asked.ok().and_then(Result::ok).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(process) = self.process().take() {
            let _ = process.kill_keeping_directory();
        }
    }
}

impl ZooKeeperEnsemble {
    /// An ensemble of one server with default settings.
    ///
    /// # Panics
    /// As [`Builder::start`].
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Settings for an ensemble to be started.
    pub fn builder() -> Builder {
        Builder {
            servers: 1,
            settings: Vec::new(),
        }
    }

    /// The hosts and ports of all servers, with a comma between.
    pub fn hosts(&self) -> String {
        let hosts = self.servers.iter();
        let hosts: Vec<_> = hosts.map(|it| format!("127.0.0.1:{}", it.port)).collect();
        hosts.join(",")
    }

    /// `zookeeper://127.0.0.1:port,..` of all servers.
    pub fn url(&self) -> String {
        format!("zookeeper://{}", self.hosts())
    }

    /// The same as a user.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("zookeeper://{user}:{password}@{}", self.hosts())
    }

    /// The port of a server.
    pub fn port(&self, server: usize) -> u16 {
        self.servers[server].port
    }

    /// The process id of a server.
    ///
    /// # Panics
    /// When it was killed.
    pub fn pid(&self, server: usize) -> u32 {
        let process = self.servers[server].process();
        process.as_ref().expect("the server was killed").pid()
    }

    /// Calls ZooKeeper's command line, and returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub async fn cli(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("java");
        command.args(["-cp", ARCHIVE, "org.apache.zookeeper.ZooKeeperMain"]);
        command.args(["-server", &self.hosts()]).args(arguments);
        let output = command.output().await;
        let output = output.unwrap_or_else(|error| panic!("java: {error}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// The number of the server that the others follow.
    ///
    /// # Panics
    /// When there is none for a minute.
    pub async fn leader(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (index, server) in self.servers.iter().enumerate() {
                if server.process().is_some() && server.state().await.contains("Mode: leader") {
                    return index;
                }
            }
            assert!(Instant::now() < deadline, "ZooKeeper has no leader");
            sleep(POLL).await;
        }
    }

    /// SIGSTOP: the server keeps its port and its connections but sends nothing.
    pub fn stop(&self, server: usize) {
        self.signal(server, Signal::STOP);
    }

    /// SIGCONT: continues after [`stop`](Self::stop).
    pub fn resume(&self, server: usize) {
        self.signal(server, Signal::CONT);
    }

    fn signal(&self, server: usize, signal: Signal) {
        let mut process = self.servers[server].process();
        let process = process.as_mut().expect("the server was killed");
        if let Err(error) = process.signal(signal) {
            panic!("signal {signal:?} to ZooKeeper: {error}");
        }
    }

    /// SIGKILL, also to a stopped server. Its data are kept.
    pub fn kill(&self, server: usize) {
        if let Some(process) = self.servers[server].process().take()
            && let Err(error) = process.kill_keeping_directory()
        {
            panic!("SIGKILL to ZooKeeper: {error}");
        }
    }

    /// Kills a server if it still runs, and starts it again with its data. Does not wait.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn begin_restart(&self, server: usize) {
        self.kill(server);
        let launched = self.launch(server);
        launched.unwrap_or_else(|error| panic!("ZooKeeper: {error}"));
    }

    /// The same, and waits until it serves requests.
    ///
    /// # Panics
    /// When it does not within a minute, with its output.
    pub async fn restart(&self, server: usize) {
        self.begin_restart(server);
        let ready = self.ready(server).await;
        ready.unwrap_or_else(|log| panic!("ZooKeeper did not start again:\n{log}"));
    }

    /// Waits until a server follows a leader. The error is its output.
    async fn ready(&self, server: usize) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        while !self.servers[server].state().await.contains("Mode: ") {
            let output = match &*self.servers[server].process() {
                Some(process) => process.output(),
                None => String::new(),
            };
            if Instant::now() >= deadline || output.contains("Address already in use") {
                return Err(output);
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    fn launch(&self, index: usize) -> io::Result<()> {
        let server = &self.servers[index];
        let directory = server.directory.directory();
        let mut lines = vec![
            format!("tickTime={TICK}"),
            "initLimit=20".to_owned(),
            "syncLimit=2".to_owned(),
            format!("dataDir={}", directory.join("data").display()),
            format!("clientPort={}", server.port),
            "clientPortAddress=127.0.0.1".to_owned(),
            "admin.enableServer=false".to_owned(),
            // All tests come from one address.
            "maxClientCnxns=0".to_owned(),
        ];
        if self.servers.len() > 1 {
            for (number, Server { peer_ports, .. }) in self.servers.iter().enumerate() {
                let [first, second] = peer_ports;
                lines.push(format!("server.{number}=127.0.0.1:{first}:{second}"));
            }
        }
        lines.extend(self.settings.iter().cloned());
        fs::create_dir_all(directory.join("data"))?;
        fs::write(directory.join("data/myid"), index.to_string())?;
        let configuration = directory.join("zoo.cfg");
        fs::write(&configuration, lines.join("\n"))?;
        let configuration = configuration.display().to_string();
        let command = [
            "java",
            "-Xmx128m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            // The system still writes the data of a process that is killed.
            "-Dzookeeper.forceSync=no",
            "-cp",
            ARCHIVE,
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            &configuration,
        ];
        let process = Supervised::spawn(directory, command)?;
        *server.process() = Some(process);
        Ok(())
    }
}
