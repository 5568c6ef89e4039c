//! A slot that moves from one primary to another, step by step, so that a test can stop half way: its keys are then found
//! by ASK, some here and some there, and what needs several of them is told TRYAGAIN.

use super::RedisCluster;
use crate::{
    RedisServer,
    nodes::{NODE_USER, until},
};

/// A slot on its way. Dropping it leaves the slot where it is: between two primaries.
#[derive(Debug)]
#[must_use = "dropped, it leaves the slot between two primaries"]
pub struct Migration<'a> {
    cluster: &'a RedisCluster,
    slot: u16,
    from: &'a RedisServer,
    to: &'a RedisServer,
    to_id: String,
}

impl RedisCluster {
    /// Says to both primaries that the slot of `key` is going to move to `to`: keys that are not at the old one any more, and
    /// new ones, are from now on answered with ASK there.
    ///
    /// # Panics
    /// When `to` has the slot already, or is not a primary.
    pub async fn begin_migration<'a>(&'a self, key: &str, to: &'a RedisServer) -> Migration<'a> {
        let (slot, from) = (self.slot_of(key).await, self.owner_of(key).await);
        assert_ne!(from.port(), to.port(), "the slot is there already");
        let (from_id, to_id) = (id(from).await, id(to).await);
        let migration = Migration {
            cluster: self,
            slot,
            from,
            to,
            to_id,
        };
        // In this order: nobody is sent to where he is turned away.
        migration.set(to, &["IMPORTING", &from_id]).await;
        migration.set(from, &["MIGRATING", &migration.to_id]).await;
        migration
    }
}

impl<'a> Migration<'a> {
    /// The slot.
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// The primary that has the slot until it is [finished](Self::finish).
    pub fn from(&self) -> &'a RedisServer {
        self.from
    }

    /// The primary that gets it.
    pub fn to(&self) -> &'a RedisServer {
        self.to
    }

    /// The keys of the slot that are still at the old primary, sorted.
    pub async fn keys(&self) -> Vec<String> {
        let command = ["CLUSTER", "GETKEYSINSLOT", &self.slot.to_string(), "100000"];
        let mut keys: Vec<String> = self.from.query(&command).await;
        keys.sort();
        keys
    }

    /// Moves one key; false if it is not there (any more).
    ///
    /// # Panics
    /// When one of both primaries does not answer.
    pub async fn move_key(&self, key: &str) -> bool {
        let port = self.cluster.port_among_nodes(self.to).to_string();
        let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "10000"];
        if let Some(password) = &self.cluster.password {
            command.extend(["AUTH2", NODE_USER, password]);
        }
        command.extend(["KEYS", key]);
        self.from.query::<String>(&command).await == "OK"
    }

    /// Moves all keys that are there now.
    pub async fn move_keys(&self) {
        for key in self.keys().await {
            self.move_key(&key).await;
        }
    }

    /// Moves what is left, says to all primaries whose the slot is now, and waits until all nodes that run know.
    ///
    /// # Panics
    /// When they do not within half a minute.
    pub async fn finish(self) {
        let masters = self.cluster.masters().await;
        self.move_keys().await;
        // The new owner first: if it failed now, nobody would have the slot otherwise.
        self.set(self.to, &["NODE", &self.to_id]).await;
        for master in masters
            .iter()
            .filter(|master| master.is_running() && master.port() != self.to.port())
        {
            self.set(master, &["NODE", &self.to_id]).await;
        }
        let port = self.to.port();
        until(
            "all nodes know the slot's new owner",
            &self.cluster.nodes,
            async || {
                let views = self.cluster.views().await;
                views
                    .iter()
                    .all(|view| view.owner_of(self.slot) == Some(port))
                    .then_some(())
            },
        )
        .await;
    }

    /// Gives up: the slot stays where it was. Keys that were moved are moved back.
    pub async fn cancel(self) {
        let back = Migration {
            from: self.to,
            to: self.from,
            to_id: id(self.from).await,
            ..self
        };
        // In this order: the old primary takes nothing back while it says that the slot is leaving.
        back.set(back.to, &["STABLE"]).await;
        back.move_keys().await;
        back.set(back.from, &["STABLE"]).await;
    }

    async fn set(&self, node: &RedisServer, what: &[&str]) {
        node.command(&[&["CLUSTER", "SETSLOT", &self.slot.to_string()], what].concat())
            .await;
    }
}

async fn id(node: &RedisServer) -> String {
    node.query(&["CLUSTER", "MYID"]).await
}
