//! `lock_runtime.fenced`, by which PostgreSQL refuses stale fencing tokens.

mod concurrency;
mod holders;
mod installation;
mod page;
mod refusals;
mod rights;

use std::time::{SystemTime, UNIX_EPOCH};

use lock_runtime::{FencingToken, fencing};
use lock_tests::{postgres, shared_postgres};
use tokio_postgres::{Client, Error};

const CALL: &str = "select lock_runtime.fenced($1, $2)";

/// The URL of a new database, with the function.
async fn database() -> String {
    let url = shared_postgres().await.new_database().await;
    fencing::install(&postgres::connect(&url).await)
        .await
        .unwrap();
    url
}

/// A connection to a new database with the function.
async fn client() -> Client {
    postgres::connect(&database().await).await
}

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

/// The time, as in a fencing token.
fn micros() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(now.as_micros()).unwrap()
}

/// A transaction of one call.
async fn fenced(client: &Client, resource: &str, fence: i64) -> Result<(), Error> {
    client.execute(CALL, &[&resource, &fence]).await.map(drop)
}

/// The largest token of a resource.
async fn seen(client: &Client, resource: &str) -> Option<i64> {
    let query = "select fence from lock_runtime.seen where resource = $1";
    let row = client.query_opt(query, &[&resource]).await.unwrap();
    row.map(|row| row.get(0))
}

#[track_caller]
fn code<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("a refusal");
    error.code().expect("an error of the server").code().into()
}
