//! Promises that need other servers than Redis. `tests/run.sh --stores` installs them.

mod fencing;
mod postgres;

use tokio_postgres::Client;

use crate::place::eventually;

/// Waits until a connection of the database waits for a lock of the server.
async fn one_waits(client: &Client) {
    let query = "select from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'";
    eventually("a transaction waits", async || {
        client.query(query, &[]).await.unwrap().len() == 1
    })
    .await;
}
