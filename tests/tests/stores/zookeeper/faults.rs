//! Faults of servers: killed, stopped, without a majority, with nodes that an operator removes.

use std::time::Duration;

use lock_runtime::{
    LockErrorKind, LockKey, Mode,
    store::{self, AcquireReply, Hold, KeyRequest, Store as _, Token, zookeeper::ZooKeeperRecords},
};
use lock_tests::{
    Lateness, ZooKeeperEnsemble,
    place::{begun, eventually},
    shared_zookeeper, unique,
};
use tokio::time::{Instant, timeout};

use super::{client, client_of};
use crate::etcd::{held_after_an_outage, once, until_served};

/// An election, and the time until a client has found the leader.
const SOON: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(30);

async fn three() -> ZooKeeperEnsemble {
    ZooKeeperEnsemble::builder().servers(3).start().await
}

#[tokio::test]
async fn a_lock_outlives_its_leader() {
    let ensemble = three().await;
    let locks = client(&ensemble).await;
    let held = locks.exclusive("held").lease(LONG).acquire().await.unwrap();
    let mut waiting = begun(locks.exclusive("held").wait(LONG * 4).acquire()).await;
    for _ in 0..3 {
        let leader = ensemble.leader().await;
        let (_, before) = until_served(&locks, "k").await;
        let late = Lateness::start();
        ensemble.kill(leader);
        let (time, after) = until_served(&locks, "k").await;
        assert!(time < late.allows(SOON), "{time:?}");
        assert!(before < after);
        ensemble.restart(leader).await;
    }
    assert!(!held.is_lost());
    let is_waiting = timeout(Duration::from_millis(10), &mut waiting).await;
    assert!(is_waiting.is_err());
    let first = held.fence();
    held.release().await.unwrap();
    assert!(first < waiting.await.unwrap().fence());
}

#[tokio::test]
async fn another_server_serves_while_one_is_stopped() {
    let ensemble = three().await;
    let locks = client(&ensemble).await;
    for server in 0..3 {
        until_served(&locks, "k").await;
        let late = Lateness::start();
        ensemble.stop(server);
        let (time, _) = until_served(&locks, "k").await;
        ensemble.resume(server);
        assert!(time < late.allows(SOON), "{time:?}");
    }
}

#[tokio::test]
async fn without_a_majority_nothing_is_granted_and_a_holder_loses_its_lock_in_time() {
    let ensemble = three().await;
    let locks = client(&ensemble).await;
    let lease = Duration::from_secs(3);
    let held = locks
        .exclusive("held")
        .lease(lease)
        .acquire()
        .await
        .unwrap();
    let (_, before) = until_served(&locks, "k").await;
    let since = Instant::now();
    ensemble.kill(0);
    ensemble.kill(1);
    let error = once(&locks, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error:#}");
    held.lost().await;
    let lost = since.elapsed();
    assert!(lost < lease + Duration::from_millis(200), "{lost:?}");
    ensemble.begin_restart(0);
    ensemble.restart(1).await;
    let (time, after) = until_served(&locks, "k").await;
    assert!(time < SOON, "{time:?}");
    assert!(before < after);
    // The lease of the lost lock is over, or will be soon.
    let (time, _) = until_served(&locks, "held").await;
    assert!(time < lease, "{time:?}");
}

#[tokio::test]
async fn a_lock_that_is_released_in_an_outage_is_free_soon_after_it() {
    let ensemble = three().await;
    let namespace = unique("ns");
    let clients = [
        client_of(&ensemble, &namespace).await,
        client_of(&ensemble, &namespace).await,
    ];
    let begin = || [0, 1].into_iter().for_each(|server| ensemble.kill(server));
    let end = async || {
        ensemble.begin_restart(0);
        ensemble.restart(1).await;
    };
    let time = held_after_an_outage(clients, begin, end).await;
    assert!(time < Duration::from_secs(5), "{time:?}");
}

/// A session is no lock: the next one goes on with it.
#[tokio::test]
async fn a_lock_and_a_waiter_outlive_their_sessions() {
    let ensemble = ZooKeeperEnsemble::start().await;
    let namespace = unique("ns");
    let [here, there] = [
        client_of(&ensemble, &namespace).await,
        client_of(&ensemble, &namespace).await,
    ];
    let held = here.exclusive("k").lease(LONG).acquire().await.unwrap();
    let waiting = tokio::spawn(there.exclusive("k").wait(LONG * 4).acquire());
    eventually("a waiter is in the queue", async || {
        !here.inspect("k").await.unwrap().waiters.is_empty()
    })
    .await;
    ensemble.restart(0).await;
    until_served(&here, "other").await;
    until_served(&there, "other").await;
    assert!(!held.is_lost());
    let before = held.fence();
    held.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(before < next.fence());
    next.release().await.unwrap();

    // Messages arrive again.
    let mut shortest = Duration::MAX;
    for _ in 0..20 {
        let held = here.exclusive("k").wait(LONG).acquire().await.unwrap();
        let waiting = tokio::spawn(there.exclusive("k").wait(LONG).acquire());
        tokio::time::sleep(Duration::from_millis(100)).await;
        let released = Instant::now();
        held.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        shortest = shortest.min(released.elapsed());
        next.release().await.unwrap();
    }
    assert!(shortest < Duration::from_millis(100), "{shortest:?}");
}

/// More messages to one client at the same time than it reads at once.
#[tokio::test]
async fn no_message_is_lost_among_others() {
    let namespace = unique("ns");
    let ensemble = shared_zookeeper().await;
    let [here, there] = [
        client_of(ensemble, &namespace).await,
        client_of(ensemble, &namespace).await,
    ];
    let keys: Vec<_> = (0..50).map(|number| format!("k{number}")).collect();
    let mut held = Vec::new();
    let mut waiting = Vec::new();
    for key in &keys {
        held.push(here.exclusive(&**key).lease(LONG).acquire().await.unwrap());
        waiting.push(tokio::spawn(there.exclusive(&**key).wait(LONG).acquire()));
    }
    for key in &keys {
        eventually("a waiter is in the queue", async || {
            !here.inspect(&**key).await.unwrap().waiters.is_empty()
        })
        .await;
    }
    // Its first polls are over.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let releases = held.into_iter().map(|guard| guard.release());
    for outcome in futures_util::future::join_all(releases).await {
        // Fifty calls at once may be slow, and go on in the background.
        let kind = outcome.err().map(|error| error.kind());
        assert!(matches!(kind, None | Some(LockErrorKind::ReleaseUnknown)));
    }
    let released = Instant::now();
    let mut late = Vec::new();
    for waiting in waiting {
        let guard = waiting.await.unwrap().unwrap();
        late.push(released.elapsed());
        drop(guard);
    }
    assert!(late[49] < Duration::from_millis(500), "{late:?}");
}

#[tokio::test]
async fn a_lock_whose_nodes_an_operator_removes_is_lost() {
    let ensemble = shared_zookeeper().await;
    let namespace = unique("ns");
    let locks = client_of(ensemble, &namespace).await;
    let lease = Duration::from_secs(2);
    let held = locks.exclusive("k").lease(lease).acquire().await.unwrap();
    let records = format!("/{namespace}/r");
    let command = ["deleteall", &*records];
    let remove = ensemble.cli(&command);
    let (lost, _) = tokio::join!(held.lost(), remove);
    assert!(matches!(lost.kind(), LockErrorKind::Lost(_)), "{lost:#}");
    let before = held.fence();
    // The directories are the operator's to restore.
    let error = once(&locks, "k").await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error:#}");
    ensemble.cli(&["create", &records]).await;
    let (_, after) = until_served(&locks, "k").await;
    assert!(before < after);
}

/// Each call ends at once, and says it; the nodes are there again for the next client.
#[tokio::test]
async fn a_namespace_that_an_operator_removes_is_named() {
    let ensemble = shared_zookeeper().await;
    let namespace = unique("ns");
    let locks = client_of(ensemble, &namespace).await;
    once(&locks, "k").await.unwrap();
    ensemble.cli(&["deleteall", &format!("/{namespace}")]).await;
    eventually("the request fails at once", async || {
        let begun = Instant::now();
        let error = once(&locks, "k").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error:#}");
        let says = lock_tests::chain(&error).contains("a node of the namespace was removed");
        says && begun.elapsed() < Duration::from_millis(200)
    })
    .await;
    let next = client_of(ensemble, &namespace).await;
    once(&next, "k").await.unwrap();
    until_served(&locks, "k").await;
}

/// The messages to processes that have ended are left out, and that to one that waits arrives.
#[tokio::test]
async fn readers_that_are_gone_cost_a_release_one_attempt() {
    let ensemble = shared_zookeeper().await;
    let namespace = unique("ns");
    let [here, there] = [
        client_of(ensemble, &namespace).await,
        client_of(ensemble, &namespace).await,
    ];
    let mut stores = Vec::new();
    for _ in 0..20 {
        let records = ZooKeeperRecords::connect(&ensemble.url(), &namespace).await;
        stores.push(records.unwrap().into_store());
    }
    let held = here.exclusive("k").lease(LONG).acquire().await.unwrap();
    for store in stores {
        let key = LockKey::new("k").unwrap();
        let hold = Hold::new(key, Mode::Shared, Token::random());
        let request = KeyRequest::new(hold, LONG, store::Instant::now() + LONG).queued();
        let reply = store.acquire(&request).await.unwrap();
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
    }
    let alive = tokio::spawn(there.shared("k").wait(LONG).acquire());
    eventually("all wait", async || {
        here.inspect("k").await.unwrap().waiters.len() == 21
    })
    .await;
    let released = Instant::now();
    held.release().await.unwrap();
    let _guard = alive.await.unwrap().unwrap();
    let took = released.elapsed();
    assert!(took < Duration::from_millis(500), "{took:?}");
}
