//! A stock in Redis.

use std::time::Duration;

use anyhow::Context;
use redis::{
    AsyncCommands, AsyncConnectionConfig, Client, IntoConnectionInfo, aio::MultiplexedConnection,
};

use super::{PATIENCE, lock_namespace};

/// The expiry of the stock, for runs that are killed.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// A stock in Redis, and the other keys of this run.
#[derive(Clone)]
pub(crate) struct RedisStock {
    connection: MultiplexedConnection,
    run: String,
}

impl RedisStock {
    /// Connects to a server that a lock client has already accepted.
    pub(super) async fn connect(url: &str, run: &str) -> anyhow::Result<Self> {
        let connect = async {
            let info = url.into_connection_info()?;
            let tcp = info.tcp_settings().clone().set_nodelay(true);
            let config = AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
            let client = Client::open(info.set_tcp_settings(tcp))?;
            client
                .get_multiplexed_async_connection_with_config(&config)
                .await
        };
        let connection = connect.await.context("cannot keep the stock in Redis")?;
        Ok(Self {
            connection,
            run: run.to_owned(),
        })
    }

    fn key(&self, item: &str) -> String {
        format!("{}:stock:{item}", self.run)
    }

    pub(super) async fn left(&self, item: &str) -> anyhow::Result<Option<u64>> {
        Ok(self.connection.clone().get(self.key(item)).await?)
    }

    pub(super) async fn write(&self, item: &str, left: u64) -> anyhow::Result<()> {
        let (mut connection, seconds) = (self.connection.clone(), FORGOTTEN_AFTER.as_secs());
        Ok(connection.set_ex(self.key(item), left, seconds).await?)
    }

    /// Counts the leftover keys of this run's locks, without fence counters. Those outlive the
    /// locks by design, for a day, so that fencing tokens keep growing.
    pub(super) async fn leftover_locks(&self) -> anyhow::Result<u64> {
        let names = self.lock_keys().await?;
        Ok(names.iter().filter(|name| !is_fence(name)).count() as u64)
    }

    /// Deletes the item and the fence counters.
    pub(super) async fn clear(&self, item: &str) -> anyhow::Result<()> {
        let mut names = self.lock_keys().await?;
        names.retain(|name| is_fence(name));
        names.push(self.key(item));
        Ok(self.connection.clone().del(names).await?)
    }

    async fn lock_keys(&self) -> redis::RedisResult<Vec<String>> {
        let mut connection = self.connection.clone();
        // The keys that belong to a lock contain its name, in braces or after a prefix.
        let pattern = format!("*{}:*", lock_namespace(&self.run));
        let mut found = connection.scan_match::<_, String>(pattern).await?;
        let mut names = Vec::new();
        while let Some(name) = found.next_item().await {
            names.push(name?);
        }
        Ok(names)
    }
}

fn is_fence(name: &str) -> bool {
    name.starts_with("f:") || (name.starts_with('{') && name.ends_with(":f"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fence_counters_are_no_leftovers() {
        for (name, fence) in [
            ("{run-lock:stock:sneaker}:f", true),
            ("f:run-lock:{stock}", true),
            ("run-lock:stock:sneaker", false),
            ("{run-lock:stock:sneaker}:q", false),
            ("run-lock:f", false),
        ] {
            assert_eq!(is_fence(name), fence, "{name}");
        }
    }
}
