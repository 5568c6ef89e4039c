//! Failover to another server: a holder keeps its lock or is notified of its loss, a waiter is
//! served, and no client stays at the old primary.

use std::num::NonZeroU32;

use lock_runtime::{LockClient, LockErrorKind, LockGuard, Loss, RedisOptions};
use lock_tests::{
    Captured, Lateness, Proxy, RedisServer, SentinelSet,
    place::{LONG, eventually, in_time, no_key_left},
    proxy::Direction,
};
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    Duration, HOUR, builder, client, copied,
    fake::{self, Fake, View},
    namespace, url_of,
};

const LEASE: Duration = Duration::from_secs(3);
/// The time in addition to the lease within which service resumes after a failover.
const BACK: Duration = Duration::from_secs(2);

/// A holder, and a waiter for the same lock in another process.
struct Busy {
    holder: LockClient,
    guard: LockGuard,
    waiting: JoinHandle<LockGuard>,
}

impl Busy {
    async fn begin(set: &SentinelSet, namespace: &str) -> Self {
        let (holder, waiter) = (client(set, namespace).await, client(set, namespace).await);
        let guard = holder.exclusive("k").lease(LEASE).acquire().await.unwrap();
        let waiting = tokio::spawn(async move {
            let guard = waiter
                .exclusive("k")
                .lease(LEASE)
                .wait(LONG)
                .acquire()
                .await
                .unwrap();
            // Verified here, while the client of the guard still exists.
            guard.verify().await.map(|()| guard).unwrap()
        });
        let waits = || async { !holder.inspect("k").await.unwrap().waiters.is_empty() };
        eventually("a request waits", waits).await;
        copied(set).await;
        Self {
            holder,
            guard,
            waiting,
        }
    }

    /// Checks, with a new primary, that the holder has its lock or an error that reports the loss,
    /// and that the waiter acquires the lock afterwards.
    async fn end(self, since: Instant, new: &RedisServer, namespace: &str) {
        let Self {
            holder,
            guard,
            waiting,
        } = self;
        loop {
            match guard.verify().await {
                Ok(()) => {
                    guard.release().await.unwrap();
                    break;
                }
                Err(error)
                    if error.kind() == LockErrorKind::Unavailable
                        && since.elapsed() < LEASE + BACK =>
                {
                    sleep(Duration::from_millis(20)).await;
                }
                Err(error) => {
                    assert!(
                        matches!(
                            error.kind(),
                            LockErrorKind::Lost(Loss::Taken | Loss::Expired)
                        ),
                        "{error}"
                    );
                    break;
                }
            }
        }
        let next = waiting.await.unwrap();
        assert!(since.elapsed() < LEASE + BACK, "{:?}", since.elapsed());
        next.release().await.unwrap();
        holder
            .exclusive("k")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        no_key_left(new, namespace).await;
    }
}

#[tokio::test]
async fn a_planned_failover_moves_the_locks_along() {
    in_time(async {
        let set = SentinelSet::start().await;
        let ns = namespace();
        for _ in 0..2 {
            let busy = Busy::begin(&set, &ns).await;
            let new = set.failover().await;
            busy.end(Instant::now(), new, &ns).await;
        }
    })
    .await;
}

#[tokio::test]
async fn acquire_follows_the_replica_of_a_dead_primary() {
    in_time(async {
        let set = SentinelSet::start().await;
        let ns = namespace();
        let busy = Busy::begin(&set, &ns).await;
        let old = set.master().await;
        old.kill();
        let new = set.new_master(old).await;
        busy.end(Instant::now(), new, &ns).await;
    })
    .await;
}

#[tokio::test]
async fn a_primary_that_hangs_is_left_once_another_is_named() {
    in_time(async {
        let set = SentinelSet::start().await;
        let ns = namespace();
        let busy = Busy::begin(&set, &ns).await;
        let old = set.master().await;
        old.stop();
        let new = set.new_master(old).await;
        busy.end(Instant::now(), new, &ns).await;
        // The old primary comes back as a replica, and no client uses it.
        old.resume();
        set.settled().await;
        let locks = client(&set, &ns).await;
        locks
            .exclusive("k")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_client_that_is_made_during_a_failover_waits_for_its_end() {
    in_time(async {
        let set = SentinelSet::start().await;
        let locks = client(&set, "early").await;
        copied(&set).await;
        let old = set.master().await;
        old.kill();
        // A request that was made before the failover goes on waiting. A client that connects now
        // fails soon if there is no primary.
        let waiting = tokio::spawn(locks.exclusive("k").wait(LONG).acquire());
        let since = Instant::now();
        if let Err(error) = LockClient::connect(&super::url_of(set.sentinels())).await {
            assert!(
                matches!(
                    error.kind(),
                    LockErrorKind::Unavailable | LockErrorKind::ReadOnly
                ),
                "{error}"
            );
        }
        assert!(
            since.elapsed() < Duration::from_secs(3),
            "{:?}",
            since.elapsed()
        );
        set.new_master(old).await;
        client(&set, "late").await;
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// Two servers, of which the second becomes the primary, and Sentinels that announce it on demand.
struct Pair {
    old: RedisServer,
    new: RedisServer,
    sentinels: [Fake; 3],
    locks: LockClient,
}

impl Pair {
    async fn start() -> Self {
        let (old, new) = (RedisServer::start().await, RedisServer::start().await);
        let sentinels = Fake::three(&View::of(old.addr(), 5)).await;
        let locks = LockClient::connect(&fake::url_of(&sentinels))
            .await
            .unwrap();
        locks
            .exclusive("warm")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        Self {
            old,
            new,
            sentinels,
            locks,
        }
    }
}

#[tokio::test]
async fn acquire_leaves_a_demoted_primary_after_its_first_refusal() {
    in_time(async {
        let Pair {
            old,
            new,
            sentinels,
            locks,
        } = Pair::start().await;
        let guard = locks.exclusive("held").lease(HOUR).acquire().await.unwrap();
        sentinels
            .iter()
            .for_each(|sentinel| sentinel.believe(&View::of(new.addr(), 6)));
        old.command(&["REPLICAOF", "127.0.0.1", &new.port().to_string()])
            .await;
        // At most one request is refused. The refusal shows that the primary was demoted.
        let guard_there = locks.exclusive("k").wait(LONG).acquire().await.unwrap();
        assert_eq!(new.query::<i64>(&["EXISTS", "lock:k"]).await, 1);
        // The client renews after the broken connection, and the new primary does not have the
        // lock. No scheduled renewal of an hour's lease is due.
        let lost = timeout(BACK, guard.held().lost())
            .await
            .expect("it is lost soon");
        assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Taken));
        guard_there.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn acquire_leaves_a_replaced_primary_on_a_sentinels_event() {
    in_time(async {
        let Pair {
            old,
            new,
            sentinels,
            locks,
        } = Pair::start().await;
        let guard = locks.exclusive("held").lease(HOUR).acquire().await.unwrap();
        eventually("each Sentinel has a subscriber", || async {
            sentinels
                .iter()
                .all(|sentinel| sentinel.switch(&View::of(old.addr(), 5)) == 1)
        })
        .await;
        // One Sentinel announces the new primary before the others do, and the old one still
        // accepts writes.
        sentinels[2].switch(&View::of(new.addr(), 6));
        let lost = timeout(BACK, guard.held().lost())
            .await
            .expect("it is lost soon");
        assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Taken));
        let guard = locks.exclusive("k").wait(LONG).acquire().await.unwrap();
        assert_eq!(new.query::<i64>(&["EXISTS", "lock:k"]).await, 1);
        assert_eq!(old.query::<i64>(&["EXISTS", "lock:k"]).await, 0);
        guard.release().await.unwrap();
    })
    .await;
}

/// The old primary grants a lock, and the client learns of the new one before that reply arrives.
#[tokio::test]
async fn the_grant_of_a_primary_that_was_replaced_meanwhile_does_not_count() {
    in_time(async {
        let (old, new) = (RedisServer::start().await, RedisServer::start().await);
        // The client may learn of it too late: then the grant counts.
        for _ in 0..20 {
            if granted_after_a_failover(&old, &new).await {
                return;
            }
        }
        panic!("no reply was late enough");
    })
    .await;
}

/// Returns whether the client learned of the new primary before it was granted the lock.
async fn granted_after_a_failover(old: &RedisServer, new: &RedisServer) -> bool {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let proxy = Proxy::to(old).await;
    let sentinels = Fake::three(&View::of(proxy.addr(), 5)).await;
    let locks = LockClient::connect(&fake::url_of(&sentinels))
        .await
        .unwrap();
    let warm = locks.exclusive("warm").acquire().await.unwrap();
    warm.release().await.unwrap();
    eventually("each Sentinel has a subscriber", || async {
        let mut sentinels = sentinels.iter();
        sentinels.all(|sentinel| sentinel.switch(&View::of(proxy.addr(), 5)) == 1)
    })
    .await;
    // Less than the time-out of a call.
    proxy.delay(Direction::ToClient, Duration::from_millis(300));
    let request = locks.exclusive("k").lease(HOUR).wait(LONG);
    let acquiring = tokio::spawn(request.acquire());
    let executed = || async { old.query::<i64>(&["EXISTS", "lock:k"]).await == 1 };
    eventually("the old primary grants it", executed).await;
    sentinels[2].switch(&View::of(new.addr(), 6));
    let guard = acquiring.await.unwrap().unwrap();
    let switched = "the Sentinels name another primary";
    let events = traces.events();
    let messages = events.iter().map(|event| &*event.message);
    let latest = messages
        .filter(|it| [switched, "acquired"].contains(it))
        .skip(1);
    let is_late = latest.eq([switched, "acquired"]);
    if is_late {
        let there = new.query::<i64>(&["EXISTS", "lock:k"]).await;
        assert_eq!(there, 1, "the new primary does not have the lock");
    }
    drop(guard);
    for server in [old, new] {
        server.command(&["DEL", "lock:k"]).await;
    }
    is_late
}

#[tokio::test]
async fn lost_resolves_after_a_failover_during_a_sentinel_outage() {
    in_time(async {
        let Pair {
            old: _old,
            new,
            sentinels,
            locks,
        } = Pair::start().await;
        let guard = locks.exclusive("held").lease(HOUR).acquire().await.unwrap();
        // The Sentinels change their view before the client subscribes or after it. The client
        // looks up the primary after each subscription.
        sentinels
            .iter()
            .for_each(|sentinel| sentinel.believe(&View::of(new.addr(), 6)));
        sentinels.iter().for_each(Fake::hang_up);
        let lost = timeout(LONG, guard.held().lost())
            .await
            .expect("it is lost");
        assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Taken));
    })
    .await;
}

#[tokio::test]
async fn a_dropped_client_subscribes_to_no_sentinel() {
    in_time(async {
        let Pair {
            old,
            new: _new,
            sentinels,
            locks,
        } = Pair::start().await;
        let listeners = |count| {
            let (view, sentinels) = (View::of(old.addr(), 5), &sentinels);
            move || {
                let view = view.clone();
                async move {
                    sentinels
                        .iter()
                        .all(|sentinel| sentinel.switch(&view) == count)
                }
            }
        };
        eventually("each Sentinel has a subscriber", listeners(1)).await;
        drop(locks);
        eventually("no Sentinel has a subscriber", listeners(0)).await;
    })
    .await;
}

/// The connection for `WAIT` leaves a primary that hangs at the same time as the other connection.
#[tokio::test]
async fn acquire_with_min_replicas_resumes_once_a_replica_is_back() {
    in_time(async {
        let set = SentinelSet::start().await;
        let ns = namespace();
        let replicated = builder(&ns)
            .redis(RedisOptions::new().min_replicas(NonZeroU32::MIN, Duration::from_millis(50)));
        let locks = replicated.connect(&url_of(set.sentinels())).await.unwrap();
        copied(&set).await;
        let (granted, mut grants) = mpsc::unbounded_channel();
        let asking = tokio::spawn(async move {
            for number in 0.. {
                let acquired = locks
                    .exclusive(format!("k{number}"))
                    .lease(LEASE)
                    .no_wait()
                    .acquire()
                    .await;
                if acquired.is_ok() && granted.send(Instant::now()).is_err() {
                    break;
                }
            }
        });
        grants.recv().await.unwrap();
        let old = set.master().await;
        old.stop();
        let new = set.new_master(old).await;
        let mut primary = new.connection().await.unwrap();
        let mut copy = redis::pipe();
        copy.cmd("SET")
            .arg("copied")
            .arg(1)
            .cmd("WAIT")
            .arg(1)
            .arg(20);
        while copy.query_async::<((), i64)>(&mut primary).await.unwrap().1 < 1 {}
        let (copied, late) = (Instant::now(), Lateness::start());
        while grants.recv().await.unwrap() < copied {}
        println!(
            "granted {:?} after the new primary had a replica",
            copied.elapsed()
        );
        assert!(
            copied.elapsed() < late.allows(Duration::from_millis(800)),
            "{:?}",
            copied.elapsed()
        );
        drop(grants);
        asking.await.unwrap();
    })
    .await;
}
