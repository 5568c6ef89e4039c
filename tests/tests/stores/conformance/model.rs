//! The model test in full: a hundred thousand operations, and all parts of their replies.

use std::{sync::Arc, time::Duration};

use lock_conformance::Model;
use lock_runtime::{
    operator::Waiter,
    store::{MemoryStore, Store, redis::RedisStore},
};
use lock_tests::{FaultyStore, RedisServer, faulty_store::Operation};
use tokio::time::sleep;

/// Of 110 operations each.
const SEQUENCES: u64 = 1_000;

#[tokio::test]
async fn redis_answers_as_memory_does() {
    let server = RedisServer::start().await;
    let model = Model::new().sequences(SEQUENCES).exact();
    let make = async || {
        let store = RedisStore::connect(&server.url(), "model").await.unwrap();
        Arc::new(store) as Arc<dyn Store>
    };
    model.run(&make).await;
}

#[tokio::test]
async fn server_of_a_quorum_answers_as_memory_does() {
    let servers = RedisServer::builder().start_all(3).await;
    let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let members = RedisStore::members(&urls, "model", Duration::ZERO).await;
    let (_, member) = members.unwrap().swap_remove(0);
    // The uptime is in whole seconds.
    sleep(Duration::from_millis(1100)).await;
    let model = Model::new().sequences(SEQUENCES).exact();
    let make = async || member.clone() as Arc<dyn Store>;
    model.run(&make).await;
}

#[tokio::test]
async fn a_waiter_that_polls_too_late_is_no_mismatch() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        if matches!(call.operation, Operation::Poll(_)) && call.nth % 50 == 0 {
            sleep(Waiter::STALE_AFTER + Duration::from_millis(100)).await;
        }
        call.execute().await
    });
    let make = async || store.clone() as Arc<dyn Store>;
    Model::new().sequences(100).run(&make).await;
}
