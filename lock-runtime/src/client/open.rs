//! From a URL to the store that it names, which connects.

use std::sync::Arc;
#[cfg(feature = "redis")]
use std::time::Duration;

#[cfg(feature = "records")]
use super::scheme;
use super::{LockClientBuilder, scheme::Scheme};
#[cfg(feature = "records")]
use crate::error::LockErrorKind;
#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
use crate::store::Records;
#[cfg(feature = "etcd")]
use crate::store::etcd::EtcdRecords;
#[cfg(feature = "postgres")]
use crate::store::postgres::PostgresRecords;
#[cfg(feature = "zookeeper")]
use crate::store::zookeeper::ZooKeeperRecords;
#[cfg(feature = "records")]
use crate::store::{RecordStore, namespace::check_namespace, remote::cannot_keep_locks};
use crate::{
    error::LockError,
    store::{MemoryStore, Store, remote::Connecting},
};
#[cfg(feature = "redis")]
use crate::{
    observe::text::Short,
    request::spec::LockSpec,
    store::redis::{RedisStore, topology::redlock},
};

/// The shortest life of a fencing token with several servers, where tokens follow the clocks of the
/// clients as well, which may be a minute ahead of those of the servers.
#[cfg(feature = "redis")]
const SHORTEST_LIFE_OF_SEVERAL: Duration = Duration::from_secs(300);

/// A store, and the part of it that connects.
pub(super) struct Opened {
    pub(super) store: Arc<dyn Store>,
    pub(super) servers: Arc<dyn Connecting>,
}

impl Opened {
    fn new<S: Store + Connecting>(store: S) -> Self {
        let store = Arc::new(store);
        Self {
            store: store.clone(),
            servers: store,
        }
    }
}

impl LockClientBuilder {
    /// Opens the store at `url`, with the settings of the builder.
    ///
    /// # Errors
    /// Those that need no server.
    pub(super) fn open(&mut self, url: &str) -> Result<Opened, LockError> {
        self.check()?;
        #[cfg(feature = "records")]
        if let Some(opened) = self.open_custom(url)? {
            return Ok(opened);
        }
        match Scheme::of(url)? {
            Scheme::Memory => self.open_in_memory(),
            #[cfg(feature = "postgres")]
            Scheme::Postgres => {
                self.refuse_replicas(
                    "PostgreSQL waits for its standbys by its own setting, synchronous_standby_names",
                )?;
                let records = PostgresRecords::open(url, &self.namespace, &self.postgres)?;
                Ok(self.over(records))
            }
            #[cfg(feature = "etcd")]
            Scheme::Etcd => {
                self.refuse_replicas("each change of etcd is on a majority of its members")?;
                let records = EtcdRecords::open(url, &self.namespace, &self.etcd)?;
                Ok(self.over(records))
            }
            #[cfg(feature = "zookeeper")]
            Scheme::ZooKeeper => {
                self.refuse_replicas("each change of ZooKeeper is on a majority of its servers")?;
                let records = ZooKeeperRecords::open(url, &self.namespace)?;
                Ok(self.over(records))
            }
            #[cfg(feature = "redis")]
            Scheme::Redlock => {
                let longest_lease = self.check_redlock()?;
                let servers = redlock::open(url, &self.namespace, &self.redis)?;
                Ok(Opened {
                    store: Arc::new(servers.store(longest_lease)?),
                    servers: Arc::new(servers),
                })
            }
            #[cfg(feature = "redis")]
            Scheme::Redis => {
                let store = RedisStore::open(url, &self.namespace, &self.redis)?;
                Ok(Opened::new(store))
            }
            #[allow(unreachable_patterns, reason = "where all stores are compiled in")]
            scheme => Err(scheme.is_not_compiled_in()),
        }
    }

    /// Checks the settings for several independent servers, and returns the longest lease.
    #[cfg(feature = "redis")]
    fn check_redlock(&mut self) -> Result<Duration, LockError> {
        self.refuse_replicas("servers of a quorum are not replicas of each other")?;
        if self
            .fences_kept_for
            .is_some_and(|time| time < SHORTEST_LIFE_OF_SEVERAL)
        {
            let message =
                "`keep_fences_for`: with several servers it must be from five minutes to a day";
            return Err(LockError::of_settings(&["keep_fences_for"], message));
        }
        let longest_lease = self.redis.longest_lease_or_default();
        let open = LockSpec::exclusive().lease(longest_lease.min(LockSpec::DEFAULT_LEASE));
        self.defaults = self.defaults.clone().or(&open);
        // Report a bad default now rather than at the first request.
        let lease = self.defaults.terms(&LockSpec::exclusive())?.lease;
        if lease > longest_lease {
            let message = format!(
                "the default lease of {} is longer than the `longest_lease` of {}; set one of them",
                Short(lease),
                Short(longest_lease)
            );
            return Err(LockError::of_settings(&["lease", "longest_lease"], message));
        }
        Ok(longest_lease)
    }

    /// Refuses a setting of Redis that would have no effect, for this reason.
    pub(super) fn refuse_replicas(&self, reason: &str) -> Result<(), LockError> {
        #[cfg(feature = "redis")]
        self.redis.refuse_replicas(reason)?;
        #[cfg(not(feature = "redis"))]
        let _ = reason;
        Ok(())
    }

    /// Creates a store in this process.
    pub(super) fn open_in_memory(&self) -> Result<Opened, LockError> {
        self.refuse_replicas("a store in this process has none")?;
        Ok(Opened::new(MemoryStore::new()))
    }

    /// Opens the store at a URL whose scheme the application has added.
    #[cfg(feature = "records")]
    fn open_custom(&self, url: &str) -> Result<Option<Opened>, LockError> {
        let Some(open) = self.schemes.of(url) else {
            return Ok(None);
        };
        check_namespace(&self.namespace)?;
        if let Some(variable) = self.password_file {
            let message = format!(
                "{variable}: it has no effect, as the application opens URLs of the scheme {}",
                scheme::parts(url).0
            );
            return Err(LockError::new(LockErrorKind::InvalidSpec, message));
        }
        self.refuse_replicas("the client does not pass it on to a custom store")?;
        let store = open(url, &self.namespace);
        let store = store.map_err(|error| cannot_keep_locks("in this database", error))?;
        Ok(Some(Opened::new(self.set_up(store))))
    }

    /// A store over records that connect.
    #[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
    fn over<R: Records + Connecting>(&self, records: R) -> Opened {
        let records = Arc::new(records);
        Opened {
            store: Arc::new(self.set_up(RecordStore::over(records.clone()))),
            servers: records,
        }
    }

    /// Gives the store the settings of the builder.
    #[cfg(feature = "records")]
    fn set_up(&self, mut store: RecordStore) -> RecordStore {
        if self.confirm_grants {
            store = store.confirm_grants(true);
        }
        if let Some(after) = self.unavailable_after {
            store = store.unavailable_after(after);
        }
        if let Some(time) = self.fences_kept_for {
            store = store.keep_fences_for(time);
        }
        store
    }
}
