//! A node that is dead or silent affects only the keys that it keeps.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{Lateness, RedisCluster, RedisServer, place::in_time};
use tokio::time::{Instant, sleep, timeout};

use super::{LONG, Place, key_of_each, keys_at, lock_name, place_on, use_lock};

/// The longest time for one use of a lock on a busy machine, much shorter than any time-out.
const QUICK: Duration = Duration::from_millis(150);

/// Acquires and releases the lock again and again. Returns the sorted durations.
async fn times_of(locks: LockClient, key: String, enough: impl Fn() -> bool) -> Vec<Duration> {
    let mut times = Vec::new();
    while !enough() {
        let begun = Instant::now();
        use_lock(&locks, &key).await;
        times.push(begun.elapsed());
        sleep(Duration::from_millis(1)).await;
    }
    times.sort_unstable();
    times
}

/// Uses locks of all nodes before, during and after `fault`, which takes the first node out of
/// service.
async fn others_do_not_notice(fault: impl Fn(&RedisServer)) {
    let cluster = RedisCluster::start().await;
    let place = place_on(&cluster);
    let locks = place.client().await;
    let [own, others @ ..] = key_of_each(&cluster, &place).await;
    let victim = cluster.masters().await[0];
    use_lock(&locks, &own).await;
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let users: Vec<_> = others
        .into_iter()
        .map(|key| {
            let over = over.clone();
            tokio::spawn(times_of(locks.clone(), key, move || {
                over.load(std::sync::atomic::Ordering::Relaxed)
            }))
        })
        .collect();
    sleep(Duration::from_millis(200)).await;
    fault(victim);
    // Its own keys fail at once or within the time-out of a call, not that of a connection.
    for _ in 0..3 {
        let (begun, late) = (Instant::now(), Lateness::start());
        let error = locks
            .exclusive(own.as_str())
            .no_wait()
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert!(
            begun.elapsed() < late.allows(Duration::from_millis(1200)),
            "two calls of 500 ms: {:?}",
            begun.elapsed()
        );
    }
    cluster.new_owner_of(&lock_name(&place, &own), victim).await;
    let (found, late) = (Instant::now(), Lateness::start());
    use_lock(&locks, &own).await;
    assert!(
        found.elapsed() < late.allows(Duration::from_secs(2)),
        "the new primary was found after {:?}",
        found.elapsed()
    );
    over.store(true, std::sync::atomic::Ordering::Relaxed);
    for user in users {
        let times = user.await.unwrap();
        let p99 = times[times.len() * 99 / 100];
        assert!(p99 < QUICK, "p99 of {} is {p99:?}", times.len());
    }
}

#[tokio::test]
async fn a_dead_node_fails_its_own_keys_alone_until_it_is_replaced() {
    in_time(others_do_not_notice(RedisServer::kill)).await;
}

#[tokio::test]
async fn a_silent_node_fails_its_own_keys_alone_until_it_is_replaced() {
    in_time(others_do_not_notice(RedisServer::stop)).await;
}

#[tokio::test]
async fn a_silent_node_costs_no_lease_of_the_others() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let locks = place.client().await;
        let masters = cluster.masters().await;
        let lease = Duration::from_secs(1);
        let mut held = Vec::new();
        for master in &masters {
            let mut guards = Vec::new();
            for key in keys_at(&cluster, &place, master, 20).await {
                guards.push(locks.exclusive(key).lease(lease).acquire().await.unwrap());
            }
            held.push(guards);
        }
        masters[0].stop();
        for guard in &held[0] {
            timeout(lease * 2, guard.held().lost())
                .await
                .expect("it cannot be renewed");
        }
        sleep(lease).await;
        for guard in held.remove(1).into_iter().chain(held.remove(1)) {
            assert!(!guard.is_lost());
            guard.release().await.unwrap();
        }
        masters[0].resume();
    })
    .await;
}

#[tokio::test]
async fn who_waits_at_a_primary_that_dies_is_served_by_the_next() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place: Place = place_on(&cluster);
        let (locks, others) = (place.client().await, place.client().await);
        let [key, ..] = key_of_each(&cluster, &place).await;
        let guard = locks.exclusive(key.as_str()).acquire().await.unwrap();
        let waiting = tokio::spawn(others.exclusive(key.as_str()).wait(LONG).acquire());
        sleep(Duration::from_millis(300)).await;
        let victim = cluster.masters().await[0];
        victim.kill();
        cluster.new_owner_of(&lock_name(&place, &key), victim).await;
        guard
            .verify()
            .await
            .expect("a replica that had it took over");
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}
