//! Permits of different numbers, beside clients that refuse another number.

use lock_runtime::{LockClient, LockGuard, Mode};
use lock_tests::{RedisServer, unique};

use super::{
    super::permits,
    Duration, connect, eventually, in_time,
    old_client::{Names, OldClient},
};

const LEASE: Duration = Duration::from_secs(30);
const TWO: u32 = 2;

async fn tried(locks: &LockClient, number: u32) -> Option<LockGuard> {
    let request = locks.permits("a", permits(number)).lease(LEASE);
    request.try_acquire().await.unwrap()
}

/// An old client that holds one of two keeps it beside one of three, and its renewals go on.
#[tokio::test]
async fn an_old_client_keeps_its_permit_beside_another_number() {
    in_time(async {
        let (server, namespace) = (RedisServer::start().await, &*unique("ns"));
        let names = Names::new(namespace, "a", true);
        let two = Mode::Permits(permits(TWO));
        let locks = connect(&server.url(), namespace).await.unwrap();
        let mut old = [
            OldClient::connect(&server, namespace).await,
            OldClient::connect(&server, namespace).await,
            OldClient::connect(&server, namespace).await,
        ];
        let (word, first) = old[0].acquire(&names, two, LEASE, false).await;
        assert_eq!(word, "granted");
        let second = tried(&locks, 3).await.expect("one of three is held");
        assert!(second.fence().number() > first.unwrap());
        let (word, _) = old[1].acquire(&names, two, LEASE, false).await;
        assert_eq!(word, "refused", "two are held");
        let third = tried(&locks, 3).await.expect("two of three are held");
        assert!(tried(&locks, 3).await.is_none());
        let left = old[0].renew(&names, two, LEASE).await;
        assert_eq!(left, LEASE.as_millis() as i64);
        second.extend(LEASE).await.unwrap();

        // It waits for its turn, as one of two.
        let (word, _) = old[2].acquire(&names, two, LEASE, true).await;
        assert_eq!(word, "queued");
        second.release().await.unwrap();
        assert_eq!(old[2].poll(&names, two).await, None, "two are held");
        assert_eq!(old[0].release(&names, two).await, "released");
        let fence = old[2].poll(&names, two).await.expect("one is held");
        assert!(fence > third.fence().number());
        let left = old[2].renew(&names, two, LEASE).await;
        assert_eq!(left, LEASE.as_millis() as i64);
        third.release().await.unwrap();
        assert_eq!(old[2].release(&names, two).await, "released");
        assert!(server.keys(&format!("{namespace}:*")).await.is_empty());
    })
    .await;
}

/// A permit that an old client could not find again is not granted to it while it waits.
#[tokio::test]
async fn an_old_waiter_is_granted_no_permit_of_another_number() {
    in_time(async {
        let (server, namespace) = (RedisServer::start().await, &*unique("ns"));
        let names = Names::new(namespace, "a", true);
        let two = Mode::Permits(permits(TWO));
        let locks = connect(&server.url(), namespace).await.unwrap();
        let mut old = OldClient::connect(&server, namespace).await;
        let mut held = vec![tried(&locks, TWO).await.expect("free")];
        held.push(tried(&locks, TWO).await.expect("one of two"));
        let (word, _) = old.acquire(&names, two, LEASE, true).await;
        assert_eq!(word, "queued");
        // All leases end, and the first holder of the next ones has another number.
        let lock = format!("{namespace}:permits:a");
        server.command(&["DEL", &lock]).await;
        let member = format!("3:{}", "a".repeat(32));
        let now: (u64, u64) = server.query(&["TIME"]).await;
        let expiry = (now.0 * 1000 + now.1 / 1000 + 30_000).to_string();
        server.command(&["ZADD", &lock, &expiry, &member]).await;
        server.command(&["PEXPIREAT", &lock, &expiry]).await;
        for guard in held {
            drop(guard);
        }
        eventually("releases advance the queue", async || {
            locks.inspect("a").permits().await.unwrap().holders.len() == 1
        })
        .await;
        assert!(tried(&locks, 3).await.is_none(), "the old one is the first");
        assert_eq!(locks.inspect("a").permits().await.unwrap().waiters.len(), 1);
        assert_eq!(old.poll(&names, two).await, None);
        server.command(&["DEL", &lock]).await;
        let fence = old.poll(&names, two).await.expect("free");
        assert!(fence > 0);
        assert_eq!(old.release(&names, two).await, "released");
    })
    .await;
}
