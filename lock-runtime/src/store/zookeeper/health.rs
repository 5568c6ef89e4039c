//! The health of the servers.

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::calls::Calls;
use crate::{
    observe::health::{Finding, Health, PATIENCE, ServerHealth, ServerRole, Severity},
    shell::time::Instant,
    store::StoreError,
};

impl Calls {
    /// Asks all servers at the same time, and reads the clock of the locks.
    pub(super) async fn health(&self) -> Health {
        let read = async {
            let read = timeout(PATIENCE, self.read(&[])).await;
            read.unwrap_or_else(|_| Err(StoreError::timed_out(PATIENCE)))
        };
        let servers = &self.ensemble.target().servers;
        let asked = join_all(servers.iter().map(|server| ask(server)));
        let (read, asked) = tokio::join!(read, asked);
        Health::of_members(read.map(drop), asked)
    }
}

/// Asks a server for its state by the command `srvr`, which servers allow by default.
async fn ask(name: &str) -> (ServerHealth, Vec<Finding>) {
    let mut server = ServerHealth::new(name);
    let sent = Instant::now();
    let reply = async {
        let mut stream = TcpStream::connect(name).await?;
        stream.write_all(b"srvr").await?;
        let mut reply = Vec::new();
        stream.take(4096).read_to_end(&mut reply).await?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&reply).into_owned())
    };
    let finding = |severity, code, message: String, remedy: &'static str| {
        vec![Finding::new(severity, code, message, remedy).about(name)]
    };
    let reply = match timeout(PATIENCE, reply).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(error)) => {
            let message = format!("the server does not answer: {error}");
            let remedy = "start the server, and check the network and its address";
            return (
                server,
                finding(Severity::Critical, "unreachable", message, remedy),
            );
        }
        Err(_) => {
            let message = format!("the server does not answer within {PATIENCE:?}");
            let remedy = "check whether it is stopped, and its disk";
            return (
                server,
                finding(Severity::Critical, "unreachable", message, remedy),
            );
        }
    };
    server.reachable = true;
    server.round_trip = Some(sent.elapsed());
    let field = |name: &str| {
        let line = reply.lines().find_map(|line| line.strip_prefix(name));
        line.map(|line| line.split([',', '-']).next().unwrap_or(line).trim())
    };
    server.version = field("Zookeeper version:").map(|version| format!("ZooKeeper {version}"));
    server.role = match field("Mode:") {
        Some("leader" | "standalone") => Some(ServerRole::Leader),
        Some("follower") => Some(ServerRole::Follower),
        Some("observer") => Some(ServerRole::Learner),
        _ => None,
    };
    server.grants_locks = server.role.is_some();
    if server.role.is_some() {
        return (server, Vec::new());
    }
    if reply.contains("not in the whitelist") {
        server.grants_locks = true;
        let message = "the server does not show its state".to_owned();
        let remedy = "add srvr to 4lw.commands.whitelist";
        return (
            server,
            finding(Severity::Notice, "unknown", message, remedy),
        );
    }
    let message = "the server follows no leader".to_owned();
    let remedy = "start a majority of the servers, and check the network between them";
    (
        server,
        finding(Severity::Critical, "no_leader", message, remedy),
    )
}
