//! Settings and start of a cluster.

use futures_util::future::join_all;

use super::{RedisCluster, View};
use crate::{
    RedisServer,
    nodes::{NODE_USER, until},
    redis_server,
};

/// Number of primaries; each has one replica.
const MASTERS: u16 = 3;

/// Settings of a [`RedisCluster`] to be started.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    node: redis_server::Builder,
    password: Option<String>,
    tls: bool,
}

impl Builder {
    /// An option of all nodes, as [`redis_server::Builder::arg`].
    #[must_use]
    pub fn arg(mut self, name: &str, value: &str) -> Self {
        self.node = self.node.arg(name, value);
        self
    }

    /// Requires this password from all clients and from the other nodes (the bus has no
    /// authentication).
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.node = self
            .node
            .password(password)
            .user(NODE_USER, password, "~* &* +@all");
        self.node = self
            .node
            .args(["--masteruser", NODE_USER, "--masterauth", password]);
        self.password = Some(password.to_owned());
        self
    }

    /// Another user of all nodes, as [`redis_server::Builder::user`].
    #[must_use]
    pub fn user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.node = self.node.user(name, password, rules);
        self
    }

    /// Enables TLS on all nodes and on the bus, with certificates of one authority. The plain ports
    /// stay open: a client on a plain port is redirected to plain ports, and a client on a TLS port
    /// to TLS ports.
    #[must_use]
    pub fn tls(mut self) -> Self {
        let tls = redis_server::Builder::default().tls();
        self.node =
            self.node
                .tls_of(&tls)
                .args(["--tls-replication", "yes", "--tls-cluster", "yes"]);
        self.tls = true;
        self
    }

    /// Starts all nodes, joins them to a cluster, and waits until they agree that it is healthy.
    ///
    /// A node reports this two seconds after its start at the earliest: a primary that comes back
    /// waits that long in case another node has taken its place.
    ///
    /// # Panics
    /// When the nodes do not agree within half a minute, with the logs.
    pub async fn start(self) -> RedisCluster {
        let timeout = RedisCluster::NODE_TIMEOUT.as_millis().to_string();
        let node = self
            .node
            .cluster_node()
            .arg("--cluster-node-timeout", &timeout);
        let node = node.arg("--cluster-require-full-coverage", "no");
        let nodes = node
            .start_all(usize::from(MASTERS) * 2)
            .await
            .try_into()
            .expect("six were started");
        let cluster = RedisCluster {
            nodes,
            tls: self.tls,
            password: self.password,
        };
        cluster.join().await;
        cluster.settled().await;
        cluster
    }
}

impl RedisCluster {
    async fn join(&self) {
        let (masters, replicas) = self.nodes.split_at(MASTERS.into());
        // Before the first CLUSTER MEET: a node that knows another one refuses SET-CONFIG-EPOCH.
        join_all(self.nodes.iter().zip(1..).map(async |(node, epoch)| {
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch.to_string()])
                .await;
        }))
        .await;
        // Each node meets each other node, which is faster than gossip.
        join_all(self.nodes.iter().map(async |node| {
            for other in self
                .nodes
                .iter()
                .filter(|other| other.port() != node.port())
            {
                self.meet(node, other).await;
            }
        }))
        .await;
        join_all(masters.iter().zip(0..).map(async |(master, number)| {
            let (first, last) = (
                Self::SLOTS / MASTERS * number,
                Self::SLOTS / MASTERS * (number + 1) - 1,
            );
            let last = if number + 1 == MASTERS {
                Self::SLOTS - 1
            } else {
                last
            };
            master
                .command(&[
                    "CLUSTER",
                    "ADDSLOTSRANGE",
                    &first.to_string(),
                    &last.to_string(),
                ])
                .await;
        }))
        .await;
        join_all(replicas.iter().zip(masters).map(async |(replica, master)| {
            let id = until("a replica knows its primary", &self.nodes, async || {
                let view = View::of(replica).await?;
                view.id_of(master.port()).map(str::to_owned)
            })
            .await;
            replica.command(&["CLUSTER", "REPLICATE", &id]).await;
        }))
        .await;
        until("all nodes know all", &self.nodes, async || {
            let views = self.views().await;
            let all = self.nodes.len();
            (views.len() == all && views.iter().all(|view| view.len() == all)).then_some(())
        })
        .await;
    }

    async fn meet(&self, node: &RedisServer, other: &RedisServer) {
        let (port, bus) = (
            self.port_among_nodes(other).to_string(),
            other.bus_port().to_string(),
        );
        node.command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus])
            .await;
    }
}
