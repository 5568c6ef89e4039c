//! The list of the locks of all nodes.

use std::time::Duration;

use tokio::time::timeout;

use super::{Cluster, no_node};
use crate::store::redis::{
    operator::listing::Scanned, outage::InOutage, script::reply::unexpected,
};
use crate::{
    shell::{call::within, sync::lock},
    store::StoreError,
};

/// The number of times that all nodes are listed. A key that moves from a node that is listed late
/// to one that was listed early is in the next pass. The slot map does not show such a move before
/// all keys of the slot have moved.
const PASSES: u32 = 2;
/// The time for which the list waits for a node, and then for the map before the second pass. Both
/// are within the time of a page.
const NODE: Duration = Duration::from_millis(300);
const MAP: Duration = Duration::from_millis(100);

/// A place in the list. Its text is `pass scan node node ..`.
struct Place {
    pass: u32,
    /// The place within the first node.
    scan: u64,
    /// The nodes that are left.
    nodes: Vec<String>,
}

impl Place {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        Some(Self {
            pass: words.next()?.parse().ok()?,
            scan: words.next()?.parse().ok()?,
            nodes: words.map(str::to_owned).collect(),
        })
    }

    fn text(&self) -> String {
        let numbers = format!("{} {}", self.pass, self.scan);
        let nodes = self.nodes.iter().map(String::as_str);
        let words: Vec<_> = [&*numbers].into_iter().chain(nodes).collect();
        words.join(" ")
    }
}

impl Cluster {
    /// Returns some keys of the nodes that match the pattern, the place of the next page, and the
    /// error of a node that did not answer, behind which the list continues.
    pub(crate) async fn page(
        &self,
        pattern: &str,
        place: Option<&str>,
    ) -> Result<(Option<Scanned>, Option<String>, Option<StoreError>), StoreError> {
        let mut place = match place {
            Some(text) => Place::parse(text).ok_or_else(unexpected)?,
            None => {
                self.found(InOutage::Refuse).await?;
                self.pass(1)
            }
        };
        if place.nodes.is_empty() {
            return Err(no_node());
        }
        let (mut scanned, mut missing) = (None, None);
        if let Some(node) = place.nodes.first() {
            match within(NODE, Box::pin(self.scan(node, place.scan, pattern))).await {
                Ok(found) => {
                    place.scan = found.as_ref().map_or(0, |found| found.next);
                    scanned = found;
                }
                Err(error) => {
                    let message = format!("the locks of the node {node} are not listed: {error}");
                    missing = Some(StoreError::new(error.kind(), message));
                    place.scan = 0;
                }
            }
            if place.scan == 0 {
                place.nodes.remove(0);
            }
        }
        if place.nodes.is_empty() {
            if place.pass == PASSES {
                return Ok((scanned, None, missing));
            }
            if let Ok(Some(slots)) = timeout(MAP, self.look_up()).await {
                self.adopt(slots);
            }
            place = self.pass(place.pass + 1);
        }
        Ok((scanned, Some(place.text()), missing))
    }

    /// The beginning of a pass over all nodes that serve a slot.
    fn pass(&self, pass: u32) -> Place {
        let map = lock(&self.map);
        let nodes = map.slots.owners().into_iter().map(ToString::to_string);
        Place {
            pass,
            scan: 0,
            nodes: nodes.collect(),
        }
    }

    /// Visits some keys of a node. Returns nothing for a node that serves no slot any more.
    async fn scan(
        &self,
        node: &str,
        place: u64,
        pattern: &str,
    ) -> Result<Option<Scanned>, StoreError> {
        let address = {
            let map = lock(&self.map);
            let mut owners = map.slots.owners().into_iter();
            owners.find(|owner| owner.to_string() == node).cloned()
        };
        let Some(address) = address else {
            return Ok(None);
        };
        let question = Scanned::question(place, pattern);
        let reply = self.node(&address)?.connection.ask(&question).await?;
        Scanned::parse(reply).map(Some)
    }
}
