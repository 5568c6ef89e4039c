//! Holders of locks in memory and in Redis that write to PostgreSQL.

use std::error::Error;

use lock_runtime::{FencingToken, LockGuard, LockSpec, fencing};
use lock_tests::{
    chain,
    place::{LONG, Place, in_time},
    postgres,
};
use tokio_postgres::Client;

use super::{client, seen, token};

const ACCOUNT: &str = "account:7";

/// The guard of a holder that was paused until its lease had ended, and that of the next holder.
async fn late_and_next(place: Place) -> (LockGuard, LockGuard) {
    let (one, other) = (place.client().await, place.client().await);
    let late = one.exclusive(ACCOUNT).lease(LockSpec::MIN_LEASE).no_renew();
    let late = late.acquire().await.unwrap();
    let next = other.exclusive(ACCOUNT).wait(LONG).acquire().await.unwrap();
    late.lost().await;
    (late, next)
}

async fn withdraw(
    client: &mut Client,
    amount: i64,
    fence: FencingToken,
) -> Result<i64, fencing::FencingError> {
    let transaction = client.transaction().await?;
    fencing::fenced(&transaction, ACCOUNT, fence).await?;
    let update = "update account set balance = balance - $1 returning balance";
    let row = transaction.query_one(update, &[&amount]).await?;
    transaction.commit().await?;
    Ok(row.get(0))
}

async fn account() -> Client {
    let client = client().await;
    let table = "create table account (balance bigint); insert into account values (100)";
    client.batch_execute(table).await.unwrap();
    client
}

async fn a_late_holder_is_refused_and_the_next_one_is_not(place: Place) {
    let mut client = account().await;
    let (late, next) = late_and_next(place).await;
    // Before the next holder has written, the order is still that of the locks.
    assert_eq!(withdraw(&mut client, 1, late.fence()).await.unwrap(), 99);
    for balance in [89, 79] {
        assert_eq!(
            withdraw(&mut client, 10, next.fence()).await.unwrap(),
            balance
        );
        let refused = withdraw(&mut client, 1, late.fence()).await.unwrap_err();
        assert!(refused.is_stale(), "{refused:?}");
    }
    assert_eq!(seen(&client, ACCOUNT).await, Some(next.fence().into()));
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_late_holder_of_a_lock_in_memory_is_refused() {
    in_time(a_late_holder_is_refused_and_the_next_one_is_not(
        Place::memory(),
    ))
    .await;
}

#[tokio::test]
async fn a_late_holder_of_a_lock_in_redis_is_refused() {
    let place = Place::redis().await;
    in_time(a_late_holder_is_refused_and_the_next_one_is_not(place)).await;
}

#[tokio::test]
async fn an_error_tells_a_stale_token_from_a_failure_and_keeps_the_cause() {
    let mut client = account().await;
    withdraw(&mut client, 1, token(7)).await.unwrap();
    let stale = withdraw(&mut client, 1, token(6)).await.unwrap_err();
    assert!(stale.is_stale());
    assert_eq!(stale.to_string(), "the fencing token was refused");
    let both = "the fencing token was refused: \
        the fencing token 6 is stale: account:7 has seen a later one";
    assert_eq!(format!("{stale:#}"), both);
    assert!(
        chain(&stale).contains("account:7 has seen a later one"),
        "{}",
        chain(&stale)
    );
    assert!(stale.source().unwrap().is::<tokio_postgres::Error>());
    // `?` in a function that returns the driver's own error keeps the code.
    let error = tokio_postgres::Error::from(stale);
    assert_eq!(error.code().unwrap().code(), fencing::STALE);

    let url = lock_tests::shared_postgres().await.new_database().await;
    let mut without = postgres::connect(&url).await;
    let missing = withdraw(&mut without, 1, token(7)).await.unwrap_err();
    assert!(!missing.is_stale());
    let shown = format!("{missing:#}");
    assert!(
        shown.contains("was not compared: ") && shown.contains("lock_runtime"),
        "{shown}"
    );
}

/// The store for PostgreSQL creates the function; its absence must not pass for a success.
#[tokio::test]
async fn a_lock_that_is_not_in_the_database_is_not_guarded() {
    let mut client = account().await;
    let transaction = client.transaction().await.unwrap();
    let error = fencing::guard_named(&transaction, "lock:order:42", token(7)).await;
    let error = error.unwrap_err();
    assert!(!error.is_stale());
    assert!(
        format!("{error:#}").contains("lock_runtime.guard"),
        "{error:#}"
    );
}
