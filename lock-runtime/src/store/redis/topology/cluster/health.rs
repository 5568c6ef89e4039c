//! The health of a cluster: that of each node that serves slots, and the slots that are out.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{
    Address, Cluster,
    slots::{SLOTS, Slot, Slots, number_in},
};
use crate::store::redis::{
    operator::health::{Examined, examine, harmless_key},
    outage::InOutage,
};
use crate::{
    observe::health::{Finding, Health, Severity},
    shell::{call::within, sync::lock},
};

/// The time for which the map is awaited.
const MAP: Duration = Duration::from_millis(300);
/// The number of ranges of slots in a message.
const SHOWN: usize = 8;

impl Cluster {
    pub(crate) async fn health(&self) -> Health {
        let found = within(MAP, Box::pin(self.found(InOutage::Refuse))).await;
        if let Err(error) = found {
            let failed = Examined::failed(&self.address(), &error);
            return Health::new(vec![failed.server], failed.findings);
        }
        // Without recent calls, the map may be older than a failover.
        if let Ok(Some(slots)) = timeout(MAP, self.look_up()).await {
            self.adopt(slots);
        }
        let mut owned: BTreeMap<String, (Address, Vec<Slot>)> = BTreeMap::new();
        {
            let map = lock(&self.map);
            for slot in 0..SLOTS {
                if let Some(owner) = map.slots.owner(slot) {
                    let of_owner = owned.entry(owner.to_string());
                    let (_, slots) = of_owner.or_insert_with(|| (owner.clone(), Vec::new()));
                    slots.push(slot);
                }
            }
        }
        let examined = owned.iter().map(async |(name, (address, slots))| {
            let examined = self.examine(name, address, slots[0]).await;
            (address, slots, examined)
        });
        let mut covered = vec![false; usize::from(SLOTS)];
        let (mut servers, mut findings) = (Vec::new(), Vec::new());
        let mut is_stale = owned.is_empty();
        let mut examined = join_all(examined).await;
        // The others may refuse locks because of those that do not answer, which come first.
        examined.sort_by_key(|(_, _, examined)| examined.server.reachable);
        for (address, slots, examined) in examined {
            let reply = examined.slots.as_ref();
            let map = reply.and_then(|reply| Slots::parse(reply, address));
            match map {
                Some(map) => {
                    is_stale |= !lock(&self.map).slots.agrees_with(&map);
                    for slot in 0..SLOTS {
                        covered[usize::from(slot)] |= map.owner(slot).is_some();
                    }
                }
                None => is_stale = true,
            }
            findings.extend(examined.findings);
            if !examined.server.grants_locks {
                let out = out(slots, examined.server.reachable);
                findings.push(out.about(&examined.server.name));
            }
            servers.push(examined.server);
        }
        // A node that does not answer has been reported with its slots.
        let answered = servers.iter().any(|server| server.reachable);
        let uncovered: Vec<_> = (0..SLOTS)
            .filter(|slot| answered && !covered[usize::from(*slot)])
            .collect();
        if !uncovered.is_empty() {
            let message = format!(
                "no node serves the slots {}: their locks are not granted",
                ranges(&uncovered)
            );
            let remedy = "assign them: redis-cli --cluster fix <host>:<port>";
            let finding = Finding::new(Severity::Critical, "slots_uncovered", message, remedy);
            findings.push(finding);
        }
        if is_stale {
            self.refresh_soon();
        }
        if servers.is_empty() {
            let message = "no node of the cluster is known to serve slots";
            let remedy = "create the cluster: redis-cli --cluster create";
            return Health::unusable(Finding::new(Severity::Critical, "no_node", message, remedy));
        }
        Health::new(servers, findings)
    }

    /// Asks the node that serves the slot.
    async fn examine(&self, name: &str, address: &Address, slot: Slot) -> Examined {
        let tag = format!(":{{{}}}", number_in(slot));
        let key = harmless_key(&self.namespace, &tag);
        match self.node(address) {
            Ok(node) => examine(&node.connection, name.to_owned(), &key, None).await,
            Err(error) => Examined::failed(name, &error),
        }
    }
}

fn out(slots: &[Slot], reachable: bool) -> Finding {
    let message = format!(
        "the slots {} are out: their locks are not granted",
        ranges(slots)
    );
    let remedy = match reachable {
        false => "bring the node back, or promote its replica: CLUSTER FAILOVER FORCE",
        true => {
            "the node answers: repair the other nodes first, or set cluster-require-full-coverage to no"
        }
    };
    Finding::new(Severity::Critical, "slots_out", message, remedy)
}

/// The ranges of ascending slots, such as `0-5460, 10923`.
fn ranges(slots: &[Slot]) -> String {
    let ranges: Vec<_> = slots
        .chunk_by(|one, next| one + 1 == *next)
        .filter_map(|range| match (range.first()?, range.last()?) {
            (first, last) if first == last => Some(first.to_string()),
            (first, last) => Some(format!("{first}-{last}")),
        })
        .collect();
    let shown = ranges.len().min(SHOWN);
    match ranges.len() - shown {
        0 => ranges.join(", "),
        more => format!("{} and {more} more ranges", ranges[..shown].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_few() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        let scattered: Vec<_> = (0..40).step_by(2).collect();
        assert!(ranges(&scattered).ends_with(", 14 and 12 more ranges"));
    }
}
