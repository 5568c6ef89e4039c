//! Old clients, and keys whose work is done once.

use lock_runtime::{LockClient, Mode, OnceEntry, OnceGuard};
use lock_tests::RedisServer;

use super::{
    Duration, LONG, connect,
    old_client::{Names, OldClient},
};

const LEASE: Duration = Duration::from_secs(30);

async fn began(locks: &LockClient, key: &str) -> OnceGuard {
    match locks
        .once(key)
        .lease(LEASE)
        .wait(LONG)
        .begin()
        .await
        .unwrap()
    {
        OnceEntry::Vacant(guard) => guard,
        OnceEntry::Done(done) => panic!("{done:?}"),
    }
}

/// To an old client it is a lock that another one holds, whatever the old client does.
#[tokio::test]
async fn an_old_client_waits_for_a_key_that_is_done() {
    let server = RedisServer::start().await;
    let (locks, names) = (
        connect(&server.url(), "lock").await.unwrap(),
        Names::new("lock", "k", false),
    );
    let [mut waits, mut asks] = [
        OldClient::connect(&server, "lock").await,
        OldClient::connect(&server, "lock").await,
    ];
    let guard = began(&locks, "k").await;
    let of_work = guard.held().fence().number();
    let (word, _) = waits.acquire(&names, Mode::Exclusive, LEASE, true).await;
    assert_eq!(word, "queued");
    guard.complete(b"receipt 7").await.unwrap();
    assert_eq!(waits.poll(&names, Mode::Exclusive).await, None);
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (word, _) = asks.acquire(&names, mode, LEASE, false).await;
        assert_eq!(word, "refused", "{mode:?}");
        assert_eq!(asks.release(&names, mode).await, "not_held");
        assert_eq!(asks.renew(&names, mode, LEASE).await, -1);
        asks.abandon(&names, mode).await;
    }
    let (holders, waiters) = asks.inspect(&names).await;
    assert_eq!((holders.len(), waiters.len()), (1, 1));
    let OnceEntry::Done(done) = locks.once("k").begin().await.unwrap() else {
        panic!("the result is lost");
    };
    assert_eq!(
        (&*done.value, done.fence.number()),
        (&b"receipt 7"[..], of_work)
    );
    // Once the result is forgotten, the old client is the next holder.
    assert!(locks.once("k").forget().await.unwrap());
    assert!(waits.granted(&names, Mode::Exclusive).await > of_work);
    let begun = locks.once("k").no_wait().begin().await;
    assert!(begun.is_err(), "{begun:?}");
    assert_eq!(waits.release(&names, Mode::Exclusive).await, "released");
}

/// Work begins when the old client has released the lock.
#[tokio::test]
async fn work_waits_for_an_old_client() {
    let server = RedisServer::start().await;
    let (locks, names) = (
        connect(&server.url(), "lock").await.unwrap(),
        Names::new("lock", "k", false),
    );
    let mut old = OldClient::connect(&server, "lock").await;
    let (_, fence) = old.acquire(&names, Mode::Exclusive, LEASE, false).await;
    let (guard, released) = tokio::join!(began(&locks, "k"), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        old.release(&names, Mode::Exclusive).await
    });
    assert_eq!(released, "handed_over");
    assert!(Some(guard.held().fence().number()) > fence);
    guard.complete(b"receipt 7").await.unwrap();
    let (word, _) = old.acquire(&names, Mode::Exclusive, LEASE, false).await;
    assert_eq!(word, "refused");
}
