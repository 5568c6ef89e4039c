//! The refresh of the slot map in the background, whenever a call shows that it may be wrong.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use rand::seq::SliceRandom as _;
use tokio::{runtime::Handle, time::timeout};

use super::{
    Cluster, Map, Node, PATIENCE,
    slots::{Slot, Slots},
};
use crate::store::redis::{CONNECT, sync::OnDrop};
use crate::{
    observe::log,
    shell::{
        sync::lock,
        time::{Instant, sleep_until},
    },
    store::{StoreError, StoreEvent},
};

/// The pause after a refresh of the map. It doubles up to [`LONGEST_PAUSE`] while the map
/// does not change.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Changes of the map that follow each other within this time belong to one failover.
const FAILOVER: Duration = Duration::from_secs(2);
/// The number of nodes that are queried at a time, so that an unresponsive one causes no delay.
const ASKED_AT_ONCE: usize = 3;

/// The state of the refresh of the map.
pub(super) struct Refresh {
    /// A task is refreshing the map.
    running: bool,
    /// Another refresh was requested after the current one had begun.
    wanted: bool,
    not_before: Instant,
    pause: Duration,
    /// The latest failover that was detected.
    failover_at: Option<Instant>,
}

impl Refresh {
    pub(super) fn new() -> Self {
        Self {
            running: false,
            wanted: false,
            not_before: Instant::now(),
            pause: FIRST_PAUSE,
            failover_at: None,
        }
    }
}

impl Cluster {
    /// The node that serves the slot in place of an unreachable one, according to the next refresh
    /// of the map. A dead node is replaced only after some time, and this does not wait for it.
    pub(super) async fn replaced(&self, slot: Slot, dead: &Node) -> Option<Arc<Node>> {
        let mut looked_up = self.looked_up.subscribe();
        self.refresh_soon();
        // The task that refreshes the map may end with its runtime.
        let _ = timeout(LONGEST_PAUSE, looked_up.changed()).await;
        let owner = self.owner(slot).ok()?;
        (owner.address != dead.address).then_some(owner)
    }

    /// Refreshes the map in the background, if there is a runtime.
    pub(crate) fn refresh_soon(&self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let mut refresh = lock(&self.refresh);
        refresh.wanted = true;
        if std::mem::replace(&mut refresh.running, true) {
            return;
        }
        drop(refresh);
        let (this, cut_off) = (self.this.clone(), self.this.clone());
        // If the runtime of the task ends, the next request starts a new task.
        let cut_off = OnDrop::new(move || {
            if let Some(cluster) = cut_off.upgrade() {
                lock(&cluster.refresh).running = false;
            }
        });
        // Spawn without the lock: a runtime that is shutting down drops a new task on the spot.
        runtime.spawn(async move {
            let not_before = |cluster: Arc<Self>| lock(&cluster.refresh).not_before;
            // Ends once the store is dropped.
            while let Some(not_before) = this.upgrade().map(not_before) {
                sleep_until(not_before).await;
                if let Some(cluster) = this.upgrade()
                    && cluster.refresh().await
                {
                    break;
                }
            }
            cut_off.disarm();
        });
    }

    /// Refreshes the map. Returns whether no other refresh was requested meanwhile.
    async fn refresh(&self) -> bool {
        lock(&self.refresh).wanted = false;
        let is_news = match self.unfound.lasts() {
            true => self.find_or_fail().await,
            false => {
                let slots = self.look_up().await;
                slots.is_some_and(|slots| self.adopt(slots))
            }
        };
        self.looked_up.send_replace(());
        // Calls are refused while a node does not answer, so none of them would find the node that
        // takes its place.
        let is_unsettled = self.unfound.lasts() || self.has_silent_owner();
        let mut refresh = lock(&self.refresh);
        let now = Instant::now();
        let is_calm = now.saturating_duration_since(refresh.not_before) > LONGEST_PAUSE;
        refresh.pause = if is_news || is_calm {
            FIRST_PAUSE
        } else {
            (refresh.pause * 2).min(LONGEST_PAUSE)
        };
        // Each attempt to find the cluster connects to nodes that do not answer.
        let pause = match self.unfound.error() {
            Some(_) => self.unfound.pause(rand::random(), now),
            None => refresh.pause,
        };
        refresh.not_before = now + pause;
        refresh.running = refresh.wanted || is_unsettled;
        !refresh.running
    }

    /// Looks for the cluster for the first time. Returns whether it was found.
    async fn find_or_fail(&self) -> bool {
        let found = timeout(CONNECT, self.find()).await;
        let found = found.unwrap_or_else(|_| Err(StoreError::timed_out(CONNECT)));
        if let Err(error) = &found
            && self.unfound.failed(0, error, Instant::now())
        {
            tracing::warn!(server = %self.address(), %error, "the cluster was not found; trying again in the background");
        }
        found.is_ok()
    }

    /// Returns whether a node that serves slots does not answer.
    fn has_silent_owner(&self) -> bool {
        let map = lock(&self.map);
        let owners = map.slots.owners();
        let mut nodes = map.nodes.values();
        nodes.any(|it| owners.contains(&it.address) && it.connection.is_in_outage())
    }

    /// Queries the map from any node, connected ones first.
    pub(super) async fn look_up(&self) -> Option<Slots> {
        let mut nodes: Vec<_> = lock(&self.map).nodes.values().cloned().collect();
        nodes.shuffle(&mut rand::rng());
        nodes.sort_by_key(|node| !node.connection.stands());
        if let Some(slots) = first_of(&nodes).await {
            return Some(slots);
        }
        let mut others = lock(&self.map).slots.members.clone();
        others.retain(|member| nodes.iter().all(|node| node.address != *member));
        others.shuffle(&mut rand::rng());
        others.extend(self.seed_addresses().cloned());
        let others = others.iter().filter_map(|address| self.node(address).ok());
        first_of(&others.collect::<Vec<_>>()).await
    }

    /// Replaces the map. Returns whether it has changed.
    pub(super) fn adopt(&self, slots: Slots) -> bool {
        let mut map = lock(&self.map);
        let is_news = !map.slots.agrees_with(&slots);
        let (before, after) = (map.slots.owners().len(), slots.owners().len());
        let is_failover = is_news && !map.slots.owners().is_subset(&slots.owners());
        map.slots = slots;
        let Map { slots, nodes } = &mut *map;
        // These are closed after the map is unlocked. A replica that only supplied the map is not
        // needed any more.
        let owners = slots.owners();
        let left = nodes.extract_if(|address, _| !owners.contains(address));
        let _left: Vec<_> = left.collect();
        drop(map);
        if is_news && before > 0 {
            self.log_change(before, after);
        }
        if is_failover && self.is_another_failover() {
            // A node does not serve any slot any more. The node in its place may lack its
            // latest writes.
            self.connector
                .pushes
                .listeners
                .notify(&StoreEvent::Disconnected);
        }
        is_news
    }

    fn log_change(&self, before: usize, after: usize) {
        let server = self.address();
        let message = "the slot map has changed";
        log::summarise(message, "map", Some(&server), |left_out| {
            tracing::info!(server, nodes = after, before, left_out, "{message}");
        });
    }

    /// Returns whether this is a new failover. While a cluster is partitioned its nodes name
    /// different owners, and the map may change with every refresh.
    fn is_another_failover(&self) -> bool {
        let now = Instant::now();
        let before = lock(&self.refresh).failover_at.replace(now);
        before.is_none_or(|before| now - before > FAILOVER)
    }
}

/// The map of the first node that answers.
async fn first_of(nodes: &[Arc<Node>]) -> Option<Slots> {
    for some in nodes.chunks(ASKED_AT_ONCE) {
        let asked = some.iter().map(|node| timeout(PATIENCE, node.slots()));
        let mut answers: FuturesUnordered<_> = asked.collect();
        while let Some(answer) = answers.next().await {
            if let Ok(Ok(slots)) = answer {
                return Some(slots);
            }
        }
    }
    None
}
