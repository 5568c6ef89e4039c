//! The servers of a storm, which can fail.

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{EtcdCluster, PostgresServer, Proxy, RedisServer, ZooKeeperEnsemble};

/// A server that keeps the acknowledged changes when it is killed.
pub(super) enum Server {
    Redis(RedisServer),
    Postgres(PostgresServer),
    /// One member.
    Etcd(EtcdCluster),
    /// One server.
    ZooKeeper(ZooKeeperEnsemble),
}

/// A connection that shows whether a server replies, and how soon. The processes of the others get
/// less of a busy machine the more they have to do, so a call must be like those of the storm.
pub(super) enum Connection {
    Redis(redis::aio::MultiplexedConnection),
    Locks(LockClient),
}

impl Server {
    /// Starts servers of Redis. A restart from the log loses no acknowledged change.
    pub(super) async fn redis(count: usize) -> Vec<Self> {
        let builder = RedisServer::builder()
            .arg("--appendonly", "yes")
            .arg("--appendfsync", "always");
        let servers = builder
            .arg("--auto-aof-rewrite-percentage", "0")
            .start_all(count)
            .await;
        servers.into_iter().map(Self::Redis).collect()
    }

    /// Starts PostgreSQL. A restart loses the latest commits that are not durable, as many as
    /// possible.
    pub(super) async fn postgres() -> Self {
        let builder = PostgresServer::builder().in_memory();
        Self::Postgres(builder.setting("wal_writer_delay", "10s").start().await)
    }

    pub(super) async fn etcd() -> Self {
        Self::Etcd(EtcdCluster::start().await)
    }

    pub(super) async fn zookeeper() -> Self {
        Self::ZooKeeper(ZooKeeperEnsemble::start().await)
    }

    /// The URL of the server itself.
    pub(super) fn url(&self) -> String {
        match self {
            Self::Redis(server) => server.url(),
            Self::Postgres(server) => server.url(),
            Self::Etcd(cluster) => cluster.url(),
            Self::ZooKeeper(ensemble) => ensemble.url(),
        }
    }

    pub(super) async fn proxy(&self) -> Proxy {
        Proxy::to_url(&self.url()).await
    }

    pub(super) fn stop(&self) {
        match self {
            Self::Redis(server) => server.stop(),
            Self::Postgres(server) => server.stop(),
            Self::Etcd(cluster) => cluster.stop(0),
            Self::ZooKeeper(ensemble) => ensemble.stop(0),
        }
    }

    pub(super) fn resume(&self) {
        match self {
            Self::Redis(server) => server.resume(),
            Self::Postgres(server) => server.resume(),
            Self::Etcd(cluster) => cluster.resume(0),
            Self::ZooKeeper(ensemble) => ensemble.resume(0),
        }
    }

    pub(super) async fn restart_from_log(&self) {
        match self {
            Self::Redis(server) => server.restart_from_log().await,
            Self::Postgres(server) => server.restart().await,
            Self::Etcd(cluster) => cluster.restart(0).await,
            Self::ZooKeeper(ensemble) => ensemble.restart(0).await,
        }
    }

    /// Connects to it without a proxy, if it replies.
    pub(super) async fn connection(&self) -> Option<Connection> {
        if let Self::Redis(server) = self {
            return Some(Connection::Redis(server.connection().await.ok()?));
        }
        let builder = LockClient::builder().namespace("watch");
        Some(Connection::Locks(builder.connect(&self.url()).await.ok()?))
    }
}

impl Connection {
    /// Returns whether the server has replied to a call, or to two: it has granted a free lock, and
    /// released it.
    pub(super) async fn replies(&mut self) -> bool {
        match self {
            Self::Redis(connection) => redis::cmd("PING").exec_async(connection).await.is_ok(),
            Self::Locks(locks) => match locks.exclusive("watch").no_wait().acquire().await {
                Ok(guard) => guard.release().await.is_ok(),
                // A restart may have lost the latest release.
                Err(error) => error.kind() == LockErrorKind::Contended,
            },
        }
    }
}
