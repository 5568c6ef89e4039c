//! A slot half-way between two nodes, with some keys of a lock at each of them.

use std::{num::NonZeroU32, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockErrorKind, LockGuard, LockRequest};
use lock_tests::{
    RedisCluster, chain,
    place::{begun, eventually, in_time},
};
use tokio::time::{sleep, timeout};

use super::{HOUR, LONG, Place, fence_name, key_at, keys_at, lock_name, place_on, use_lock};

/// The keys that have already moved.
#[derive(Clone, Copy, Debug)]
enum Gone {
    Nothing,
    Lock,
    Fence,
    Both,
}

const HALF_WAYS: [Gone; 4] = [Gone::Nothing, Gone::Lock, Gone::Fence, Gone::Both];

fn request(locks: &LockClient, key: &str, mode: usize) -> LockRequest {
    match mode {
        0 => locks.exclusive(key),
        1 => locks.shared(key),
        _ => locks.permits(key, NonZeroU32::new(2).unwrap()),
    }
}

/// The names of the lock and of its fence in the store.
fn names(place: &Place, key: &str, mode: usize) -> (String, String) {
    let key = if mode == 2 {
        format!("permits:{key}")
    } else {
        key.to_owned()
    };
    (lock_name(place, &key), fence_name(place, &key))
}

/// Acquires locks in every mode, begins to move their slots, and runs `go_on` with each lock while
/// its slot is half-way.
async fn half_way(lease: Duration, go_on: impl AsyncFn(LockGuard, Gone)) {
    let cluster = RedisCluster::start().await;
    let place = place_on(&cluster);
    let locks = place.client().await;
    let masters = cluster.masters().await;
    let mut held = Vec::new();
    // Each lock has a slot of its own.
    let sources = join_all(
        masters
            .iter()
            .map(|source| keys_at(&cluster, &place, source, HALF_WAYS.len())),
    )
    .await;
    for (mode, keys) in sources.into_iter().enumerate() {
        for (gone, key) in HALF_WAYS.into_iter().zip(keys) {
            let guard = request(&locks, &key, mode)
                .lease(lease)
                .acquire()
                .await
                .unwrap();
            let (lock, fence) = names(&place, &key, mode);
            let migration = cluster
                .begin_migration(&lock, masters[(mode + 1) % masters.len()])
                .await;
            if matches!(gone, Gone::Lock | Gone::Both) {
                assert!(migration.move_key(&lock).await);
            }
            if matches!(gone, Gone::Fence | Gone::Both) {
                assert!(migration.move_key(&fence).await);
            }
            held.push((guard, gone, key, mode, migration));
        }
    }
    let going_on = held
        .into_iter()
        .map(async |(guard, gone, key, mode, migration)| {
            go_on(guard, gone).await;
            (gone, key, mode, migration)
        });
    for (gone, key, mode, migration) in join_all(going_on).await {
        migration.finish().await;
        let what = format!("mode {mode} is free, {gone:?} gone");
        let is_free = async || {
            let found = match mode {
                2 => locks.inspect(key.as_str()).permits().await,
                _ => locks.inspect(key.as_str()).await,
            };
            found.is_ok_and(|found| found.holders.is_empty() && found.waiters.is_empty())
        };
        eventually(&what, is_free).await;
    }
}

#[tokio::test]
async fn a_lock_on_its_way_is_given_back() {
    in_time(half_way(HOUR, async |guard, gone| {
        let released = guard.release().await;
        released.unwrap_or_else(|error| panic!("{gone:?}: {error}"));
    }))
    .await;
}

#[tokio::test]
async fn a_dropped_lock_on_its_way_is_given_back() {
    in_time(half_way(HOUR, async |guard, _| drop(guard))).await;
}

/// All keys are still at the old node, which releases the lock and then cannot grant it again.
#[tokio::test]
async fn release_in_a_migrating_slot_hands_off_after_the_migration() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, from).await;
        for mode in 0..3 {
            // The last permit.
            let one = NonZeroU32::new(1).unwrap();
            let request = |locks: &LockClient| match mode {
                2 => locks.permits(key.as_str(), one),
                _ => request(locks, &key, mode),
            };
            let guard = request(&locks).lease(HOUR).acquire().await.unwrap();
            let waiter = if mode == 2 {
                request(&others)
            } else {
                others.exclusive(key.as_str())
            };
            let waiting = tokio::spawn(waiter.wait(LONG).acquire());
            let in_line = async || {
                let found = match mode {
                    2 => locks.inspect(key.as_str()).permits().await,
                    _ => locks.inspect(key.as_str()).await,
                };
                found.unwrap().waiters.len() == 1
            };
            eventually("a request waits", in_line).await;
            let (lock, _) = names(&place, &key, mode);
            let target = if cluster.owner_of(&lock).await.port() == to.port() {
                from
            } else {
                to
            };
            let migration = cluster.begin_migration(&lock, target).await;
            guard
                .release()
                .await
                .unwrap_or_else(|error| panic!("mode {mode}: {error}"));
            assert!(!waiting.is_finished());
            migration.finish().await;
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_lock_on_its_way_is_renewed() {
    // Rule 25.
    let lease = Duration::from_secs(1);
    in_time(half_way(lease, async |guard, gone| {
        let held = guard.held();
        timeout(lease.mul_f32(1.2), held.lost())
            .await
            .expect_err("it is renewed");
        eventually(&format!("it is held, {gone:?} gone"), async || {
            guard.verify().await.is_ok()
        })
        .await;
    }))
    .await;
}

#[tokio::test]
async fn a_lock_on_its_way_is_not_to_be_had_until_it_is_there() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let locks = place.client().await;
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, from).await;
        use_lock(&locks, &key).await;
        let migration = cluster.begin_migration(&lock_name(&place, &key), to).await;
        // Its fence exists, its lock does not.
        let error = locks
            .exclusive(key.as_str())
            .no_wait()
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert!(chain(&error).contains("moved to another node"), "{error}");
        let waiting = tokio::spawn(begun(locks.exclusive(key.as_str()).wait(LONG).acquire()).await);
        sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        migration.finish().await;
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_held_lock_is_refused_also_when_it_has_gone_ahead() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, from).await;
        let guard = locks.exclusive(key.as_str()).acquire().await.unwrap();
        let migration = cluster.begin_migration(&lock_name(&place, &key), to).await;
        let refused = async || {
            others
                .exclusive(key.as_str())
                .no_wait()
                .acquire()
                .await
                .unwrap_err()
        };
        for name in [lock_name(&place, &key), fence_name(&place, &key)] {
            assert_eq!(refused().await.kind(), LockErrorKind::Unavailable);
            migration.move_key(&name).await;
        }
        migration.finish().await;
        assert_eq!(refused().await.kind(), LockErrorKind::Contended);
        guard.release().await.unwrap();
        use_lock(&others, &key).await;
    })
    .await;
}

#[tokio::test]
async fn a_place_in_a_line_on_its_way_is_kept_and_given_up() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let [from, to, ..] = cluster.masters().await[..] else {
            unreachable!()
        };
        let key = key_at(&cluster, &place, from).await;
        let guard = locks.exclusive(key.as_str()).acquire().await.unwrap();
        let places = async |count: usize| {
            let what = format!("{count} are in the wait queue");
            let count = async || {
                locks
                    .inspect(key.as_str())
                    .await
                    .is_ok_and(|found| found.waiters.len() == count)
            };
            eventually(&what, count).await;
        };
        let stays = tokio::spawn(others.shared(key.as_str()).wait(LONG).acquire());
        places(1).await;
        let gives_up = tokio::spawn(others.exclusive(key.as_str()).wait(LONG).acquire());
        let third = place.client().await;
        let third = tokio::spawn(third.exclusive(key.as_str()).wait(LONG).acquire());
        places(2).await;
        let migration = cluster.begin_migration(&lock_name(&place, &key), to).await;
        migration.move_key(&lock_name(&place, &key)).await;
        gives_up.abort();
        third.abort();
        sleep(Duration::from_millis(300)).await;
        guard.release().await.unwrap();
        migration.finish().await;
        stays.await.unwrap().unwrap().release().await.unwrap();
        places(0).await;
        use_lock(&locks, &key).await;
    })
    .await;
}
