//! Promises that need other servers than Redis. `tests/run.sh --stores` installs them.

mod fencing;
mod postgres;

use lock_tests::{place::eventually, shared_postgres, unique};
use tokio_postgres::Client;

/// Creates a role without rights on the shared server.
async fn role(owner: &Client) -> String {
    let role = unique("role").replace('-', "_");
    let create = format!("create role {role} login");
    owner.batch_execute(&create).await.unwrap();
    role
}

/// The URL of a database of the shared server, as another role.
async fn url_as(role: &str, url: &str) -> String {
    let (_, database) = url.rsplit_once('/').unwrap();
    shared_postgres().await.url_as(role, "", database)
}

/// Waits until a connection of the database waits for a lock of the server.
async fn one_waits(client: &Client) {
    let query = "select from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'";
    eventually("a transaction waits", async || {
        client.query(query, &[]).await.unwrap().len() == 1
    })
    .await;
}
