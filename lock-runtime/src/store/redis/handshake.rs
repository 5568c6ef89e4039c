//! The questions that a server is asked once, on connect: is it one that can keep locks?

use redis::Value;
use tokio::time::Instant;

use super::{clock::ServerClock, connection::Connection, error, reply::unexpected};
use crate::store::{StoreError, StoreErrorKind};

/// Checks the server, and reads its clock.
pub(super) async fn greet(connection: &Connection) -> Result<ServerClock, StoreError> {
    match connection.command(&redis::cmd("INFO")).await {
        Ok(value) => check(&text(value)?)?,
        Err(error) if error.kind() == StoreErrorKind::Forbidden => {
            tracing::warn!(
                "the server forbids INFO: whether it is a primary that does not evict locks was not checked"
            );
        }
        Err(error) => return Err(error),
    }
    match connection.command(&redis::cmd("TIME")).await? {
        Value::Array(time) => {
            let received = Instant::now();
            let mut parts = time.into_iter().map(|part| text(part)?.parse::<u64>().map_err(|_| unexpected()));
            match (parts.next(), parts.next()) {
                (Some(seconds), Some(micros)) => Ok(ServerClock::new(seconds? * 1_000_000 + micros?, received)),
                _ => Err(unexpected()),
            }
        }
        _ => Err(unexpected()),
    }
}

fn text(value: Value) -> Result<String, StoreError> {
    redis::from_redis_value(value).map_err(|_| unexpected())
}

/// The version in the answer to INFO.
pub(super) fn version(info: &str) -> Option<&str> {
    field(info, "redis_version")
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn check(info: &str) -> Result<(), StoreError> {
    if let Some(version) = version(info)
        && version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major < 6)
    {
        return Err(error::too_old(Some(version)));
    }
    if field(info, "redis_mode") == Some("sentinel") {
        let message = "the server is a Sentinel, which keeps no locks; connect to the primary that it watches";
        return Err(StoreError::new(StoreErrorKind::NotRedis, message));
    }
    if field(info, "role").is_some_and(|role| matches!(role, "slave" | "replica")) {
        return Err(error::read_only());
    }
    if let Some(policy) = field(info, "maxmemory_policy")
        && (policy.starts_with("volatile-") || policy.starts_with("allkeys-"))
    {
        tracing::warn!(policy, "the server may evict a lock while it is held; set maxmemory-policy to noeviction");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_cannot_keep_locks_is_refused() {
        let kind = |info: &str| check(info).map_err(|error| error.kind());
        assert_eq!(kind("# Server\r\nredis_version:7.0.15\r\nrole:master\r\n"), Ok(()));
        assert_eq!(kind("role:slave\r\n"), Err(StoreErrorKind::ReadOnly));
        assert_eq!(kind("redis_version:7.0.15\r\nredis_mode:sentinel\r\n"), Err(StoreErrorKind::NotRedis));
        let error = check("redis_version:5.0.14\r\nrole:master\r\n").unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::NotRedis);
        assert!(error.to_string().contains("5.0.14"), "{error}");
    }
}
