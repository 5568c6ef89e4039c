//! [`RecordStore`]: locks in a store of records.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::time::sleep;

use super::{
    Caller, Change, Decide, Inbox, Record, RecordName, Records, Swap, Swapped, Timestamp, Version,
    news,
    probe::Presence,
    step::{
        attempt::Attempt,
        body::Body,
        cache::{Cache, Halves},
        clock::Clock,
        evaluation::Lock,
        outcome::Outcome,
        turns::Turns,
    },
};
use crate::{
    error::LockError,
    guard::fence::FencingToken,
    request::{key::LockKey, spec::LockKind},
    shell::{sync::lock, time::Instant},
    store::{
        AcquireAllReply, AcquireReply, ClientId, Cursor, Hold, IfBusy, KeyRequest, Listeners, Page,
        StoreError, StoreErrorKind, StoreEvent, Token,
        remote::{Connecting, connect_within, outage::InOutage},
        table::{Step, Table, acquire_all},
    },
};

/// A time that is later than the deadline of any request.
const NEVER: Duration = Duration::from_secs(100 * 24 * 60 * 60);

/// The pause after a conflict about the name of a client, which may be locked.
const PAUSE: Duration = Duration::from_millis(20);

/// The time limit of the first call.
const REACH: Duration = Duration::from_secs(5);

/// The parts of a list of locks.
const LOCKS: &str = "l:";
const PERMITS: &str = "p:";

/// Locks in a store of [`Records`].
///
/// A free lock is acquired by one call, and released by one. A process that has not seen the
/// present record of a lock, or that acquires it again at once beside other clients, needs one call
/// more.
pub struct RecordStore(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) records: Arc<dyn Records>,
    pub(super) cache: Cache,
    pub(super) clock: Clock,
    pub(super) listeners: Listeners,
    /// The clients that have used this store last. Others that wait receive messages.
    pub(super) clients: Mutex<Halves<ClientId, ()>>,
    /// A grant that a message announces is polled before it is used.
    confirms: AtomicBool,
    pub(super) presence: Presence,
    pub(super) turns: Turns,
    /// The time for which a record is kept after the last use of its lock, in seconds.
    kept_for: AtomicU64,
    /// The usual time of a swap, in microseconds.
    pub(super) round_trip: AtomicU64,
    /// Whether the database locks contended records, so that all clients change them in turn.
    pub(super) locks_records: bool,
    /// Whether a message that grants a lock contains its record.
    pub(super) trusts_messages: bool,
}

impl fmt::Debug for RecordStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RecordStore").field(&self.0.records).finish()
    }
}

impl RecordStore {
    /// Creates a store of locks.
    pub fn new(records: impl Records) -> Self {
        Self::over(Arc::new(records))
    }

    /// Creates a store of locks in records that are in use elsewhere as well.
    pub fn over(records: Arc<dyn Records>) -> Self {
        let nothing = Decide::new(Caller(Weak::new()), |_| None);
        let locks_records = records.update(&[], nothing).is_some();
        let trusts_messages = records.trusts_messages();
        let shared = Arc::new(Shared {
            records,
            cache: Cache::default(),
            clock: Clock::default(),
            listeners: Listeners::default(),
            clients: Mutex::default(),
            confirms: AtomicBool::new(false),
            presence: Presence::default(),
            turns: Turns::default(),
            kept_for: AtomicU64::new(FencingToken::KEPT_FOR.as_secs()),
            round_trip: AtomicU64::new(0),
            locks_records,
            trusts_messages,
        });
        let inbox: Weak<dyn Inbox> = Arc::downgrade(&shared) as _;
        shared.records.listen(inbox);
        Self(shared)
    }

    /// Sets whether the store is asked about each grant that a message announces, as
    /// [`LockClientBuilder::confirm_grants`](crate::LockClientBuilder::confirm_grants) describes.
    #[must_use]
    pub fn confirm_grants(self, confirms: bool) -> Self {
        self.0.confirms.store(confirms, Ordering::Relaxed);
        self
    }

    /// Sets for how long the record of a lock is kept after its last use, as
    /// [`LockClientBuilder::keep_fences_for`](crate::LockClientBuilder::keep_fences_for) describes;
    /// a minute to a day.
    #[must_use]
    pub fn keep_fences_for(self, time: Duration) -> Self {
        let time = time.clamp(Duration::from_secs(60), FencingToken::KEPT_FOR);
        self.0.kept_for.store(time.as_secs(), Ordering::Relaxed);
        self
    }

    /// Executes a release in a transaction of the application, with which it takes effect.
    #[cfg(feature = "postgres")]
    pub(crate) async fn release_in(
        &self,
        release: crate::store::Release,
        transaction: &tokio_postgres::Transaction<'_>,
    ) -> Result<crate::store::ReleaseReply, StoreError> {
        let lock = Lock::new(&release.hold.key, release.hold.mode.kind());
        let rule = move |table: &mut Table, step: &mut Step<'_>| table.release(&release, step);
        let attempt = Attempt::new(vec![lock], rule);
        self.0.execute_in(attempt, transaction).await
    }

    /// Sets the time without an answer after which requests are refused at once, as
    /// [`LockClientBuilder::unavailable_after`](crate::LockClientBuilder::unavailable_after)
    /// describes, 100 ms to a day. A reply is any that is not `Unavailable`.
    #[must_use]
    pub fn unavailable_after(self, after: impl Into<Option<Duration>>) -> Self {
        let limits = Duration::from_millis(100)..=crate::LockSpec::MAX_LEASE;
        let after = after.into();
        let after = after.map(|after| after.clamp(*limits.start(), *limits.end()));
        self.0.presence.set_unavailable_after(after);
        self
    }
}

impl Connecting for RecordStore {
    /// Reads the clock of the database.
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        let read = async { self.0.records.read(&[]).await.map(drop) };
        Box::pin(connect_within(REACH, "in this database".into(), read))
    }
}

impl Inbox for Shared {
    fn deliver(&self, message: &[u8]) {
        let Some(reading) = self.clock.reading() else {
            return;
        };
        let Some((event, record)) = news::read(message, &reading) else {
            tracing::debug!("a message of another version of this library was ignored");
            return;
        };
        if let Some((name, record)) = record.filter(|_| self.trusts_messages) {
            self.cache.put(&name, Some(record));
        }
        let micros = reading.at(Instant::now()).latest.micros();
        let confirms = self.confirms.load(Ordering::Relaxed);
        self.listeners.notify(&event.announced(micros, confirms));
    }

    fn connected(&self, is_connected: bool) {
        if !is_connected {
            // The next connection may be to a database that shows another time.
            self.clock.forget();
        }
        self.listeners.notify(&match is_connected {
            true => StoreEvent::Reconnected,
            false => StoreEvent::Disconnected,
        });
    }
}

impl Shared {
    /// The part of the usual life of a record that is left out.
    pub(super) fn kept_shorter_by(&self) -> Duration {
        FencingToken::KEPT_FOR - Duration::from_secs(self.kept_for.load(Ordering::Relaxed))
    }

    fn knows(&self, token: Token) {
        let client = token.client();
        let mut clients = lock(&self.clients);
        if clients.get(&client).is_none() {
            clients.put(client, ());
        }
    }

    /// Begins an operation on one lock with the record that was seen last.
    pub(super) fn on<T: Outcome>(
        &self,
        key: &LockKey,
        kind: LockKind,
        rule: impl FnMut(&mut Table, &mut Step<'_>) -> T + Send + 'static,
    ) -> Attempt<T> {
        Attempt::new(vec![Lock::new(key, kind)], rule).cached(&self.cache, false)
    }

    pub(super) fn acquire(&self, request: &KeyRequest) -> Attempt<AcquireReply> {
        let Hold { key, mode, token } = &request.hold;
        self.knows(*token);
        let in_outage = in_outage([request]);
        let (lock, token) = (Lock::new(key, mode.kind()), *token);
        let request = request.clone();
        let rule = move |table: &mut Table, step: &mut Step<'_>| match timely(&request, step) {
            Some(request) => table.acquire(&request, step),
            None => AcquireReply::Late,
        };
        let attempt = Attempt::new(vec![lock], rule);
        let attempt = attempt.cached(&self.cache, true).caller(Some(token));
        attempt.in_outage(in_outage)
    }

    pub(super) fn acquire_all(&self, requests: &[KeyRequest]) -> Attempt<AcquireAllReply> {
        requests
            .iter()
            .for_each(|request| self.knows(request.hold.token));
        let lock = |request: &KeyRequest| Lock::new(&request.hold.key, request.hold.mode.kind());
        let locks = requests.iter().map(lock).collect();
        let in_outage = in_outage(requests);
        let client = requests.first().map(|it| it.hold.token.client());
        let requests = requests.to_vec();
        let rule = move |table: &mut Table, step: &mut Step<'_>| {
            let timely = requests.iter().map(|request| timely(request, step));
            match timely.collect::<Option<Vec<_>>>() {
                Some(requests) => acquire_all(&mut [table], |_| 0, &requests, step),
                None => AcquireAllReply::Refused {
                    index: 0,
                    reply: AcquireReply::Late,
                },
            }
        };
        let attempt = Attempt::new(locks, rule).cached(&self.cache, true);
        attempt.of_client(client).in_outage(in_outage)
    }

    /// Executes operations on holds, those on the same lock together.
    pub(super) async fn each<I, T>(
        self: Arc<Self>,
        items: Vec<I>,
        hold: fn(&I) -> &Hold,
        (is_cached, in_outage): (bool, InOutage),
        rule: fn(&I, &mut Table, &mut Step<'_>) -> T,
    ) -> Vec<Result<T, StoreError>>
    where
        I: Send + 'static,
        T: Outcome,
    {
        let mut replies: Vec<_> = items.iter().map(|_| Err(StoreError::no_reply())).collect();
        let mut groups = BTreeMap::<RecordName, (Lock, Vec<(usize, I)>)>::new();
        for (index, item) in items.into_iter().enumerate() {
            let lock = Lock::new(&hold(&item).key, hold(&item).mode.kind());
            let group = groups.entry(lock.name.clone());
            let (_, group) = group.or_insert_with(|| (lock, Vec::new()));
            group.push((index, item));
        }
        let (mut places, mut attempts) = (Vec::new(), Vec::new());
        for (lock, group) in groups.into_values() {
            places.push(group.iter().map(|(index, _)| *index).collect::<Vec<_>>());
            let caller = group.first().map(|(_, item)| hold(item).token);
            let rule = move |table: &mut Table, step: &mut Step<'_>| -> Vec<T> {
                let one = |(_, item): &(usize, I)| {
                    step.caller = Some(hold(item).token);
                    rule(item, table, step)
                };
                group.iter().map(one).collect()
            };
            let attempt = Attempt::new(vec![lock], rule).caller(caller);
            let attempt = attempt.in_outage(in_outage);
            attempts.push(match is_cached {
                true => attempt.cached(&self.cache, false),
                false => attempt,
            });
        }
        for (places, outcomes) in places.into_iter().zip(self.execute_each(attempts).await) {
            match outcomes {
                Ok(outcomes) => {
                    for (place, outcome) in places.into_iter().zip(outcomes) {
                        replies[place] = Ok(outcome);
                    }
                }
                Err(error) => places
                    .into_iter()
                    .for_each(|place| replies[place] = Err(error.clone())),
            }
        }
        replies
    }

    pub(super) async fn introduce(
        self: &Arc<Self>,
        client: ClientId,
        name: &str,
        keep_for: Duration,
    ) -> Result<(), StoreError> {
        let record = RecordName::of_client(client);
        let mut known = self.cache.get(&record).flatten();
        loop {
            let now = match self.now() {
                Some(now) => now,
                None => {
                    known = self
                        .read(std::slice::from_ref(&record))
                        .await?
                        .pop()
                        .flatten();
                    continue;
                }
            };
            let change = Change::new(
                record.clone(),
                known.map(|known| known.version),
                Record::new(Version::random(), name.into()),
                now.reached.later(keep_for),
            );
            let mut swap = Swap::new(vec![change], now.reached);
            swap.durable = false;
            match self.swap(&swap).await?.outcome {
                Swapped::Done => return Ok(()),
                Swapped::Conflict(present) => {
                    known = present.into_iter().next().flatten();
                    sleep(PAUSE).await;
                }
                Swapped::Early | Swapped::Guarded => known = self.cache.get(&record).flatten(),
            }
        }
    }

    /// Lists the locks first and then the permits. The cursor begins with the part of the list.
    pub(super) async fn list(
        self: &Arc<Self>,
        prefix: &str,
        cursor: Option<Cursor>,
    ) -> Result<Page, StoreError> {
        let cursor = cursor.as_ref().map_or(LOCKS, Cursor::as_str);
        let (part, after, kind) = match (cursor.strip_prefix(LOCKS), cursor.strip_prefix(PERMITS)) {
            (Some(after), _) => (LOCKS, after, LockKind::Lock),
            (None, Some(after)) => (PERMITS, after, LockKind::Permits),
            (None, None) => {
                let message = "the cursor is of another store";
                return Err(StoreError::new(StoreErrorKind::Unsupported, message));
            }
        };
        let after = (!after.is_empty()).then(|| RecordName::new(after));
        if self.now().is_none() {
            self.read(&[]).await?;
        }
        let prefix = RecordName::prefix(kind, prefix);
        let asked = self.presence.asked();
        let found = self.records.list(&prefix, after.as_ref()).await;
        self.replied(&found);
        drop(asked);
        let found = found?;
        let next = match found.last() {
            Some((name, _)) => Some(Cursor::new(format!("{part}{name}"))),
            None => (kind == LockKind::Lock).then(|| Cursor::new(PERMITS)),
        };
        let mut page = Page::new(Vec::new(), next);
        let now = self
            .now()
            .map_or_else(Timestamp::default, |now| now.reached);
        for (name, record) in found {
            // The names of permits have a prefix that may begin with that of the locks.
            let lock = name.lock().filter(|(_, found)| *found == kind);
            let body = Body::read(&name, &record.body);
            if body.is_ok_and(|body| body.is_taken(now)) {
                page.locks.extend(lock);
            }
        }
        Ok(page)
    }
}

/// The handling of requests during an outage, by whether one of them can wait.
pub(super) fn in_outage<'a>(requests: impl IntoIterator<Item = &'a KeyRequest>) -> InOutage {
    let mut requests = requests.into_iter();
    match requests.any(|it| it.then_queues || it.if_busy == IfBusy::Queue) {
        true => InOutage::Wait,
        false => InOutage::Refuse,
    }
}

/// Returns the request with a deadline by the clock of `step`, unless its deadline has passed.
fn timely(request: &KeyRequest, step: &Step<'_>) -> Option<KeyRequest> {
    (Instant::now() <= request.deadline).then(|| KeyRequest {
        deadline: step.now + NEVER,
        ..request.clone()
    })
}
