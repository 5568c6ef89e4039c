//! What a session has seen of nodes, whose versions are the conditions of changes.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use crate::{
    shell::time::Instant,
    store::records::{RecordName, Version},
};

/// The time for which the version of a node is remembered.
const REMEMBERED: Duration = Duration::from_secs(600);
/// The nodes that are remembered.
const NODES: usize = 100_000;

#[derive(Default)]
pub(in super::super) struct Seen {
    nodes: HashMap<RecordName, Node>,
    /// The nodes that another session had changed when this one was about to.
    contended: HashSet<RecordName>,
    /// The latest value of the clock, and the version of its node.
    pub(in super::super) value: Option<(u64, i32)>,
}

struct Node {
    /// The version of the record, unless it is removed.
    version: Option<Version>,
    node: i32,
    at: Instant,
}

impl Seen {
    /// Remembers the version of a node.
    pub(in super::super) fn remember(
        &mut self,
        name: &RecordName,
        version: Option<Version>,
        node: i32,
    ) {
        if self.nodes.len() >= NODES {
            self.nodes.clear();
        }
        let at = Instant::now();
        self.nodes.insert(name.clone(), Node { version, node, at });
    }

    /// Remembers that a change of the node has come too late.
    pub(in super::super) fn was_late(&mut self, name: &RecordName) {
        if self.contended.len() >= NODES {
            self.contended.clear();
        }
        self.contended.insert(name.clone());
    }

    /// Returns whether a change of the node has come too late before.
    pub(in super::super) fn is_contended(&self, name: &RecordName) -> bool {
        self.contended.contains(name)
    }

    pub(in super::super) fn forget(&mut self, name: &RecordName) {
        self.nodes.remove(name);
    }

    /// Returns the version that the node must have for a record of the version `known`, or without
    /// one: that of no node is `None`. Returns nothing if it has to be read first.
    pub(in super::super) fn node_of(
        &self,
        name: &RecordName,
        known: Option<Version>,
    ) -> Option<Option<i32>> {
        let seen = self.nodes.get(name);
        match seen.filter(|seen| Instant::now() < seen.at + REMEMBERED) {
            Some(seen) if seen.version == known => Some(Some(seen.node)),
            _ => known.is_none().then_some(None),
        }
    }
}
