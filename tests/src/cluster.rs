//! A Redis Cluster of three primaries with a replica each, all real processes on loopback.
//!
//! ```no_run
//! # async fn example() {
//! use lock_tests::RedisCluster;
//!
//! let cluster = RedisCluster::start().await;
//! let owner = cluster.owner_of("lock:stock").await;
//! let new = cluster.failover(owner).await;
//! assert_eq!(cluster.owner_of("lock:stock").await.port(), new.port());
//!
//! // A slot in migration: requests for a key that has moved are answered with ASK.
//! let [target, ..] = cluster.masters().await[..] else { unreachable!("there are three") };
//! let migration = cluster.begin_migration("lock:stock", target).await;
//! migration.move_key("lock:stock").await;
//! migration.finish().await;
//! # }
//! ```
//!
//! Every node is a [`RedisServer`], which can be stopped, killed and started again like any other.
//! It keeps its place in the cluster when it is killed.

mod builder;
mod migration;
mod view;

use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::OnceCell;

use self::view::View;
pub use self::{builder::Builder, migration::Migration};
use crate::{
    RedisServer,
    nodes::{ask, field, follows, until},
};

/// Cluster shared by all tests of this process that neither stop a part of it nor move its slots.
pub async fn shared_cluster() -> &'static RedisCluster {
    static SHARED: OnceCell<RedisCluster> = OnceCell::const_new();
    SHARED.get_or_init(RedisCluster::start).await
}

/// Six nodes; all are killed when it is dropped.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: [RedisServer; 6],
    tls: bool,
    /// The password that MIGRATE uses at the target node.
    password: Option<String>,
}

impl RedisCluster {
    /// Number of slots.
    pub const SLOTS: u16 = 16_384;
    /// Time without a reply after which the other nodes consider a node down.
    pub const NODE_TIMEOUT: Duration = Duration::from_millis(1200);

    /// A cluster with default settings, whose nodes agree that it is healthy.
    ///
    /// # Panics
    /// When they do not within half a minute, with the logs.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Settings for a cluster to be started.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// All nodes: the first three were the primaries at the start, each with the node three places
    /// later as its replica.
    pub fn nodes(&self) -> &[RedisServer; 6] {
        &self.nodes
    }

    /// The URLs of all nodes, as the default user.
    pub fn urls(&self) -> [String; 6] {
        self.nodes.each_ref().map(RedisServer::url)
    }

    /// The same for a user made by [`Builder::user`].
    pub fn urls_as(&self, user: &str, password: &str) -> [String; 6] {
        self.nodes
            .each_ref()
            .map(|node| node.url_as(user, password))
    }

    /// [`urls`](Self::urls) over TLS.
    pub fn tls_urls(&self) -> [String; 6] {
        self.nodes.each_ref().map(RedisServer::tls_url)
    }

    /// [`urls_as`](Self::urls_as) over TLS.
    pub fn tls_urls_as(&self, user: &str, password: &str) -> [String; 6] {
        self.nodes
            .each_ref()
            .map(|node| node.tls_url_as(user, password))
    }

    /// The certificate, in PEM, of the authority of all nodes.
    pub fn ca_pem(&self) -> &str {
        self.nodes[0].ca_pem()
    }

    /// The slot of a key.
    pub async fn slot_of(&self, key: &str) -> u16 {
        until("a node computes a slot", &self.nodes, async || {
            for node in &self.nodes {
                if let Some(slot) = ask(node, &["CLUSTER", "KEYSLOT", key]).await {
                    return Some(slot);
                }
            }
            None
        })
        .await
    }

    /// The primary that owns the slot of `key`, in the view of most running nodes.
    pub async fn owner_of(&self, key: &str) -> &RedisServer {
        let slot = self.slot_of(key).await;
        until("most nodes name one owner", &self.nodes, async || {
            let views = self.views().await;
            let owners: Vec<_> = views
                .iter()
                .filter_map(|view| view.owner_of(slot))
                .collect();
            let most = |port: &&u16| {
                owners.iter().filter(|owner| *owner == *port).count() * 2 > views.len()
            };
            owners.iter().find(most).map(|port| self.node_at(*port))
        })
        .await
    }

    /// The primaries with slots, in the order of [`nodes`](Self::nodes).
    pub async fn masters(&self) -> Vec<&RedisServer> {
        let masters = until(
            "most nodes name the same primaries",
            &self.nodes,
            async || {
                let views = self.views().await;
                let masters: Vec<_> = views.iter().map(View::masters).collect();
                let most = |one: &&Vec<u16>| {
                    masters.iter().filter(|other| other == one).count() * 2 > masters.len()
                };
                masters.iter().find(most).cloned()
            },
        )
        .await;
        self.nodes
            .iter()
            .filter(|node| masters.contains(&node.port()))
            .collect()
    }

    /// The running replicas of a primary that have its data.
    pub async fn replicas_of(&self, master: &RedisServer) -> Vec<&RedisServer> {
        let follow = join_all(
            self.nodes
                .iter()
                .map(|node| follows(node, self.port_among_nodes(master))),
        )
        .await;
        self.nodes
            .iter()
            .zip(follow)
            .filter_map(|(node, follows)| follows.then_some(node))
            .collect()
    }

    /// CLUSTER FAILOVER: promotes a replica with the agreement of its primary. Returns the new
    /// primary once all running nodes see it.
    ///
    /// # Panics
    /// When that takes more than half a minute, for example without a running replica.
    pub async fn failover(&self, master: &RedisServer) -> &RedisServer {
        let new = until("a replica begins a failover", &self.nodes, async || {
            let replica = *self.replicas_of(master).await.first()?;
            ask::<String>(replica, &["CLUSTER", "FAILOVER"])
                .await
                .map(|_| replica)
        })
        .await;
        until("all nodes see the new primary", &self.nodes, async || {
            let roles: String = ask(new, &["INFO", "replication"]).await?;
            (field(&roles, "role") == Some("master")).then_some(())
        })
        .await;
        self.settled().await;
        new
    }

    /// Waits until another node has taken over the slots of `old`, and all running nodes see it.
    /// Returns the new primary of `key`, which belonged to `old`.
    ///
    /// # Panics
    /// When that takes more than half a minute.
    pub async fn new_owner_of(&self, key: &str, old: &RedisServer) -> &RedisServer {
        let slot = self.slot_of(key).await;
        until("another owner", &self.nodes, async || {
            let views = self.agreed().await?;
            views
                .owner_of(slot)
                .filter(|port| *port != old.port())
                .map(|port| self.node_at(port))
        })
        .await
    }

    /// Waits until all running nodes report a healthy cluster and see the same owners of all slots
    /// and the same replicas, and the replicas have their primaries' data.
    ///
    /// # Panics
    /// When that takes more than half a minute.
    pub async fn settled(&self) {
        until("a cluster that is well", &self.nodes, async || {
            self.agreed().await.map(drop)
        })
        .await;
    }

    /// The port by which the nodes address a node. Clients on a plain port still get plain ports.
    fn port_among_nodes(&self, node: &RedisServer) -> u16 {
        if self.tls {
            node.tls_port()
        } else {
            node.port()
        }
    }

    fn node_at(&self, port: u16) -> &RedisServer {
        self.nodes
            .iter()
            .find(|node| node.port() == port)
            .expect("a node of this cluster has the port")
    }

    /// The views of all nodes that answer.
    async fn views(&self) -> Vec<View> {
        join_all(self.nodes.iter().map(View::of))
            .await
            .into_iter()
            .flatten()
            .collect()
    }

    /// The view that all running nodes agree on, in a healthy cluster.
    async fn agreed(&self) -> Option<View> {
        let running: Vec<_> = self.nodes.iter().filter(|node| node.is_running()).collect();
        let infos = join_all(
            running
                .iter()
                .map(|node| ask::<String>(node, &["CLUSTER", "INFO"])),
        )
        .await;
        let ok = |info: &Option<String>| {
            info.as_deref()
                .is_some_and(|info| field(info, "cluster_state") == Some("ok"))
        };
        let mut views = self.views().await;
        let first = views.pop()?;
        let agree = views.len() + 1 == running.len() && views.iter().all(|view| *view == first);
        if !(infos.iter().all(ok) && agree) {
            return None;
        }
        let masters = first.masters();
        for node in running {
            let port = node.port();
            let master = first.master_of(port)?;
            let master = self.node_at(master);
            let is_master = masters.contains(&port) && master.port() == port;
            if !is_master && !follows(node, self.port_among_nodes(master)).await {
                return None;
            }
        }
        Some(first)
    }
}
