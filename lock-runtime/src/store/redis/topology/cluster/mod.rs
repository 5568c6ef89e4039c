//! The nodes of a Redis Cluster: a connection to each node, established when it is first needed,
//! and the slot map.
//!
//! Calls go straight to the node that serves their slot, and no call waits for the map. It is
//! refreshed in the background, and until it is up to date the nodes redirect calls. If a node is
//! dead or unresponsive, only the calls for its own slots fail. The cluster connection of the
//! client library is not used: it stops all calls while it refreshes its map, and repeats them by
//! its own rules.
//!
//! A call that a node refuses because it does not serve the slot was not executed, and is sent to
//! another node. A call whose node cannot be reached is sent to the node in its place if it was
//! not sent before, or may be repeated.

mod audience;
#[cfg(test)]
#[path = "../../../../../fuzz/cluster.rs"]
mod fuzz;
mod health;
mod listing;
mod refresh;
pub(crate) mod slots;
mod subscriptions;

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, Weak},
    time::Duration,
};

use futures_util::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use redis::{Cmd, ConnectionAddr, ConnectionInfo, Value};
use tokio::{sync::watch, time::timeout};

pub(crate) use self::slots::{Slot, slot_of};
use self::{
    refresh::Refresh,
    slots::{Address, Redirection, Slots, number_in},
    subscriptions::Subscriptions,
};
use super::{
    super::{
        connection::{
            BATCH, Connection, Errand, Failed, Repeat, connector::Connector, endpoint::Endpoint,
            pushes::Pushes,
        },
        error::unavailable,
        operator::acl::AclLine,
        outage::{InOutage, Outage},
        script::{
            Call,
            names::{format_name, lock_name},
        },
        settings::RedisOptions,
        sync::OnDrop,
    },
    servers::{Freed, ScriptReply},
    target::Target,
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{Hold, Listener, StoreError, StoreErrorKind, StoreEvent},
};

/// The maximum number of redirections of a call. More than one or two occur only if the
/// nodes disagree.
const REDIRECTIONS: usize = 5;
/// The time within which a node must return its map.
const PATIENCE: Duration = Duration::from_millis(500);
static ASKING: LazyLock<Cmd> = LazyLock::new(|| redis::cmd("ASKING"));

/// The nodes of a cluster.
pub(crate) struct Cluster {
    this: Weak<Self>,
    namespace: String,
    /// The parameters that all connections share.
    pub(crate) connector: Connector,
    /// The nodes to begin with. The credentials and TLS settings of the first are used for all
    /// nodes that are discovered later.
    seeds: Vec<(Address, Endpoint)>,
    // A std mutex: it is held to read or update the map, never across an await.
    map: Mutex<Map>,
    refresh: Mutex<Refresh>,
    /// Lasts until the cluster is found for the first time.
    unfound: Outage,
    /// Notified after each refresh of the map.
    looked_up: watch::Sender<()>,
    subscriptions: Arc<Subscriptions>,
}

struct Map {
    slots: Slots,
    nodes: HashMap<Address, Arc<Node>>,
}

/// A node to which a connection has been started.
pub(crate) struct Node {
    address: Address,
    connection: Arc<Connection>,
}

/// The cause of a failed request.
pub(crate) enum Failure {
    /// The keys are split between two nodes. Only a call with a single key is possible.
    Moving(StoreError),
    /// The script stopped halfway for the same reason. Its release comes first.
    HalfWay(StoreError),
    Failed(StoreError),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        let (Failure::Moving(error) | Failure::HalfWay(error) | Failure::Failed(error)) = failure;
        error
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl Errand<'_> {
    fn slot(&self) -> Slot {
        match self {
            Self::Call(call, _) => slot_of(call.key(0)),
            Self::By { slot, .. } => *slot,
        }
    }

    fn in_outage(&self) -> InOutage {
        match self {
            Self::Call(..) => InOutage::Try,
            Self::By { in_outage, .. } => *in_outage,
        }
    }

    fn may_be_repeated(&self) -> bool {
        matches!(self, Self::Call(_, Repeat::Once))
    }
}

impl Cluster {
    /// Creates the state of a cluster that is still to be [found](Self::find). The seeds are the
    /// addresses to begin with, at least one.
    pub(crate) fn new(
        seeds: Vec<Endpoint>,
        namespace: &str,
        settings: &RedisOptions,
    ) -> Result<Arc<Self>, StoreError> {
        let with_address = |seed: Endpoint| Some((address_of(&seed.info)?, seed));
        let seeds: Vec<_> = seeds.into_iter().filter_map(with_address).collect();
        let (_, first) = seeds.first().ok_or_else(no_node)?;
        let pushes = Pushes::sharded(namespace).confirming(settings.confirms());
        let target = Target::Server(Arc::new(first.clone()));
        let connector = Connector::new(target, pushes, AclLine::of_cluster(namespace));
        let connector = connector.with(settings);
        let (slots, nodes) = (Slots::empty(), HashMap::new());
        let cluster = Arc::new_cyclic(|this: &Weak<Self>| Self {
            this: this.clone(),
            namespace: namespace.to_owned(),
            subscriptions: Arc::new(Subscriptions::new(connector.clone())),
            unfound: Outage::new(connector.unavailable_after, Instant::now()),
            connector,
            seeds,
            map: Mutex::new(Map { slots, nodes }),
            refresh: Mutex::new(Refresh::new()),
            looked_up: watch::Sender::new(()),
        });
        cluster.connector.pushes.listeners.add(cluster.this.clone());
        // Compute the numbers now, and not for the first waiter.
        number_in(0);
        Ok(cluster)
    }

    /// Discovers the cluster that the seeds belong to. The first answer is used.
    pub(crate) async fn find(&self) -> Result<(), StoreError> {
        let seeds = self.seed_addresses();
        let mut answers: FuturesUnordered<_> = seeds.map(|seed| self.first_map(seed)).collect();
        let mut error = None;
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(slots) => {
                    drop(answers);
                    self.check_format(&slots).await?;
                    self.adopt(slots);
                    self.unfound.end(0, Instant::now());
                    return Ok(());
                }
                // Prefer a permanent error, which says more than that no node is reachable.
                Err(other) if error.as_ref().is_none_or(StoreError::is_transient) => {
                    error = Some(other)
                }
                Err(_) => {}
            }
        }
        Err(error.unwrap_or_else(no_node))
    }

    /// The addresses of the seeds.
    pub(crate) fn address(&self) -> String {
        let seeds: Vec<_> = self.seed_addresses().map(Address::to_string).collect();
        seeds.join(",")
    }

    fn seed_addresses(&self) -> impl Iterator<Item = &Address> {
        self.seeds.iter().map(|(address, _)| address)
    }

    /// The slot of the lock that `hold` holds or requests.
    pub(crate) fn slot(&self, hold: &Hold) -> Slot {
        slot_of(lock_name(&self.namespace, &hold.key, hold.mode.kind()).as_bytes())
    }

    /// The channel for the waiters in a slot.
    pub(crate) fn channel(&self, slot: Slot) -> String {
        self.subscriptions.channel(slot)
    }

    /// A number that the keys of one node share.
    pub(crate) fn node_number(&self, slot: Slot) -> u64 {
        lock(&self.map).slots.owner_number(slot)
    }

    /// Registers `hold`, which is queued at `node`, for notifications.
    pub(crate) fn waits(&self, hold: &Hold, node: &Node) {
        let slot = self.slot(hold);
        self.subscriptions
            .waits(slot, hold, &node.address, &node.connection.connector);
    }

    /// Unregisters `hold`, which is no longer queued.
    pub(crate) fn leaves(&self, hold: &Hold) {
        self.subscriptions.leaves(|| self.slot(hold), hold.token);
    }

    /// Runs a script on the node that serves its slot.
    pub(crate) async fn run(&self, errand: Errand<'_>) -> Result<ScriptReply, Failure> {
        let slot = errand.slot();
        self.found(errand.in_outage()).await?;
        let mut owner = self.owner(slot)?;
        // The node that is tried once in place of the owner, after an `ASK` redirection.
        let mut other: Option<Arc<Node>> = None;
        // The call may have been executed.
        let mut sent = false;
        for _ in 0..=REDIRECTIONS {
            let node = other.as_ref().unwrap_or(&owner);
            let value = match self.ask(node, other.is_some(), errand).await {
                Ok(value) => value,
                // Another node may have taken over in the meantime, but the call does not wait.
                Err(Failed {
                    error,
                    refused: true,
                    ..
                }) => {
                    self.refresh_soon();
                    let node = self.owner(slot)?;
                    if node.address == owner.address {
                        return Err(error.with_unsent(!sent).into());
                    }
                    (owner, other) = (node, None);
                    continue;
                }
                Err(Failed { error, .. }) => {
                    sent |= !error.is_unsent();
                    if (!sent || errand.may_be_repeated())
                        && let Some(node) = self.replaced(slot, &owner).await
                    {
                        (owner, other) = (node, None);
                        continue;
                    }
                    return Err(error.with_unsent(!sent).into());
                }
            };
            let redirection = Redirection::parse(&value, &node.address);
            let refusal = match node.connection.settle(value) {
                Ok(value) => {
                    let node = Some(owner);
                    return Ok(ScriptReply { value, node });
                }
                Err(refusal) => refusal,
            };
            match redirection {
                Some(Redirection::Moved(slot, address)) => {
                    (owner, other) = (self.moved(slot, address)?, None);
                }
                Some(Redirection::Ask(address)) => other = Some(self.node(&address)?),
                Some(Redirection::Down) => {
                    self.refresh_soon();
                    return Err(refusal.into());
                }
                Some(Redirection::TryAgain) => return Err(Failure::Moving(refusal)),
                Some(Redirection::HalfWay) => return Err(Failure::HalfWay(refusal)),
                None => return Err(refusal.into()),
            }
        }
        self.refresh_soon();
        let message = "the nodes of the cluster do not agree on which of them keeps this lock";
        Err(unavailable(message).into())
    }

    /// Runs a script that releases a lock, or `alone` if that script cannot be run.
    pub(crate) async fn free(
        &self,
        call: &Call,
        alone: impl FnOnce() -> Call + Send,
        repeat: Repeat,
    ) -> Result<Freed, StoreError> {
        match self.run(Errand::Call(call, repeat)).await {
            Ok(answer) => Ok(Freed::Wholly(answer)),
            Err(Failure::Failed(error)) => Err(error),
            Err(Failure::Moving(_)) => {
                let answer = self.run(Errand::Call(&alone(), repeat)).await?;
                Ok(Freed::LockAlone(answer))
            }
            Err(Failure::HalfWay(_)) => {
                // Make sure that the lock is released.
                self.run(Errand::Call(&alone(), repeat)).await?;
                Ok(Freed::HalfWay)
            }
        }
    }

    /// Runs `count` scripts in concurrent batches, grouped by node, and returns a result for each.
    /// An unresponsive node does not delay the calls to the others.
    pub(crate) async fn run_each(
        &self,
        count: usize,
        write: &(dyn Fn(usize) -> Call + Sync),
        in_outage: InOutage,
    ) -> Vec<Result<ScriptReply, StoreError>> {
        if let Err(error) = self.found(in_outage).await {
            return (0..count).map(|_| Err(error.clone())).collect();
        }
        let mut by_node: HashMap<u64, Vec<(usize, Call)>> = HashMap::new();
        for index in 0..count {
            let call = write(index);
            let node = self.node_number(slot_of(call.key(0)));
            by_node.entry(node).or_default().push((index, call));
        }
        let mut batches = Vec::new();
        for mut calls in by_node.into_values() {
            while !calls.is_empty() {
                let batch = calls.drain(..calls.len().min(BATCH)).collect();
                batches.push(self.run_batch(batch, write, in_outage));
            }
        }
        let mut results: Vec<_> = (0..count).map(|_| Err(no_node())).collect();
        for (index, result) in join_all(batches).await.into_iter().flatten() {
            results[index] = result;
        }
        results
    }

    /// Runs scripts of one node, at least one.
    async fn run_batch(
        &self,
        batch: Vec<(usize, Call)>,
        write: &(dyn Fn(usize) -> Call + Sync),
        in_outage: InOutage,
    ) -> Vec<(usize, Result<ScriptReply, StoreError>)> {
        let (indices, calls): (Vec<_>, Vec<Call>) = batch.into_iter().unzip();
        let fail = |indices: Vec<usize>, error: StoreError| {
            let failed = indices.into_iter().map(|index| (index, Err(error.clone())));
            failed.collect()
        };
        let slot = slot_of(calls[0].key(0));
        let node = match self.owner(slot) {
            Ok(node) => node,
            Err(error) => return fail(indices, error),
        };
        let connection = node.connection.here();
        if let Err(refused) = connection.admits(in_outage) {
            self.refresh_soon();
            return fail(indices, refused.error);
        }
        let unanswered = self.unanswered();
        let mut results = Vec::with_capacity(indices.len());
        let mut elsewhere = Vec::new();
        match connection.answer_each(calls).await {
            Ok(values) => {
                unanswered.disarm();
                for (index, value) in indices.into_iter().zip(values) {
                    if Redirection::parse(&value, &node.address).is_some() {
                        elsewhere.push(index);
                        continue;
                    }
                    let (value, node) = (node.connection.settle(value), Some(node.clone()));
                    results.push((index, value.map(|value| ScriptReply { value, node })));
                }
            }
            Err(error) => {
                drop(unanswered);
                if self.replaced(slot, &node).await.is_none() {
                    return fail(indices, error);
                }
                elsewhere = indices;
            }
        }
        // Redirect each call on its own. It may have been executed before.
        let elsewhere = elsewhere.into_iter().map(async |index| {
            let call = write(index);
            let outcome = self.run(Errand::Call(&call, Repeat::Once)).await;
            let sent = |failure| StoreError::from(failure).with_unsent(false);
            (index, outcome.map_err(sent))
        });
        results.extend(join_all(elsewhere).await);
        results
    }

    /// Waits until the cluster is found, for one attempt.
    async fn found(&self, in_outage: InOutage) -> Result<(), StoreError> {
        if !self.unfound.lasts() {
            return Ok(());
        }
        let refused = self.unfound.admits(
            in_outage,
            &format_args!("the cluster at {}", self.address()),
        );
        let mut looked_up = self.looked_up.subscribe();
        // The runtime of the task that looks for it may have ended.
        self.refresh_soon();
        refused?;
        // The task tries again, so a call need not find out whether it is still refused.
        let permanent = |error: &StoreError| !error.is_transient();
        if let Some(error) = self.unfound.error().filter(permanent) {
            return Err(error.with_unsent(true));
        }
        // The sender is not dropped meanwhile.
        let _ = looked_up.changed().await;
        self.unfound
            .error()
            .map_or(Ok(()), |error| Err(error.with_unsent(true)))
    }

    /// The node that serves the slot.
    fn owner(&self, slot: Slot) -> Result<Arc<Node>, StoreError> {
        let owner = lock(&self.map).slots.owner(slot).cloned();
        let Some(address) = owner else {
            self.refresh_soon();
            let message = format!("no node of the cluster serves the slot of this lock ({slot})");
            return Err(unavailable(message));
        };
        self.node(&address)
    }

    /// The node at `address`. Starts to connect to it if there is no connection.
    fn node(&self, address: &Address) -> Result<Arc<Node>, StoreError> {
        let mut map = lock(&self.map);
        if let Some(node) = map.nodes.get(address) {
            return Ok(node.clone());
        }
        let connection = Connection::begin(self.connector.to_node(self.endpoint(address)));
        let node = Arc::new(Node {
            address: address.clone(),
            connection,
        });
        map.nodes.insert(address.clone(), node.clone());
        Ok(node)
    }

    fn endpoint(&self, address: &Address) -> Endpoint {
        match self.seeds.iter().find(|(seed, _)| seed == address) {
            Some((_, seed)) => seed.clone(),
            None => self.seeds[0].1.at(address.host.to_string(), address.port),
        }
    }

    /// Records a `MOVED` redirection. Other slots may have moved with this one.
    fn moved(&self, slot: Slot, address: Address) -> Result<Arc<Node>, StoreError> {
        lock(&self.map).slots.assign(slot..=slot, address.clone());
        self.refresh_soon();
        self.node(&address)
    }

    async fn ask(&self, node: &Node, asking: bool, errand: Errand<'_>) -> Result<Value, Failed> {
        let first = asking.then(|| &*ASKING);
        let unanswered = self.unanswered();
        let answer = node.connection.here().answer(first, errand).await?;
        unanswered.disarm();
        Ok(answer)
    }

    /// Marks a call in flight. If it fails, or its caller stops waiting for it, the map may be
    /// wrong.
    fn unanswered(&self) -> OnDrop<impl FnOnce()> {
        OnDrop::new(|| self.refresh_soon())
    }

    /// The map of a seed, once it is connected.
    async fn first_map(&self, seed: &Address) -> Result<Slots, StoreError> {
        let node = self.node(seed)?;
        node.connection.here().ready().await?;
        node.slots().await
    }

    /// Refuses a namespace of another format. Each connection to the node that keeps the version
    /// checks it; this makes the first one. A node that does not reply in time refuses nothing.
    async fn check_format(&self, slots: &Slots) -> Result<(), StoreError> {
        let node = async {
            let slot = slot_of(format_name(&self.namespace).as_bytes());
            match slots.owner(slot) {
                Some(address) => self.node(address)?.connection.ready().await,
                None => Ok(()),
            }
        };
        match timeout(PATIENCE, node).await {
            Ok(Err(error)) if error.kind() == StoreErrorKind::IncompatibleFormat => Err(error),
            _ => Ok(()),
        }
    }
}

impl Listener for Cluster {
    fn on_event(&self, event: &StoreEvent) {
        match event {
            StoreEvent::Granted { hold, .. } => {
                self.subscriptions.leaves(|| self.slot(hold), hold.token)
            }
            // A node may be gone, and its slots may have moved to another one.
            StoreEvent::Disconnected => self.refresh_soon(),
            _ => {}
        }
    }
}

impl Node {
    /// The map of this node.
    async fn slots(&self) -> Result<Slots, StoreError> {
        let mut question = redis::cmd("CLUSTER");
        question.arg("SLOTS");
        let connection = self.connection.here();
        // One that does not answer is probed at its own pace.
        connection.admits(InOutage::Refuse)?;
        let answer = connection.ask(&question).await?;
        Slots::parse(&answer, &self.address).ok_or_else(|| {
            unavailable("the cluster serves no slots; create it with: redis-cli --cluster create")
        })
    }
}

fn no_node() -> StoreError {
    unavailable("no node of the cluster answers")
}

fn address_of(info: &ConnectionInfo) -> Option<Address> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some(Address::new(host, *port))
        }
        _ => None,
    }
}
