//! Common code of the fixtures with several servers: requests to those that run, and waits until
//! they agree.

use std::{future::Future, time::Duration};

use redis::FromRedisValue;
use tokio::time::{Instant, sleep, timeout};

use crate::{RedisServer, redis_server::POLL};

/// Time limit for servers to agree. A failed election is repeated after several seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for the reply of a running server, so that one that hangs does not delay requests to
/// the others.
const ANSWER: Duration = Duration::from_secs(2);

/// User by which the servers of a set authenticate to each other, separate from those of the tests.
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

/// Whether a running server is a replica of the one at `port`, and has its data.
pub(crate) async fn follows(replica: &RedisServer, port: u16) -> bool {
    let info: String = ask(replica, &["INFO", "replication"])
        .await
        .unwrap_or_default();
    field(&info, "master_port") == Some(&port.to_string())
        && field(&info, "master_link_status") == Some("up")
}

/// Calls `look` until it returns a value.
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
