//! A private server for the time of one run.

#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
use anyhow::Context;
#[cfg(feature = "postgres")]
use lock_runtime::PostgresOptions;
#[cfg(feature = "etcd")]
use lock_tests::EtcdCluster;
#[cfg(feature = "postgres")]
use lock_tests::PostgresServer;
#[cfg(feature = "zookeeper")]
use lock_tests::ZooKeeperEnsemble;

use crate::options::Options;
#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
use crate::options::Store;
#[cfg(feature = "postgres")]
use crate::stock::PostgresStock;

/// A server that ends with this value, and also when this process is killed.
pub(crate) enum PrivateServer {
    #[cfg(feature = "postgres")]
    Postgres { _server: PostgresServer },
    #[cfg(feature = "etcd")]
    Etcd { _server: EtcdCluster },
    #[cfg(feature = "zookeeper")]
    ZooKeeper { _server: ZooKeeperEnsemble },
}

/// Starts a server if the options ask for a store that has one, without a URL, and sets the URL.
#[cfg_attr(
    not(any(feature = "postgres", feature = "etcd", feature = "zookeeper")),
    expect(
        clippy::match_single_binding,
        reason = "for the stores that are compiled in"
    )
)]
pub(crate) async fn start(options: &mut Options) -> anyhow::Result<Option<PrivateServer>> {
    if options.url().is_some() {
        return Ok(None);
    }
    Ok(match options.store()? {
        #[cfg(feature = "postgres")]
        Store::Postgres => {
            // With the one that listens.
            let locks = PostgresOptions::DEFAULT_CONNECTIONS.get() as u64 + 1;
            let of_process = locks + PostgresStock::CONNECTIONS as u64;
            // This process has one client before the sale, and one after it.
            let connections = (options.processes + 2) * of_process;
            let server = PostgresServer::builder()
                .in_memory()
                .setting("max_connections", &connections.to_string());
            let server = server.try_start().await;
            let server = server.context("cannot start a PostgreSQL server")?;
            options.postgres = Some(server.url());
            Some(PrivateServer::Postgres { _server: server })
        }
        #[cfg(feature = "etcd")]
        Store::Etcd => {
            let server = EtcdCluster::builder().try_start().await;
            let server = server.context("cannot start etcd")?;
            options.etcd = Some(server.url());
            Some(PrivateServer::Etcd { _server: server })
        }
        #[cfg(feature = "zookeeper")]
        Store::ZooKeeper => {
            let server = ZooKeeperEnsemble::builder().try_start().await;
            let server = server.context("cannot start ZooKeeper")?;
            options.zookeeper = Some(server.url());
            Some(PrivateServer::ZooKeeper { _server: server })
        }
        _ => None,
    })
}
