//! The stock: numbers without any synchronization of their own. That is left to the lock.

#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod file;
#[cfg(feature = "postgres")]
mod postgres;
mod redis;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
use futures_util::TryStreamExt as _;
#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
use lock_runtime::LockClient;

#[cfg(any(feature = "etcd", feature = "zookeeper"))]
use self::file::FileStock;
#[cfg(feature = "postgres")]
pub(crate) use self::postgres::PostgresStock;
pub(crate) use self::redis::RedisStock;
use crate::options::{Options, Store};

/// The time limit of a store.
const PATIENCE: Duration = Duration::from_secs(5);

/// The storage of the numbers.
#[derive(Clone)]
pub(crate) enum Stock {
    /// The mutex is held for one read or one write, never for both, so it does not protect a
    /// sale.
    Memory(Arc<Mutex<HashMap<String, u64>>>),
    Redis(RedisStock),
    #[cfg(feature = "postgres")]
    Postgres(PostgresStock),
    #[cfg(any(feature = "etcd", feature = "zookeeper"))]
    File(FileStock),
}

/// Returns the namespace of this run's locks.
pub(crate) fn lock_namespace(run: &str) -> String {
    format!("{run}-lock")
}

/// Counts the locks of this run that are held or that requests wait for.
#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
async fn locks_in_use(url: &str, run: &str) -> anyhow::Result<u64> {
    let locks = LockClient::builder().namespace(lock_namespace(run));
    let locks = locks.connect(url).await?;
    // It holds no lock. A shutdown would write its name in the background, after the clean-up.
    let listed: Vec<_> = locks.list("").try_collect().await?;
    let in_use = listed
        .iter()
        .filter(|lock| !lock.state.holders.is_empty() || !lock.state.waiters.is_empty());
    Ok(in_use.count() as u64)
}

impl Stock {
    /// Connects to the store of the options, which a lock client has already accepted.
    pub(crate) async fn connect(options: &Options, run: &str) -> anyhow::Result<Self> {
        Ok(match (options.store()?, options.url()) {
            (Store::Redis, Some(url)) => Self::Redis(RedisStock::connect(url, run).await?),
            #[cfg(feature = "postgres")]
            (Store::Postgres, Some(url)) => Self::Postgres(PostgresStock::new(url, run)?),
            #[cfg(any(feature = "etcd", feature = "zookeeper"))]
            (Store::Etcd | Store::ZooKeeper, Some(url)) => Self::File(FileStock::new(url, run)),
            _ => Self::Memory(Arc::default()),
        })
    }

    /// Returns the number of pieces left; `None` for an unknown item.
    pub(crate) async fn left(&self, item: &str) -> anyhow::Result<Option<u64>> {
        match self {
            Self::Memory(items) => Ok(items
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get(item)
                .copied()),
            Self::Redis(redis) => redis.left(item).await,
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => postgres.left(item).await,
            #[cfg(any(feature = "etcd", feature = "zookeeper"))]
            Self::File(file) => file.left(item),
        }
    }

    /// Sets the number of pieces left.
    pub(crate) async fn write(&self, item: &str, left: u64) -> anyhow::Result<()> {
        match self {
            Self::Memory(items) => {
                items
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(item.to_owned(), left);
                Ok(())
            }
            Self::Redis(redis) => redis.write(item, left).await,
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => postgres.write(item, left).await,
            #[cfg(any(feature = "etcd", feature = "zookeeper"))]
            Self::File(file) => file.write(item, left),
        }
    }

    /// Puts the first pieces on sale.
    pub(crate) async fn fill(&self, item: &str, pieces: u64) -> anyhow::Result<()> {
        #[cfg(feature = "postgres")]
        if let Self::Postgres(postgres) = self {
            postgres.create().await?;
        }
        #[cfg(any(feature = "etcd", feature = "zookeeper"))]
        if let Self::File(file) = self {
            file.create()?;
        }
        self.write(item, pieces).await
    }

    /// Counts this run's locks that were not released. Those in memory are known to their
    /// process.
    pub(crate) async fn leftover_locks(&self) -> anyhow::Result<u64> {
        match self {
            Self::Memory(_) => Ok(0),
            Self::Redis(redis) => redis.leftover_locks().await,
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => postgres.leftover_locks().await,
            #[cfg(any(feature = "etcd", feature = "zookeeper"))]
            Self::File(file) => locks_in_use(&file.url, &file.run).await,
        }
    }

    /// Deletes the item, and the records of locks that were released, which later runs do not
    /// need, because their names differ. Those in etcd and ZooKeeper are removed in a day.
    pub(crate) async fn clear(&self, item: &str) -> anyhow::Result<()> {
        match self {
            Self::Memory(_) => Ok(()),
            Self::Redis(redis) => redis.clear(item).await,
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => postgres.clear().await,
            #[cfg(any(feature = "etcd", feature = "zookeeper"))]
            Self::File(file) => file.clear(),
        }
    }
}
