//! Locks in PostgreSQL: the server, its connections and its crashes. The promises of every store
//! are in the other modules.

mod blocked;
mod clock;
mod connecting;
mod connections;
mod crashes;
mod credentials;
mod faults;
mod forged;
mod guard;
mod late;
mod names;
mod results;
mod roles;
mod schema;
mod standby;
mod unread;

use lock_runtime::{LockClient, LockGuard, LockRequest};
use lock_tests::{
    PostgresServer,
    place::{LONG, begun, eventually},
    postgres, shared_postgres,
};
use tokio_postgres::Client;

use super::one_waits;

/// A client, and a connection to its database. The database is of this test alone.
async fn client_of_new_database() -> (String, LockClient, Client) {
    let url = shared_postgres().await.new_database().await;
    let locks = LockClient::connect(&url).await.unwrap();
    let admin = postgres::connect(&url).await;
    (url, locks, admin)
}

async fn once(request: LockRequest) -> Result<(), lock_runtime::LockError> {
    request.acquire().await?.release().await
}

/// Acquires a lock for the default lease.
async fn held(locks: &LockClient, key: &str) -> LockGuard {
    locks.exclusive(key).acquire().await.unwrap()
}

/// Waits until a number of processes wait for a lock.
async fn waiters(locks: &LockClient, key: &str, count: usize) {
    eventually("they are in the queue", async || {
        let found = locks.inspect(key).await;
        found.is_ok_and(|found| found.waiters.len() == count)
    })
    .await;
}

/// The number of connections of clients to the database that fulfil a condition.
async fn connections(admin: &Client, condition: &str) -> i64 {
    let query = format!(
        "select count(*) from pg_stat_activity where application_name = 'lock-runtime' \
         and datname = current_database() and {condition}"
    );
    admin.query_one(&query, &[]).await.unwrap().get(0)
}

/// The number that a query returns.
async fn number(admin: &Client, query: &str) -> i64 {
    admin.query_one(query, &[]).await.unwrap().get(0)
}

/// A server of this test alone, which does not wait for its disk.
async fn server() -> PostgresServer {
    PostgresServer::builder().in_memory().start().await
}

/// Asserts that a holder keeps its lock and a waiter its place while the server fails.
async fn outlive(one: &LockClient, other: &LockClient, failure: impl AsyncFnOnce()) {
    let guard = held(one, "outlives").await;
    let request = other.exclusive("outlives").wait(LONG);
    let waiting = tokio::spawn(begun(request.acquire()).await);
    waiters(one, "outlives", 1).await;
    failure().await;
    eventually("the holder is known", async || guard.verify().await.is_ok()).await;
    assert!(!waiting.is_finished());
    let fence = guard.fence();
    guard.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.fence() > fence);
    next.release().await.unwrap();
}
