//! The guide's page on fencing tokens, with sqlx and a real PostgreSQL server.

#![cfg(test)]

use lock_runtime::{FencingToken, LockClient, LockSpec, fencing};
use lock_tests::shared_postgres;
use sqlx::PgPool;

include!("../../../../lock-runtime/guide/fencing/sqlx.rs");

#[tokio::test]
async fn a_late_holder_is_refused_and_the_next_one_is_not() -> Result<(), sqlx::Error> {
    let pool = PgPool::connect(&shared_postgres().await.new_database().await).await?;
    for _ in 0..2 {
        sqlx::raw_sql(fencing::MIGRATION).execute(&pool).await?;
    }
    let table = "create table account (id bigint, balance bigint);
        insert into account values (7, 100)";
    sqlx::raw_sql(table).execute(&pool).await?;

    let locks = LockClient::in_memory();
    let late = locks
        .exclusive("account:7")
        .lease(LockSpec::MIN_LEASE)
        .no_renew();
    let late = late.acquire().await.unwrap();
    let next = locks.exclusive("account:7").acquire().await.unwrap();
    withdraw(&pool, 10, next.fence()).await?;
    let refused = withdraw(&pool, 1, late.fence()).await.unwrap_err();
    assert!(is_stale(&refused), "{refused}");
    withdraw(&pool, 10, next.fence()).await?;
    let balance = sqlx::query_scalar("select balance from account");
    let balance: i64 = balance.fetch_one(&pool).await?;
    assert_eq!(balance, 80);
    assert!(!is_stale(&sqlx::Error::PoolClosed));
    Ok(())
}
