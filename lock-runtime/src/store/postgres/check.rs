//! The check of a new connection: its server, its database and the version of the schema.

use std::ops::ControlFlow;

use tokio_postgres::{
    Client, Error, Row,
    error::{DbError, SqlState},
};

use super::{MIGRATION, VERSION, error::failed};
use crate::store::{StoreError, StoreErrorKind};

const CHECK: &str = "select pg_postmaster_start_time()::text, pg_backend_pid(), \
    current_setting('server_encoding'), current_setting('transaction_read_only') = 'on', \
    version, since from lock_runtime.format";

/// The server of a connection.
pub(super) struct Server {
    /// By which two servers behind one address differ.
    pub(super) start: String,
    /// The process that serves the connection.
    pub(super) process: i32,
}

/// Checks the database of a new connection. Creates the schema if it is missing or older.
pub(super) async fn check(client: &Client) -> Result<Server, StoreError> {
    if let ControlFlow::Break(checked) = check_version(client).await {
        return checked;
    }
    client
        .batch_execute(MIGRATION)
        .await
        .map_err(|error| not_created(&error))?;
    match check_version(client).await {
        ControlFlow::Break(checked) => checked,
        ControlFlow::Continue(()) => Err(incompatible("the schema is still missing")),
    }
}

/// Continues if the schema has to be created or brought up to date.
async fn check_version(client: &Client) -> ControlFlow<Result<Server, StoreError>> {
    const MISSING: [SqlState; 2] = [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME];
    let rows = match client.query_typed(CHECK, &[]).await {
        Err(error) if error.code().is_some_and(|code| MISSING.contains(code)) => {
            return ControlFlow::Continue(());
        }
        rows => rows,
    };
    let state = rows.and_then(|rows| rows.first().map(State::read).transpose());
    match state {
        Ok(Some(state)) if state.version < VERSION && !state.is_read_only => {
            ControlFlow::Continue(())
        }
        Ok(Some(state)) => ControlFlow::Break(state.checked()),
        Ok(None) => ControlFlow::Continue(()),
        Err(error) => ControlFlow::Break(Err(failed(&error))),
    }
}

struct State {
    server: Server,
    encoding: String,
    is_read_only: bool,
    version: i32,
    since: i32,
}

impl State {
    fn read(row: &Row) -> Result<Self, Error> {
        Ok(Self {
            server: Server {
                start: row.try_get(0)?,
                process: row.try_get(1)?,
            },
            encoding: row.try_get(2)?,
            is_read_only: row.try_get(3)?,
            version: row.try_get(4)?,
            since: row.try_get(5)?,
        })
    }

    fn checked(self) -> Result<Server, StoreError> {
        if self.is_read_only {
            let message = "the server is a standby, or allows no writes; connect to the primary, \
                           or add target_session_attrs=read-write and its address";
            return Err(StoreError::new(StoreErrorKind::ReadOnly, message));
        }
        if self.encoding != "UTF8" {
            let message = format!(
                "the encoding of the database is {}; keep the locks in one with the encoding UTF8",
                self.encoding
            );
            return Err(StoreError::new(StoreErrorKind::WrongServer, message));
        }
        if self.since > VERSION {
            return Err(incompatible(&format!(
                "the schema lock_runtime has version {}, and this version of the library knows {VERSION}",
                self.version
            )));
        }
        Ok(self.server)
    }
}

fn incompatible(message: &str) -> StoreError {
    let message = format!("{message}; use versions of one format");
    StoreError::new(StoreErrorKind::IncompatibleFormat, message)
}

fn not_created(error: &Error) -> StoreError {
    let failed = failed(error);
    match error.as_db_error().map(DbError::code) {
        Some(code) if *code == SqlState::INSUFFICIENT_PRIVILEGE => {
            let message = format!(
                "the schema lock_runtime cannot be created or brought up to date: {}; execute \
                 lock_runtime::store::postgres::MIGRATION as the owner of the database",
                error.as_db_error().map_or("", DbError::message)
            );
            StoreError::new(failed.kind(), message)
        }
        _ => failed,
    }
}
