//! The calls that operations make, and the answers of a store that come from its database.

use std::sync::atomic::Ordering;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{
    super::adapter::in_outage,
    site::{Events, Site},
    *,
};
use crate::{
    request::spec::LockKind,
    store::{RevokeScope, remote::outage::InOutage},
};

const WAY: Duration = Duration::from_millis(10);

/// Creates a request for another lock than `a`.
fn request_for(key: &str, if_busy: IfBusy) -> KeyRequest {
    let mut request = request(if_busy);
    request.hold.key = LockKey::new(key).unwrap();
    request
}

fn records(database: &Database) -> BTreeMap<String, Record> {
    lock(&database.state).records.clone()
}

/// Others lock its record for longer than a batch would wait.
#[tokio::test(start_paused = true)]
async fn an_operation_that_has_lost_succeeds_once_its_record_is_locked_for_it() {
    let database = Database::new();
    let site = Arc::new(Site::new(&database, WAY).locking("a", Duration::from_secs(1)));
    let (store, other) = (site.store(), database.store(Duration::ZERO));
    acquire(&other, &request(IfBusy::Refuse)).await;
    // From here on it knows the time, and takes the other lock to be free.
    acquire(&store, &request_for("b", IfBusy::Refuse)).await;
    let waiter = request(IfBusy::Queue);
    let queued = store.acquire(&waiter).await.unwrap();
    assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");
    assert_eq!(site.updates(), 1);
    // The record is as it was found, so the next operation needs no lock.
    store.abandon(&waiter.hold).await.unwrap();
    assert_eq!(site.updates(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_is_dropped_before_its_record_is_locked_changes_nothing() {
    let database = Database::new();
    let site = Arc::new(Site::new(&database, WAY).locking("a", WAY));
    let (store, other) = (site.store(), database.store(Duration::ZERO));
    acquire(&other, &request(IfBusy::Refuse)).await;
    acquire(&store, &request_for("b", IfBusy::Refuse)).await;
    let before = records(&database);
    // A swap, and then the database waits for the record.
    let waiter = request(IfBusy::Queue);
    let asked = timeout(WAY * 3, store.acquire(&waiter)).await;
    assert!(asked.is_err(), "{asked:?}");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(site.updates(), 1);
    assert!(records(&database) == before);
}

#[tokio::test(start_paused = true)]
async fn the_replies_of_a_batch_wait_200_ms_for_a_record_that_others_lock() {
    let database = Database::new();
    let site = Arc::new(Site::new(&database, WAY).locking("slow", Duration::from_secs(1)));
    let (store, other) = (site.store(), database.store(Duration::ZERO));
    let mut renewals = Vec::new();
    for key in ["slow", "quick"] {
        let holder = request_for(key, IfBusy::Refuse);
        acquire(&store, &holder).await;
        renewals.push(Renewal::new(holder.hold, LEASE));
        // So the store does not know the present record.
        let waiter = request_for(key, IfBusy::Queue);
        let queued = other.acquire(&waiter).await.unwrap();
        assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");
    }
    let began = Instant::now();
    let replies = store.renew(&renewals).await;
    let is_renewed = |reply| matches!(reply, &Ok(RenewReply::Renewed { .. }));
    assert_eq!(site.updates(), 2);
    let renewed: Vec<_> = replies.iter().map(is_renewed).collect();
    assert_eq!(renewed, [false, true], "{replies:?}");
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(200), "{took:?}");
    assert!(took < WAY * 4 + Duration::from_millis(250), "{took:?}");
}

/// Otherwise each of them would lose to each of the others.
#[tokio::test(start_paused = true)]
async fn the_operations_of_one_process_on_a_contended_record_come_one_after_the_other() {
    const NUMBER: usize = 16;
    let database = Database::new();
    let store = database.store(Duration::from_millis(1));
    acquire(&store, &request(IfBusy::Refuse)).await;
    let waiters: Vec<_> = (0..NUMBER).map(|_| request(IfBusy::Queue)).collect();
    let before = lock(&database.state).calls;
    for reply in join_all(waiters.iter().map(|waiter| store.acquire(waiter))).await {
        assert!(matches!(reply, Ok(AcquireReply::Queued { .. })));
    }
    let calls = lock(&database.state).calls - before;
    assert!(calls < 6 * NUMBER, "{calls} calls");
}

#[tokio::test(start_paused = true)]
async fn the_first_swap_is_the_measure_of_the_next_ones() {
    let store = Database::new().store(WAY);
    acquire(&store, &request(IfBusy::Refuse)).await;
    let measured = store.0.round_trip.load(Ordering::Relaxed);
    assert_eq!(Duration::from_micros(measured), WAY * 2);
}

/// The clock of the database is set forward after it was read.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_reservation_is_announced_by_the_time_of_its_step() {
    let database = Database::new();
    let store = database.store(Duration::ZERO);
    let events = Events::of(&store);
    let holder = request(IfBusy::Refuse);
    acquire(&store, &holder).await;
    store.acquire(&request(IfBusy::Queue)).await.unwrap();
    lock(&database.state).ahead += Duration::from_millis(500);
    let mut release = Release::new(holder.hold);
    release.keep_for = Some(Duration::from_millis(900));
    store.release(&release).await.unwrap();
    let events = events.all();
    let [StoreEvent::FreeIn { ttl, .. }] = &events[..] else {
        panic!("{events:?}");
    };
    assert!(*ttl <= Duration::from_millis(400), "{ttl:?}");
}

/// No message has reached the holder.
#[tokio::test(start_paused = true)]
async fn a_holder_learns_from_the_record_that_it_was_revoked() {
    let database = Database::new();
    let (store, other) = (
        database.store(Duration::ZERO),
        database.store(Duration::ZERO),
    );
    let events = Events::of(&store);
    let holder = request(IfBusy::Refuse);
    acquire(&store, &holder).await;
    let Hold { key, token, .. } = holder.hold.clone();
    let scope = RevokeScope::AlsoEndless;
    other.revoke(&key, LockKind::Lock, scope).await.unwrap();
    let renewals = [Renewal::new(holder.hold, LEASE)];
    let reply = store.renew(&renewals).await.remove(0).unwrap();
    assert_eq!(reply, RenewReply::Gone);
    let events = events.all();
    let is_revoked = |event: &StoreEvent| match event {
        StoreEvent::Revoked { token: revoked } => *revoked == token,
        _ => false,
    };
    assert!(events.iter().any(is_revoked), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_list_has_each_lock_and_each_name_of_permits_once() {
    let site = Arc::new(Site::new(&Database::new(), Duration::ZERO));
    let store = site.store();
    for key in ["a", "b", "p", "z"] {
        acquire(&store, &request_for(key, IfBusy::Refuse)).await;
    }
    let released = request_for("c", IfBusy::Refuse);
    acquire(&store, &released).await;
    store.release(&Release::new(released.hold)).await.unwrap();
    let mut permit = request_for("q", IfBusy::Refuse);
    permit.hold.mode = Mode::Permits(NonZeroU32::MIN);
    acquire(&store, &permit).await;

    let (mut found, mut cursor) = (Vec::new(), None);
    for _ in 0..20 {
        let page = store.list("", cursor.take()).await.unwrap();
        let named = |(key, kind): &(LockKey, LockKind)| (key.as_str().to_owned(), *kind);
        found.extend(page.locks.iter().map(named));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert!(cursor.is_none(), "the list has an end");
    let expected = [
        ("a", LockKind::Lock),
        ("b", LockKind::Lock),
        ("p", LockKind::Lock),
        ("z", LockKind::Lock),
        ("q", LockKind::Permits),
    ];
    assert_eq!(found, expected.map(|(name, kind)| (name.to_owned(), kind)));
}

#[tokio::test(start_paused = true)]
async fn the_name_of_a_client_is_known_once_it_is_introduced() {
    let store = Database::new().store(WAY);
    let (known, unknown) = (ClientId::random(), ClientId::random());
    let introduced = store.introduce(known, "worker 1", &[], LEASE);
    introduced.await.unwrap();
    let names = store.names_of(&[unknown, known]).await.unwrap();
    assert_eq!(names, [None, Some("worker 1".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn a_record_is_kept_for_as_long_as_fencing_tokens_are() {
    let hour = Duration::from_secs(3600);
    let mut needed = Vec::new();
    for kept_for in [None, Some(hour)] {
        let site = Arc::new(Site::new(&Database::new(), Duration::ZERO));
        let store = match kept_for {
            Some(time) => site.store().keep_fences_for(time),
            None => site.store(),
        };
        acquire(&store, &request(IfBusy::Refuse)).await;
        needed.extend(lock(&site.needed).last().copied());
    }
    let shorter = needed[0].since(needed[1]);
    assert_eq!(shorter, FencingToken::KEPT_FOR - hour);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_has_ended_says_nothing_about_the_next_clock() {
    let store = Database::new().store(Duration::ZERO);
    let events = Events::of(&store);
    acquire(&store, &request(IfBusy::Refuse)).await;
    store.0.connected(true);
    assert!(store.0.now().is_some());
    store.0.connected(false);
    assert!(store.0.now().is_none());
    assert_eq!(events.shown(), ["Reconnected", "Disconnected"]);
}

#[tokio::test(start_paused = true)]
async fn a_request_is_in_time_at_its_deadline_and_late_after_it() {
    let store = Database::new().store(Duration::ZERO);
    let mut due = request(IfBusy::Refuse);
    due.deadline = Instant::now();
    acquire(&store, &due).await;
    sleep(Duration::from_millis(1)).await;
    let reply = store.acquire(&due).await.unwrap();
    assert_eq!(reply, AcquireReply::Late);
}

#[test]
fn a_request_that_can_wait_is_not_refused_in_a_short_outage() {
    let mut then_queues = request(IfBusy::Refuse);
    then_queues.then_queues = true;
    let requests = [request(IfBusy::Refuse), request(IfBusy::Queue), then_queues];
    let each = requests.each_ref().map(|request| in_outage([request]));
    assert_eq!(each, [InOutage::Refuse, InOutage::Wait, InOutage::Wait]);
    assert_eq!(in_outage(&requests), InOutage::Wait);
}

#[tokio::test(start_paused = true)]
async fn a_store_of_records_answers_for_its_database() {
    let key = LockKey::new("a").unwrap();
    for says in [false, true] {
        let mut site = Site::new(&Database::new(), Duration::ZERO);
        site.says = says;
        let store = RecordStore::new(site);
        assert_eq!(store.sends_events(), says);
        assert_eq!(store.serves_any_runtime(), says);
        let place = store.name_of(&key, LockKind::Lock, KeyPart::Lock);
        assert_eq!(place.as_deref(), Some("the record a"));
        let name = store.guarded_name(&key, LockKind::Permits);
        assert_eq!(name.as_deref(), Some("app:permits:a"));
        let itself = store.as_any().unwrap();
        assert!(itself.is::<RecordStore>());
        #[cfg(feature = "postgres")]
        {
            let locks = LockClient::with_store(Arc::new(store));
            let guard = locks.exclusive("a").acquire().await.unwrap();
            let name = guard.views()[0].guarded_name();
            assert_eq!(name.as_deref(), Some("app:a"));
        }
    }
}
