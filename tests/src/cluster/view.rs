//! The cluster in the view of one node, from CLUSTER NODES.

use crate::{RedisServer, nodes::ask};

/// The nodes, their primaries and their slots: equal if two nodes have the same view.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    /// Sorted by port.
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq)]
struct Node {
    id: String,
    port: u16,
    /// The id of its primary, if it is a replica.
    master: Option<String>,
    /// Ranges of slots, both ends included.
    slots: Vec<(u16, u16)>,
}

impl View {
    /// Returns `None` if the node does not run, or has not completed a handshake with another node.
    pub(super) async fn of(node: &RedisServer) -> Option<Self> {
        let lines: String = ask(node, &["CLUSTER", "NODES"]).await?;
        let mut nodes: Vec<_> = lines.lines().map(Node::parse).collect::<Option<_>>()?;
        nodes.sort_by_key(|node| node.port);
        Some(Self { nodes })
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn id_of(&self, port: u16) -> Option<&str> {
        self.nodes
            .iter()
            .find(|node| node.port == port)
            .map(|node| node.id.as_str())
    }

    /// The port of the node that owns a slot.
    pub(super) fn owner_of(&self, slot: u16) -> Option<u16> {
        let owns = |node: &&Node| {
            node.slots
                .iter()
                .any(|(first, last)| (*first..=*last).contains(&slot))
        };
        self.nodes.iter().find(owns).map(|node| node.port)
    }

    /// The ports of the nodes that own slots.
    pub(super) fn masters(&self) -> Vec<u16> {
        self.nodes
            .iter()
            .filter(|node| !node.slots.is_empty())
            .map(|node| node.port)
            .collect()
    }

    /// The port of a node's primary; its own if it is one.
    pub(super) fn master_of(&self, port: u16) -> Option<u16> {
        let node = self.nodes.iter().find(|node| node.port == port)?;
        let Some(master) = &node.master else {
            return Some(port);
        };
        self.nodes
            .iter()
            .find(|node| node.id == *master)
            .map(|node| node.port)
    }
}

impl Node {
    /// Parses `<id> <ip:port@bus> <flags> <primary> <ping> <pong> <epoch> <link> <slot> ...`, with
    /// slots of the form `<slot>`, `<slot>-<slot>` or `[<slot>->-<id>]`.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split(' ').collect();
        let [id, address, flags, master, _, _, _, _, slots @ ..] = &words[..] else {
            return None;
        };
        let (host, port) = address.split_once('@')?.0.rsplit_once(':')?;
        if flags.contains("handshake") || flags.contains("noaddr") || host.is_empty() {
            return None;
        }
        let range = |word: &&str| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        // Slots in migration are in brackets.
        let slots = slots
            .iter()
            .filter(|word| !word.starts_with('['))
            .map(range)
            .collect::<Option<_>>()?;
        let master = (*master != "-").then(|| (*master).to_owned());
        Some(Self {
            id: (*id).to_owned(),
            port: port.parse().ok()?,
            master,
            slots,
        })
    }
}
