//! Results of work that is done once, recorded by a transaction of the application.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind, OnceEntry, OnceGuard};
use lock_tests::place::{LONG, begun, in_time};
use tokio_postgres::Client;

use super::client_of_new_database;

const TABLE: &str = "create table account (amount int); insert into account values (100)";

async fn running(locks: &LockClient) -> OnceGuard {
    match locks.once("invoice:42").wait(LONG).begin().await.unwrap() {
        OnceEntry::Vacant(guard) => guard,
        OnceEntry::Done(done) => panic!("{done:?}"),
    }
}

async fn result(locks: &LockClient) -> Option<Vec<u8>> {
    let done = locks.once("invoice:42").stored().await.unwrap();
    done.map(|done| done.value)
}

async fn amount(database: &Client) -> i32 {
    let row = database.query_one("select amount from account", &[]).await;
    row.unwrap().get(0)
}

// Rule 43 of docs/PROTOCOL.md.
#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_recorded_if_and_only_if_its_transaction_commits() {
    let (url, locks, mut database) = client_of_new_database().await;
    let other = LockClient::connect(&url).await.unwrap();
    database.batch_execute(TABLE).await.unwrap();
    for commits in [false, true] {
        let mut guard = running(&locks).await;
        let fence = guard.held().fence();
        // One waits, in another process.
        let waits = other.once("invoice:42").wait(LONG);
        let waiter = tokio::spawn(async move { waits.begin().await.unwrap() });
        super::waiters(&locks, "invoice:42", 1).await;
        let transaction = database.transaction().await.unwrap();
        let take = "update account set amount = amount - 5";
        transaction.execute(take, &[]).await.unwrap();
        guard.complete_in(&transaction, b"receipt").await.unwrap();
        assert_eq!(result(&other).await, None, "before the commit");
        if commits {
            transaction.commit().await.unwrap();
            assert_eq!(result(&other).await.as_deref(), Some(&b"receipt"[..]));
            guard.release().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
            assert!(!guard.held().is_lost());
            drop(guard);
        }
        match in_time(waiter).await.unwrap() {
            OnceEntry::Done(done) => {
                assert!(
                    commits && done.fence == fence && done.value == b"receipt",
                    "{done:?}"
                );
            }
            OnceEntry::Vacant(next) => {
                assert!(!commits && next.held().fence() > fence);
                next.release().await.unwrap();
            }
        }
        let amount = amount(&database).await;
        assert_eq!(amount, if commits { 95 } else { 100 });
    }
    // Also where the guard is dropped, and its release comes after the result.
    assert_eq!(result(&locks).await.as_deref(), Some(&b"receipt"[..]));
    let again = locks.once("invoice:42").begin().await.unwrap();
    assert!(matches!(again, OnceEntry::Done(done) if done.is_replay));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_dropped_before_the_commit_leaves_the_result() {
    let (url, locks, mut database) = client_of_new_database().await;
    let mut guard = running(&locks).await;
    let transaction = database.transaction().await.unwrap();
    guard.complete_in(&transaction, b"receipt").await.unwrap();
    let released = begun(guard.release()).await;
    transaction.commit().await.unwrap();
    drop(in_time(released).await);
    locks.shutdown().await;
    let locks = LockClient::connect(&url).await.unwrap();
    assert_eq!(result(&locks).await.as_deref(), Some(&b"receipt"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_without_its_lock_is_refused_in_a_transaction() {
    let (url, locks, mut database) = client_of_new_database().await;
    let mut guard = running(&locks).await;
    let revoked = locks.revoke("invoice:42").await.unwrap();
    assert_eq!(revoked, lock_runtime::operator::Revocation::Revoked);
    let transaction = database.transaction().await.unwrap();
    let refused = guard.complete_in(&transaction, b"late").await.unwrap_err();
    assert!(
        matches!(refused.kind(), LockErrorKind::Lost(_)),
        "{refused}"
    );
    drop(transaction);
    drop(guard);
    // The next one, whose result is too long, or is to be recorded elsewhere.
    let mut guard = running(&locks).await;
    let transaction = database.transaction().await.unwrap();
    let long = vec![0; 64 * 1024 + 1];
    let refused = guard.complete_in(&transaction, &long).await.unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::InvalidResult, "{refused}");
    let elsewhere = LockClient::in_memory();
    let mut other = running(&elsewhere).await;
    let refused = other
        .complete_in(&transaction, b"receipt")
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::InvalidSpec, "{refused}");
    drop(transaction);
    assert_eq!(result(&locks).await, None);
    // A transaction that has failed.
    let transaction = database.transaction().await.unwrap();
    transaction.execute("select 1 / 0", &[]).await.unwrap_err();
    guard
        .complete_in(&transaction, b"receipt")
        .await
        .unwrap_err();
    drop(transaction);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(result(&locks).await, None);
    guard.complete(b"receipt").await.unwrap();
    let other = LockClient::connect(&url).await.unwrap();
    assert_eq!(result(&other).await.as_deref(), Some(&b"receipt"[..]));
}
