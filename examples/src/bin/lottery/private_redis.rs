//! A private `redis-server` for the time of one run.

use std::{env, fs::DirBuilder, io, os::unix::fs::DirBuilderExt, process::Stdio, time::Duration};

use anyhow::{Context, bail};
use lock_examples::run_id;
use lock_runtime::LockClient;
use tokio::{
    process::{Child, ChildStdin, Command},
    time::{Instant, sleep},
};

/// Ends the server when its input is closed, even if this process is killed. The server removes
/// its socket itself.
const SUPERVISOR: &str = r#"
directory=$1
shift
redis-server "$@" </dev/null >/dev/null 2>&1 &
cat >/dev/null
kill "$!"
wait "$!"
rmdir -- "$directory"
"#;
const START: Duration = Duration::from_secs(10);

/// A server that listens on a socket in a directory of its own, and so on no port. Dropping it
/// ends the server.
#[derive(Debug)]
pub(crate) struct PrivateRedis {
    /// Dropped first: the supervisor then ends the server.
    _alive: ChildStdin,
    _supervisor: Child,
    url: String,
}

impl PrivateRedis {
    /// Starts a server; `None` if no `redis-server` is installed.
    ///
    /// # Errors
    /// If the server is installed but does not start.
    pub(crate) async fn start() -> anyhow::Result<Option<Self>> {
        match Command::new("redis-server")
            .arg("--version")
            .stdout(Stdio::null())
            .status()
            .await
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            status => status.context("cannot run redis-server")?,
        };
        // The supervisor removes the directory after the server has ended.
        let directory = env::temp_dir().join(run_id("lottery"));
        DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .context("cannot create a directory for the redis-server")?;
        let socket = directory.join("redis.sock");
        let mut supervisor = Command::new("sh")
            .args(["-c", SUPERVISOR, "supervisor"])
            .arg(&directory)
            .args([
                "--port",
                "0",
                "--save",
                "",
                "--appendonly",
                "no",
                "--unixsocket",
            ])
            .arg(&socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Ctrl-C in a terminal reaches a whole process group, but the supervisor must survive
            // it to clean up.
            .process_group(0)
            .spawn()
            .context("cannot start a redis-server")?;
        let Some(alive) = supervisor.stdin.take() else {
            bail!("the redis-server has no input")
        };
        let url = format!("unix://{}", socket.display());
        let server = Self {
            _alive: alive,
            _supervisor: supervisor,
            url,
        };
        server.ready().await?;
        Ok(Some(server))
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    async fn ready(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START;
        loop {
            match LockClient::connect(&self.url).await {
                Ok(client) => {
                    client.shutdown().await;
                    return Ok(());
                }
                Err(error) if Instant::now() > deadline => {
                    return Err(error).context("the redis-server does not start");
                }
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }
}
