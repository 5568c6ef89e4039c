//! Revocation of a holder that an operator has seen, and of no other (rule 37).

use std::time::{Duration, Instant};

use lock_runtime::{
    LockClient, LockErrorKind, Loss,
    operator::{HolderId, Identity, Revocation},
};
use lock_tests::{
    Proxy, RedisServer,
    place::{LONG, Place, begun, in_time, on_every_store},
    proxy::{Direction, DropReply},
    shared_server,
};
use tokio::join;

on_every_store! {
    a_lock_that_has_changed_hands_is_left_alone,
    of_two_operators_one_revokes,
    one_reader_of_several_is_revoked,
    a_holder_is_revoked_or_keeps_its_lock_while_the_lock_changes_hands,
    a_reservation_is_not_the_holder_that_left_it,
    a_release_after_a_revocation_names_it,
    ; with permits:
    one_permit_of_several_is_revoked,
}

async fn holder_of(locks: &LockClient, key: &str) -> HolderId {
    locks.inspect(key).await.unwrap().holders[0].id
}

async fn a_lock_that_has_changed_hands_is_left_alone(place: Place) {
    let (locks, operator) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let seen = holder_of(&operator, "a").await;
    assert_eq!(
        holder_of(&locks, "a").await,
        seen,
        "the identifier is that of the holder"
    );
    let revoke = async || operator.revoke("a").holder(seen).await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(revoke().await, Revocation::NotHeld);

    let guard = locks.exclusive("a").acquire().await.unwrap();
    assert_eq!(revoke().await, Revocation::Changed);
    guard.verify().await.unwrap();
    guard.release().await.unwrap();

    let reader = locks.shared("a").acquire().await.unwrap();
    assert_eq!(revoke().await, Revocation::Changed);
    reader.verify().await.unwrap();
    reader.release().await.unwrap();
}

/// The work of an operator is no loss that wakes another one.
async fn a_release_after_a_revocation_names_it(place: Place) {
    let (locks, operator) = (place.client().await, place.client().await);
    for _ in 0..5 {
        for request in [locks.exclusive("a"), locks.shared("a")] {
            let guard = request.acquire().await.unwrap();
            let seen = holder_of(&operator, "a").await;
            let revoked = operator.revoke("a").holder(seen).await;
            assert_eq!(revoked.unwrap(), Revocation::Revoked);
            let error = guard.release().await.unwrap_err();
            assert_eq!(
                error.kind(),
                LockErrorKind::Lost(Loss::Revoked),
                "{error:#}"
            );
        }
    }
}

async fn of_two_operators_one_revokes(place: Place) {
    let (locks, next) = (place.client().await, place.client().await);
    let (one, other) = (place.client().await, place.client().await);
    for with_waiter in [false, true] {
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let waiting = match with_waiter {
            true => Some(begun(next.exclusive("a").wait(LONG).acquire()).await),
            false => None,
        };
        let holder = holder_of(&one, "a").await;
        let (first, second) = join!(
            one.revoke("a").holder(holder),
            other.revoke("a").holder(holder)
        );
        let mut replies = [first.unwrap(), second.unwrap()];
        replies.sort_by_key(|reply| *reply != Revocation::Revoked);
        assert_eq!(replies[0], Revocation::Revoked);
        // A majority may see both of them at work on different servers.
        let is_majority = matches!(place, Place::Majority(_));
        let is_late = matches!(replies[1], Revocation::NotHeld | Revocation::Changed);
        assert!(is_late || is_majority, "{replies:?}");
        assert!(matches!(guard.lost().await.kind(), LockErrorKind::Lost(_)));
        drop(guard);
        if let Some(waiting) = waiting {
            let guard = waiting.await.unwrap();
            let third = one.revoke("a").holder(holder).await.unwrap();
            assert_eq!(third, Revocation::Changed);
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
        }
    }
}

async fn one_reader_of_several_is_revoked(place: Place) {
    let locks = place.client().await;
    // In this order of expiry.
    let seconds = |seconds| Duration::from_secs(seconds);
    let revoked = locks
        .shared("a")
        .lease(seconds(10))
        .acquire()
        .await
        .unwrap();
    let kept = locks
        .shared("a")
        .lease(seconds(30))
        .acquire()
        .await
        .unwrap();
    let seen = locks.inspect("a").await.unwrap();
    assert_eq!(seen.holders.len(), 2);
    let holder = seen.holders[0].id;
    assert_eq!(
        locks
            .revoke("a")
            .holder(holder)
            .also_endless()
            .await
            .unwrap(),
        Revocation::Revoked
    );
    assert_eq!(
        revoked.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
    kept.verify().await.unwrap();
    let left = locks.inspect("a").await.unwrap().holders;
    assert_eq!(
        left.iter().map(|it| it.id).collect::<Vec<_>>(),
        [seen.holders[1].id]
    );
    assert_eq!(
        locks
            .revoke("a")
            .also_endless()
            .holder(holder)
            .await
            .unwrap(),
        Revocation::Changed
    );
    kept.release().await.unwrap();
    assert!(locks.inspect("a").await.unwrap().holders.is_empty());
    assert_eq!(
        locks.revoke("a").holder(holder).await.unwrap(),
        Revocation::NotHeld
    );
}

async fn one_permit_of_several_is_revoked(place: Place) {
    let locks = place.client().await;
    let two = 2.try_into().unwrap();
    let seconds = |seconds| Duration::from_secs(seconds);
    let revoked = locks
        .permits("a", two)
        .lease(seconds(10))
        .acquire()
        .await
        .unwrap();
    let kept = locks
        .permits("a", two)
        .lease(seconds(30))
        .acquire()
        .await
        .unwrap();
    let waiting = begun(locks.permits("a", two).wait(LONG).acquire()).await;
    let seen = locks.inspect("a").permits().await.unwrap().holders[0].id;
    assert_eq!(
        locks.revoke("a").permits().holder(seen).await.unwrap(),
        Revocation::Revoked
    );
    assert_eq!(
        revoked.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
    let next = waiting.await.unwrap();
    assert_eq!(
        locks.revoke("a").permits().holder(seen).await.unwrap(),
        Revocation::Changed
    );
    for permit in [kept, next] {
        permit.verify().await.unwrap();
        permit.release().await.unwrap();
    }
}

async fn a_holder_is_revoked_or_keeps_its_lock_while_the_lock_changes_hands(place: Place) {
    let (locks, next, operator) = (
        place.client().await,
        place.client().await,
        place.client().await,
    );
    let mut outcomes = [0, 0];
    for _ in 0..40 {
        let first = locks.exclusive("a").acquire().await.unwrap();
        let holder = holder_of(&operator, "a").await;
        let waiting = next.exclusive("a").wait(LONG).acquire();
        let (released, second, reply) = join!(
            first.release(),
            waiting,
            operator.revoke("a").holder(holder)
        );
        let second = second.unwrap();
        let is_revoked = reply.unwrap() == Revocation::Revoked;
        // The servers of a majority may be asked in another order each.
        if !matches!(place, Place::Majority(_)) {
            assert_eq!(released.is_err(), is_revoked, "{released:?}");
        }
        outcomes[usize::from(is_revoked)] += 1;
        second.verify().await.unwrap();
        second.release().await.unwrap();
    }
    assert!(outcomes[0] > 0, "{outcomes:?}");
}

async fn a_reservation_is_not_the_holder_that_left_it(place: Place) {
    let locks = place.client().await;
    let reserved = Duration::from_secs(20);
    let guard = locks
        .exclusive("a")
        .min_hold(reserved)
        .acquire()
        .await
        .unwrap();
    let holder = holder_of(&locks, "a").await;
    guard.release().await.unwrap();
    let left = locks.inspect("a").await.unwrap().holders.remove(0);
    assert!(left.is_reservation, "{left:?}");
    let reply = locks.revoke("a").holder(holder).await.unwrap();
    assert_eq!(reply, Revocation::Changed);
    let reply = locks.revoke("a").holder(left.id).await.unwrap();
    assert_eq!(reply, Revocation::Revoked);
    assert!(locks.inspect("a").await.unwrap().holders.is_empty());
}

/// A lock that another program has set, whose value is a secret of that program.
#[tokio::test]
async fn a_foreign_holder_is_revoked_by_its_value_which_is_never_shown() {
    in_time(async {
        let (server, place) = (shared_server().await, Place::redis().await);
        let locks = place.client().await;
        let name = format!("{}:a", place.namespace());
        for end in [&["PX", "60000"][..], &[]] {
            let set = async |value: &str| {
                server
                    .command(&[&["SET", &name, value][..], end].concat())
                    .await;
            };
            set("hunter2").await;
            let seen = locks.inspect("a").await.unwrap();
            assert_eq!(seen.holders[0].client, Identity::Foreign);
            assert_eq!(seen.holders[0].held_for, None);
            assert!(!format!("{seen:?}").contains("hunter2"));
            let holder = seen.holders[0].id;
            set("hunter3").await;
            assert_eq!(
                locks.revoke("a").holder(holder).await.unwrap(),
                Revocation::Changed
            );
            assert_eq!(server.query::<String>(&["GET", &name]).await, "hunter3");
            set("hunter2").await;
            assert_eq!(
                locks.revoke("a").holder(holder).await.unwrap(),
                Revocation::Revoked
            );
            assert_eq!(server.query::<u64>(&["EXISTS", &name]).await, 0);
        }
    })
    .await;
}

/// A second execution would take the lock away from the next holder.
#[tokio::test]
async fn a_revocation_whose_reply_is_lost_is_not_repeated() {
    in_time(async {
        let proxy = Proxy::to(shared_server().await).await;
        let place = Place::redis().await;
        let (locks, next) = (place.client().await, place.client().await);
        let operator = LockClient::builder().namespace(place.namespace());
        let operator = operator.connect(&proxy.url()).await.unwrap();
        let revoked = locks.exclusive("a").acquire().await.unwrap();
        let waiting = begun(next.exclusive("a").wait(LONG).acquire()).await;
        // The server knows the script already.
        let reply = operator.revoke("b").await.unwrap();
        assert_eq!(reply, Revocation::NotHeld);

        proxy.drop_reply(DropReply::next().to("EVALSHA"));
        let error = operator.revoke("a").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert_eq!(proxy.dropped_replies(), 1);
        assert!(matches!(
            revoked.lost().await.kind(),
            LockErrorKind::Lost(_)
        ));
        let guard = waiting.await.unwrap();
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
    })
    .await;
}

/// Fills the lock `k` of a server with as many readers, who hold it for ten minutes and more, and
/// waiters.
async fn fill(server: &RedisServer, readers: u64, waiters: u64) {
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let (seconds, _): (u64, u64) = redis::cmd("TIME")
        .query_async(&mut connection)
        .await
        .unwrap();
    let now = seconds * 1000;
    let mut pipe = redis::pipe();
    for reader in 0..readers {
        let expiry = now + 600_000 + 1000 * reader;
        pipe.cmd("ZADD")
            .arg("lock:k")
            .arg(expiry)
            .arg(format!("{reader:032x}"));
    }
    pipe.cmd("PEXPIREAT")
        .arg("lock:k")
        .arg(now + 600_000 + 1000 * (readers - 1));
    for place in 1..=waiters {
        let token = format!("{place:032x}");
        let entry = format!("{now} exclusive 30000 0 {token} lock:channel");
        let mut set = redis::cmd("HSET");
        set.arg("{lock:k}:q")
            .arg(place)
            .arg(entry)
            .arg(&token)
            .arg(place);
        pipe.add_command(set);
    }
    let ends = format!("1 {waiters} {waiters}");
    pipe.cmd("HSET").arg("{lock:k}:q").arg("ends").arg(ends);
    let _: redis::Value = pipe.query_async(&mut connection).await.unwrap();
}

/// A page of a thousand for each call, so that no call keeps the server from others.
#[tokio::test]
async fn many_holders_and_waiters_are_inspected_in_pages() {
    const READERS: u64 = 1500;
    const WAITERS: u64 = 3000;
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let client = redis::Client::open(server.url()).unwrap();
        fill(&server, READERS, WAITERS).await;

        let calls = async || {
            let mut info = redis::cmd("INFO");
            let mut connection = client.get_multiplexed_async_connection().await.unwrap();
            let stats: String = info
                .arg("commandstats")
                .query_async(&mut connection)
                .await
                .unwrap();
            let scripts = stats
                .lines()
                .filter(|line| line.starts_with("cmdstat_evalsha:"));
            let calls = scripts.filter_map(|line| line.split_once("calls=")?.1.split_once(','));
            calls
                .map(|(calls, _)| calls.parse::<u64>().unwrap())
                .sum::<u64>()
        };
        locks.inspect("other").await.unwrap();
        let before = calls().await;
        let found = locks.inspect("k").await.unwrap();
        assert_eq!(found.holders.len() as u64, READERS);
        assert_eq!(found.waiters.len() as u64, WAITERS);
        assert!(found.holders.is_sorted_by_key(|holder| holder.ttl));
        // And one for the names of the clients.
        assert!(calls().await - before >= READERS / 1000 + WAITERS / 1000);
    })
    .await;
}

/// The pages together may take longer than a call may.
#[tokio::test]
async fn slow_pages_are_inspected() {
    const READERS: u64 = 5000;
    const DELAY: Duration = Duration::from_millis(120);
    in_time(async {
        let server = RedisServer::start().await;
        fill(&server, READERS, 1).await;
        let proxy = Proxy::to(&server).await;
        let locks = LockClient::connect(&proxy.url()).await.unwrap();
        proxy.delay(Direction::ToClient, DELAY);
        let begun = Instant::now();
        let found = locks.inspect("k").await.unwrap();
        assert_eq!(found.holders.len() as u64, READERS);
        assert!(begun.elapsed() > DELAY * 5, "{:?}", begun.elapsed());
    })
    .await;
}
