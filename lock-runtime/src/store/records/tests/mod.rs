//! A database in memory, with a clock of its own and behind links of any length.

mod calls;
mod damaged;
mod messages;
mod presence;
mod shared_clock;
pub(super) mod site;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    mem::take,
    num::NonZeroU32,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::time::sleep;

use super::*;
use crate::{
    LockClient, LockRequest,
    request::key::LockKey,
    request::spec::Mode,
    shell::sync::lock,
    shell::time::Instant,
    store::{
        AcquireReply, Cursor, Grant, Hold, IfBusy, KeyRequest, Listener, Release, ReleaseReply,
        RenewReply, Renewal, Store, StoreErrorKind, StoreEvent, Token,
    },
};

const LEASE: Duration = Duration::from_secs(10);
const NOW: u64 = 1_800_000_000_000_000;

/// The content of a database, which several links may share.
#[derive(Debug)]
struct Database {
    began: Instant,
    state: Mutex<State>,
}

/// The store that gets the messages.
struct Inboxed(Weak<dyn Inbox>);

impl fmt::Debug for Inboxed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inboxed")
    }
}

#[derive(Debug, Default)]
struct State {
    records: BTreeMap<String, Record>,
    /// The time by which its clock was set forward.
    ahead: Duration,
    /// The calls that it has executed.
    calls: usize,
    /// It delivers messages, which only those can send who may write records.
    pushes: bool,
    /// The clients that have expected messages.
    listening: BTreeSet<ClientId>,
    inbox: Option<Inboxed>,
    inboxes: Vec<Inboxed>,
    /// The messages that were sent.
    sent: Vec<Vec<u8>>,
}

impl Database {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            state: Mutex::default(),
        })
    }

    fn now(&self) -> Timestamp {
        let ahead = lock(&self.state).ahead;
        Timestamp::from_micros(NOW).later(self.began.elapsed() + ahead)
    }

    fn store(self: &Arc<Self>, way: Duration) -> RecordStore {
        let database = self.clone();
        RecordStore::new(Link { database, way })
    }
}

/// A connection on which a message takes this time in each direction.
#[derive(Debug)]
struct Link {
    database: Arc<Database>,
    way: Duration,
}

impl Link {
    fn execute(&self, swap: &Swap) -> Swapped {
        let now = self.database.now();
        let state = &mut *lock(&self.database.state);
        state.calls += 1;
        let records = &mut state.records;
        let present = |change: &Change| records.get(change.name.as_str()).cloned();
        let present: Vec<_> = swap.changes.iter().map(present).collect();
        let versions = present.iter().map(|it| it.as_ref().map(|it| it.version));
        if now < swap.not_before {
            return Swapped::Early;
        }
        if !versions.eq(swap.changes.iter().map(|change| change.known)) {
            return Swapped::Conflict(present);
        }
        for Change { name, record, .. } in &swap.changes {
            records.insert(name.as_str().to_owned(), record.clone());
        }
        for Message { body, .. } in &swap.messages {
            state.sent.push(body.clone());
            if state.pushes {
                let inboxes = state.inboxes.iter().filter_map(|it| it.0.upgrade());
                let (inboxes, body, way) = (inboxes.collect::<Vec<_>>(), body.clone(), self.way);
                tokio::spawn(async move {
                    sleep(way).await;
                    inboxes.iter().for_each(|inbox| inbox.deliver(&body));
                });
            }
        }
        Swapped::Done
    }
}

impl Records for Link {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        Box::pin(async move {
            sleep(self.way).await;
            let reply = SwapReply::new(self.database.now(), self.execute(swap));
            sleep(self.way).await;
            Ok(reply)
        })
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        Box::pin(async move {
            sleep(self.way).await;
            let now = self.database.now();
            lock(&self.database.state).calls += 1;
            let records = names.iter().map(|name| {
                let records = &lock(&self.database.state).records;
                records.get(name.as_str()).cloned()
            });
            let reply = ReadReply::new(now, records.collect());
            sleep(self.way).await;
            Ok(reply)
        })
    }

    fn trusts_messages(&self) -> bool {
        lock(&self.database.state).pushes
    }

    fn limits(&self) -> Limits {
        Limits::new().push(lock(&self.database.state).pushes)
    }

    fn listen(&self, inbox: Weak<dyn Inbox>) {
        let state = &mut *lock(&self.database.state);
        state.inboxes.push(Inboxed(inbox.clone()));
        state.inbox = Some(Inboxed(inbox));
    }

    fn expect_messages(&self, client: ClientId) -> BoxFuture<'_, ()> {
        lock(&self.database.state).listening.insert(client);
        Box::pin(std::future::ready(()))
    }
}

fn request(if_busy: IfBusy) -> KeyRequest {
    let key = LockKey::new("a").unwrap();
    let hold = Hold::new(key, Mode::Exclusive, Token::random());
    let mut request = KeyRequest::new(hold, LEASE, Instant::now() + LEASE);
    request.if_busy = if_busy;
    request
}

async fn acquire(store: &RecordStore, request: &KeyRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        AcquireReply::Granted(grant) => grant,
        reply => panic!("{reply:?}"),
    }
}

/// Keeps the grants that its store or a message reports.
#[derive(Default)]
struct Grants(Mutex<Vec<Grant>>);

impl Listener for Grants {
    fn on_event(&self, event: &StoreEvent) {
        if let StoreEvent::Granted { grant, .. } = event {
            lock(&self.0).push(*grant);
        }
    }
}

/// A record whose latest token is the last one, as a user may have written it.
#[tokio::test(start_paused = true)]
async fn no_fencing_token_is_granted_twice_at_the_end_of_the_numbers() {
    let database = Database::new();
    let store = database.store(Duration::ZERO);
    let mut last = step::body::Body::default();
    (last.fence, last.since) = (crate::FencingToken::LAST.number(), 1);
    let record = Record::new(
        Version::random(),
        last.write(&RecordName::new("a")).unwrap(),
    );
    lock(&database.state).records.insert("a".to_owned(), record);
    for if_busy in [IfBusy::Refuse, IfBusy::Queue, IfBusy::Refuse] {
        let reply = store.acquire(&request(if_busy)).await.unwrap();
        assert_eq!(reply, AcquireReply::ForeignKey(KeyPart::Fence));
    }
    let locks = LockClient::with_store(Arc::new(store));
    let error = locks.exclusive("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), crate::LockErrorKind::ForeignKey, "{error:#}");
    drop(locks.exclusive("b").acquire().await.unwrap());
}

/// The client at the other end of a long link knows the clock of the database within bounds.
#[tokio::test(start_paused = true)]
async fn a_reservation_ends_no_earlier_than_asked_behind_a_slow_link() {
    let min_hold = Duration::from_secs(2);
    for way in [1, 20, 100].map(Duration::from_millis) {
        let database = Database::new();
        let near = LockClient::with_store(Arc::new(database.store(Duration::ZERO)));
        let far = LockClient::with_store(Arc::new(database.store(way)));
        let began = Instant::now();
        let guard = far.exclusive("a").min_hold(min_hold).acquire().await;
        let guard = guard.unwrap();
        let waits = near.exclusive("a").wait(LEASE);
        let waiter = tokio::spawn(async move { waits.acquire().await });
        sleep(way * 3).await;
        guard.release().await.unwrap();
        let next = waiter.await.unwrap().unwrap();
        let held = began.elapsed();
        assert!(held >= min_hold, "{way:?}: free after {held:?}");
        assert!(
            held < min_hold + Duration::from_secs(1),
            "{way:?}: {held:?}"
        );
        next.release().await.unwrap();
    }
}

/// Less the time of one call: the clock was read when the previous one was executed.
#[tokio::test(start_paused = true)]
async fn an_extension_lasts_as_long_as_asked_behind_a_slow_link() {
    let way = Duration::from_millis(150);
    let store = Database::new().store(way);
    let holder = request(IfBusy::Refuse);
    acquire(&store, &holder).await;
    let renewals = [Renewal::new(holder.hold, LEASE * 2)];
    let reply = store.renew(&renewals).await.remove(0).unwrap();
    let RenewReply::Renewed { ttl } = reply else {
        panic!("{reply:?}");
    };
    assert!(ttl >= LEASE * 2 - way * 2, "{ttl:?}");
}

/// The clock of the database is set forward after it was read, and before the step is executed.
#[tokio::test(start_paused = true)]
async fn a_grant_ends_with_its_record_however_old_the_reading_of_the_clock() {
    let ahead = Duration::from_secs(2);
    let database = Database::new();
    let store = database.store(Duration::ZERO);
    let grants = Arc::new(Grants::default());
    let listener: Arc<dyn Listener> = grants.clone();
    store.listen(Arc::downgrade(&listener));
    let holder = request(IfBusy::Refuse);
    acquire(&store, &holder).await;
    let released = Release::new(holder.hold);
    store.release(&released).await.unwrap();

    lock(&database.state).ahead += ahead;
    let holder = request(IfBusy::Refuse);
    let grant = acquire(&store, &holder).await;
    assert!(grant.ttl <= LEASE - ahead, "{grant:?}");

    let waiter = request(IfBusy::Queue);
    let queued = store.acquire(&waiter).await.unwrap();
    assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");
    lock(&database.state).ahead += ahead;
    store.release(&Release::new(holder.hold)).await.unwrap();
    let grants = lock(&grants.0).clone();
    let [pushed] = grants[..] else {
        panic!("{grants:?}");
    };
    assert!(pushed.ttl <= Grant::HANDOFF_LEASE - ahead, "{pushed:?}");
}

/// Acquires a lock and releases it.
async fn once(request: LockRequest) {
    let guard = request.acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// With each reply, the one client knows the record before the other learns that it has lost.
#[tokio::test(start_paused = true)]
async fn a_client_that_asks_again_and_again_keeps_no_other_one_from_its_release() {
    let database = Database::new();
    let way = Duration::from_millis(2);
    let locks = |way| LockClient::with_store(Arc::new(database.store(way)));
    let (near, far, busy) = (locks(way), locks(way * 3), locks(way));
    let permits = |locks: &LockClient| locks.permits("a", NonZeroU32::new(2).unwrap());
    for head_start in 0..8 {
        let one = if head_start % 2 == 0 { &near } else { &far };
        let guard = permits(one).acquire().await.unwrap();
        let other = permits(&busy);
        let busy = tokio::spawn(async move {
            loop {
                once(other.clone()).await;
            }
        });
        sleep(Duration::from_millis(50) + way * head_start / 2).await;
        let began = Instant::now();
        guard.release().await.unwrap();
        assert!(began.elapsed() < way * 200, "{:?}", began.elapsed());
        busy.abort();
        let _ = busy.await;
    }
}

/// No record shows the client that has lost.
/// Each request enters the wait queue and leaves it, which changes the record twice.
#[tokio::test(start_paused = true)]
async fn a_client_that_gives_up_again_and_again_keeps_no_other_one_from_its_lock() {
    let database = Database::new();
    let way = Duration::from_millis(2);
    let locks = |way| LockClient::with_store(Arc::new(database.store(way)));
    let (far, busy) = (locks(way * 3), locks(way));
    let request = far.exclusive("a").lease(Duration::from_secs(1));
    let guard = request.acquire().await.unwrap();
    let busy = tokio::spawn(async move {
        loop {
            let request = busy.exclusive("a").wait(Duration::from_millis(1));
            let _ = request.acquire().await;
        }
    });
    sleep(Duration::from_secs(20)).await;
    assert!(!guard.is_lost(), "after {} renewals", guard.renewals());
    let began = Instant::now();
    guard.release().await.unwrap();
    assert!(began.elapsed() < way * 100, "{:?}", began.elapsed());
    busy.abort();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_a_lock_again_and_again_lets_another_one_enter_the_wait_queue() {
    let database = Database::new();
    let way = Duration::from_millis(2);
    let locks = || LockClient::with_store(Arc::new(database.store(way)));
    let (one, busy) = (locks(), locks());
    let busy = tokio::spawn(async move {
        loop {
            once(busy.exclusive("a")).await;
        }
    });
    for _ in 0..4 {
        once(one.exclusive("a")).await;
    }
    busy.abort();
}

#[tokio::test(start_paused = true)]
async fn a_client_without_a_name_is_one_client_too() {
    let database = Database::new();
    let store: Arc<dyn Store> = Arc::new(database.store(Duration::from_millis(1)));
    let other = LockClient::with_store(store.clone());
    let nameless = LockClient::builder().without_identity();
    let nameless = nameless.build_with_store(store).unwrap();
    let guard = other.exclusive("a").acquire().await.unwrap();
    for _ in 0..20 {
        let waits = nameless.exclusive("a").wait(Duration::from_millis(20));
        waits.acquire().await.unwrap_err();
    }
    assert_eq!(lock(&database.state).listening.len(), 1);
    guard.release().await.unwrap();
}

/// A role that may only send messages could otherwise have a client write a false record under the
/// true version.
#[tokio::test(start_paused = true)]
async fn a_record_in_a_message_is_not_believed() {
    let database = Database::new();
    let store = database.store(Duration::ZERO);
    let first = request(IfBusy::Refuse);
    assert!(matches!(
        store.acquire(&first).await,
        Ok(AcquireReply::Granted(_))
    ));
    let record = || {
        let records = &lock(&database.state).records;
        let (name, record) = records.iter().next().expect("that of the lock");
        (RecordName::new(name.clone()), record.clone())
    };
    store
        .release(&Release::new(first.hold.clone()))
        .await
        .unwrap();
    let (_, free) = record();
    let held = request(IfBusy::Refuse);
    assert!(matches!(
        store.acquire(&held).await,
        Ok(AcquireReply::Granted(_))
    ));
    let (name, present) = record();
    let false_record = Record::new(present.version, free.body);
    let message = super::news::with_record(&name, &false_record);
    let inbox = lock(&database.state).inbox.take().expect("it listens");
    inbox.0.upgrade().unwrap().deliver(&message);
    let other = request(IfBusy::Refuse);
    let reply = store.acquire(&other).await.unwrap();
    assert!(matches!(reply, AcquireReply::Busy { .. }), "{reply:?}");
}

/// The new holder has not seen the record since it entered the wait queue.
#[tokio::test(start_paused = true)]
async fn a_lock_that_a_message_grants_is_released_in_one_call_where_messages_are_of_writers() {
    for (pushes, calls) in [(true, 1), (false, 2)] {
        let database = Database::new();
        lock(&database.state).pushes = pushes;
        let (near, far) = (
            database.store(Duration::ZERO),
            database.store(Duration::ZERO),
        );
        let inbox = lock(&database.state).inbox.take().expect("it listens");
        let holder = request(IfBusy::Refuse);
        acquire(&near, &holder).await;
        let waiter = request(IfBusy::Queue);
        let queued = far.acquire(&waiter).await.unwrap();
        assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");
        near.release(&Release::new(holder.hold)).await.unwrap();
        let sent = take(&mut lock(&database.state).sent);
        let [message] = &sent[..] else {
            panic!("{} messages", sent.len());
        };
        inbox.0.upgrade().unwrap().deliver(message);
        let before = lock(&database.state).calls;
        let reply = far.release(&Release::new(waiter.hold)).await.unwrap();
        assert_eq!(reply, ReleaseReply::Released);
        assert_eq!(lock(&database.state).calls - before, calls);
    }
}

/// Clients that are equally far away have equally many turns, and few of their swaps are lost.
#[tokio::test(start_paused = true)]
async fn turns_at_a_contended_record_are_shared() {
    let way = Duration::from_millis(2);
    for (number, fewest, most_calls) in [(2, 0.7, 6), (8, 0.5, 12), (32, 0.15, 35)] {
        // Enough of them for each client that chance does not matter.
        let all = 640.max(number * 60);
        let database = Database::new();
        lock(&database.state).pushes = true;
        let turns = Arc::new(Mutex::new(vec![0; number]));
        let task = |client: usize| {
            let locks = LockClient::with_store(Arc::new(database.store(way)));
            let turns = turns.clone();
            tokio::spawn(async move {
                while lock(&turns).iter().sum::<usize>() < all {
                    once(locks.exclusive("a")).await;
                    lock(&turns)[client] += 1;
                }
            })
        };
        let began = Instant::now();
        for task in (0..number).map(task).collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let (turns, calls) = (lock(&turns).clone(), lock(&database.state).calls);
        let (min, max) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
        assert!(*min as f64 >= fewest * *max as f64, "{turns:?}");
        assert!(calls < all * most_calls, "{number}: {calls} calls");
        // An acquisition and a release take four.
        let took = began.elapsed();
        assert!(took < way * 8 * all as u32, "{number}: {took:?}");
    }
}

/// A role that may read the records and send messages knows the tokens of the waiters.
#[tokio::test(start_paused = true)]
async fn a_forged_message_is_a_grant_only_where_grants_are_not_confirmed() {
    for (confirms, ahead, deceived) in [
        (false, Duration::ZERO, 1),
        (true, Duration::ZERO, 0),
        (false, Duration::from_secs(3600), 0),
    ] {
        let database = Database::new();
        let store = database.store(Duration::ZERO).confirm_grants(confirms);
        let grants = Arc::new(Grants::default());
        let listener: Arc<dyn Listener> = grants.clone();
        store.listen(Arc::downgrade(&listener));
        acquire(&store, &request(IfBusy::Refuse)).await;
        let waiter = request(IfBusy::Queue);
        let queued = store.acquire(&waiter).await.unwrap();
        assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");
        let now = database.now();
        let fence = crate::FencingToken::new(now.later(ahead).micros()).unwrap();
        let event =
            StoreEvent::granted(waiter.hold.clone(), Grant::new(fence, Grant::HANDOFF_LEASE));
        let (name, record) = (
            RecordName::new("a"),
            Record::new(Version::random(), Vec::new()),
        );
        let change = Change::new(name, None, record, now);
        let message = news::message(waiter.hold.token.client(), &event, &change, now, false);
        let inbox = lock(&database.state).inbox.take().expect("it listens");
        let inbox = inbox.0.upgrade().unwrap();
        inbox.deliver(&message.expect("a short message").body);
        let grants = lock(&grants.0).len();
        assert_eq!(grants, deceived, "confirms: {confirms}, {ahead:?} ahead");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cursor_of_another_store_is_refused() {
    let store = Database::new().store(Duration::ZERO);
    for cursor in ["", "l", "0", "7 1", "\u{e9}", "l\u{e9}"] {
        let page = store.list("", Some(Cursor::new(cursor))).await;
        let kind = page.unwrap_err().kind();
        assert_eq!(kind, StoreErrorKind::Unsupported, "{cursor}");
    }
}
