//! The migration, executed by several processes, in transactions, and again.

use std::sync::Arc;

use futures_util::future::join_all;
use lock_runtime::fencing::{self, MIGRATION};
use lock_tests::{postgres, shared_postgres};
use tokio::sync::Barrier;
use tokio_postgres::Client;

use super::{code, fenced, seen};

const PROCESSES: usize = 4;

async fn has_schema(client: &Client) -> bool {
    let query = "select to_regnamespace('lock_runtime') is not null";
    client.query_one(query, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn several_processes_install_at_once() {
    for _ in 0..20 {
        let url = shared_postgres().await.new_database().await;
        let clients = join_all((0..PROCESSES).map(|_| postgres::connect(&url))).await;
        let barrier = Arc::new(Barrier::new(PROCESSES));
        let tasks = clients.into_iter().map(|client| {
            let barrier = barrier.clone();
            tokio::spawn(async move {
                barrier.wait().await;
                fencing::install(&client).await.unwrap();
                fenced(&client, "account:7", 7).await.unwrap();
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let client = postgres::connect(&url).await;
        assert_eq!(seen(&client, "account:7").await, Some(7));
    }
}

#[tokio::test]
async fn a_second_installation_keeps_the_tokens() {
    let client = super::client().await;
    fenced(&client, "account:7", 7).await.unwrap();
    fencing::install(&client).await.unwrap();
    assert_eq!(code(fenced(&client, "account:7", 6).await), fencing::STALE);
}

/// As migration frameworks execute it.
#[tokio::test]
async fn a_transaction_may_install_it_and_roll_it_back() {
    let url = shared_postgres().await.new_database().await;
    let mut client = postgres::connect(&url).await;
    for isolation in ["read committed", "repeatable read", "serializable"] {
        let transaction = client.transaction().await.unwrap();
        let set = format!("set transaction isolation level {isolation}");
        transaction.batch_execute(&set).await.unwrap();
        fencing::install(&transaction).await.unwrap();
        transaction.batch_execute(MIGRATION).await.unwrap();
        let fenced = fencing::fenced(&transaction, "account:7", super::token(7)).await;
        fenced.unwrap();
        transaction.rollback().await.unwrap();
        assert!(!has_schema(&client).await);
    }
    let transaction = client.transaction().await.unwrap();
    fencing::install(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    fenced(&client, "account:7", 7).await.unwrap();
}

/// Also without a transaction of the caller.
#[tokio::test]
async fn an_installation_that_fails_leaves_nothing() {
    let url = shared_postgres().await.new_database().await;
    let client = postgres::connect(&url).await;
    let other = "create schema lock_runtime;
        create function lock_runtime.fenced(resource text, fence bigint) returns int
            language sql as 'select 1'";
    client.batch_execute(other).await.unwrap();
    assert_eq!(code(client.batch_execute(MIGRATION).await), "42P13");
    let table = "select to_regclass('lock_runtime.seen') is null";
    let missing = client.query_one(table, &[]).await.unwrap();
    assert!(missing.get::<_, bool>(0));
}
