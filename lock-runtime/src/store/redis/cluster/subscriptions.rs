//! Where those who wait are told of grants: on a channel of their slot, at the node that keeps it, as long as somebody waits.
//!
//! Each node is listened to on a connection of its own. When a slot moves, the node ends the subscription with a message that looks like
//! the answer to a command, and whatever else was asked on that connection would get the answer of its neighbour
//! (<https://github.com/valkey-io/valkey/issues/1066>).
//!
//! Nobody waits for a subscription: whoever stands in line already is told to ask once it stands. What is lost is found by the polls,
//! each of which sees to it that the slot is listened to.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, PushInfo, PushKind, RedisError, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};
use tokio::{
    runtime::Handle,
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};

use super::{
    super::{error, link::Dial},
    audience::{Audience, LINGER, Wanted},
    slots::{Address, Slot, number_in, slot_of},
};
use crate::{
    store::{Hold, StoreErrorKind, StoreEvent, Token},
    sync::lock,
};

/// A node that has not answered for so long is not heard.
const PATIENCE: Duration = Duration::from_secs(1);

/// The channels of one store.
pub(super) struct Subscriptions {
    dial: Dial,
    desk: Mutex<Desk>,
}

#[derive(Default)]
struct Desk {
    audience: Audience,
    ears: HashMap<Address, Arc<Ear>>,
    /// Somebody looks for channels that nobody waits at.
    swept: bool,
}

/// The connection on which a node is listened to.
struct Ear {
    address: Address,
    client: Client,
    connection: OnceCell<MultiplexedConnection>,
    /// It was made, so its end is news.
    stood: AtomicBool,
}

impl Subscriptions {
    /// `dial` tells whom to tell.
    pub(super) fn new(dial: Dial) -> Self {
        Self {
            dial,
            desk: Mutex::default(),
        }
    }

    /// The channel of a slot.
    pub(super) fn channel(&self, slot: Slot) -> String {
        self.dial.pushes.of_slot(number_in(slot))
    }

    /// `hold` stands in line, as the node says that keeps the slot and is reached by `client`.
    pub(super) fn waits(
        self: &Arc<Self>,
        slot: Slot,
        hold: &Hold,
        node: &Address,
        client: &Client,
    ) {
        // Outside of a runtime nobody can listen.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let mut desk = lock(&self.desk);
        let todo = desk.audience.waits(slot, hold, node, Instant::now());
        let before = todo
            .unsubscribe
            .and_then(|node| desk.ears.get(&node).cloned());
        let ear = todo.subscribe.then(|| {
            desk.ears
                .entry(node.clone())
                .or_insert_with(|| Ear::new(node, client))
                .clone()
        });
        let sweep = !std::mem::replace(&mut desk.swept, true);
        drop(desk);
        // Not under the lock: a runtime that is shutting down drops a new task on the spot.
        if let Some(before) = before {
            let channel = self.channel(slot);
            runtime.spawn(async move { before.unsubscribe(&channel).await });
        }
        if let Some(ear) = ear {
            let this = self.clone();
            runtime.spawn(async move { this.subscribe(slot, &ear).await });
        }
        if sweep {
            let sweeper = Sweeper {
                all: Arc::downgrade(self),
                done: false,
            };
            runtime.spawn(sweeper.run());
        }
    }

    /// `token` does not wait any more.
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
            ear.connection(&self)
                .await?
                .req_packed_command(&command)
                .await
        };
        match timeout(PATIENCE, answer).await {
            Ok(Ok(Value::ServerError(refusal))) => {
                let refusal = error::refused(&refusal, &self.dial.acl);
                // Of a server before 7.0 too, which does not know the command.
                let forbidden = matches!(
                    refusal.kind(),
                    StoreErrorKind::Forbidden | StoreErrorKind::WrongServer
                );
                if forbidden {
                    self.dial.warn_of_silence(&refusal);
                }
                lock(&self.desk)
                    .audience
                    .failed(slot, &ear.address, forbidden);
            }
            // Where it stands, that has been told already; this may be the word on another subscription.
            Ok(Ok(_)) => lock(&self.desk).audience.failed(slot, &ear.address, false),
            Ok(Err(_)) | Err(_) => {
                self.forget(ear);
            }
        }
    }

    /// What is told on the connection.
    fn take(&self, ear: &Arc<Ear>, push: &PushInfo) {
        let slot = || match push.data.first() {
            Some(Value::BulkString(channel)) => Some(slot_of(channel)),
            _ => None,
        };
        let wanted = match push.kind {
            PushKind::SSubscribe => {
                slot().map(|slot| lock(&self.desk).audience.subscribed(slot, &ear.address))
            }
            PushKind::SUnsubscribe => {
                slot().map(|slot| lock(&self.desk).audience.unsubscribed(slot, &ear.address))
            }
            PushKind::Disconnection => return self.lost(ear),
            _ => return self.dial.pushes.take(push),
        };
        self.call(wanted.unwrap_or_default());
    }

    /// Nothing is heard on the connection any more.
    fn lost(&self, ear: &Arc<Ear>) {
        let wanted = self.forget(ear);
        // One that was never made has nothing to miss: asking at once would only try it again and again.
        if ear.stood.load(Ordering::Acquire) {
            self.call(wanted);
        }
    }

    fn forget(&self, ear: &Arc<Ear>) -> Vec<Wanted> {
        let mut desk = lock(&self.desk);
        if desk
            .ears
            .get(&ear.address)
            .is_none_or(|current| !Arc::ptr_eq(current, ear))
        {
            return Vec::new();
        }
        desk.ears.remove(&ear.address);
        desk.audience.lost(&ear.address)
    }

    /// Has those ask who wait.
    fn call(&self, wanted: Vec<Wanted>) {
        for (key, kind) in wanted {
            self.dial.pushes.listeners().notify(&StoreEvent::FreeIn {
                key,
                kind,
                ttl: Duration::ZERO,
            });
        }
    }

    /// Says which channels nobody waits at, and closes the connections on which nothing is to be heard. `None` if nobody waits at all.
    fn sweep(&self) -> Option<Vec<(Slot, Arc<Ear>)>> {
        let mut desk = lock(&self.desk);
        let left = desk.audience.sweep(Instant::now());
        let Desk {
            audience,
            ears,
            swept,
        } = &mut *desk;
        // Closed once the desk is free: their end is told here.
        let _closed: Vec<_> = ears
            .extract_if(|node, _| !audience.listens_at(node))
            .collect();
        *swept = !audience.is_empty();
        let open = |(slot, node)| Some((slot, ears.get(&node)?.clone()));
        let left = swept.then(|| left.into_iter().filter_map(open).collect());
        drop(desk);
        left
    }
}

impl Ear {
    fn new(address: &Address, client: &Client) -> Arc<Self> {
        let (address, client) = (address.clone(), client.clone());
        Arc::new(Self {
            address,
            client,
            connection: OnceCell::new(),
            stood: AtomicBool::new(false),
        })
    }

    async fn connection(
        self: &Arc<Self>,
        all: &Arc<Subscriptions>,
    ) -> Result<MultiplexedConnection, RedisError> {
        let connect = async || {
            let reader = Reader {
                all: Arc::downgrade(all),
                ear: Arc::downgrade(self),
            };
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(PATIENCE))
                .set_response_timeout(None)
                .set_push_sender(move |push: PushInfo| {
                    reader.take(&push);
                    Ok::<_, redis::aio::SendError>(())
                });
            let connection = self
                .client
                .get_multiplexed_async_connection_with_config(&config)
                .await?;
            self.stood.store(true, Ordering::Release);
            Ok(connection)
        };
        self.connection.get_or_try_init(connect).await.cloned()
    }

    /// If there is a connection.
    async fn unsubscribe(&self, channel: &str) {
        let Some(mut connection) = self.connection.get().cloned() else {
            return;
        };
        let mut command = redis::cmd("SUNSUBSCRIBE");
        command.arg(channel);
        // That it stands no longer is told by a message.
        let _ = timeout(PATIENCE, connection.req_packed_command(&command)).await;
    }
}

/// Belongs to the task that reads from the connection, and ends with it: also when the runtime of that task ends.
struct Reader {
    all: Weak<Subscriptions>,
    ear: Weak<Ear>,
}

impl Reader {
    fn take(&self, push: &PushInfo) {
        if let (Some(all), Some(ear)) = (self.all.upgrade(), self.ear.upgrade()) {
            all.take(&ear, push);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let (Some(all), Some(ear)) = (self.all.upgrade(), self.ear.upgrade()) {
            all.lost(&ear);
        }
    }
}

/// Looks for channels that nobody waits at, as long as there are any.
struct Sweeper {
    all: Weak<Subscriptions>,
    done: bool,
}

impl Sweeper {
    async fn run(mut self) {
        loop {
            sleep(LINGER).await;
            let Some(all) = self.all.upgrade() else {
                return;
            };
            let Some(left) = all.sweep() else {
                self.done = true;
                return;
            };
            for (slot, ear) in left {
                ear.unsubscribe(&all.channel(slot)).await;
            }
        }
    }
}

impl Drop for Sweeper {
    /// Its runtime may have ended, and another one goes on.
    fn drop(&mut self) {
        if !self.done
            && let Some(all) = self.all.upgrade()
        {
            lock(&all.desk).swept = false;
        }
    }
}
