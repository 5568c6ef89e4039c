//! A waiter that continues with the queue entry of another one of its process.

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{LockClient, LockRequest};
use lock_tests::{
    Proxy, RedisServer,
    place::{begun, eventually, in_time},
    proxy::Direction::ToClient,
};
use tokio::time::sleep;

use super::LONG;

/// The delay of the message about the grant, so that others are granted the lock before it arrives.
const DELAY: Duration = Duration::from_millis(300);

/// The mode of the requests, and the number of others that keep the lock from them.
type Case = (
    fn(&LockClient) -> LockRequest,
    fn(&LockClient) -> LockRequest,
    usize,
);

#[tokio::test]
async fn an_inherited_grant_has_a_larger_token_than_earlier_grants() {
    in_time(async {
        let server = RedisServer::start().await;
        let proxy = Proxy::to(&server).await;
        let locks = LockClient::connect(&proxy.url()).await.unwrap();
        let others = LockClient::connect(&server.url()).await.unwrap();
        let cases: [Case; 2] = [
            (|locks| locks.shared("a"), |locks| locks.exclusive("a"), 1),
            (
                |locks| locks.permits("a", TWO),
                |locks| locks.permits("a", TWO),
                2,
            ),
        ];
        for (wanted, held, count) in cases {
            let mut holders = Vec::new();
            for _ in 0..count {
                holders.push(held(&others).acquire().await.unwrap());
            }
            let first = tokio::spawn(wanted(&locks).wait(LONG).acquire());
            let waits = async || {
                let (lock, permits) =
                    tokio::join!(others.inspect("a"), others.inspect("a").permits());
                lock.unwrap().waiters.len() + permits.unwrap().waiters.len() == 1
            };
            eventually("the first waiter is in the queue", waits).await;

            proxy.delay(ToClient, DELAY);
            for holder in holders {
                holder.release().await.unwrap();
            }
            let other = wanted(&others).acquire().await.unwrap();
            // It asks after the other grant, and the first waiter leaves its queue entry to it.
            let second = begun(wanted(&locks).wait(LONG).acquire()).await;
            first.abort();
            let guard = second.await.unwrap();
            assert!(
                guard.fence() > other.fence(),
                "{} was granted after {}",
                guard.fence(),
                other.fence()
            );
            proxy.delay(ToClient, Duration::ZERO);
            guard.release().await.unwrap();
            other.release().await.unwrap();
            sleep(DELAY).await;
        }
    })
    .await;
}

const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();
