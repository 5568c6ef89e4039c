//! The connection of one client to the store: calls and messages that take time, and get lost.

use std::{
    fmt,
    future::pending,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::{BoxFuture, ready};
use tokio::{sync::oneshot, time::sleep};

use super::{super::dice::Dice, world::World};
use crate::{
    request::key::LockKey,
    request::spec::LockKind,
    shell::sync::lock,
    store::{
        AcquireAllReply, AcquireReply, ClientId, ConvertReply, Hold, HolderId, Inspection, KeyPart,
        KeyRequest, Limits, Listener, MemoryStore, PollReply, Release, ReleaseReply, RenewReply,
        Renewal, Replied, Replies, RevokeReply, RevokeScope, Store, StoreError, StoreErrorKind,
        StoreEvent,
    },
};

/// The longest delay of a message, and of one that is late.
const USUAL_MILLIS: usize = 4;
const LATE_MILLIS: usize = 1_200;

/// A connection to the in-memory store.
pub(super) struct Wire {
    world: Arc<World>,
    /// The number of its client.
    number: usize,
    dice: Mutex<Dice>,
    is_down: AtomicBool,
    listener: Mutex<Option<Weak<dyn Listener>>>,
    relay: Arc<Relay>,
}

struct Relay(Weak<Wire>);

/// What happens to a call.
struct Fate {
    there: Duration,
    back: Duration,
    arrives: bool,
    replies: bool,
    /// A call without a reply ends with an error, and not by its time-out.
    fails: bool,
}

impl Wire {
    pub(super) fn new(world: &Arc<World>, number: usize, dice: Dice) -> Arc<Self> {
        let wire = Arc::new_cyclic(|wire: &Weak<Self>| Self {
            world: world.clone(),
            number,
            dice: Mutex::new(dice),
            is_down: AtomicBool::new(false),
            listener: Mutex::default(),
            relay: Arc::new(Relay(wire.clone())),
        });
        let relay: Arc<dyn Listener> = wire.relay.clone();
        world.store.listen(Arc::downgrade(&relay));
        wire
    }

    /// Breaks the connection, or restores it.
    pub(super) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
        self.world.fault(self.number);
        let event = match is_down {
            true => StoreEvent::Disconnected,
            false => StoreEvent::Reconnected,
        };
        self.world
            .note(|| format!("client {}: {event:?}", self.number));
        let listener = lock(&self.listener).as_ref().and_then(Weak::upgrade);
        if let Some(listener) = listener {
            listener.on_event(&event);
        }
    }

    fn fate(&self) -> Fate {
        let mut dice = lock(&self.dice);
        let mut delay = || match dice.chance(self.world.faults()) {
            true => dice.below(LATE_MILLIS),
            false => dice.below(USUAL_MILLIS + 1) * dice.below(2),
        };
        let (there, back) = (delay(), delay());
        let is_down = self.is_down.load(Ordering::Relaxed);
        let mut is_kept = || !is_down && !dice.chance(self.world.faults());
        let (arrives, replies) = (is_kept(), is_kept());
        let fate = Fate {
            there: Duration::from_millis(there as u64),
            back: Duration::from_millis(back as u64),
            arrives,
            replies: arrives && replies,
            fails: dice.chance(500),
        };
        if !fate.replies || there.max(back) > USUAL_MILLIS {
            // Until the message has arrived.
            self.world.fault_until(self.number, fate.there + fate.back);
        }
        fate
    }

    /// Sends a call, which is executed whether or not its future is dropped.
    async fn call<T: fmt::Debug + Send + 'static>(
        &self,
        what: String,
        execute: impl FnOnce(Arc<MemoryStore>) -> BoxFuture<'static, T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (fate, world, number) = (self.fate(), self.world.clone(), self.number);
        world.note(|| format!("client {number}: {what}"));
        let store = world.store.clone();
        let executes = {
            let world = world.clone();
            async move {
                let reply = execute(store).await;
                world.note(|| format!("client {number}: {what}: {}", world.shown(&reply)));
                reply
            }
        };
        if fate.replies && fate.there + fate.back == Duration::ZERO {
            return Ok(executes.await);
        }
        let (sender, reply) = oneshot::channel();
        tokio::spawn(async move {
            sleep(fate.there).await;
            if fate.arrives {
                let reply = executes.await;
                sleep(fate.back).await;
                if fate.replies {
                    let _ = sender.send(reply);
                }
            }
        });
        match reply.await {
            Ok(reply) => Ok(reply),
            Err(_) if fate.fails => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "the connection was closed",
            )),
            Err(_) => pending().await,
        }
    }

    async fn call_for_each<T: fmt::Debug + Send + 'static>(
        &self,
        calls: usize,
        what: String,
        execute: impl FnOnce(Arc<MemoryStore>) -> BoxFuture<'static, Vec<Result<T, StoreError>>>
        + Send
        + 'static,
    ) -> Vec<Result<T, StoreError>> {
        let replies = self.call(what, execute).await;
        replies.unwrap_or_else(|error| (0..calls).map(|_| Err(error.clone())).collect())
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire({})", self.number)
    }
}

impl Listener for Relay {
    fn on_event(&self, event: &StoreEvent) {
        let Some(wire) = self.0.upgrade() else { return };
        let listener = lock(&wire.listener).clone();
        let fate = wire.fate();
        if let (Some(listener), true) = (listener, fate.replies) {
            let event = event.clone();
            tokio::spawn(async move {
                sleep(fate.there).await;
                if let Some(listener) = listener.upgrade() {
                    listener.on_event(&event);
                }
            });
        }
    }
}

fn shown(hold: &Hold) -> String {
    format!("{} {:?}", hold.key, hold.mode)
}

impl Store for Wire {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        let request = request.clone();
        let what = format!("acquire {}", shown(&request.hold));
        Box::pin(self.call(what, |store| {
            Box::pin(async move { done(store.acquire(&request).await) })
        }))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        let requests = requests.to_vec();
        let what = format!("acquire {} keys", requests.len());
        Box::pin(self.call(what, |store| {
            Box::pin(async move { done(store.acquire_all(&requests).await) })
        }))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        let holds = holds.to_vec();
        let what = format!("poll {}", shown(&holds[0]));
        Box::pin(self.call_for_each(holds.len(), what, |store| {
            Box::pin(async move { store.poll(&holds).await })
        }))
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        let renewals = renewals.to_vec();
        let what = format!("renew {} locks", renewals.len());
        Box::pin(self.call_for_each(renewals.len(), what, |store| {
            Box::pin(async move { store.renew(&renewals).await })
        }))
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        let release = release.clone();
        let what = format!("release {}", shown(&release.hold));
        Box::pin(self.call(what, |store| {
            Box::pin(async move { done(store.release(&release).await) })
        }))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        let hold = hold.clone();
        let what = format!("convert {}", shown(&hold));
        Box::pin(self.call(what, |store| {
            Box::pin(async move { done(store.convert(&hold).await) })
        }))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        let hold = hold.clone();
        let what = format!("abandon {}", shown(&hold));
        Box::pin(self.call(what, |store| {
            Box::pin(async move { done(store.abandon(&hold).await) })
        }))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        let key = key.clone();
        Box::pin(async move {
            let what = format!("inspect {key}");
            let inspected = self.call(what, move |store| {
                Box::pin(async move { done(store.inspect(&key, kind).await) })
            });
            inspected.await
        })
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        let key = key.clone();
        self.world.revoked(&key);
        Box::pin(self.call(format!("revoke {key}"), move |store| {
            Box::pin(async move { done(store.revoke(&key, kind, scope).await) })
        }))
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        let (name, grants) = (name.to_owned(), grants.to_vec());
        Box::pin(self.call("introduce".into(), move |store| {
            Box::pin(async move { done(store.introduce(client, &name, &grants, keep_for).await) })
        }))
    }

    fn name_of(&self, _key: &LockKey, _kind: LockKind, _part: KeyPart) -> Option<String> {
        None
    }

    fn server_of(&self, key: &LockKey, _kind: LockKind) -> u64 {
        // Two servers, to each of which the renewals are sent.
        key.as_str().len() as u64 % 2
    }

    fn limits(&self) -> Limits {
        Limits::new()
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        *lock(&self.listener) = Some(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }
}

/// The reply of the in-memory store, which never fails.
fn done<T>(reply: Result<T, StoreError>) -> T {
    reply.expect("the in-memory store replies")
}
