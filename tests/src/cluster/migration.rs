//! Migration of a slot from one primary to another, step by step, so that a test can stop half way:
//! each key is then at one of the two and found by ASK, and commands with several keys get
//! TRYAGAIN.

use super::RedisCluster;
use crate::{
    RedisServer,
    nodes::{NODE_USER, until},
};

/// A slot in migration. Dropping it leaves the slot between two primaries.
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
    /// Announces to both primaries that the slot of `key` moves to `to`: from now on the old
    /// primary answers with ASK for keys that it no longer has, and for new ones.
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
        // In this order: no client is redirected to a node that refuses it.
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

    /// The primary that owns the slot until the migration is [finished](Self::finish).
    pub fn from(&self) -> &'a RedisServer {
        self.from
    }

    /// The primary that the slot moves to.
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

    /// Moves one key; false if the old primary does not have it (any more).
    ///
    /// # Panics
    /// When one of the two primaries does not answer.
    pub async fn move_key(&self, key: &str) -> bool {
        let port = self.cluster.port_among_nodes(self.to).to_string();
        let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "10000"];
        if let Some(password) = &self.cluster.password {
            command.extend(["AUTH2", NODE_USER, password]);
        }
        command.extend(["KEYS", key]);
        self.from.query::<String>(&command).await == "OK"
    }

    /// Moves all keys that the old primary has now.
    pub async fn move_keys(&self) {
        for key in self.keys().await {
            self.move_key(&key).await;
        }
    }

    /// Moves the remaining keys, announces the new owner to all primaries, and waits until all
    /// running nodes see it.
    ///
    /// # Panics
    /// When they do not within half a minute.
    pub async fn finish(self) {
        let masters = self.cluster.masters().await;
        self.move_keys().await;
        // The new owner first: in another order, its failure here would leave the slot without an
        // owner.
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

    /// Cancels the migration: the slot stays where it was. Keys that were moved are moved back.
    pub async fn cancel(self) {
        let back = Migration {
            from: self.to,
            to: self.from,
            to_id: id(self.from).await,
            ..self
        };
        // In this order: the old primary accepts no keys while it has the slot marked as leaving.
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
