//! The stream on which messages and the values of the clock arrive.

use std::{
    collections::HashMap,
    future::pending,
    mem::replace,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};
use tonic::{Status, Streaming, codegen::http::uri::PathAndQuery};
use tonic_prost::ProstCodec;

use super::{
    error,
    layout::Layout,
    members::Members,
    messages::{WATCH, WatchCreate, WatchRequest, WatchResponse},
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{
        ClientId, StoreError,
        records::{Inbox, SharedClock, inboxes::Inboxes},
    },
};

/// The number of the watch of the clock. Those of clients are positive.
const CLOCK: i64 = 0;
/// The time limit of opening a stream, and of a client that waits for its watch.
const OPEN: Duration = Duration::from_secs(2);
/// The pauses before the next attempt to open one, from the first one to the longest.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);

pub(super) struct Watching(Arc<Shared>);

struct Shared {
    members: Arc<Members>,
    layout: Layout,
    clock: Arc<SharedClock>,
    inboxes: Inboxes,
    state: Mutex<WatchState>,
    /// Notified when a watch has begun.
    begun: watch::Sender<()>,
}

#[derive(Default)]
struct WatchState {
    /// The clients whose messages are expected: the number of the watch, and whether it has begun.
    clients: HashMap<ClientId, (i64, bool)>,
    /// The stream that is open.
    requests: Option<mpsc::UnboundedSender<WatchRequest>>,
    is_running: bool,
}

impl Watching {
    pub(super) fn new(members: Arc<Members>, layout: Layout, clock: Arc<SharedClock>) -> Self {
        Self(Arc::new(Shared {
            members,
            layout,
            clock,
            inboxes: Inboxes::default(),
            state: Mutex::default(),
            begun: watch::Sender::new(()),
        }))
    }

    pub(super) fn inform(&self, inbox: Weak<dyn Inbox>) {
        self.0.inboxes.add(inbox);
    }

    /// Opens the stream, which brings the values of the clock.
    pub(super) fn start(&self) {
        if !replace(&mut lock(&self.0.state).is_running, true) {
            // Spawn without the lock: a runtime that is shutting down drops a new task on the spot.
            tokio::spawn(run(Running(Arc::downgrade(&self.0))));
        }
    }

    /// Waits until messages to `client` are received, for a bounded time. `None` if that is so.
    pub(super) fn expect(&self, client: ClientId) -> Option<impl Future<Output = ()> + use<>> {
        self.start();
        let mut begun = self.0.begun.subscribe();
        {
            let mut state = lock(&self.0.state);
            let next = state.clients.len() as i64 + 1;
            match state.clients.get(&client) {
                Some((_, true)) => return None,
                Some((_, false)) => {}
                None => {
                    state.clients.insert(client, (next, false));
                    if let Some(requests) = &state.requests {
                        // If the stream has ended, the next one begins with all of them.
                        let _ = requests.send(self.0.messages_to(client, next));
                    }
                }
            }
        }
        let shared = self.0.clone();
        Some(async move {
            let has_begun = || {
                lock(&shared.state)
                    .clients
                    .get(&client)
                    .is_some_and(|it| it.1)
            };
            // Polls find the grant if there is no stream.
            let _ = timeout(OPEN, begun.wait_for(|()| has_begun())).await;
        })
    }
}

/// Ends the stream with the store.
impl Drop for Watching {
    fn drop(&mut self) {
        lock(&self.0.state).requests = None;
    }
}

impl Shared {
    fn watch_of(key: Vec<u8>, range_end: Vec<u8>, watch_id: i64) -> WatchRequest {
        let create = WatchCreate {
            key,
            range_end,
            filters: vec![1],
            watch_id,
        };
        WatchRequest {
            create: Some(create),
        }
    }

    fn messages_to(&self, client: ClientId, number: i64) -> WatchRequest {
        let (first, end) = self.layout.messages_to(client);
        Self::watch_of(first, end, number)
    }

    /// Begins a stream with all watches.
    fn requests(&self) -> mpsc::UnboundedReceiver<WatchRequest> {
        let (sender, requests) = mpsc::unbounded_channel();
        let mut state = lock(&self.state);
        let clock = Self::watch_of(self.layout.clock(), Vec::new(), CLOCK);
        let clients = state.clients.iter();
        let clients = clients.map(|(client, (number, _))| self.messages_to(*client, *number));
        for request in [clock].into_iter().chain(clients) {
            let _ = sender.send(request);
        }
        state.requests = Some(sender);
        requests
    }

    fn ended(&self, was_open: bool) {
        {
            let mut state = lock(&self.state);
            state.requests = None;
            state.clients.values_mut().for_each(|it| it.1 = false);
        }
        if was_open {
            self.inboxes.connected(false);
        }
    }

    fn began(&self, number: i64) {
        let mut state = lock(&self.state);
        if let Some(client) = state.clients.values_mut().find(|it| it.0 == number) {
            client.1 = true;
        }
        // Those who wait look at the state while the channel is locked.
        drop(state);
        self.begun.send_replace(());
    }

    fn received(&self, reply: WatchResponse) -> Result<(), Status> {
        if reply.canceled {
            return Err(Status::unavailable(reply.cancel_reason));
        }
        if reply.created {
            self.began(reply.watch_id);
        }
        let values = reply.events.into_iter().filter_map(|event| event.kv);
        let values = values.map(|kv| kv.value);
        if reply.watch_id == CLOCK {
            let values = values.filter_map(|value| Layout::micros(&value));
            values.for_each(|micros| self.clock.heard(micros));
            return Ok(());
        }
        values.for_each(|value| self.inboxes.deliver(&value));
        Ok(())
    }
}

/// The task that keeps a stream open. If its runtime ends, the next call begins another one.
struct Running(Weak<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            let is_open = lock(&shared.state).requests.is_some();
            shared.ended(is_open);
            lock(&shared.state).is_running = false;
        }
    }
}

/// Keeps a stream open until the store is dropped.
async fn run(running: Running) {
    let shared = &running.0;
    let mut pause = PAUSE;
    while let Some(this) = shared.upgrade() {
        let (index, token) = (this.members.current(), this.members.token());
        let begun = Instant::now();
        let opened = open(&this, index).await;
        let was_open = opened.is_ok();
        let ended = match opened {
            Ok(messages) => {
                this.inboxes.connected(true);
                let dropped = this.begun.subscribe();
                drop(this);
                receive(shared, messages, dropped).await
            }
            Err(status) => status,
        };
        let Some(this) = shared.upgrade() else { return };
        this.ended(was_open);
        let refused: Result<(), StoreError> = match error::is_token_refused(&ended) {
            true => this.members.authenticate(token).await,
            false => Err(this.members.failed(index, &ended)),
        };
        if let Err(error) = refused {
            tracing::debug!("no stream of messages: {error}");
        }
        drop(this);
        pause = match was_open && Instant::now() >= begun + LONGEST {
            true => PAUSE,
            false => (pause * 2).min(LONGEST),
        };
        sleep(pause).await;
    }
}

async fn open(this: &Shared, index: usize) -> Result<Streaming<WatchResponse>, Status> {
    let mut requests = this.requests();
    let requests = stream::poll_fn(move |cx| requests.poll_recv(cx));
    // It stays open when there is nothing more to request.
    let requests = requests.chain(stream::once(pending()));
    let opened = async {
        let mut grpc = this.members.grpc(index).await?;
        let path = PathAndQuery::from_static(WATCH);
        let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
        let requests = this.members.request(requests, true);
        grpc.streaming(requests, path, codec).await
    };
    let opened = timeout(OPEN, opened).await;
    let opened = opened.unwrap_or_else(|_| Err(Status::unavailable("no stream of messages")));
    opened.map(tonic::Response::into_inner)
}

/// Handles messages until the stream ends, or the store is dropped.
async fn receive(
    shared: &Weak<Shared>,
    mut messages: Streaming<WatchResponse>,
    mut dropped: watch::Receiver<()>,
) -> Status {
    loop {
        let message = tokio::select! {
            message = messages.next() => message,
            // An error: the store is dropped.
            changed = dropped.changed() => match changed {
                Ok(()) => continue,
                Err(_) => None,
            },
        };
        let received = match message {
            Some(Ok(reply)) => shared.upgrade().map(|this| this.received(reply)),
            Some(Err(status)) => return status,
            None => None,
        };
        match received {
            Some(Ok(())) => {}
            Some(Err(status)) => return status,
            None => return Status::unavailable("the stream of messages has ended"),
        }
    }
}
