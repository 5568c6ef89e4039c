//! The stock: numbers without any synchronization of their own. That is left to the lock.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use redis::{
    AsyncCommands, AsyncConnectionConfig, Client, IntoConnectionInfo, aio::MultiplexedConnection,
};

/// The expiry of the stock, for runs that are killed.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);
const PATIENCE: Duration = Duration::from_secs(5);

/// The storage of the numbers.
#[derive(Clone)]
pub(crate) enum Stock {
    /// The mutex is held for one read or one write, never for both, so it does not protect a
    /// sale.
    Memory(Arc<Mutex<HashMap<String, u64>>>),
    Redis(RedisStock),
}

/// A stock in Redis, and the other keys of this run.
#[derive(Clone)]
pub(crate) struct RedisStock {
    connection: MultiplexedConnection,
    run: String,
}

impl Stock {
    pub(crate) fn in_memory() -> Self {
        Self::Memory(Arc::default())
    }

    /// Returns the number of pieces left; `None` for an unknown item.
    pub(crate) async fn left(&self, item: &str) -> redis::RedisResult<Option<u64>> {
        match self {
            Self::Memory(items) => Ok(items
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get(item)
                .copied()),
            Self::Redis(redis) => redis.connection.clone().get(redis.key(item)).await,
        }
    }

    /// Sets the number of pieces left.
    pub(crate) async fn write(&self, item: &str, left: u64) -> redis::RedisResult<()> {
        match self {
            Self::Memory(items) => {
                items
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(item.to_owned(), left);
                Ok(())
            }
            Self::Redis(redis) => {
                redis
                    .connection
                    .clone()
                    .set_ex(redis.key(item), left, FORGOTTEN_AFTER.as_secs())
                    .await
            }
        }
    }
}

impl RedisStock {
    /// Connects to a server that a lock client has already accepted.
    pub(crate) async fn connect(url: &str, run: &str) -> anyhow::Result<Self> {
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

    /// Returns the namespace of this run's locks.
    pub(crate) fn lock_namespace(run: &str) -> String {
        format!("{run}-lock")
    }

    /// Counts the leftover keys of this run's locks, without fence counters. Those outlive the
    /// locks by design, for a day, so that fencing tokens keep growing.
    pub(crate) async fn leftover_locks(&self) -> redis::RedisResult<u64> {
        let names = self.lock_keys().await?;
        Ok(names.iter().filter(|name| !is_fence(name)).count() as u64)
    }

    /// Deletes the item, and the fence counters, which later runs do not need, because their
    /// names differ.
    pub(crate) async fn clear(&self, item: &str) -> redis::RedisResult<()> {
        let mut names = self.lock_keys().await?;
        names.retain(|name| is_fence(name));
        names.push(self.key(item));
        self.connection.clone().del(names).await
    }

    async fn lock_keys(&self) -> redis::RedisResult<Vec<String>> {
        let mut connection = self.connection.clone();
        // The keys that belong to a lock contain its name, in braces or after a prefix.
        let pattern = format!("*{}:*", Self::lock_namespace(&self.run));
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
