//! Real etcd clusters on loopback, of one member or several, that always end with the test process.
//!
//! ```no_run
//! # async fn example() {
//! use lock_tests::{EtcdCluster, shared_etcd};
//!
//! // A cluster for a test that stops, kills or configures it.
//! let cluster = EtcdCluster::builder().members(3).start().await;
//! let leader = cluster.leader().await;
//! cluster.kill(leader);
//! cluster.restart(leader).await;
//!
//! // One member, for all other tests.
//! shared_etcd().await.ctl(&["put", "colour", "blue"]).await;
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
    process::Command,
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};

use crate::{
    certificates::{Certificates, Identity},
    links::Links,
    ports::free_port,
    redis_server::POLL,
    supervised::{Log, Supervised},
};

/// Time limit for a start, and for an election.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time without a heartbeat after which the others elect a leader, in milliseconds.
const ELECTION: u32 = 500;

/// One member, shared by all tests of this process that neither stop it nor change its settings.
/// Every test has a namespace of its own.
pub async fn shared_etcd() -> &'static EtcdCluster {
    static SHARED: OnceCell<EtcdCluster> = OnceCell::const_new();
    SHARED.get_or_init(EtcdCluster::start).await
}

/// Settings of an [`EtcdCluster`] to be started.
#[derive(Clone, Debug)]
pub struct Builder {
    members: usize,
    flags: Vec<String>,
    certificates: Option<Certificates>,
    /// The time for which a signed token of a user is valid, in seconds.
    signed_for: Option<u32>,
    is_linked: bool,
}

impl Builder {
    /// Sets the number of members, one by default.
    #[must_use]
    pub fn members(self, members: usize) -> Self {
        Self { members, ..self }
    }

    /// Adds an option of the command line: `.flag("--max-txn-ops=200")`.
    #[must_use]
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Gives users tokens that any member can verify (JWT), valid for this number of seconds.
    #[must_use]
    pub fn signed_tokens(self, seconds: u32) -> Self {
        let signed_for = Some(seconds);
        Self { signed_for, ..self }
    }

    /// Connects the members by links that [`EtcdCluster::cut_off`] can cut.
    #[must_use]
    pub fn linked(self) -> Self {
        Self {
            is_linked: true,
            ..self
        }
    }

    /// Accepts TLS only, from clients that have a certificate of the same authority.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.certificates = Some(Certificates::new(&["127.0.0.1", "localhost"]));
        self
    }

    /// Starts the members and waits until they are ready.
    ///
    /// # Panics
    /// When etcd is not installed, or not ready within 30 s, with the log of a member.
    pub async fn start(self) -> EtcdCluster {
        self.try_start()
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts the members and waits until they are ready.
    ///
    /// # Errors
    /// When etcd is not installed, or not ready within 30 s, with the log of a member.
    pub async fn try_start(self) -> io::Result<EtcdCluster> {
        let mut attempts = 20;
        loop {
            attempts -= 1;
            match self.launch().await {
                Ok(cluster) => return Ok(cluster),
                // Another process bound a port between our check and the server's.
                Err(log) if log.contains("address already in use") && attempts > 0 => {}
                Err(log) => return Err(io::Error::other(format!("etcd did not start:\n{log}"))),
            }
        }
    }

    async fn launch(&self) -> Result<EtcdCluster, String> {
        let links = Links::default();
        let member = |index| {
            let mut member = Member::new(self.certificates.as_ref())?;
            if self.is_linked {
                member.peer_link = links.open(index, member.peer_port)?;
            }
            Ok(member)
        };
        let members: io::Result<Vec<_>> = (0..self.members).map(member).collect();
        let cluster = EtcdCluster {
            members: members.map_err(|error| error.to_string())?,
            links,
            settings: self.clone(),
            user: Mutex::default(),
        };
        for index in 0..self.members {
            cluster.launch(index).map_err(|error| {
                format!("{error}; `tests/run.sh --stores` installs etcd-server and etcd-client")
            })?;
        }
        for member in &cluster.members {
            member.ready().await?;
        }
        Ok(cluster)
    }
}

/// Real etcd members, killed when it is dropped or when this process ends in any way.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<Member>,
    links: Links,
    settings: Builder,
    /// The user of [`ctl`](Self::ctl), with the password.
    user: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Member {
    port: u16,
    peer_port: u16,
    /// The port at which the others reach it.
    peer_link: u16,
    /// `None` after a kill. A std mutex: it is never held across an await.
    process: Mutex<Option<Supervised>>,
    /// The data, removed at the end.
    directory: Supervised,
}

impl Member {
    fn new(certificates: Option<&Certificates>) -> io::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("lock-tests-etcd-")
            .tempdir()?;
        if let Some(Certificates { ca, server, client }) = certificates {
            let write = |name: &str, content: &str| fs::write(directory.path().join(name), content);
            write("ca.pem", ca)?;
            write("server.pem", &server.certificate)?;
            write("server.key", &server.key)?;
            write("client.pem", &client.certificate)?;
            write("client.key", &client.key)?;
        }
        // A process that does nothing: its supervisor removes the directory.
        let held = Supervised::spawn(directory.path(), ["sleep", "infinity"])?;
        let _ = directory.keep();
        let peer_port = free_port();
        Ok(Self {
            port: free_port(),
            peer_port,
            peer_link: peer_port,
            process: Mutex::default(),
            directory: held,
        })
    }

    fn process(&self) -> MutexGuard<'_, Option<Supervised>> {
        // A failed test must still end its servers.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it serves requests. The error is its log.
    async fn ready(&self) -> Result<(), String> {
        let log = self.process().as_ref().map(Supervised::log);
        let mut log = log.ok_or("the member was killed")?;
        let ready = |log: &Log| log.ended || log.text.contains("ready to serve client requests");
        match timeout(PATIENCE, log.wait_for(ready)).await {
            Ok(Ok(log)) if !log.ended => return Ok(()),
            _ => {}
        }
        let text = log.borrow().text.clone();
        Err(text)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(process) = self.process().take() {
            let _ = process.kill_keeping_directory();
        }
    }
}

impl EtcdCluster {
    /// A cluster of one member with default settings.
    ///
    /// # Panics
    /// As [`Builder::start`].
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Settings for a cluster to be started.
    pub fn builder() -> Builder {
        Builder {
            members: 1,
            flags: Vec::new(),
            certificates: None,
            signed_for: None,
            is_linked: false,
        }
    }

    /// The hosts and ports of all members, with a comma between.
    pub fn hosts(&self) -> String {
        let hosts = self.members.iter();
        let hosts: Vec<_> = hosts.map(|it| format!("127.0.0.1:{}", it.port)).collect();
        hosts.join(",")
    }

    /// `etcd://127.0.0.1:port,..` of all members, `etcds` with TLS.
    pub fn url(&self) -> String {
        let scheme = if self.settings.certificates.is_some() {
            "etcds"
        } else {
            "etcd"
        };
        format!("{scheme}://{}", self.hosts())
    }

    /// The same as a user.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        self.url()
            .replacen("://", &format!("://{user}:{password}@"), 1)
    }

    /// The port of a member.
    pub fn port(&self, member: usize) -> u16 {
        self.members[member].port
    }

    /// The certificate, in PEM, of the authority of the members, and that of a client.
    ///
    /// # Panics
    /// When the cluster was built without TLS.
    pub fn certificates(&self) -> (&str, &Identity) {
        let certificates = self.settings.certificates.as_ref();
        let certificates = certificates.expect("the cluster was built with `tls`");
        (&certificates.ca, &certificates.client)
    }

    /// The process id of a member.
    ///
    /// # Panics
    /// When it was killed.
    pub fn pid(&self, member: usize) -> u32 {
        let process = self.members[member].process();
        process.as_ref().expect("the member was killed").pid()
    }

    /// The output of a member.
    pub fn log(&self, member: usize) -> String {
        let process = self.members[member].process();
        process.as_ref().map(Supervised::output).unwrap_or_default()
    }

    /// Lets etcd require users. `root` has this password, and is that of [`ctl`](Self::ctl).
    ///
    /// # Panics
    /// When etcd refuses it.
    pub async fn require_users(&self, password: &str) {
        let root = format!("root:{password}");
        self.ctl(&["user", "add", &root]).await;
        self.ctl(&["user", "grant-role", "root", "root"]).await;
        self.ctl(&["auth", "enable"]).await;
        *self.user.lock().unwrap_or_else(PoisonError::into_inner) = Some(root);
    }

    /// Creates a user with the right to read and to write the keys that begin with `prefix`.
    ///
    /// # Panics
    /// When etcd refuses it.
    pub async fn user(&self, name: &str, password: &str, prefix: &str) {
        self.ctl(&["user", "add", &format!("{name}:{password}")])
            .await;
        self.ctl(&["role", "add", name]).await;
        let grant = [
            "role",
            "grant-permission",
            name,
            "--prefix=true",
            "readwrite",
            prefix,
        ];
        self.ctl(&grant).await;
        self.ctl(&["user", "grant-role", name, name]).await;
    }

    /// Calls `etcdctl` on all members, and returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub async fn ctl(&self, arguments: &[&str]) -> String {
        let output = self.try_ctl(arguments).await;
        output.unwrap_or_else(|error| panic!("etcdctl {}: {error}", arguments.join(" ")))
    }

    /// The same for a call that may fail.
    ///
    /// # Errors
    /// The output of `etcdctl`.
    pub async fn try_ctl(&self, arguments: &[&str]) -> Result<String, String> {
        self.ctl_at(&self.hosts(), arguments).await
    }

    async fn ctl_at(&self, hosts: &str, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3");
        command.args(["--endpoints", hosts, "--command-timeout=10s"]);
        let user = self
            .user
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(user) = user {
            command.args(["--user", &user]);
        }
        if self.settings.certificates.is_some() {
            let directory = self.members[0].directory.directory();
            for (flag, file) in [
                ("cacert", "ca.pem"),
                ("cert", "client.pem"),
                ("key", "client.key"),
            ] {
                command.arg(format!("--{flag}={}", directory.join(file).display()));
            }
        }
        let output = command.args(arguments).output().await;
        let output = output.map_err(|error| format!("etcdctl: {error}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// The number of the member that the others follow.
    ///
    /// # Panics
    /// When there is none for half a minute.
    pub async fn leader(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (index, member) in self.members.iter().enumerate() {
                let host = format!("127.0.0.1:{}", member.port);
                let status = ["endpoint", "status", "--write-out=json"];
                let status = match member.process().is_some() {
                    true => self.ctl_at(&host, &status),
                    false => continue,
                };
                let status = timeout(Duration::from_secs(1), status).await;
                let Ok(Ok(status)) = status else { continue };
                let status: serde_json::Value = serde_json::from_str(&status).unwrap_or_default();
                let status = &status[0]["Status"];
                let own = &status["header"]["member_id"];
                if own.is_number() && *own == status["leader"] {
                    return index;
                }
            }
            assert!(Instant::now() < deadline, "etcd has no leader");
            sleep(POLL).await;
        }
    }

    /// SIGSTOP: the member keeps its port and its connections but sends nothing.
    pub fn stop(&self, member: usize) {
        self.signal(member, Signal::STOP);
    }

    /// SIGCONT: continues after [`stop`](Self::stop).
    pub fn resume(&self, member: usize) {
        self.signal(member, Signal::CONT);
    }

    fn signal(&self, member: usize, signal: Signal) {
        let mut process = self.members[member].process();
        let process = process.as_mut().expect("the member was killed");
        if let Err(error) = process.signal(signal) {
            panic!(
                "signal {signal:?} to etcd: {error}; its log:\n{}",
                process.output()
            );
        }
    }

    /// Cuts a member off from the others, which clients still reach, as they do the member. No end
    /// of a connection learns of it.
    ///
    /// # Panics
    /// When the members are not [linked](Builder::linked), or do not know the member.
    pub async fn cut_off(&self, member: usize) {
        assert!(self.settings.is_linked, "the members have no links");
        let members = self.ctl(&["member", "list"]).await;
        let name = format!("m{member}");
        let id = members.lines().find_map(|line| {
            let mut parts = line.split(", ");
            let id = parts.next()?;
            parts.any(|part| part == name).then(|| id.to_owned())
        });
        let id = id.unwrap_or_else(|| panic!("no {name} among {members}"));
        self.links.cut_off(member, id);
    }

    /// Ends [`cut_off`](Self::cut_off).
    pub fn join(&self) {
        self.links.join();
    }

    /// SIGKILL, also to a stopped member. Its data are kept.
    pub fn kill(&self, member: usize) {
        if let Some(process) = self.members[member].process().take()
            && let Err(error) = process.kill_keeping_directory()
        {
            panic!("SIGKILL to etcd: {error}");
        }
    }

    /// Kills a member if it still runs, and starts it again with its data. Does not wait.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn begin_restart(&self, member: usize) {
        self.kill(member);
        let launched = self.launch(member);
        launched.unwrap_or_else(|error| panic!("etcd: {error}"));
    }

    /// The same, and waits until it serves requests.
    ///
    /// # Panics
    /// When it does not within 30 s, with its log.
    pub async fn restart(&self, member: usize) {
        self.begin_restart(member);
        let ready = self.members[member].ready().await;
        ready.unwrap_or_else(|log| panic!("etcd did not start again:\n{log}"));
    }

    /// Writes a snapshot of the data.
    ///
    /// # Panics
    /// When etcd refuses it.
    pub async fn save(&self, file: &Path) {
        let host = format!("127.0.0.1:{}", self.members[0].port);
        let file = file.display().to_string();
        let saved = self.ctl_at(&host, &["snapshot", "save", &file]).await;
        saved.unwrap_or_else(|error| panic!("snapshot: {error}"));
    }

    /// Replaces the data of a cluster of one member by a snapshot.
    ///
    /// # Panics
    /// When etcd does not start with it.
    pub async fn restore(&self, file: &Path) {
        self.kill(0);
        let member = &self.members[0];
        let data = member.directory.directory().join("data");
        fs::remove_dir_all(&data).unwrap_or_else(|error| panic!("{}: {error}", data.display()));
        let data = format!("--data-dir={}", data.display());
        let peers = format!("--initial-cluster={}", self.peers());
        let peer = format!(
            "--initial-advertise-peer-urls=http://127.0.0.1:{}",
            member.peer_link
        );
        let file = file.display().to_string();
        self.ctl(&[
            "snapshot",
            "restore",
            &file,
            "--name=m0",
            &data,
            &peers,
            &peer,
        ])
        .await;
        self.restart(0).await;
    }

    fn peers(&self) -> String {
        let peers = self.members.iter().enumerate();
        let peers: Vec<_> = peers
            .map(|(index, it)| format!("m{index}=http://127.0.0.1:{}", it.peer_link))
            .collect();
        peers.join(",")
    }

    fn launch(&self, index: usize) -> io::Result<()> {
        let member = &self.members[index];
        let directory = member.directory.directory();
        let scheme = if self.settings.certificates.is_some() {
            "https"
        } else {
            "http"
        };
        let client = format!("{scheme}://127.0.0.1:{}", member.port);
        let peer = format!("http://127.0.0.1:{}", member.peer_port);
        let mut command = vec![
            "etcd".to_owned(),
            format!("--name=m{index}"),
            format!("--data-dir={}", directory.join("data").display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!(
                "--initial-advertise-peer-urls=http://127.0.0.1:{}",
                member.peer_link
            ),
            format!("--initial-cluster={}", self.peers()),
            "--heartbeat-interval=50".to_owned(),
            format!("--election-timeout={ELECTION}"),
            // The system still writes the data of a process that is killed.
            "--unsafe-no-fsync".to_owned(),
        ];
        if self.settings.certificates.is_some() {
            command.push("--client-cert-auth".to_owned());
            for (flag, file) in [
                ("trusted-ca-file", "ca.pem"),
                ("cert-file", "server.pem"),
                ("key-file", "server.key"),
            ] {
                command.push(format!("--{flag}={}", directory.join(file).display()));
            }
        }
        if let Some(seconds) = self.settings.signed_for {
            let secret = directory.join("secret");
            fs::write(&secret, "the same for all members")?;
            command.push(format!(
                "--auth-token=jwt,priv-key={},sign-method=HS256,ttl={seconds}s",
                secret.display()
            ));
        }
        command.extend(self.settings.flags.iter().cloned());
        let process = Supervised::spawn(directory, command.iter().map(String::as_str))?;
        *member.process() = Some(process);
        Ok(())
    }
}
