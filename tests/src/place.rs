//! Places for a test's locks: in this process, on a Redis server or cluster, in PostgreSQL, in
//! etcd, or in ZooKeeper.
//! `on_every_store!` runs one test body on all of them.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use lock_runtime::{
    EtcdOptions, LockClient, LockClientBuilder, LockError, LockErrorKind, LockRequest, LockSpec,
    PostgresOptions,
    store::{
        MemoryStore, QuorumMember, QuorumStore, Store, etcd::EtcdRecords,
        postgres::PostgresRecords, redis::RedisStore, zookeeper::ZooKeeperRecords,
    },
};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    RedisCluster, RedisServer, shared_cluster, shared_etcd, shared_postgres, shared_server,
    shared_zookeeper, unique,
};

/// Longer than any operation that does not hang.
pub const LONG: Duration = Duration::from_secs(30);
/// The time after which a test counts as hanging, on however busy a machine.
pub const HANGS: Duration = Duration::from_secs(300);

/// Returns how often, or for how many times as long, a storm is to run.
pub fn times_as_long() -> usize {
    let times = std::env::var("LOCK_TESTS_STORM").ok();
    times.and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Measures time, less the time in which tasks of this machine waited for a processor.
#[derive(Debug)]
pub struct Stopwatch {
    began: Instant,
    waited: Duration,
}

impl Stopwatch {
    /// Starts to measure.
    pub fn start() -> Self {
        Self {
            began: Instant::now(),
            waited: waited(),
        }
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        // Read first, so that it covers no time that is not measured.
        let waited = waited().saturating_sub(self.waited);
        self.began.elapsed().saturating_sub(waited)
    }
}

/// The time in which some task of this machine waited for a processor. Zero where the kernel does
/// not measure it.
fn waited() -> Duration {
    let pressure = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let some = pressure.lines().find(|line| line.starts_with("some "));
    let total = some.and_then(|some| some.split_once("total=")?.1.parse().ok());
    Duration::from_micros(total.unwrap_or_default())
}

/// Makes a test of each function, which takes a [`Place`], on every store; those after `with
/// permits:` on every store that has permits. The clock is paused where the stores are in memory.
#[macro_export]
macro_rules! on_every_store {
    ($($name:ident),* $(,)? $(; with permits: $($counted:ident),+ $(,)?)?) => {
        mod in_memory {
            $crate::on_every_store!(@ tokio::test(start_paused = true), $crate::place::Place::memory(), $($name)* $($($counted)+)?);
        }
        mod by_majority {
            $crate::on_every_store!(@ tokio::test(start_paused = true), $crate::place::Place::majority(), $($name)*);
        }
        mod on_redis {
            $crate::on_every_store!(@ tokio::test, $crate::place::Place::redis().await, $($name)* $($($counted)+)?);
        }
        mod on_postgres {
            $crate::on_every_store!(@ tokio::test, $crate::place::Place::postgres().await, $($name)* $($($counted)+)?);
        }
        mod on_etcd {
            $crate::on_every_store!(@ tokio::test, $crate::place::Place::etcd().await, $($name)* $($($counted)+)?);
        }
        mod on_zookeeper {
            $crate::on_every_store!(@ tokio::test, $crate::place::Place::zookeeper().await, $($name)* $($($counted)+)?);
        }
        mod on_a_cluster {
            $crate::on_every_store!(@ tokio::test, $crate::place::Place::cluster().await, $($name)* $($($counted)+)?);
        }
    };
    (@ $test:meta, $place:expr, $($name:ident)*) => {$(
        #[$test]
        async fn $name() {
            $crate::place::in_time(super::$name($place)).await;
        }
    )*};
}
pub use on_every_store;

/// One set of locks, shared by any number of clients.
#[derive(Clone, Debug)]
pub enum Place {
    /// A store of this process.
    Memory(Arc<MemoryStore>),
    /// Several stores, with agreement by majority.
    Majority([Arc<MemoryStore>; 5]),
    /// A namespace of a server of Redis, or of a cluster.
    Redis {
        /// Its URL.
        url: String,
        /// The namespace.
        namespace: String,
    },
    /// A namespace of PostgreSQL.
    Postgres {
        /// Its URL.
        url: String,
        /// The namespace.
        namespace: String,
    },
    /// A namespace of etcd.
    Etcd {
        /// Its URL.
        url: String,
        /// The namespace.
        namespace: String,
    },
    /// A namespace of ZooKeeper.
    ZooKeeper {
        /// Its URL.
        url: String,
        /// The namespace.
        namespace: String,
    },
}

impl Place {
    /// A new store of this process.
    pub fn memory() -> Self {
        Self::Memory(Arc::default())
    }

    /// Five new stores of this process.
    pub fn majority() -> Self {
        Self::Majority(Default::default())
    }

    /// A separate namespace on the shared server.
    pub async fn redis() -> Self {
        Self::at(shared_server().await.url())
    }

    /// A separate namespace on the shared PostgreSQL server.
    pub async fn postgres() -> Self {
        Self::Postgres {
            url: shared_postgres().await.url(),
            namespace: unique("ns"),
        }
    }

    /// A separate namespace on the shared member of etcd.
    pub async fn etcd() -> Self {
        Self::Etcd {
            url: shared_etcd().await.url(),
            namespace: unique("ns"),
        }
    }

    /// A separate namespace on the shared server of ZooKeeper.
    pub async fn zookeeper() -> Self {
        Self::ZooKeeper {
            url: shared_zookeeper().await.url(),
            namespace: unique("ns"),
        }
    }

    /// A separate namespace on the shared cluster.
    pub async fn cluster() -> Self {
        Self::at(cluster_url(shared_cluster().await))
    }

    /// A separate namespace behind a URL.
    pub fn at(url: String) -> Self {
        Self::Redis {
            url,
            namespace: unique("ns"),
        }
    }

    /// A new client: to the store, another process.
    pub async fn client(&self) -> LockClient {
        self.client_of(LockClient::builder()).await
    }

    /// A new client with these settings.
    pub async fn client_of(&self, builder: LockClientBuilder) -> LockClient {
        match self {
            Self::Memory(_) | Self::Majority(_) => {
                let client = builder.build_with_store(self.store().await);
                client.expect("a client with settings that the store honours")
            }
            Self::Redis { url, namespace }
            | Self::Postgres { url, namespace }
            | Self::Etcd { url, namespace }
            | Self::ZooKeeper { url, namespace } => builder
                .namespace(namespace)
                .connect(url)
                .await
                .expect("a client of a server that runs"),
        }
    }

    /// The store without a client, to act for a process that has ended.
    pub async fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Memory(store) => store.clone(),
            Self::Majority(stores) => {
                let servers = stores.iter().enumerate();
                let servers = servers.map(|(number, store)| {
                    (number.to_string(), store.clone() as Arc<dyn QuorumMember>)
                });
                Arc::new(
                    QuorumStore::new(servers, LockSpec::MAX_LEASE).expect("five are an odd number"),
                )
            }
            Self::Redis { url, namespace } => Arc::new(
                RedisStore::connect(url, namespace)
                    .await
                    .expect("a server that runs"),
            ),
            Self::Postgres { url, namespace } => {
                let options = PostgresOptions::default();
                let records = PostgresRecords::connect(url, namespace, options).await;
                Arc::new(records.expect("a server that runs").into_store())
            }
            Self::Etcd { url, namespace } => {
                let records = EtcdRecords::connect(url, namespace, EtcdOptions::new()).await;
                Arc::new(records.expect("a server that runs").into_store())
            }
            Self::ZooKeeper { url, namespace } => {
                let records = ZooKeeperRecords::connect(url, namespace).await;
                Arc::new(records.expect("a server that runs").into_store())
            }
        }
    }

    /// A majority of stores cannot count permits.
    pub fn has_permits(&self) -> bool {
        !matches!(self, Self::Majority(_))
    }

    /// The time by which a lease may be over late, as the store does not know the time better.
    pub fn unsure(&self) -> Duration {
        match self {
            Self::Etcd { .. } | Self::ZooKeeper { .. } => Duration::from_millis(300),
            _ => Duration::ZERO,
        }
    }

    /// The namespace; empty in memory.
    pub fn namespace(&self) -> &str {
        match self {
            Self::Memory(_) | Self::Majority(_) => "",
            Self::Redis { namespace, .. }
            | Self::Postgres { namespace, .. }
            | Self::Etcd { namespace, .. }
            | Self::ZooKeeper { namespace, .. } => namespace,
        }
    }
}

/// The URL of several independent servers.
pub fn redlock_url(urls: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let urls: Vec<_> = urls
        .into_iter()
        .map(|url| url.as_ref().to_owned())
        .collect();
    format!("redlock:{}", urls.join(","))
}

/// The URL of a cluster that a node at one of these URLs, which differ in their address only,
/// belongs to.
pub fn cluster_url_of(nodes: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let mut nodes = nodes.into_iter();
    let first = nodes.next().expect("a node");
    let mut url = first.as_ref().replacen("://", "+cluster://", 1);
    for node in nodes {
        let node = node.as_ref();
        let host = node.rsplit(['@', '/']).next().unwrap_or(node);
        url.push(',');
        url.push_str(host);
    }
    url
}

/// A URL that names all nodes of a cluster.
pub fn cluster_url(cluster: &RedisCluster) -> String {
    let nodes: Vec<_> = cluster
        .nodes()
        .iter()
        .map(|node| node.addr().to_string())
        .collect();
    format!("redis+cluster://{}", nodes.join(","))
}

/// Fails a test that hangs.
pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout(HANGS, future).await.expect("the test hangs")
}

/// Polls a future once, which must then wait, and returns it.
pub async fn begun<F: Future>(future: F) -> Pin<Box<F>>
where
    F::Output: fmt::Debug,
{
    let mut future = Box::pin(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Pending => Poll::Ready(()),
        Poll::Ready(output) => panic!("it did not wait: {output:?}"),
    })
    .await;
    future
}

/// Checks a condition until it holds; for changes without a notification.
pub async fn eventually<Fut: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> Fut) {
    let deadline = Instant::now() + HANGS / 2;
    while !is_so().await {
        assert!(
            Instant::now() < deadline,
            "not within {:?}: {what}",
            HANGS / 2
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// Requests a lock that is held for a short wait, or for a longer one where the store has not
/// answered within it, and returns the error.
pub async fn in_vain(request: LockRequest) -> LockError {
    let mut wait = Duration::from_millis(50);
    loop {
        let error = request
            .clone()
            .wait(wait)
            .acquire()
            .await
            .expect_err("a lock that is held");
        if error.kind() != LockErrorKind::Unavailable || wait > LONG {
            return error;
        }
        wait *= 4;
    }
}

/// Waits until none of the keys has a holder.
pub async fn all_free(client: &LockClient, keys: &[&str]) {
    for key in keys {
        eventually(&format!("{key} is free"), || async {
            let seen = client.inspect(*key).await.expect("a store that answers");
            seen.holders.is_empty()
        })
        .await;
    }
}

/// Waits until no lock and no wait queue is left in a namespace of the server; fences may remain.
pub async fn no_key_left(server: &RedisServer, namespace: &str) {
    for pattern in [
        format!("{namespace}:*"),
        format!("{{{namespace}:*}}:q"),
        format!("q:{namespace}:*"),
    ] {
        let what = format!("no {pattern} is left");
        eventually(&what, || async { server.keys(&pattern).await.is_empty() }).await;
    }
}
