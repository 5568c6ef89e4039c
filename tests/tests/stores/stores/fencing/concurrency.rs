//! Transactions on one resource at the same time, in each isolation level.

use futures_util::future::join_all;
use lock_runtime::fencing::{self, STALE};
use lock_tests::{
    place::{begun, in_time},
    postgres,
};
use tokio_postgres::{Client, IsolationLevel};

use super::{super::one_waits, code, database, fenced, seen, token};

async fn commit(client: &Client) {
    client.batch_execute("commit").await.unwrap();
}

async fn begin(client: &Client, isolation: &str) {
    let begin = format!("begin isolation level {isolation}");
    client.batch_execute(&begin).await.unwrap();
}

#[tokio::test]
async fn a_transaction_waits_for_the_one_before_and_compares_then() {
    let url = database().await;
    let (one, other) = (postgres::connect(&url).await, postgres::connect(&url).await);
    let watching = postgres::connect(&url).await;
    // The first row of a resource, and a later one.
    for (resource, before) in [("new", None), ("old", Some(3))] {
        if let Some(before) = before {
            fenced(&one, resource, before).await.unwrap();
        }
        for end in ["rollback", "commit"] {
            begin(&one, "read committed").await;
            fenced(&one, resource, 7).await.unwrap();
            let waiting = begun(fenced(&other, resource, 6)).await;
            let ended = async {
                one_waits(&watching).await;
                one.batch_execute(end).await.unwrap();
            };
            let (result, ()) = in_time(async { tokio::join!(waiting, ended) }).await;
            if end == "commit" {
                assert_eq!(code(result), STALE);
                assert_eq!(seen(&one, resource).await, Some(7));
            } else {
                result.unwrap();
                assert_eq!(seen(&one, resource).await, Some(6));
            }
        }
    }
}

/// The promise of a call at the start of a transaction.
#[tokio::test]
async fn a_transaction_reads_all_that_earlier_holders_have_written() {
    let url = database().await;
    let (one, other) = (postgres::connect(&url).await, postgres::connect(&url).await);
    let watching = postgres::connect(&url).await;
    let table = "create table account (balance bigint); insert into account values (100)";
    one.batch_execute(table).await.unwrap();
    begin(&one, "read committed").await;
    fenced(&one, "account", 6).await.unwrap();
    one.batch_execute("update account set balance = 90")
        .await
        .unwrap();

    begin(&other, "read committed").await;
    let waiting = begun(fenced(&other, "account", 7)).await;
    let ended = async {
        one_waits(&watching).await;
        commit(&one).await;
    };
    in_time(async { tokio::join!(waiting, ended) })
        .await
        .0
        .unwrap();
    let row = other.query_one("select balance from account", &[]).await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 90);
    commit(&other).await;
}

/// The transaction has read an older state, so it has to be repeated before its token is compared.
#[tokio::test]
async fn a_stricter_isolation_level_asks_for_a_retry() {
    let url = database().await;
    let (one, other) = (postgres::connect(&url).await, postgres::connect(&url).await);
    for isolation in ["repeatable read", "serializable"] {
        for (fence, expected) in [(6, Some(STALE)), (8, None)] {
            let resource = format!("{isolation} {fence}");
            begin(&other, isolation).await;
            assert_eq!(seen(&other, &resource).await, None);
            fenced(&one, &resource, 7).await.unwrap();
            assert_eq!(code(fenced(&other, &resource, fence).await), "40001");
            other.batch_execute("rollback").await.unwrap();

            begin(&other, isolation).await;
            let again = fenced(&other, &resource, fence).await;
            match expected {
                Some(expected) => assert_eq!(code(again), expected),
                None => again.unwrap(),
            }
            commit(&other).await;
            assert_eq!(seen(&other, &resource).await, Some(fence.max(7)));
        }
    }
}

#[tokio::test]
async fn a_transaction_that_is_rolled_back_has_no_effect() {
    let url = database().await;
    let mut client = postgres::connect(&url).await;
    for isolation in [
        IsolationLevel::ReadCommitted,
        IsolationLevel::RepeatableRead,
        IsolationLevel::Serializable,
    ] {
        fenced(&client, "account:7", 5).await.unwrap();
        let transaction = client.build_transaction().isolation_level(isolation);
        let mut transaction = transaction.start().await.unwrap();
        let savepoint = transaction.savepoint("before").await.unwrap();
        fencing::fenced(&savepoint, "account:7", token(9))
            .await
            .unwrap();
        savepoint.rollback().await.unwrap();
        fencing::fenced(&transaction, "account:7", token(6))
            .await
            .unwrap();

        // A refusal leaves the rest of the transaction to its caller.
        let savepoint = transaction.savepoint("before").await.unwrap();
        let refused = fencing::fenced(&savepoint, "account:7", token(5)).await;
        assert!(refused.unwrap_err().is_stale());
        savepoint.rollback().await.unwrap();
        fencing::fenced(&transaction, "account:7", token(6))
            .await
            .unwrap();
        transaction.rollback().await.unwrap();
        assert_eq!(seen(&client, "account:7").await, Some(5));
    }
}

/// At the end of a transaction a refusal undoes its writes, too.
#[tokio::test]
async fn a_refused_transaction_cannot_commit() {
    let client = postgres::connect(&database().await).await;
    let table = "create table account (balance bigint); insert into account values (100)";
    client.batch_execute(table).await.unwrap();
    fenced(&client, "account", 7).await.unwrap();
    begin(&client, "read committed").await;
    client
        .batch_execute("update account set balance = 0")
        .await
        .unwrap();
    assert_eq!(code(fenced(&client, "account", 6).await), STALE);
    let after = client.batch_execute("update account set balance = 0").await;
    assert_eq!(code(after), "25P02");
    // PostgreSQL executes it as a rollback.
    commit(&client).await;
    let row = client.query_one("select balance from account", &[]).await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 100);
}

/// Commits of many connections with tokens in any order: those of a resource never decrease.
#[tokio::test]
async fn committed_tokens_never_decrease() {
    const CONNECTIONS: usize = 8;
    const TRANSACTIONS: usize = 60;
    const LARGEST: i64 = 40;
    let url = database().await;
    let client = postgres::connect(&url).await;
    let table = "create table written
        (id bigint generated always as identity, resource text, fence bigint)";
    client.batch_execute(table).await.unwrap();
    let tasks = (0..CONNECTIONS).map(async |_| {
        let client = postgres::connect(&url).await;
        let mut refused = 0;
        for _ in 0..TRANSACTIONS {
            let resource = ["a", "b"][rand::random_range(0..2)];
            let fence = rand::random_range(1..=LARGEST);
            begin(&client, "read committed").await;
            match fenced(&client, resource, fence).await {
                Ok(()) => {
                    let insert = "insert into written (resource, fence) values ($1, $2)";
                    client.execute(insert, &[&resource, &fence]).await.unwrap();
                }
                error => {
                    assert_eq!(code(error), STALE);
                    refused += 1;
                }
            }
            commit(&client).await;
        }
        refused
    });
    let refused: usize = in_time(join_all(tasks)).await.into_iter().sum();
    let query = "select resource, fence from written order by resource, id";
    let rows = client.query(query, &[]).await.unwrap();
    assert_eq!(rows.len() + refused, CONNECTIONS * TRANSACTIONS);
    assert!(refused > 0 && rows.len() > 2, "{refused} were refused");
    let written: Vec<(&str, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert!(written.is_sorted(), "{written:?}");
}
