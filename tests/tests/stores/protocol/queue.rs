//! Rules 3, 4, 5, 15, 16 and 23, in the wait queue that a Redis server keeps: which waiter gets a
//! lock, when, and how it is notified.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lock_runtime::{
    LockKey, Mode,
    store::{
        AcquireReply, Grant, Hold, KeyRequest, Listener, NextHolder, PollReply, Release,
        ReleaseReply, RevokeScope, Store as _, StoreEvent, Token, redis::RedisStore,
    },
};
use lock_tests::{RedisServer, replies::poll};
use tokio::{
    sync::{Mutex, mpsc},
    time::timeout,
};

use super::{
    HOUR, LONG, MODES, TWO_PERMITS, acquire, beside, eventually, fence_name, fresh_hold, granted,
    in_a_minute, inspect, key, lock_name, member, micros,
};

mod handoff;
pub(crate) mod hostile;
mod leaving;
mod order;
mod server;

const SECOND: Duration = Duration::from_secs(1);

/// Records the events of a store.
struct Recorder {
    events: mpsc::UnboundedSender<StoreEvent>,
    /// On a shared server the revocations of other tests arrive, too.
    also_revocations: bool,
}

impl Listener for Recorder {
    fn on_event(&self, event: &StoreEvent) {
        if self.also_revocations || !matches!(event, StoreEvent::Revoked { .. }) {
            let _ = self.events.send(event.clone());
        }
    }
}

/// A store on a server, and its events.
struct Client {
    store: Arc<RedisStore>,
    events: Mutex<mpsc::UnboundedReceiver<StoreEvent>>,
    _recorder: Arc<Recorder>,
}

impl Client {
    async fn of(server: &RedisServer) -> Self {
        Self::at(&server.url()).await
    }

    async fn at(url: &str) -> Self {
        Self::recording(url, false).await
    }

    async fn recording(url: &str, also_revocations: bool) -> Self {
        let store = Arc::new(RedisStore::connect(url, "lock").await.unwrap());
        let (sender, events) = mpsc::unbounded_channel();
        let recorder = Arc::new(Recorder {
            events: sender,
            also_revocations,
        });
        let weak: Weak<Recorder> = Arc::downgrade(&recorder);
        store.listen(weak);
        Self {
            store,
            events: Mutex::new(events),
            _recorder: recorder,
        }
    }

    async fn event(&self) -> StoreEvent {
        timeout(LONG, self.events.lock().await.recv())
            .await
            .expect("an event")
            .unwrap()
    }

    /// Waits for a notification of a grant, which must be to `hold`.
    async fn pushed(&self, hold: &Hold) -> Grant {
        match self.event().await {
            StoreEvent::Granted {
                hold: granted,
                grant,
                ..
            } if granted == *hold => grant,
            other => panic!("{other:?} for {hold:?}"),
        }
    }

    /// Waits for the notification of a grant to `hold` over a connection that was lost before.
    async fn pushed_after_a_reconnect(&self, hold: &Hold) {
        loop {
            match self.event().await {
                StoreEvent::Granted { hold: granted, .. } if granted == *hold => break,
                StoreEvent::Disconnected | StoreEvent::Reconnected => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The events so far. The server replies in order, so its earlier notifications have arrived.
    async fn events_so_far(&self) -> Vec<StoreEvent> {
        inspect(&*self.store, &fresh_hold(Mode::Exclusive)).await;
        let mut events = self.events.lock().await;
        std::iter::from_fn(|| events.try_recv().ok()).collect()
    }

    async fn queue(&self, hold: &Hold) -> AcquireReply {
        self.queue_for(hold, HOUR).await
    }

    async fn queue_for(&self, hold: &Hold, lease: Duration) -> AcquireReply {
        self.store
            .acquire(&KeyRequest::new(hold.clone(), lease, in_a_minute()).queued())
            .await
            .unwrap()
    }

    /// Another acquisition of the same lock, in the queue.
    async fn waiter(&self, key: &LockKey, mode: Mode) -> Hold {
        let [hold] = self.waiters(key, mode).await;
        hold
    }

    /// Further acquisitions of the same lock, in the queue in this order.
    async fn waiters<const N: usize>(&self, key: &LockKey, mode: Mode) -> [Hold; N] {
        let holds = [(); N].map(|()| beside(key, mode));
        for hold in &holds {
            let reply = self.queue(hold).await;
            assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        }
        holds
    }

    async fn held(&self, mode: Mode) -> Hold {
        let hold = fresh_hold(mode);
        granted(&*self.store, &hold, HOUR).await;
        hold
    }

    /// Another acquisition of the same lock, which takes the second of two permits.
    async fn fill(&self, holder: &Hold) -> Hold {
        let other = beside(&holder.key, holder.mode);
        if holder.mode == TWO_PERMITS {
            granted(&*self.store, &other, HOUR).await;
        }
        other
    }

    async fn poll(&self, hold: &Hold) -> PollReply {
        poll(&*self.store, hold).await.unwrap()
    }

    async fn is_queued(&self, hold: &Hold) -> bool {
        matches!(self.poll(hold).await, PollReply::Queued { .. })
    }

    async fn is_held(&self, hold: &Hold) -> bool {
        matches!(self.poll(hold).await, PollReply::Granted(_))
    }

    async fn abandon(&self, hold: &Hold) {
        self.store.abandon(hold).await.unwrap();
    }

    async fn release(&self, hold: &Hold) -> ReleaseReply {
        self.store
            .release(&Release::new(hold.clone()))
            .await
            .unwrap()
    }

    async fn release_to(&self, hold: &Hold, next: Token) -> ReleaseReply {
        let next = NextHolder::new(next, HOUR, 3);
        self.store
            .release(&Release::new(hold.clone()).next(next))
            .await
            .unwrap()
    }

    async fn revoke(&self, hold: &Hold) {
        self.store
            .revoke(&hold.key, hold.mode.kind(), RevokeScope::Leased)
            .await
            .unwrap();
    }

    async fn waiting(&self, hold: &Hold) -> Vec<Mode> {
        inspect(&*self.store, hold)
            .await
            .waiters
            .iter()
            .map(|waiter| waiter.mode)
            .collect()
    }

    /// Waits until the leases of all holders but `left` have expired.
    async fn expired(&self, hold: &Hold, left: usize) {
        eventually("a lease expires", async || {
            inspect(&*self.store, hold).await.holders.len() == left
        })
        .await;
    }
}

/// A mode that waits for holders in `mode`.
fn conflicting(mode: Mode) -> Mode {
    match mode {
        Mode::Shared => Mode::Exclusive,
        mode => mode,
    }
}

fn queue_name(hold: &Hold) -> String {
    match hold.key.hash_tag() {
        Some(_) => format!("q:{}", lock_name(hold)),
        None => format!("{{{}}}:q", lock_name(hold)),
    }
}

/// The number of fields of the queue's hash.
async fn queue_len(server: &RedisServer, hold: &Hold) -> usize {
    server.query(&["HLEN", &queue_name(hold)]).await
}

/// Backdates the last poll of `hold`.
async fn silent(server: &RedisServer, hold: &Hold, ago: Duration) {
    let queue = queue_name(hold);
    let place: String = server.query(&["HGET", &queue, &member(hold)]).await;
    let entry: String = server.query(&["HGET", &queue, &place]).await;
    let (_, rest) = entry.split_once(' ').unwrap();
    let seen = u128::from(micros(server).await) / 1000 - ago.as_millis();
    server
        .command(&["HSET", &queue, &place, &format!("{seen} {rest}")])
        .await;
}

/// Nothing is left of a lock but its counter.
async fn only_the_counter_is_left(server: &RedisServer, hold: &Hold) {
    assert_eq!(
        server.keys(&format!("*{}*", hold.key)).await,
        [fence_name(hold)]
    );
}
