//! Rules 11 to 13: nothing shortens a lease, a renewal creates nothing, and none follows a release.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, Mode,
    store::{MemoryStore, Release, RenewReply, Renewal, Store},
};
use lock_tests::{
    FaultyStore, RedisServer, faulty_store::Operation, replies::Replies as _, shared_server,
};

use super::{
    Hold, MODES, beside, fresh_hold, granted, inspect, lock_name, member, micros, monitor::Monitor,
    redis_on,
};

const HOUR: Duration = super::HOUR;
const MINUTE: Duration = Duration::from_secs(60);

async fn renew(store: &dyn Store, hold: &Hold, lease: Duration) -> RenewReply {
    store
        .renew(&[Renewal::new(hold.clone(), lease)])
        .await
        .all()
        .unwrap()[0]
}

// Rule 11: a reader with a short lease once ended the whole set, and a writer came in.
#[tokio::test]
async fn a_set_lives_as_long_as_its_longest_holder() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in [Mode::Shared, super::TWO_PERMITS] {
        let long = fresh_hold(mode);
        let short = beside(&long.key, mode);
        let left = async || server.query::<u64>(&["PTTL", &lock_name(&long)]).await;
        granted(&*store, &long, HOUR).await;
        granted(&*store, &short, MINUTE).await;
        assert!(left().await > 1_800_000, "{mode:?}");
        renew(&*store, &short, MINUTE * 2).await;
        assert!(left().await > 1_800_000, "{mode:?}");
        store
            .release(&Release::new(short.clone()).keep_for(Some(MINUTE)))
            .await
            .unwrap();
        assert!(left().await > 1_800_000, "{mode:?}");
        store.release(&Release::new(long.clone())).await.unwrap();
        assert!(left().await <= 120_000, "and no longer than that");
    }
}

// Rule 11: the renewal that follows asks for the lease of the lock, which is shorter.
#[tokio::test]
async fn a_renewal_after_an_extension_leaves_it_as_long() {
    let server = shared_server().await;
    for mode in MODES {
        let store = FaultyStore::new(redis_on(server).await, |call| async move {
            call.execute().await
        });
        let locks = LockClient::with_store(store.clone());
        let hold = fresh_hold(mode);
        let request = match mode {
            Mode::Shared => locks.shared(&hold.key),
            Mode::Permits(permits) => locks.permits(&hold.key, permits),
            _ => locks.exclusive(&hold.key),
        };
        let guard = request
            .lease(Duration::from_millis(1_500))
            .acquire()
            .await
            .unwrap();
        guard.extend(HOUR).await.unwrap();
        // The first is the extension itself.
        store
            .wait_for(3, |operation| matches!(operation, Operation::Renew(_)))
            .await;
        guard.verify().await.unwrap();
        assert!(
            server.query::<i64>(&["PTTL", &lock_name(&hold)]).await > 1_800_000,
            "{mode:?}"
        );
        assert!(guard.validity() > HOUR / 2);
        guard.release().await.unwrap();
    }
}

// Rule 12.
#[tokio::test]
async fn a_renewal_of_nothing_creates_nothing() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        assert_eq!(renew(&*store, &hold, HOUR).await, RenewReply::Gone);
        granted(&*store, &hold, HOUR).await;
        server.command(&["DEL", &lock_name(&hold)]).await;
        assert_eq!(
            renew(&*store, &hold, HOUR).await,
            RenewReply::Gone,
            "{mode:?}"
        );
        assert_eq!(
            server.query::<i64>(&["EXISTS", &lock_name(&hold)]).await,
            0,
            "{mode:?}"
        );
    }
}

// Rule 12.
#[tokio::test]
async fn an_expired_holder_is_not_revived_by_its_renewal() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in [Mode::Shared, super::TWO_PERMITS] {
        let crashed = fresh_hold(mode);
        let alive = beside(&crashed.key, mode);
        granted(&*store, &crashed, HOUR).await;
        granted(&*store, &alive, HOUR).await;
        let past = (micros(server).await / 1000 - 1).to_string();
        server
            .command(&["ZADD", &lock_name(&crashed), "XX", &past, &member(&crashed)])
            .await;
        assert_eq!(
            renew(&*store, &crashed, HOUR).await,
            RenewReply::Gone,
            "{mode:?}"
        );
        assert!(matches!(
            renew(&*store, &alive, 2 * HOUR).await,
            RenewReply::Renewed { .. }
        ));
        // 13 of the failures seen elsewhere: the living keep no dead one alive.
        assert_eq!(inspect(&*store, &alive).await.holders.len(), 1, "{mode:?}");
    }
}

// Rule 13, and 1 of the failures seen elsewhere.
#[tokio::test(start_paused = true)]
async fn no_renewal_is_sent_after_the_release() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        let outcome = call.execute().await;
        if matches!(call.operation, Operation::Renew(_)) {
            tokio::time::sleep(Duration::from_millis(9)).await;
        }
        outcome
    });
    let locks = LockClient::with_store(store.clone());
    let mut holders = tokio::task::JoinSet::new();
    for number in 0..200_u64 {
        let locks = locks.clone();
        holders.spawn(async move {
            let lease = Duration::from_millis(100);
            let guard = locks
                .exclusive(format!("k{number}"))
                .lease(lease)
                .acquire()
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(7 * (number / 4))).await;
            match number % 4 {
                0 => drop(guard),
                1 => drop(tokio::time::timeout(Duration::ZERO, guard.release()).await),
                _ => guard.release().await.unwrap(),
            }
        });
    }
    holders.join_all().await;
    tokio::time::sleep(Duration::from_secs(1)).await;

    let operations = store.operations();
    let renewed = |operation: &Operation| match operation {
        Operation::Renew(renewals) => renewals.iter().map(|one| one.hold.token).collect(),
        _ => Vec::new(),
    };
    assert!(
        operations.iter().flat_map(renewed).count() > 200,
        "leases were renewed"
    );
    for token in store.requests().iter().map(|request| request.hold.token) {
        let released = operations
            .iter()
            .position(|o| matches!(o, Operation::Release(release) if release.hold.token == token))
            .expect("all are released");
        let mut later = operations[released..].iter().flat_map(renewed);
        assert!(!later.any(|renewed| renewed == token));
    }
}

// Rule 13, as the server sees it.
#[tokio::test]
async fn the_server_sees_nothing_of_a_lock_after_its_release() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    // A script that the server does not know is sent once more, which is another story.
    let lease = Duration::from_millis(900);
    let guard = locks.exclusive("warm").acquire().await.unwrap();
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    let warm = |number| locks.exclusive(format!("warm{number}")).lease(lease);
    let guards = join_all((0..40).map(|number| warm(number).acquire())).await;
    tokio::time::sleep(lease / 2).await;
    join_all(guards.into_iter().map(|guard| guard.unwrap().release())).await;
    let monitor = Monitor::of(&server).await;
    let mut holders = tokio::task::JoinSet::new();
    for number in 0..40_u64 {
        let locks = locks.clone();
        holders.spawn(async move {
            let guard = locks
                .exclusive(format!("k{number}."))
                .lease(lease)
                .acquire()
                .await
                .unwrap();
            // At every phase of the first renewal.
            tokio::time::sleep(Duration::from_millis(250 + 3 * number)).await;
            // On a busy machine the lease may have run out, or the answer may be late: then it is
            // said once more.
            guard.release().await.is_ok().then_some(number)
        });
    }
    let released = holders.join_all().await;
    locks.shutdown().await;
    let lines = monitor.lines_so_far(&server).await;
    let mut renewed = 0;
    for number in released.into_iter().flatten() {
        let name = format!("\"lock:k{number}.\"");
        let about: Vec<_> = lines.iter().filter(|line| line.contains(&name)).collect();
        renewed += about
            .iter()
            .filter(|line| line.contains("\"PEXPIRE\""))
            .count();
        let end = about
            .iter()
            .position(|line| line.contains("lua] \"DEL\""))
            .expect("it was released");
        assert_eq!(about[end + 1..], [""; 0], "{about:#?}");
    }
    assert!(renewed > 0, "leases were renewed");
}
