//! Queues with damaged or hostile fields: no script reads more than is there.

use std::slice;

use lock_runtime::{
    Mode,
    store::{KeyRequest, NextHolder, Release, RevokeScope, Store as _},
};
use lock_tests::{RedisServer, place::in_time, redis_server::ENDLESS_QUEUES};

use super::{Client, HOUR, MODES, beside, conflicting, in_a_minute, queue_name};

/// Every script that reads the queue ends at once. Without an end, the server would be busy, and
/// would not answer the next command.
#[tokio::test]
async fn a_queue_without_an_end_stops_no_script() {
    let server = RedisServer::start().await;
    let client = Client::of(&server).await;
    let store = &*client.store;
    for ends in ENDLESS_QUEUES {
        for mode in MODES {
            in_time(async {
                let holder = client.held(mode).await;
                client.fill(&holder).await;
                let queue = queue_name(&holder);
                server.command(&["HSET", &queue, "ends", ends]).await;
                let other = beside(&holder.key, conflicting(mode));
                let request = KeyRequest::new(other.clone(), HOUR, in_a_minute());
                let name = format!("{ends:?}, {mode:?}");
                assert!(store.acquire(&request).await.is_ok(), "{name}");
                assert!(store.acquire(&request.queued()).await.is_ok(), "{name}");
                _ = store.poll(slice::from_ref(&other)).await;
                _ = store.abandon(&other).await;
                _ = store.inspect(&holder.key, mode.kind()).await;
                if mode == Mode::Exclusive {
                    let next_holder = beside(&holder.key, mode);
                    let next = NextHolder::new(next_holder.token, HOUR, 0);
                    _ = store
                        .release(&Release::new(holder.clone()).next(next))
                        .await;
                    _ = store.convert(&next_holder).await;
                }
                // Damaged data keeps no holder from its release.
                _ = store.release(&Release::new(holder.clone())).await;
                let scope = RevokeScope::Leased;
                _ = store.revoke(&holder.key, mode.kind(), scope).await;
                server.command(&["DEL", &queue]).await;
            })
            .await;
        }
    }
}
