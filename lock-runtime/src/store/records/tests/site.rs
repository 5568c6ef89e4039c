//! A database that refuses calls, does not answer, or locks the records that an operation changes.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::time::sleep;

use super::{
    super::{
        Change, Decide, Inbox, ReadReply, Record, RecordName, RecordStore, Records, Swap,
        SwapReply, Timestamp,
    },
    Database, Link,
};
use crate::{
    shell::sync::lock,
    store::{KeyPart, Limits, Listener, Replied, Store, StoreError, StoreEvent},
};

/// Keeps the messages and the interruptions that a database reports.
#[derive(Default)]
pub(in crate::store::records) struct Received {
    pub(in crate::store::records) messages: Mutex<Vec<Vec<u8>>>,
    pub(in crate::store::records) connections: Mutex<Vec<bool>>,
}

impl Inbox for Received {
    fn deliver(&self, message: &[u8]) {
        lock(&self.messages).push(message.to_vec());
    }

    fn connected(&self, is_connected: bool) {
        lock(&self.connections).push(is_connected);
    }
}

/// Keeps the events of a store.
#[derive(Default)]
pub(super) struct Events(Mutex<Vec<StoreEvent>>);

impl Listener for Events {
    fn on_event(&self, event: &StoreEvent) {
        lock(&self.0).push(event.clone());
    }
}

impl Events {
    /// Listens to a store from now on.
    pub(super) fn of(store: &RecordStore) -> Arc<Self> {
        let events = Arc::new(Self::default());
        let listener: Arc<dyn Listener> = events.clone();
        store.listen(Arc::downgrade(&listener));
        events
    }

    pub(super) fn all(&self) -> Vec<StoreEvent> {
        lock(&self.0).clone()
    }

    /// Returns the names of the events.
    pub(super) fn shown(&self) -> Vec<String> {
        let shown = |event| format!("{event:?}");
        self.all().iter().map(shown).collect()
    }
}

/// The answer to the calls.
#[derive(Clone, Debug, Default)]
pub(super) enum Fate {
    #[default]
    Served,
    Refused(StoreError),
    Silent,
}

/// A connection to a database, and its behavior.
#[derive(Debug)]
pub(super) struct Site {
    link: Link,
    pub(super) fate: Mutex<Fate>,
    /// Whether contended records are locked for an operation.
    locks: bool,
    /// A record that others lock first, for this time.
    slow: Option<(&'static str, Duration)>,
    /// Whether messages arrive, and calls may be made on any runtime.
    pub(super) says: bool,
    calls: AtomicUsize,
    updates: AtomicUsize,
    /// The end of the need of each record that was to be replaced.
    pub(super) needed: Mutex<Vec<Timestamp>>,
}

impl Site {
    pub(super) fn new(database: &Arc<Database>, way: Duration) -> Self {
        let database = database.clone();
        Self {
            link: Link { database, way },
            fate: Mutex::default(),
            locks: false,
            slow: None,
            says: false,
            calls: AtomicUsize::new(0),
            updates: AtomicUsize::new(0),
            needed: Mutex::default(),
        }
    }

    /// Locks contended records, this one after a while.
    pub(super) fn locking(self, slow: &'static str, by: Duration) -> Self {
        Self {
            locks: true,
            slow: Some((slow, by)),
            ..self
        }
    }

    pub(super) fn store(self: &Arc<Self>) -> RecordStore {
        RecordStore::over(self.clone())
    }

    pub(super) fn set(&self, fate: Fate) {
        *lock(&self.fate) = fate;
    }

    /// Returns the number of calls that were made.
    pub(super) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns the number of operations for which records were locked.
    pub(super) fn updates(&self) -> usize {
        self.updates.load(Ordering::Relaxed)
    }

    async fn called(&self) -> Result<(), StoreError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let fate = lock(&self.fate).clone();
        match fate {
            Fate::Served => Ok(()),
            Fate::Refused(error) => Err(error),
            Fate::Silent => std::future::pending().await,
        }
    }

    async fn updated(
        &self,
        names: &[RecordName],
        decide: Decide<'_>,
    ) -> Result<Option<SwapReply>, StoreError> {
        self.called().await?;
        self.updates.fetch_add(1, Ordering::Relaxed);
        sleep(self.link.way).await;
        if let Some((slow, by)) = self.slow
            && names.iter().any(|name| name.as_str() == slow)
        {
            sleep(by).await;
        }
        let database = &self.link.database;
        let present = |name: &RecordName| {
            let records = &lock(&database.state).records;
            records.get(name.as_str()).cloned()
        };
        let present = names.iter().map(present).collect();
        let Some(swap) = decide.decide(ReadReply::new(database.now(), present)) else {
            return Ok(None);
        };
        let reply = SwapReply::new(database.now(), self.link.execute(&swap));
        sleep(self.link.way).await;
        Ok(Some(reply))
    }
}

impl Records for Site {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        Box::pin(async move {
            self.called().await?;
            let needed = |change: &Change| change.needed_until;
            lock(&self.needed).extend(swap.changes.iter().map(needed));
            self.link.swap(swap).await
        })
    }

    fn update<'a>(
        &'a self,
        names: &'a [RecordName],
        decide: Decide<'a>,
    ) -> Option<Replied<'a, Option<SwapReply>>> {
        match self.locks {
            true => Some(Box::pin(self.updated(names, decide))),
            false => None,
        }
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        Box::pin(async move {
            self.called().await?;
            self.link.read(names).await
        })
    }

    /// One record at a time.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a RecordName>,
    ) -> Replied<'a, Vec<(RecordName, Record)>> {
        let records = &lock(&self.link.database.state).records;
        let is_after = |name: &str| after.is_none_or(|after| name > after.as_str());
        let mut found = records.iter();
        let found = found.find(|(name, _)| name.starts_with(prefix) && is_after(name));
        let found = found.map(|(name, record)| (RecordName::new(name.clone()), record.clone()));
        Box::pin(std::future::ready(Ok(found.into_iter().collect())))
    }

    fn limits(&self) -> Limits {
        Limits::new()
    }

    fn sends_messages(&self) -> bool {
        self.says
    }

    fn serves_any_runtime(&self) -> bool {
        self.says
    }

    fn expect_messages(&self, client: crate::store::ClientId) -> BoxFuture<'_, ()> {
        self.link.expect_messages(client)
    }

    fn place_of(&self, name: &RecordName, _part: KeyPart) -> Option<String> {
        Some(format!("the record {name}"))
    }

    fn guarded_name(&self, name: &RecordName) -> Option<String> {
        Some(format!("app:{name}"))
    }
}
