//! What the fixtures of several servers share: asking those that run, and waiting until they agree.

use std::{future::Future, time::Duration};

use redis::FromRedisValue;
use tokio::time::{Instant, sleep, timeout};

use crate::{RedisServer, redis_server::POLL};

/// How long servers may take to agree on something. An election that fails is held again after several seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// A server that runs answers within it, and whoever asks several does not wait for one that hangs.
const ANSWER: Duration = Duration::from_secs(2);

/// With what the servers of a set authenticate to each other: a user of their own beside those of the tests.
pub(crate) const NODE_USER: &str = "nodes";

/// The reply of a server, if it runs and gives one of that type.
pub(crate) async fn ask<T: FromRedisValue>(server: &RedisServer, command: &[&str]) -> Option<T> {
    if !server.is_running() {
        return None;
    }
    let reply = timeout(ANSWER, server.try_command(command))
        .await
        .ok()?
        .ok()?;
    redis::from_redis_value(reply).ok()
}

/// The value of `name` in a reply of INFO or CLUSTER INFO.
pub(crate) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim_end)
}

/// Whether a server that runs is a replica of the one at `port`, and has its data.
pub(crate) async fn follows(replica: &RedisServer, port: u16) -> bool {
    let info: String = ask(replica, &["INFO", "replication"])
        .await
        .unwrap_or_default();
    field(&info, "master_port") == Some(&port.to_string())
        && field(&info, "master_link_status") == Some("up")
}

/// Asks until there is an answer.
///
/// # Panics
/// When there is none within half a minute, with the logs of all servers.
pub(crate) async fn until<T, Fut: Future<Output = Option<T>>>(
    what: &str,
    servers: impl IntoIterator<Item = &RedisServer>,
    mut look: impl FnMut() -> Fut,
) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        if Instant::now() > deadline {
            let logs: Vec<_> = servers
                .into_iter()
                .map(|server| format!("{}:\n{}", server.port(), server.log()))
                .collect();
            panic!("not within {PATIENCE:?}: {what}\n{}", logs.join("\n"));
        }
        sleep(POLL).await;
    }
}
