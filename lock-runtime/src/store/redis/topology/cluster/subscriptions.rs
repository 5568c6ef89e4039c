//! Subscriptions to the channels on which waiters are notified of grants. Each channel belongs to
//! a slot, and is subscribed to at the node that serves the slot, while the slot has waiters.
//!
//! Each node has a separate connection for subscriptions. When a slot moves, the node ends the
//! subscription with a message that looks like the reply to a command, and any other command on
//! that connection would get the reply of its neighbour
//! (<https://github.com/valkey-io/valkey/issues/1066>).
//!
//! No request waits for a subscription: a waiter that is queued earlier is prompted to poll once
//! the subscription is established. Polls make up for lost messages, and each poll also ensures
//! that the slot's channel is subscribed to.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, PushInfo, PushKind, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};
use tokio::{
    runtime::Handle,
    sync::OnceCell,
    time::{sleep, timeout},
};

use super::{
    audience::{Audience, LINGER, Wanted},
    slots::{Address, Slot, number_in, slot_of},
};
use crate::store::redis::{
    clock::ServerClock,
    connection::{
        connector::{Connector, in_time},
        endpoint::{Driver, Endpoint},
        login::Authentication,
    },
    error,
    sync::OnDrop,
    topology::target::Target,
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{
        Hold, StoreError,
        StoreErrorKind::{Forbidden, WrongServer},
        StoreEvent, Token,
    },
};

/// The time limit for a connection to a node, and for each reply on it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The channels of one store.
pub(super) struct Subscriptions {
    connector: Connector,
    desk: Mutex<Desk>,
}

#[derive(Default)]
struct Desk {
    audience: Audience,
    ears: HashMap<Address, Arc<Ear>>,
    /// A task looks for channels without waiters.
    swept: bool,
}

/// The subscription connection to a node.
struct Ear {
    address: Address,
    server: Arc<Endpoint>,
    clock: Arc<OnceLock<ServerClock>>,
    /// With its driver, and the task that authenticates it again, if its credentials end.
    connection: OnceCell<(MultiplexedConnection, Driver, Option<Authentication>)>,
}

impl Subscriptions {
    /// Creates the subscriptions of a store. Events go to the listeners of `connector`.
    pub(super) fn new(connector: Connector) -> Self {
        let desk = Mutex::default();
        Self { connector, desk }
    }

    /// The channel of a slot.
    pub(super) fn channel(&self, slot: Slot) -> String {
        self.connector.pushes.of_slot(number_in(slot))
    }

    /// Registers `hold`, which is queued at `node`, which serves the slot, with the parameters of
    /// its other connection.
    pub(super) fn waits(
        self: &Arc<Self>,
        slot: Slot,
        hold: &Hold,
        node: &Address,
        connector: &Connector,
    ) {
        let Target::Server(server) = &connector.target else {
            return;
        };
        // A subscription needs a runtime.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let mut desk = lock(&self.desk);
        let todo = desk.audience.waits(slot, hold, node, Instant::now());
        let ear_at = |node| desk.ears.get(&node).cloned();
        let before = todo.unsubscribe.and_then(ear_at);
        let ear = todo.subscribe.then(|| {
            let ear = desk.ears.entry(node.clone()).or_insert_with(|| {
                Arc::new(Ear {
                    address: node.clone(),
                    server: server.clone(),
                    clock: connector.clock.clone(),
                    connection: OnceCell::new(),
                })
            });
            ear.clone()
        });
        let sweep = !std::mem::replace(&mut desk.swept, true);
        drop(desk);
        // Spawn without the lock: a runtime that is shutting down drops a new task on the spot.
        if let Some(before) = before {
            let channel = self.channel(slot);
            runtime.spawn(async move { before.unsubscribe(&channel).await });
        }
        if let Some(ear) = ear {
            let this = self.clone();
            runtime.spawn(async move { this.subscribe(slot, &ear).await });
        }
        if sweep {
            self.start_to_sweep(&runtime);
        }
    }

    /// Removes a waiter.
    pub(super) fn leaves(&self, slot: impl FnOnce() -> Slot, token: Token) {
        let mut desk = lock(&self.desk);
        if !desk.audience.is_empty() {
            desk.audience.leaves(slot(), token, Instant::now());
        }
    }

    async fn subscribe(self: Arc<Self>, slot: Slot, ear: &Arc<Ear>) {
        let mut command = redis::cmd("SSUBSCRIBE");
        command.arg(self.channel(slot));
        let answer = async {
            let mut connection = ear.connection(&self).await?;
            let answer = connection.req_packed_command(&command).await;
            answer.map_err(|cause| error::disconnected(&cause, &self.connector.acl))
        };
        let Ok(Ok(value)) = timeout(PATIENCE, answer).await else {
            self.forget(ear);
            return;
        };
        // A push message has already reported the subscription if it is established. This may be
        // the reply for another one.
        let mut forbidden = false;
        if let Value::ServerError(refusal) = value {
            let refusal = error::refused(&refusal, &self.connector.acl);
            // A server before 7.0 does not know the command.
            forbidden = matches!(refusal.kind(), Forbidden | WrongServer);
            if forbidden {
                self.connector.warn_of_silence(&refusal);
            }
        }
        let audience = &mut lock(&self.desk).audience;
        audience.failed(slot, &ear.address, forbidden);
    }

    /// Handles a message on the connection.
    fn take(&self, ear: &Arc<Ear>, push: &PushInfo) {
        let change = match push.kind {
            PushKind::SSubscribe => Audience::subscribed,
            PushKind::SUnsubscribe => Audience::unsubscribed,
            PushKind::Disconnection => return self.lost(ear),
            _ => return self.connector.pushes.take(push, ear.clock.get()),
        };
        if let Some(Value::BulkString(channel)) = push.data.first() {
            let slot = slot_of(channel);
            let wanted = change(&mut lock(&self.desk).audience, slot, &ear.address);
            self.call(wanted);
        }
    }

    /// Handles the end of the connection.
    fn lost(&self, ear: &Arc<Ear>) {
        let wanted = self.forget(ear);
        // A connection that was never established has missed nothing. To poll at once would only
        // repeat the attempt again and again.
        if ear.connection.initialized() {
            self.call(wanted);
        }
    }

    fn forget(&self, ear: &Arc<Ear>) -> Vec<Wanted> {
        let mut desk = lock(&self.desk);
        let current = desk.ears.get(&ear.address);
        if current.is_none_or(|current| !Arc::ptr_eq(current, ear)) {
            return Vec::new();
        }
        desk.ears.remove(&ear.address);
        desk.audience.lost(&ear.address)
    }

    /// Prompts the waiters of these locks to poll.
    fn call(&self, wanted: Vec<Wanted>) {
        let (listeners, ttl) = (&self.connector.pushes.listeners, Duration::ZERO);
        for (key, kind) in wanted {
            listeners.notify(&StoreEvent::FreeIn { key, kind, ttl });
        }
    }

    /// Unsubscribes from channels without waiters, as long as there are any channels.
    fn start_to_sweep(self: &Arc<Self>, runtime: &Handle) {
        let this = Arc::downgrade(self);
        let cut_off = this.clone();
        // The runtime of the task may end, while another one goes on.
        let cut_off = OnDrop::new(move || {
            if let Some(all) = cut_off.upgrade() {
                lock(&all.desk).swept = false;
            }
        });
        runtime.spawn(async move {
            loop {
                sleep(LINGER).await;
                let Some(all) = this.upgrade() else { break };
                let Some(left) = all.sweep() else { break };
                for (slot, ear) in left {
                    ear.unsubscribe(&all.channel(slot)).await;
                }
            }
            cut_off.disarm();
        });
    }

    /// Returns the channels without waiters, and closes the connections without channels. `None`
    /// if there are no channels left.
    fn sweep(&self) -> Option<Vec<(Slot, Arc<Ear>)>> {
        let mut locked = lock(&self.desk);
        let desk = &mut *locked;
        let left = desk.audience.sweep(Instant::now());
        // These are closed after the desk is unlocked, as their end is reported here.
        let unused = |node: &Address, _: &mut _| !desk.audience.listens_at(node);
        let _closed: Vec<_> = desk.ears.extract_if(unused).collect();
        desk.swept = !desk.audience.is_empty();
        let open = |(slot, node)| Some((slot, desk.ears.get(&node)?.clone()));
        let left = left.into_iter().filter_map(open).collect();
        let left = desk.swept.then_some(left);
        drop(locked);
        left
    }
}

impl Ear {
    async fn connection(
        self: &Arc<Self>,
        all: &Arc<Subscriptions>,
    ) -> Result<MultiplexedConnection, StoreError> {
        let connect = async || {
            let (weak_all, weak_ear) = (Arc::downgrade(all), Arc::downgrade(self));
            let both = move || Some((weak_all.upgrade()?, weak_ear.upgrade()?));
            // Belongs to the task that reads from the connection, and is dropped with it, also when
            // the runtime of that task ends.
            let still = both.clone();
            let end = OnDrop::new(move || {
                if let Some((all, ear)) = still() {
                    all.lost(&ear);
                }
            });
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(None)
                .set_response_timeout(None)
                .set_push_sender(move |push: PushInfo| {
                    let _owned = &end;
                    if let Some((all, ear)) = both() {
                        all.take(&ear, &push);
                    }
                    Ok::<_, redis::aio::SendError>(())
                });
            let (door, login) = self.server.door().await?;
            let disconnected = |cause| error::disconnected(&cause, &all.connector.acl);
            let opened = in_time(door.open(&config)).await;
            let (connection, driver) = opened.map_err(disconnected)?;
            // The replies to commands may be those to others here, so only errors are certain.
            let authentication = login.map(|login| login.keep(&connection));
            Ok::<_, StoreError>((connection, driver, authentication))
        };
        let connected = self.connection.get_or_try_init(connect).await;
        connected.map(|(connection, ..)| connection.clone())
    }

    /// Unsubscribes from the channel, if there is a connection.
    async fn unsubscribe(&self, channel: &str) {
        let Some((connection, ..)) = self.connection.get() else {
            return;
        };
        let mut connection = connection.clone();
        let mut command = redis::cmd("SUNSUBSCRIBE");
        command.arg(channel);
        // A push message reports the end of the subscription.
        let _ = timeout(PATIENCE, connection.req_packed_command(&command)).await;
    }
}
