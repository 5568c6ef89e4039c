//! Rules 3, 4, 5, 15, 16 and 23, in the line that a Redis server keeps: who is handed a lock, when, and how it is told.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lock_runtime::{
    LockKey, Mode, RevokeScope,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, KeyPart, KeyRequest, Listener,
        NextHolder, PollReply, Release, ReleaseReply, RenewReply, Renewal, Store, StoreErrorKind,
        StoreEvent, Token, redis::RedisStore,
    },
};
use lock_tests::{Captured, Proxy, RedisServer, shared_server, unique};
use tokio::{
    sync::{Mutex, mpsc},
    time::timeout,
};
use tracing::Level;

use crate::replies::poll;

use super::{
    HOUR, LONG, MODES, TWO_PERMITS, acquire, beside, eventually, fence_name, fresh_hold, granted,
    in_a_minute, inspect, key, lock_name, member, micros,
};

/// Writes down what a store tells.
struct Heard {
    news: mpsc::UnboundedSender<StoreEvent>,
    /// On a server of many tests the others' revocations are told too.
    also_revocations: bool,
}

impl Listener for Heard {
    fn on_event(&self, event: &StoreEvent) {
        if self.also_revocations || !matches!(event, StoreEvent::Revoked { .. }) {
            let _ = self.news.send(event.clone());
        }
    }
}

/// A store on a server, and what it tells.
struct Client {
    store: Arc<RedisStore>,
    news: Mutex<mpsc::UnboundedReceiver<StoreEvent>>,
    _heard: Arc<Heard>,
}

impl Client {
    async fn of(server: &RedisServer) -> Self {
        Self::at(&server.url()).await
    }

    async fn at(url: &str) -> Self {
        Self::hearing(url, false).await
    }

    async fn hearing(url: &str, also_revocations: bool) -> Self {
        let store = Arc::new(RedisStore::connect(url, "lock").await.unwrap());
        let (news, told) = mpsc::unbounded_channel();
        let heard = Arc::new(Heard {
            news,
            also_revocations,
        });
        let weak: Weak<Heard> = Arc::downgrade(&heard);
        store.listen(weak);
        Self {
            store,
            news: Mutex::new(told),
            _heard: heard,
        }
    }

    async fn told(&self) -> StoreEvent {
        timeout(LONG, self.news.lock().await.recv())
            .await
            .expect("it is told")
            .unwrap()
    }

    /// Waits until it is told of a grant to `hold`, and of no other.
    async fn pushed(&self, hold: &Hold) -> Grant {
        match self.told().await {
            StoreEvent::Granted { hold: whose, grant } if whose == *hold => grant,
            other => panic!("{other:?} for {hold:?}"),
        }
    }

    /// Everything that was told so far. The server answers in order, so what it told before this call has come.
    async fn told_so_far(&self) -> Vec<StoreEvent> {
        inspect(&*self.store, &fresh_hold(Mode::Exclusive)).await;
        let mut news = self.news.lock().await;
        std::iter::from_fn(|| news.try_recv().ok()).collect()
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

    /// Another acquisition of the same lock, in line.
    async fn waiter(&self, key: &LockKey, mode: Mode) -> Hold {
        let hold = beside(key, mode);
        let reply = self.queue(&hold).await;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        hold
    }

    async fn held(&self, mode: Mode) -> Hold {
        let hold = fresh_hold(mode);
        granted(&*self.store, &hold, HOUR).await;
        hold
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

    async fn waiting(&self, hold: &Hold) -> Vec<Mode> {
        inspect(&*self.store, hold)
            .await
            .waiters
            .iter()
            .map(|waiter| waiter.mode)
            .collect()
    }
}

fn queue_name(hold: &Hold) -> String {
    match hold.key.hash_tag() {
        Some(_) => format!("q:{}", lock_name(hold)),
        None => format!("{{{}}}:q", lock_name(hold)),
    }
}

/// As if `hold` had last been heard of so long ago.
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

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn who_came_first_is_served_first() {
    let server = shared_server().await;
    let clients = [Client::of(server).await, Client::of(server).await];
    let mut holder = clients[0].held(Mode::Exclusive).await;
    let mut waiters = Vec::new();
    for number in 0..6 {
        waiters.push(
            clients[number % 2]
                .waiter(&holder.key, Mode::Exclusive)
                .await,
        );
    }
    assert_eq!(clients[0].waiting(&holder).await.len(), 6);
    let mut fence = None;
    for (number, waiter) in waiters.into_iter().enumerate() {
        assert_eq!(clients[0].release(&holder).await, ReleaseReply::Released);
        let grant = clients[number % 2].pushed(&waiter).await;
        assert!(Some(grant.fence) > fence);
        fence = Some(grant.fence);
        assert!(matches!(
            clients[0]
                .store
                .renew(&[Renewal::new(waiter.clone(), HOUR)])
                .await[0],
            Ok(RenewReply::Renewed { .. })
        ));
        holder = waiter;
    }
    clients[0].release(&holder).await;
    only_the_counter_is_left(server, &holder).await;
}

// Rules 3 and 4.
#[tokio::test]
async fn a_grant_from_the_line_is_newer_than_its_place_and_short() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for (lease, longest) in [(HOUR, 3 * SECOND), (SECOND / 2, SECOND / 2)] {
        for mode in MODES {
            let holders = [client.held(mode).await];
            let mut holders = holders.to_vec();
            if mode == TWO_PERMITS {
                holders.push(beside(&holders[0].key, mode));
                granted(&*client.store, &holders[1], HOUR).await;
            }
            let wanted = if mode == Mode::Shared {
                Mode::Exclusive
            } else {
                mode
            };
            let waiter = beside(&holders[0].key, wanted);
            let reply = client.queue_for(&waiter, lease).await;
            let AcquireReply::Queued {
                counter: Some(counter),
                holder_ttl: Some(left),
            } = reply
            else {
                panic!("{reply:?}")
            };
            assert!(left > HOUR - LONG && left <= HOUR, "{left:?}");
            client.release(&holders[0]).await;
            let grant = client.pushed(&waiter).await;
            assert!(grant.fence > counter, "{mode:?}");
            assert_eq!((grant.ttl, grant.reserved), (longest, 0), "{mode:?}");
            let ttl: u64 = server.query(&["PTTL", &lock_name(&waiter)]).await;
            if mode != TWO_PERMITS {
                assert!(u128::from(ttl) <= longest.as_millis(), "{mode:?}: {ttl}");
            }
        }
    }
}

// Rule 19.
#[tokio::test]
async fn a_block_of_fencing_tokens_belongs_to_one_writer() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let first = fresh_hold(Mode::Exclusive);
    let request = |hold: &Hold| {
        KeyRequest::new(hold.clone(), HOUR, in_a_minute())
            .queued()
            .reserved(32)
    };
    let reply = client.store.acquire(&request(&first)).await.unwrap();
    let AcquireReply::Granted(block) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(block.reserved, 32);
    let PollReply::Granted(again) = client.poll(&first).await else {
        panic!("it holds")
    };
    assert_eq!(
        (again.fence.number(), again.reserved),
        (block.fence.number() + 32, 0),
        "told again, it is the last of the block"
    );
    let second = beside(&first.key, Mode::Exclusive);
    let reply = client.store.acquire(&request(&second)).await.unwrap();
    assert!(
        matches!(reply, AcquireReply::Queued { counter: Some(counter), .. } if counter == again.fence),
        "{reply:?}"
    );
    client.release(&first).await;
    let grant = client.pushed(&second).await;
    assert!(
        grant.fence > again.fence && grant.reserved == 32,
        "{grant:?}"
    );
    let next = Token::random();
    let ReleaseReply::Passed(passed) = client.release_to(&second, next).await else {
        panic!("nobody waits")
    };
    assert!(
        passed.fence.number() > grant.fence.number() + 32 && passed.reserved == 3,
        "{passed:?}"
    );
    client
        .release(&Hold::new(first.key.clone(), Mode::Exclusive, next))
        .await;
    let reader = fresh_hold(Mode::Shared);
    let reply = client.store.acquire(&request(&reader)).await.unwrap();
    assert!(
        matches!(reply, AcquireReply::Granted(Grant { reserved: 0, .. })),
        "{reply:?}"
    );
}

#[tokio::test]
async fn readers_come_in_together_after_a_writer() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let writer = client.held(Mode::Exclusive).await;
    let first = client.waiter(&writer.key, Mode::Shared).await;
    let second = client.waiter(&writer.key, Mode::Shared).await;
    let next_writer = client.waiter(&writer.key, Mode::Exclusive).await;
    let third = client.waiter(&writer.key, Mode::Shared).await;
    client.release(&writer).await;
    let fences = [
        client.pushed(&first).await.fence,
        client.pushed(&second).await.fence,
    ];
    assert!(fences[0] < fences[1]);
    assert_eq!(
        client.waiting(&writer).await,
        [Mode::Exclusive, Mode::Shared]
    );
    client.release(&first).await;
    assert!(client.is_queued(&next_writer).await && client.is_queued(&third).await);
    client.release(&second).await;
    client.pushed(&next_writer).await;
    assert!(client.is_queued(&third).await);
    client.release(&next_writer).await;
    client.pushed(&third).await;
    client.release(&third).await;
    only_the_counter_is_left(server, &third).await;
}

#[tokio::test]
async fn a_reader_stands_behind_a_writer_who_waits() {
    let client = Client::of(shared_server().await).await;
    let reader = client.held(Mode::Shared).await;
    let writer = client.waiter(&reader.key, Mode::Exclusive).await;
    let late = client.waiter(&reader.key, Mode::Shared).await;
    let busy = acquire(&*client.store, &beside(&reader.key, Mode::Shared), HOUR).await;
    assert!(
        matches!(
            busy,
            AcquireReply::Busy {
                holder_ttl: Some(_),
                has_waiters: true
            }
        ),
        "{busy:?}"
    );
    client.release(&reader).await;
    client.pushed(&writer).await;
    client.release(&writer).await;
    client.pushed(&late).await;
}

#[tokio::test]
async fn permits_are_handed_over_one_by_one() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let first = client.held(TWO_PERMITS).await;
    let second = beside(&first.key, TWO_PERMITS);
    granted(&*client.store, &second, HOUR).await;
    let third = client.waiter(&first.key, TWO_PERMITS).await;
    let fourth = client.waiter(&first.key, TWO_PERMITS).await;
    client.release(&second).await;
    client.pushed(&third).await;
    assert!(client.is_queued(&fourth).await);
    client.release(&first).await;
    client.pushed(&fourth).await;
    for hold in [third, fourth] {
        client.release(&hold).await;
    }
    only_the_counter_is_left(server, &first).await;
}

#[tokio::test]
async fn readers_in_front_come_in_when_a_writer_becomes_one() {
    let client = Client::of(shared_server().await).await;
    let writer = client.held(Mode::Exclusive).await;
    let reader = client.waiter(&writer.key, Mode::Shared).await;
    let next_writer = client.waiter(&writer.key, Mode::Exclusive).await;
    let ConvertReply::Converted(converted) = client.store.convert(&writer).await.unwrap() else {
        panic!("it holds")
    };
    assert!(client.pushed(&reader).await.fence > converted.fence);
    assert!(client.is_queued(&next_writer).await);
}

// Rule 5.
#[tokio::test]
async fn a_repeated_request_keeps_its_place() {
    let client = Client::of(shared_server().await).await;
    for mode in [Mode::Exclusive, TWO_PERMITS] {
        let holder = client.held(mode).await;
        let other = beside(&holder.key, mode);
        if mode == TWO_PERMITS {
            granted(&*client.store, &other, HOUR).await;
        }
        let first = client.waiter(&holder.key, mode).await;
        let second = client.waiter(&holder.key, mode).await;
        let reply = client.queue(&first).await;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        assert_eq!(client.waiting(&holder).await.len(), 2);
        client.release(&holder).await;
        client.pushed(&first).await;
        let reply = client.queue(&first).await;
        assert!(
            matches!(reply, AcquireReply::Granted(grant) if grant.ttl <= 3 * SECOND),
            "{reply:?}"
        );
        assert!(client.is_queued(&second).await);
        client.release(&first).await;
        client.pushed(&second).await;
    }
}

// Rule 5.
#[tokio::test]
async fn a_poll_never_enqueues() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        assert_eq!(client.poll(&hold).await, PollReply::Gone);
        assert_eq!(server.keys(&format!("*{}*", hold.key)).await, [""; 0]);
    }
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    assert_eq!(
        client.poll(&beside(&holder.key, Mode::Exclusive)).await,
        PollReply::Gone
    );
    assert_eq!(client.waiting(&holder).await.len(), 1);
    let PollReply::Queued {
        counter: Some(_),
        holder_ttl: Some(left),
    } = client.poll(&waiter).await
    else {
        panic!("it waits")
    };
    assert!(left > HOUR - LONG);
}

#[tokio::test]
async fn whoever_gives_up_leaves_no_gap() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for given_up in [
        vec![0],
        vec![2],
        vec![4],
        vec![1, 3],
        vec![0, 1],
        vec![3, 4],
        vec![0, 1, 2, 3, 4],
        vec![4, 2, 0],
    ] {
        let holder = client.held(Mode::Exclusive).await;
        let mut waiters = Vec::new();
        for _ in 0..5 {
            waiters.push(client.waiter(&holder.key, Mode::Exclusive).await);
        }
        for index in &given_up {
            client.store.abandon(&waiters[*index]).await.unwrap();
            assert_eq!(client.poll(&waiters[*index]).await, PollReply::Gone);
            client.store.abandon(&waiters[*index]).await.unwrap();
        }
        assert_eq!(client.waiting(&holder).await.len(), 5 - given_up.len());
        client.release(&holder).await;
        for (index, waiter) in waiters.iter().enumerate() {
            if !given_up.contains(&index) {
                client.pushed(waiter).await;
                client.release(waiter).await;
            }
        }
        only_the_counter_is_left(server, &holder).await;
    }
}

// A writer may hold for months, while others come and go.
#[tokio::test]
async fn those_who_gave_up_are_not_remembered_while_a_writer_holds() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let mut steady = vec![client.waiter(&holder.key, Mode::Exclusive).await];
    let mut before = None;
    for number in 0..2000 {
        let passing = client.waiter(&holder.key, Mode::Exclusive).await;
        // The first of each pair leaves from the middle of the line, every third of them also from its end.
        if number % 3 == 0 {
            client.store.abandon(&passing).await.unwrap();
            continue;
        }
        if let Some(before) = before.replace(passing) {
            client.store.abandon(&before).await.unwrap();
        }
        if number % 100 == 1 {
            for waiter in &steady {
                assert!(client.is_queued(waiter).await);
            }
        }
        if number % 700 == 1 {
            steady.push(client.waiter(&holder.key, Mode::Exclusive).await);
        }
    }
    steady.extend(before);
    let ends: String = server.query(&["HGET", &queue_name(&holder), "ends"]).await;
    let ends: Vec<u64> = ends.split(' ').map(|end| end.parse().unwrap()).collect();
    assert!(
        ends[1] - ends[0] < 200 && ends[2] == steady.len() as u64,
        "{ends:?}"
    );
    // `ends`, and two fields for each.
    assert_eq!(
        server.query::<usize>(&["HLEN", &queue_name(&holder)]).await,
        1 + 2 * steady.len()
    );
    assert_eq!(client.waiting(&holder).await.len(), steady.len());
    let mut holder = holder;
    for waiter in steady {
        client.release(&holder).await;
        client.pushed(&waiter).await;
        holder = waiter;
    }
    client.release(&holder).await;
    only_the_counter_is_left(server, &holder).await;
}

#[tokio::test]
async fn a_long_line_closes_up_in_its_order() {
    let server = RedisServer::start().await;
    let client = Client::of(&server).await;
    let holder = client.held(Mode::Exclusive).await;
    let mut waiters = Vec::new();
    for _ in 0..1300 {
        waiters.push(client.waiter(&holder.key, Mode::Exclusive).await);
    }
    let forgotten = [waiters.remove(600), waiters.remove(1100)];
    let mut kept = Vec::new();
    for (number, waiter) in waiters.into_iter().enumerate() {
        if number % 3 == 1 {
            kept.push(waiter);
        } else {
            client.store.abandon(&waiter).await.unwrap();
        }
    }
    for waiter in &kept {
        assert!(client.is_queued(waiter).await);
    }
    for gone in &forgotten {
        silent(&server, gone, 11 * SECOND).await;
    }
    // A server out of memory lets nobody in, and the line is as it was.
    let before: Vec<u8> = server.query(&["DUMP", &queue_name(&holder)]).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let newcomer =
        KeyRequest::new(beside(&holder.key, Mode::Exclusive), HOUR, in_a_minute()).queued();
    client.store.acquire(&newcomer).await.expect_err("no room");
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert!(
        before
            == server
                .query::<Vec<u8>>(&["DUMP", &queue_name(&holder)])
                .await
    );

    kept.push(client.waiter(&holder.key, Mode::Exclusive).await);
    assert_eq!(
        server.query::<usize>(&["HLEN", &queue_name(&holder)]).await,
        1 + 2 * kept.len()
    );
    for gone in &forgotten {
        assert_eq!(client.poll(gone).await, PollReply::Gone);
    }
    let mut holder = holder;
    for (number, waiter) in kept.into_iter().enumerate() {
        if number % 2 == 0 {
            client.release(&holder).await;
            client.pushed(&waiter).await;
            holder = waiter;
        } else {
            client.store.abandon(&waiter).await.unwrap();
        }
    }
    client.release(&holder).await;
    only_the_counter_is_left(&server, &holder).await;
}

// Rule 15: also who gives up, as a holder, hands over.
#[tokio::test]
async fn whatever_frees_a_lock_hands_it_over() {
    let server = RedisServer::start().await;
    let client = Client::hearing(&server.url(), true).await;
    for mode in MODES {
        let wanted = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let holder = client.held(mode).await;
        let also = beside(&holder.key, mode);
        if mode == TWO_PERMITS {
            granted(&*client.store, &also, HOUR).await;
        }
        let [first, second] = [
            client.waiter(&holder.key, wanted).await,
            client.waiter(&holder.key, wanted).await,
        ];
        client.store.abandon(&holder).await.unwrap();
        client.pushed(&first).await;
        client
            .store
            .revoke(&holder.key, mode.kind(), RevokeScope::Leased)
            .await
            .unwrap();
        let mut told = [client.told().await, client.told().await].to_vec();
        if mode == TWO_PERMITS {
            told.push(client.told().await);
        }
        let lost = |token| {
            told.iter()
                .any(|event| matches!(event, StoreEvent::Revoked { token: lost } if *lost == token))
        };
        assert!(
            lost(first.token) && lost(also.token) == (mode == TWO_PERMITS),
            "{told:?}"
        );
        let next = |event: &StoreEvent| matches!(event, StoreEvent::Granted { hold, .. } if *hold == second);
        assert!(told.iter().any(next), "{told:?}");
    }
}

// Rule 16.
#[tokio::test]
async fn who_is_silent_is_passed_over_and_has_its_turn_later() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let first = client.waiter(&holder.key, Mode::Exclusive).await;
    let second = client.waiter(&holder.key, Mode::Exclusive).await;
    let third = client.waiter(&holder.key, Mode::Exclusive).await;
    silent(server, &first, 4 * SECOND).await;
    client.release(&holder).await;
    client.pushed(&second).await;
    assert_eq!(client.waiting(&holder).await.len(), 2);
    assert!(client.is_queued(&first).await, "and it is heard of");
    client.release(&second).await;
    client.pushed(&first).await;
    client.release(&first).await;
    client.pushed(&third).await;
}

// Rule 16.
#[tokio::test]
async fn who_is_silent_for_long_is_forgotten() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let [first, second, third] = [
        client.waiter(&holder.key, Mode::Exclusive).await,
        client.waiter(&holder.key, Mode::Exclusive).await,
        client.waiter(&holder.key, Mode::Exclusive).await,
    ];
    for gone in [&first, &second] {
        silent(server, gone, 11 * SECOND).await;
    }
    assert_eq!(client.waiting(&holder).await.len(), 1);
    assert_eq!(
        client.poll(&second).await,
        PollReply::Gone,
        "it comes too late"
    );
    client.release(&holder).await;
    client.pushed(&third).await;
    client.release(&third).await;
    only_the_counter_is_left(server, &holder).await;
    assert_eq!(client.poll(&first).await, PollReply::Gone);

    // Nobody else is left: a newcomer need not wait.
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    silent(server, &waiter, 4 * SECOND).await;
    client.release(&holder).await;
    granted(&*client.store, &beside(&holder.key, Mode::Exclusive), HOUR).await;
    assert!(client.is_queued(&waiter).await);
}

// 15 of the failures seen elsewhere: nothing stays for ever.
#[tokio::test]
async fn a_line_of_the_dead_ends_by_itself() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    let left = async || server.query::<i64>(&["PTTL", &queue_name(&holder)]).await;
    assert!((1..=10_000).contains(&left().await));
    server
        .command(&["PEXPIRE", &queue_name(&holder), "5000"])
        .await;
    assert!(client.is_queued(&waiter).await);
    assert!(left().await > 5_000, "a poll begins its time anew");
    server
        .command(&["PEXPIRE", &queue_name(&holder), "1"])
        .await;
    eventually("it ends", async || left().await == -2).await;
    assert_eq!(client.poll(&waiter).await, PollReply::Gone);
    assert_eq!(client.release(&holder).await, ReleaseReply::Released);
}

// Rules 15 and 16: an expiry opens the way to the first in line, and to nobody else.
#[tokio::test]
async fn nobody_barges_in_after_an_expiry() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for mode in MODES {
        let wanted = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let holders = [fresh_hold(mode)];
        let also = beside(&holders[0].key, mode);
        granted(&*client.store, &holders[0], SECOND / 5).await;
        if mode == TWO_PERMITS {
            granted(&*client.store, &also, HOUR).await;
        }
        let first = client.waiter(&also.key, wanted).await;
        let second = client.waiter(&also.key, wanted).await;
        let before = if mode == TWO_PERMITS { 1 } else { 0 };
        eventually("it expires", async || {
            inspect(&*client.store, &also).await.holders.len() == before
        })
        .await;
        // Also by a request that gets nothing itself.
        let busy = acquire(&*client.store, &beside(&also.key, wanted), HOUR).await;
        assert!(matches!(busy, AcquireReply::Busy { .. }), "{busy:?}");
        client.pushed(&first).await;
        let all = [KeyRequest::new(
            beside(&also.key, Mode::Exclusive),
            HOUR,
            in_a_minute(),
        )];
        if mode != TWO_PERMITS {
            let reply = client.store.acquire_all(&all).await.unwrap();
            let busy = matches!(
                reply,
                AcquireAllReply::Refused {
                    index: 0,
                    reply: AcquireReply::Busy { .. }
                }
            );
            assert!(busy, "{reply:?}");
        }
        assert!(client.is_queued(&second).await);
    }
}

// Rule 15: by a poll the first one finds its grant, and is not told twice; a later one opens the way for the first.
#[tokio::test]
async fn a_poll_finds_the_way_free() {
    let client = Client::of(shared_server().await).await;
    let holder = fresh_hold(Mode::Exclusive);
    granted(&*client.store, &holder, SECOND / 5).await;
    let [first, second] = [
        client.waiter(&holder.key, Mode::Exclusive).await,
        client.waiter(&holder.key, Mode::Exclusive).await,
    ];
    let expired = async || inspect(&*client.store, &holder).await.holders.is_empty();
    eventually("it expires", expired).await;
    let PollReply::Granted(grant) = client.poll(&first).await else {
        panic!("it is its turn")
    };
    assert!(grant.ttl <= 3 * SECOND);
    assert!(client.told_so_far().await.is_empty());
    client.store.abandon(&first).await.unwrap();
    client.pushed(&second).await;

    let holder = fresh_hold(Mode::Exclusive);
    granted(&*client.store, &holder, SECOND / 5).await;
    let [first, second] = [
        client.waiter(&holder.key, Mode::Exclusive).await,
        client.waiter(&holder.key, Mode::Exclusive).await,
    ];
    let expired = async || inspect(&*client.store, &holder).await.holders.is_empty();
    eventually("it expires", expired).await;
    assert!(client.is_queued(&second).await);
    client.pushed(&first).await;
}

#[tokio::test]
async fn a_lock_that_is_passed_on_goes_to_the_line_first() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    let next = beside(&holder.key, Mode::Exclusive);
    for _ in 0..2 {
        let reply = client.release_to(&holder, next.token).await;
        let ReleaseReply::Queued {
            counter: Some(counter),
            holder_ttl: Some(left),
        } = reply
        else {
            panic!("{reply:?}")
        };
        assert!(left <= 3 * SECOND);
        let PollReply::Granted(grant) = client.poll(&waiter).await else {
            panic!("it is its turn")
        };
        assert_eq!(grant.fence, counter);
        assert_eq!(client.waiting(&holder).await.len(), 1);
    }
    client.pushed(&waiter).await;
    client.release(&waiter).await;
    let grant = client.pushed(&next).await;
    assert_eq!(grant.reserved, 3);
    // The reply to a repeated release tells of the grant, whatever led to it.
    let reply = client.release_to(&holder, next.token).await;
    assert!(
        matches!(reply, ReleaseReply::Passed(again) if again.fence.number() == grant.fence.number() + 3),
        "{reply:?}"
    );

    // Nobody waits, or nobody who is heard of.
    let silent_one = client.waiter(&holder.key, Mode::Exclusive).await;
    silent(server, &silent_one, 4 * SECOND).await;
    let last = beside(&holder.key, Mode::Exclusive);
    for _ in 0..2 {
        let reply = client.release_to(&next, last.token).await;
        assert!(
            matches!(reply, ReleaseReply::Passed(grant) if grant.ttl > HOUR - LONG),
            "{reply:?}"
        );
    }
    assert!(client.is_queued(&silent_one).await);
    assert_eq!(
        client.release_to(&holder, Token::random()).await,
        ReleaseReply::NotHeld
    );
}

#[tokio::test]
async fn a_lock_that_is_kept_is_handed_over_afterwards() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let one_permit = Mode::Permits(1.try_into().unwrap());
    for mode in [Mode::Exclusive, Mode::Shared, one_permit] {
        let holder = client.held(mode).await;
        let wanted = if mode == one_permit {
            mode
        } else {
            Mode::Exclusive
        };
        // Who is silent is not told.
        let gone = Client::of(server).await;
        let silent_one = gone.waiter(&holder.key, wanted).await;
        silent(server, &silent_one, 4 * SECOND).await;
        let waiter = client.waiter(&holder.key, wanted).await;
        let kept = Release::new(holder.clone()).keep_for(Some(SECOND / 5));
        assert_eq!(
            client.store.release(&kept).await.unwrap(),
            ReleaseReply::Released
        );
        // The first in line is told, who would not notice before its next poll.
        let told = client.told_so_far().await;
        let [StoreEvent::FreeIn { key, kind, ttl }] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!((key, *kind, *ttl), (&holder.key, mode.kind(), SECOND / 5));
        assert!(gone.told_so_far().await.is_empty());
        eventually("it is free", async || client.is_held(&waiter).await).await;
    }
}

#[tokio::test]
async fn of_several_keys_none_is_taken_from_those_who_wait() {
    let client = Client::of(shared_server().await).await;
    let mut names = [unique("a"), unique("b")];
    names.sort();
    let [free, wanted] = names.map(|name| beside(&key(&name), Mode::Exclusive));
    let holder = beside(&wanted.key, Mode::Shared);
    granted(&*client.store, &holder, HOUR).await;
    let waiter = client.waiter(&wanted.key, Mode::Exclusive).await;
    let reader = beside(&wanted.key, Mode::Shared);
    let requests =
        [&free, &reader].map(|hold| KeyRequest::new(hold.clone(), HOUR, in_a_minute()).queued());
    let reply = client.store.acquire_all(&requests).await.unwrap();
    let busy = matches!(
        reply,
        AcquireAllReply::Refused {
            index: 1,
            reply: AcquireReply::Busy { .. }
        }
    );
    assert!(busy, "{reply:?}");
    assert!(inspect(&*client.store, &free).await.holders.is_empty());
    assert_eq!(client.waiting(&holder).await.len(), 1);
    client.release(&holder).await;
    client.pushed(&waiter).await;
    client.release(&waiter).await;
    assert!(matches!(
        client.store.acquire_all(&requests).await.unwrap(),
        AcquireAllReply::Granted(_)
    ));
}

// Rule 21.
#[tokio::test]
async fn somebodys_data_in_the_place_of_a_line_stay_whole() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for data in [
        &["SET", "", "somebody's"][..],
        &["RPUSH", "", "ann", "bob"],
        &["ZADD", "", "1", "ann"],
        &["HSET", "", "ann", "1"],
        &["HSET", "", "ends", "of the world"],
    ] {
        for mode in [Mode::Exclusive, TWO_PERMITS] {
            let holder = client.held(mode).await;
            if mode == TWO_PERMITS {
                granted(&*client.store, &beside(&holder.key, mode), HOUR).await;
            }
            let queue = queue_name(&holder);
            let command: Vec<_> = data
                .iter()
                .map(|word| if word.is_empty() { &queue } else { *word })
                .collect();
            server.command(&command).await;
            let before: Vec<u8> = server.query(&["DUMP", &queue]).await;
            let waiter = beside(&holder.key, mode);
            assert_eq!(
                client.queue(&waiter).await,
                AcquireReply::ForeignKey(KeyPart::Queue),
                "{data:?}"
            );
            match poll(&*client.store, &waiter).await {
                Ok(reply) => assert_eq!(reply, PollReply::Gone, "{data:?}"),
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::ForeignKey, "{data:?}"),
            }
            client.store.abandon(&waiter).await.unwrap();
            // It keeps nobody from giving the lock back.
            let reply = client.release(&holder).await;
            assert_eq!(reply, ReleaseReply::Released, "{data:?} {mode:?}");
            assert_eq!(
                inspect_len(server, &holder).await,
                u64::from(mode == TWO_PERMITS),
                "{data:?} {mode:?}"
            );
            client
                .store
                .revoke(&holder.key, mode.kind(), RevokeScope::Leased)
                .await
                .unwrap();
            let after: Vec<u8> = server.query(&["DUMP", &queue]).await;
            assert_eq!(before, after, "{data:?}");
            assert_eq!(server.query::<i64>(&["PTTL", &queue]).await, -1, "{data:?}");
        }
    }
}

/// How many hold the lock, where it cannot be asked through the store.
async fn inspect_len(server: &RedisServer, hold: &Hold) -> u64 {
    match hold.mode {
        Mode::Exclusive => server.query(&["EXISTS", &lock_name(hold)]).await,
        _ => server.query(&["ZCARD", &lock_name(hold)]).await,
    }
}

// Rule 23.
#[tokio::test]
async fn a_server_out_of_memory_hands_locks_over() {
    let server = RedisServer::start().await;
    let client = Client::of(&server).await;
    let full = async |full: bool| {
        server
            .command(&["CONFIG", "SET", "maxmemory", if full { "1" } else { "0" }])
            .await;
    };
    for mode in MODES {
        let wanted = if mode == Mode::Shared {
            Mode::Exclusive
        } else {
            mode
        };
        let holder = client.held(mode).await;
        if mode == TWO_PERMITS {
            granted(&*client.store, &beside(&holder.key, mode), HOUR).await;
        }
        let [first, second, third] = [
            client.waiter(&holder.key, wanted).await,
            client.waiter(&holder.key, wanted).await,
            client.waiter(&holder.key, wanted).await,
        ];
        full(true).await;
        assert_eq!(
            client.release(&holder).await,
            ReleaseReply::Released,
            "{mode:?}"
        );
        client.pushed(&first).await;
        client.store.abandon(&first).await.unwrap();
        client.pushed(&second).await;
        assert!(client.is_queued(&third).await, "its place is kept");
        if mode == Mode::Exclusive {
            let next = beside(&holder.key, Mode::Exclusive);
            let reply = client.release_to(&second, next.token).await;
            assert!(matches!(reply, ReleaseReply::Queued { .. }), "{reply:?}");
            client.pushed(&third).await;
            // Gone with its lease: the way is found free by a poll.
            server.command(&["DEL", &lock_name(&holder)]).await;
            assert!(client.is_held(&next).await);
        }
        let newcomer = KeyRequest::new(fresh_hold(wanted), HOUR, in_a_minute()).queued();
        client
            .store
            .acquire(&newcomer)
            .await
            .expect_err("nothing new");
        full(false).await;
        server.command(&["FLUSHALL"]).await;
    }
}

// Rule 23.
#[tokio::test]
async fn who_may_not_be_told_finds_its_grant_by_a_poll() {
    for forbidden in ["resetchannels", "-subscribe", "-publish"] {
        let server = RedisServer::builder()
            .user("ann", "hunter2", "~* &* +@all")
            .user("bob", "b", "")
            .start()
            .await;
        let rules = [
            "ACL", "SETUSER", "bob", "on", ">b", "~*", "&*", "+@all", forbidden,
        ];
        server.command(&rules).await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let client = Client::at(&server.url_as("bob", "b")).await;
        let holder = client.held(Mode::Exclusive).await;
        let [first, second] = [
            client.waiter(&holder.key, Mode::Exclusive).await,
            client.waiter(&holder.key, Mode::Exclusive).await,
        ];
        assert_eq!(
            client.release(&holder).await,
            ReleaseReply::Released,
            "{forbidden}"
        );
        assert!(client.is_held(&first).await, "{forbidden}");
        assert_eq!(
            client.release(&first).await,
            ReleaseReply::Released,
            "{forbidden}"
        );
        assert!(client.is_held(&second).await, "{forbidden}");
        assert!(client.told_so_far().await.is_empty());
        client.release(&second).await;
        only_the_counter_is_left(&server, &holder).await;
        let warnings: Vec<_> = traces
            .events()
            .into_iter()
            .filter(|event| event.level == Level::WARN)
            .collect();
        assert_eq!(
            warnings.len(),
            usize::from(forbidden != "-publish"),
            "{forbidden}: {warnings:?}"
        );
        for warning in warnings {
            assert!(format!("{warning:?}").contains("&lock:*"), "{warning:?}");
        }
    }
}

#[tokio::test]
async fn who_lost_its_connection_is_told_again_on_the_next() {
    let server = RedisServer::start().await;
    let proxy = Proxy::to(&server).await;
    let [there, client] = [Client::of(&server).await, Client::at(&proxy.url()).await];
    for _ in 0..3 {
        let holder = there.held(Mode::Exclusive).await;
        let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
        proxy.cut();
        assert!(matches!(client.told().await, StoreEvent::Disconnected));
        eventually("it is back", async || {
            poll(&*client.store, &waiter).await.is_ok()
        })
        .await;
        there.release(&holder).await;
        loop {
            match client.told().await {
                StoreEvent::Granted { hold, .. } if hold == waiter => break,
                StoreEvent::Disconnected => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

// The manager is replaced where the server refuses the connection in words.
#[tokio::test]
async fn who_was_turned_away_is_told_again_afterwards() {
    let server = RedisServer::start().await;
    let [there, client] = [Client::of(&server).await, Client::of(&server).await];
    let holder = there.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    let mut admin = server.connection().await.unwrap();
    let admin = &mut admin;
    let mut say = async |words: &[&str]| {
        redis::cmd(words[0])
            .arg(&words[1..])
            .query_async::<redis::Value>(admin)
            .await
            .unwrap();
    };
    say(&["CONFIG", "SET", "requirepass", "another"]).await;
    say(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    eventually("it is turned away", async || {
        poll(&*client.store, &waiter).await.is_err()
    })
    .await;
    say(&["CONFIG", "SET", "requirepass", ""]).await;
    let back = async || {
        poll(&*client.store, &waiter).await.is_ok() && poll(&*there.store, &holder).await.is_ok()
    };
    eventually("it is back", back).await;
    there.release(&holder).await;
    loop {
        match client.told().await {
            StoreEvent::Granted { hold, .. } if hold == waiter => break,
            StoreEvent::Disconnected => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn who_outlives_the_runtime_it_connected_on_is_told_on_another() {
    let server = shared_server().await;
    let (url, there) = (server.url(), Client::of(server).await);
    let client = std::thread::spawn(move || {
        tokio::runtime::Runtime::new()
            .unwrap()
            .block_on(Client::at(&url))
    });
    let client = client.join().unwrap();
    let holder = there.held(Mode::Exclusive).await;
    let waiter = beside(&holder.key, Mode::Exclusive);
    let request = KeyRequest::new(waiter.clone(), HOUR, in_a_minute()).queued();
    eventually("it is back", async || {
        client.store.acquire(&request).await.is_ok()
    })
    .await;
    there.release(&holder).await;
    loop {
        match client.told().await {
            StoreEvent::Granted { hold, .. } if hold == waiter => break,
            StoreEvent::Disconnected => {}
            other => panic!("{other:?}"),
        }
    }
}

// Rule 22.
#[tokio::test]
async fn a_line_lies_beside_its_lock() {
    let server = RedisServer::builder()
        .args(["--cluster-enabled", "yes"])
        .start()
        .await;
    server
        .command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"])
        .await;
    let is_up = async || {
        server
            .query::<String>(&["CLUSTER", "INFO"])
            .await
            .contains("cluster_state:ok")
    };
    eventually("the cluster is up", is_up).await;
    let client = Client::of(&server).await;
    for name in ["{tag}:a b", "x{tag}y", "plain"] {
        for mode in [Mode::Exclusive, TWO_PERMITS] {
            let holder = beside(&key(name), mode);
            granted(&*client.store, &holder, HOUR).await;
            if mode == TWO_PERMITS {
                granted(&*client.store, &beside(&holder.key, mode), HOUR).await;
            }
            let waiter = client.waiter(&holder.key, mode).await;
            assert_eq!(
                server.query::<i64>(&["EXISTS", &queue_name(&holder)]).await,
                1
            );
            let slot =
                async |name: String| server.query::<i64>(&["CLUSTER", "KEYSLOT", &name]).await;
            assert_eq!(
                slot(queue_name(&holder)).await,
                slot(lock_name(&holder)).await
            );
            client.release(&holder).await;
            client.pushed(&waiter).await;
            assert_eq!(
                server.query::<i64>(&["EXISTS", &queue_name(&holder)]).await,
                0
            );
            client
                .store
                .revoke(&holder.key, mode.kind(), RevokeScope::Leased)
                .await
                .unwrap();
        }
    }
}

#[tokio::test]
async fn who_waits_is_seen() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let waiters = [
        client.waiter(&holder.key, Mode::Shared).await,
        client.waiter(&holder.key, Mode::Exclusive).await,
        client.waiter(&holder.key, Mode::Shared).await,
    ];
    silent(server, &waiters[1], 2 * SECOND).await;
    let seen = inspect(&*client.store, &holder).await;
    assert_eq!(seen.holders.len(), 1);
    let modes: Vec<_> = seen.waiters.iter().map(|waiter| waiter.mode).collect();
    assert_eq!(modes, [Mode::Shared, Mode::Exclusive, Mode::Shared]);
    assert!(seen.waiters.iter().all(|waiter| waiter.lease == HOUR));
    assert!(
        seen.waiters[1].silent >= 2 * SECOND && seen.waiters[2].silent < 2 * SECOND,
        "{seen:?}"
    );
}
