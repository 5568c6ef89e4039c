//! A primary with two replicas and the three Sentinels that monitor them, all real processes on
//! loopback.
//!
//! ```no_run
//! # async fn example() {
//! use lock_tests::SentinelSet;
//!
//! let set = SentinelSet::start().await;
//! let old = set.master().await;
//! old.kill();
//! let new = set.new_master(old).await;
//! assert_ne!(new.port(), old.port());
//! // It comes back as a replica of the new one.
//! old.restart_empty().await;
//! set.settled().await;
//! # }
//! ```
//!
//! Every node and every Sentinel is a [`RedisServer`], which can be stopped, killed and started
//! again like any other. It keeps its identity when it is killed.

mod builder;

use std::{collections::HashMap, time::Duration};

use futures_util::future::join_all;
use tokio::sync::OnceCell;

pub use self::builder::Builder;
use crate::{
    RedisServer,
    nodes::{ask, field, follows, until},
};

/// Set shared by all tests of this process that neither stop a part of it nor fail it over.
pub async fn shared_sentinels() -> &'static SentinelSet {
    static SHARED: OnceCell<SentinelSet> = OnceCell::const_new();
    SHARED.get_or_init(SentinelSet::start).await
}

/// Three data nodes and three Sentinels; all are killed when it is dropped.
#[derive(Debug)]
pub struct SentinelSet {
    nodes: [RedisServer; 3],
    sentinels: [RedisServer; 3],
    tls: bool,
}

impl SentinelSet {
    /// The name under which the Sentinels know the primary.
    pub const SERVICE: &str = "locks";
    /// Time without a reply after which two Sentinels consider a node down; the third takes twice
    /// as long.
    pub const DOWN_AFTER: Duration = Duration::from_millis(750);

    /// A set with default settings, whose Sentinels know all nodes and each other.
    ///
    /// # Panics
    /// When they do not within half a minute, with the logs.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Settings for a set to be started.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The data nodes: the first was the primary at the start.
    pub fn nodes(&self) -> &[RedisServer; 3] {
        &self.nodes
    }

    /// The Sentinels.
    pub fn sentinels(&self) -> &[RedisServer; 3] {
        &self.sentinels
    }

    /// The URLs of the Sentinels, with their password if they have one.
    pub fn sentinel_urls(&self) -> [String; 3] {
        self.sentinels.each_ref().map(RedisServer::url)
    }

    /// The URL of the primary: `before` in front of the hosts of the Sentinels, `behind` after its
    /// name.
    pub fn url_with(&self, before: &str, behind: &str) -> String {
        let hosts = self.sentinels.each_ref().map(|it| it.addr().to_string());
        let (hosts, service) = (hosts.join(","), Self::SERVICE);
        format!("redis+sentinel://{before}{hosts}/{service}{behind}")
    }

    /// The same over TLS.
    pub fn sentinel_tls_urls(&self) -> [String; 3] {
        self.sentinels.each_ref().map(RedisServer::tls_url)
    }

    /// The certificate, in PEM, of the authority of all nodes and Sentinels.
    pub fn ca_pem(&self) -> &str {
        self.nodes[0].ca_pem()
    }

    /// The primary that two Sentinels name. During a failover it may be down, or no longer the
    /// primary.
    ///
    /// # Panics
    /// When no two Sentinels agree within half a minute.
    pub async fn master(&self) -> &RedisServer {
        until("two Sentinels name one primary", self.all(), async || {
            let named = join_all(self.sentinels.iter().map(named_master)).await;
            self.nodes.iter().find(|node| {
                named
                    .iter()
                    .filter(|port| **port == Some(self.port_of(node)))
                    .count()
                    >= 2
            })
        })
        .await
    }

    /// The nodes other than [`master`](Self::master).
    pub async fn replicas(&self) -> Vec<&RedisServer> {
        let master = self.master().await.port();
        self.nodes
            .iter()
            .filter(|node| node.port() != master)
            .collect()
    }

    /// SIGSTOP to all replicas: the primary goes on without confirmation of its writes until they
    /// are [resumed](RedisServer::resume). Returns the replicas.
    pub async fn stop_replicas(&self) -> Vec<&RedisServer> {
        let replicas = self.replicas().await;
        replicas
            .iter()
            .filter(|replica| replica.is_running())
            .for_each(|replica| replica.stop());
        replicas
    }

    /// SENTINEL FAILOVER: promotes a replica without the agreement of the primary. Returns the new
    /// primary once all running nodes follow it.
    ///
    /// # Panics
    /// When that takes more than half a minute.
    pub async fn failover(&self) -> &RedisServer {
        let old = self.settled().await;
        until("a failover", self.all(), async || {
            let master = self.agreed().await?;
            if master.port() != old.port() {
                return Some(master);
            }
            // No failover has started, or it was given up: a Sentinel with one in progress does not
            // report a healthy primary.
            for sentinel in &self.sentinels {
                if ask::<String>(sentinel, &["SENTINEL", "FAILOVER", Self::SERVICE])
                    .await
                    .is_some()
                {
                    break;
                }
            }
            None
        })
        .await
    }

    /// Waits until the Sentinels have promoted another node in place of `old`, and all running
    /// nodes follow it.
    ///
    /// # Panics
    /// When that takes more than half a minute.
    pub async fn new_master(&self, old: &RedisServer) -> &RedisServer {
        until("another primary", self.all(), async || {
            self.agreed().await.filter(|new| new.port() != old.port())
        })
        .await
    }

    /// Waits until all running Sentinels name one primary, and all running nodes follow it. Returns
    /// it.
    ///
    /// # Panics
    /// When that takes more than half a minute.
    pub async fn settled(&self) -> &RedisServer {
        until("all follow one primary", self.all(), || self.agreed()).await
    }

    fn all(&self) -> impl Iterator<Item = &RedisServer> {
        self.nodes.iter().chain(&self.sentinels)
    }

    /// The port by which the nodes and the Sentinels address a node.
    fn port_of(&self, node: &RedisServer) -> u16 {
        if self.tls {
            node.tls_port()
        } else {
            node.port()
        }
    }

    async fn agreed(&self) -> Option<&RedisServer> {
        let sentinels: Vec<_> = self
            .sentinels
            .iter()
            .filter(|sentinel| sentinel.is_running())
            .collect();
        let views = join_all(sentinels.iter().map(|sentinel| self.view(sentinel))).await;
        let port = views.first().copied()??;
        let master = self.nodes.iter().find(|node| self.port_of(node) == port)?;
        if views.iter().any(|view| *view != Some(port)) {
            return None;
        }
        let info: String = ask(master, &["INFO", "replication"]).await?;
        let others = self
            .nodes
            .iter()
            .filter(|node| node.is_running() && node.port() != master.port());
        let followed = join_all(others.map(|node| follows(node, port))).await;
        (field(&info, "role") == Some("master") && followed.into_iter().all(|follows| follows))
            .then_some(master)
    }

    /// The port of the primary, if this Sentinel considers it healthy and knows all other nodes and
    /// Sentinels.
    async fn view(&self, sentinel: &RedisServer) -> Option<u16> {
        let master: HashMap<String, String> =
            ask(sentinel, &["SENTINEL", "MASTER", Self::SERVICE]).await?;
        let is = |name: &str, value: &str| master.get(name).is_some_and(|is| is == value);
        let well = is("flags", "master") && is("num-slaves", "2") && is("num-other-sentinels", "2");
        if !well {
            return None;
        }
        // A peer with further flags, such as `disconnected`, cannot take part in a vote yet.
        let sentinels: Vec<HashMap<String, String>> =
            ask(sentinel, &["SENTINEL", "SENTINELS", Self::SERVICE]).await?;
        let replicas: Vec<HashMap<String, String>> =
            ask(sentinel, &["SENTINEL", "REPLICAS", Self::SERVICE]).await?;
        for (peers, servers, flags) in [
            (sentinels, &self.sentinels, "sentinel"),
            (replicas, &self.nodes, "slave"),
        ] {
            for server in servers.iter().filter(|server| server.is_running()) {
                let port = self.port_of(server).to_string();
                let peer = peers.iter().find(|peer| peer.get("port") == Some(&port));
                if peer.is_some_and(|peer| peer.get("flags").is_none_or(|is| is != flags)) {
                    return None;
                }
            }
        }
        master.get("port")?.parse().ok()
    }
}

async fn named_master(sentinel: &RedisServer) -> Option<u16> {
    let address: (String, u16) = ask(
        sentinel,
        &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SentinelSet::SERVICE],
    )
    .await?;
    Some(address.1)
}
