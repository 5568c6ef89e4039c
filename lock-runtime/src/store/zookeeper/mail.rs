//! The task that reads messages to clients, and the values of the clock.

use std::{
    collections::{BTreeMap, HashMap},
    mem::{replace, take},
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use base64::Engine as _;
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    sync::{Notify, mpsc, watch},
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{
    BASE64, DIRECTORIES,
    calls::{Calls, PART},
    error,
    jute::{Change, Kind, Node},
    session::Session,
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{
        ClientId, StoreError,
        records::{Inbox, inboxes::Inboxes},
    },
};

/// The time limit of a client that waits for its nodes.
const OPEN: Duration = Duration::from_secs(2);
/// The pauses before the next attempt to begin a session, from the first one to the longest.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);
/// The pause between two looks at the session, and for the clock if it does not exist yet.
const LOOK: Duration = Duration::from_secs(1);
/// The messages that are deleted together, unless a look comes before.
const MANY: usize = 16;
/// The looks between two directories whose old records are removed.
const UPKEEP: usize = 60;
/// The visits of directories with one of which messages to clients that are gone are removed.
const RARELY: u32 = 16;
/// The time without a call after which a client does not follow the clock.
const IDLE: Duration = Duration::from_secs(5);

pub(super) struct Mail(Arc<Shared>);

struct Shared {
    calls: Arc<Calls>,
    inboxes: Inboxes,
    state: Mutex<MailState>,
    /// Notified when the nodes of a client are there.
    begun: watch::Sender<()>,
    /// Notified of a client whose messages are expected, and when the store is dropped.
    changed: Notify,
}

#[derive(Default)]
struct MailState {
    /// The clients whose messages are expected, and whether they have their nodes.
    clients: HashMap<ClientId, bool>,
    /// The time of the latest call.
    used: Option<Instant>,
    is_open: bool,
    is_running: bool,
    is_dropped: bool,
}

impl Mail {
    pub(super) fn new(calls: Arc<Calls>) -> Self {
        Self(Arc::new(Shared {
            calls,
            inboxes: Inboxes::default(),
            state: Mutex::default(),
            begun: watch::Sender::new(()),
            changed: Notify::new(),
        }))
    }

    pub(super) fn inform(&self, inbox: Weak<dyn Inbox>) {
        self.0.inboxes.add(inbox);
    }

    /// Begins to read.
    pub(super) fn start(&self) {
        {
            let mut state = lock(&self.0.state);
            state.used = Some(Instant::now());
            if replace(&mut state.is_running, true) {
                return;
            }
        }
        // Spawn without the lock: a runtime that is shutting down drops a new task on the spot.
        tokio::spawn(run(Running(self.0.clone())));
    }

    /// Waits until messages to `client` are received, for a bounded time. `None` if that is so.
    pub(super) fn expect(&self, client: ClientId) -> Option<impl Future<Output = ()> + use<>> {
        self.start();
        let mut begun = self.0.begun.subscribe();
        if *lock(&self.0.state).clients.entry(client).or_default() {
            return None;
        }
        self.0.changed.notify_one();
        let shared = self.0.clone();
        Some(async move {
            let has_begun = || {
                lock(&shared.state)
                    .clients
                    .get(&client)
                    .is_some_and(|it| *it)
            };
            // Polls find the grant if there is no session.
            let _ = timeout(OPEN, begun.wait_for(|()| has_begun())).await;
        })
    }
}

/// Ends the task with the store.
impl Drop for Mail {
    fn drop(&mut self) {
        lock(&self.0.state).is_dropped = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    /// Returns whether the client has made calls lately.
    fn is_used(&self) -> bool {
        let used = lock(&self.state).used;
        used.is_some_and(|used| Instant::now() < used + IDLE)
    }

    fn is_dropped(&self) -> bool {
        lock(&self.state).is_dropped
    }

    /// Records that messages are not received any more.
    fn ended(&self) {
        let was_open = {
            let mut state = lock(&self.state);
            state.clients.values_mut().for_each(|it| *it = false);
            replace(&mut state.is_open, false)
        };
        if was_open {
            self.inboxes.connected(false);
        }
    }

    /// Creates the nodes for the messages to those clients that have none. Returns their paths.
    async fn open_all(&self, session: &Session) -> Result<Vec<String>, StoreError> {
        let mut paths = Vec::new();
        loop {
            let next = lock(&self.state)
                .clients
                .iter()
                .find_map(|(client, is_open)| (!is_open).then_some(*client));
            let Some(client) = next else { return Ok(paths) };
            self.open(session, client).await?;
            paths.push(self.calls.shared.layout.messages_to(client));
            if let Some(is_open) = lock(&self.state).clients.get_mut(&client) {
                *is_open = true;
            }
            self.begun.send_replace(());
        }
    }

    async fn open(&self, session: &Session, client: ClientId) -> Result<(), StoreError> {
        let layout = &self.calls.shared.layout;
        let (reader, directory) = (layout.reader(client), layout.messages_to(client));
        let create = |path, kind| Change::Create {
            path,
            data: Vec::new(),
            access: self.calls.ensemble.access(),
            kind,
        };
        // That of an earlier session would end with it.
        let old = session.change(Change::Delete {
            path: reader.clone(),
            version: None,
        });
        let new = session.change(create(reader, Kind::OfSession));
        let messages = session.change(create(directory, Kind::Lasting));
        for (changed, expected) in [
            (old.await?, error::NO_NODE),
            (new.await?, error::NODE_EXISTS),
            (messages.await?, error::NODE_EXISTS),
        ] {
            match changed {
                Err(code) if code != expected => {
                    return Err(error::of_call(&session.server, code));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Passes on those messages to a client that came after the latest one. Returns the number of
    /// the latest one, and the paths of all.
    fn deliver(&self, directory: &str, names: Vec<String>, mut latest: i32) -> (i32, Vec<String>) {
        let numbered = |name: &String| {
            let (body, number) = name.rsplit_once('-')?;
            Some((number.parse().ok()?, BASE64.decode(body).ok()?))
        };
        let messages: BTreeMap<i32, _> = names.iter().filter_map(numbered).collect();
        for (number, body) in messages {
            if number > latest {
                latest = number;
                self.inboxes.deliver(&body);
            }
        }
        let paths = names.into_iter().map(|name| format!("{directory}/{name}"));
        (latest, paths.collect())
    }

    /// Reads what changes until the session ends, or the store is dropped.
    async fn read(
        &self,
        session: &Arc<Session>,
        mut events: mpsc::UnboundedReceiver<String>,
    ) -> Result<(), StoreError> {
        self.calls.ready().await?;
        let opened = self.open_all(session).await?;
        lock(&self.state).is_open = true;
        self.inboxes.connected(true);
        let clock = self.calls.shared.layout.clock();
        let read = |path: String| {
            let is_clock = path == clock;
            let value = is_clock.then(|| session.get(&path, true));
            let names = (!is_clock).then(|| session.children(&path, true));
            async move {
                let read = match (value, names) {
                    (Some(value), _) => value.await.map(Read::Clock),
                    (_, Some(names)) => names.await.map(Read::Messages),
                    (None, None) => Ok(Read::Clock(None)),
                };
                (path, read)
            }
        };
        let mut reads = FuturesUnordered::new();
        reads.extend(opened.into_iter().chain([clock.clone()]).map(&read));
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut has_clock, mut looks) = (false, rand::random_range(0..UPKEEP));
        let mut boxes = HashMap::<String, Delivered>::new();
        loop {
            for path in self.open_all(session).await? {
                reads.push(read(path));
            }
            let path: String = tokio::select! {
                Some((path, read)) = reads.next(), if !reads.is_empty() => {
                    match read? {
                        Read::Clock(node) => {
                            has_clock = node.is_some();
                            if let Some(micros) = self.calls.shared.value(session, node)? {
                                self.calls.shared.clock.heard(micros);
                            }
                        }
                        Read::Messages(names) => {
                            // An operator, or a client for which this one was gone, has removed it.
                            let names = names.ok_or_else(|| error::lost(&session.server))?;
                            let delivered = boxes.entry(path.clone()).or_default();
                            let (latest, paths) = self.deliver(&path, names, delivered.latest);
                            *delivered = Delivered { latest, paths };
                            if delivered.paths.len() >= MANY {
                                delete(session, take(&mut delivered.paths));
                            }
                        }
                    }
                    continue;
                }
                path = events.recv() => match path {
                    // An idle client does not follow the clock.
                    Some(path) if path == clock && !self.is_used() => {
                        has_clock = false;
                        continue;
                    }
                    Some(path) => path,
                    None => return Ok(()),
                },
                () = self.changed.notified() => {
                    if self.is_dropped() {
                        return Ok(());
                    }
                    continue;
                }
                () = session.over() => return Ok(()),
                _ = look.tick() => {
                    if !self.calls.ensemble.serves(session) {
                        return Ok(());
                    }
                    for delivered in boxes.values_mut() {
                        delete(session, take(&mut delivered.paths));
                    }
                    looks += 1;
                    if looks.is_multiple_of(UPKEEP) {
                        tokio::spawn(upkeep(self.calls.clone()));
                    }
                    // A node that does not exist cannot be watched.
                    if has_clock || !self.is_used() {
                        continue;
                    }
                    clock.clone()
                }
            };
            reads.push(read(path));
        }
    }
}

/// What was read after a change: the node of the clock, or the names of messages.
enum Read {
    Clock(Option<Node>),
    Messages(Option<Vec<String>>),
}

/// The messages to a client that were passed on: the number of the latest one, and the paths of
/// those that are to be deleted.
struct Delivered {
    latest: i32,
    paths: Vec<String>,
}

impl Default for Delivered {
    fn default() -> Self {
        Self {
            latest: -1,
            paths: Vec::new(),
        }
    }
}

/// Removes some of the nodes that are needed no more.
async fn upkeep(calls: Arc<Calls>) {
    let directory = rand::random_range(0..DIRECTORIES);
    let mut removed = calls.remove_old(directory).await.map(drop);
    if removed.is_ok() && rand::random_ratio(1, RARELY) {
        removed = calls.remove_unread().await;
    }
    if let Err(error) = removed {
        tracing::debug!("old nodes are left: {error}");
    }
}

/// Deletes messages, without waiting for it. They are read again if it fails, and not passed on.
fn delete(session: &Session, paths: Vec<String>) {
    let delete = |path| Change::Delete {
        path,
        version: None,
    };
    for part in paths.chunks(PART) {
        drop(session.multi(part.iter().cloned().map(delete).collect()));
    }
}

/// The task that reads. If its runtime ends, the next call begins another one.
struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.ended();
        lock(&self.0.state).is_running = false;
    }
}

/// Reads messages until the store is dropped.
async fn run(running: Running) {
    let shared = &running.0;
    let mut pause = PAUSE;
    while !shared.is_dropped() {
        let read = async {
            let session = shared.calls.ensemble.session().await?;
            let Some(events) = session.events() else {
                // Those of a session go to the task that has begun to read them.
                shared.calls.ensemble.leave(&session);
                return Ok(());
            };
            let read = shared.read(&session, events).await;
            if read.is_err() {
                shared.calls.ensemble.leave(&session);
            }
            read
        };
        let begun = Instant::now();
        let read: Result<(), StoreError> = read.await;
        shared.ended();
        if let Err(error) = read {
            tracing::debug!("no messages: {error}");
        }
        pause = match Instant::now() >= begun + LONGEST {
            true => PAUSE,
            false => (pause * 2).min(LONGEST),
        };
        let dropped = async {
            while !shared.is_dropped() {
                shared.changed.notified().await;
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = dropped => {}
        }
    }
}
