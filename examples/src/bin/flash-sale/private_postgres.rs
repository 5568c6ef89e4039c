//! A private PostgreSQL server for the time of one run.

use anyhow::Context;
use lock_runtime::store::postgres::PostgresOptions;
use lock_tests::PostgresServer;

use crate::{
    options::{Options, Store},
    stock::PostgresStock,
};

/// Starts a server if the options ask for PostgreSQL without a URL, and sets the URL. The server
/// ends with the returned value, and also when this process is killed.
pub(crate) async fn start(options: &mut Options) -> anyhow::Result<Option<PostgresServer>> {
    if options.store()? != Store::Postgres || options.postgres.is_some() {
        return Ok(None);
    }
    // With the one that listens.
    let locks = PostgresOptions::DEFAULT_CONNECTIONS.get() as u64 + 1;
    let of_process = locks + PostgresStock::CONNECTIONS as u64;
    // This process has one client before the sale, and one after it.
    let connections = (options.processes + 2) * of_process;
    let server = PostgresServer::builder()
        .in_memory()
        .setting("max_connections", &connections.to_string());
    let server = server.try_start().await;
    let server = server.context("cannot start a PostgreSQL server")?;
    options.postgres = Some(server.url());
    Ok(Some(server))
}
