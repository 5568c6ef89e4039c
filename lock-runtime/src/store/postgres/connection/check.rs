//! The check of a new connection: its server, its database and the version of the schema.

use std::ops::ControlFlow;

use tokio_postgres::{
    Client, Error, Row,
    error::{DbError, SqlState},
    types::Type,
};

use super::super::{MIGRATION, VERSION, error::failed};
use crate::store::{StoreError, StoreErrorKind};

/// Returns a role that owns the schema or a part of it and is not trusted with the rights of this
/// user, and whether this user may bring the schema up to date. Reads nothing in the schema, which
/// might execute code of its owner.
///
/// A role that this user is a member of is not trusted for that reason: before version 16, a role
/// could make another one its member.
const OWNERS: &str = "select (select r.rolname::text from pg_catalog.pg_roles r where r.oid in ( \
        select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'lock_runtime' \
        union all select c.relowner from pg_catalog.pg_class c \
            join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
            where n.nspname = 'lock_runtime' and c.relname in ('format', 'record') \
        union all select p.proowner from pg_catalog.pg_proc p \
            join pg_catalog.pg_namespace n on n.oid = p.pronamespace \
            where n.nspname = 'lock_runtime' \
            and p.proname in ('micros', 'swap', 'lock', 'remove', 'varint', 'is_held', 'guard')) \
    and r.rolname <> current_user and not r.rolsuper and r.rolname <> 'pg_database_owner' \
    and r.oid <> (select d.datdba from pg_catalog.pg_database d \
        where d.datname = pg_catalog.current_database()) \
    and r.rolname::text <> all ($1) limit 1), \
    coalesce((select pg_catalog.pg_has_role(n.nspowner, 'usage') from pg_catalog.pg_namespace n \
        where n.nspname = 'lock_runtime'), true), \
    exists (select from pg_catalog.pg_namespace n where n.nspname = 'lock_runtime')";

const CHECK: &str = "select pg_catalog.pg_postmaster_start_time()::text, pg_catalog.pg_backend_pid(), \
    pg_catalog.current_setting('server_encoding'), \
    pg_catalog.current_setting('transaction_read_only') = 'on', \
    version, since from lock_runtime.format";

/// The oldest version of the schema that this version of the library can use.
const OLDEST: i32 = 1;

/// The server of a connection.
pub(crate) struct Server {
    /// By which two servers behind one address differ.
    pub(crate) start: String,
    /// The process that serves the connection.
    pub(crate) process: i32,
}

/// Checks the database of a new connection. Creates the schema if it is missing or older. `owners`
/// may own it, besides this user, the owner of the database and superusers.
pub(crate) async fn check(client: &Client, owners: &[String]) -> Result<Server, StoreError> {
    let (is_there, may_create) = check_owners(client, owners).await?;
    // A schema that has been created since then may be that of any role.
    let older = match is_there {
        true => match check_version(client).await {
            ControlFlow::Break(checked) => return checked,
            ControlFlow::Continue(older) => older,
        },
        false => None,
    };
    let usable = older.filter(|state| state.version >= OLDEST);
    let created = match (may_create, &usable) {
        (false, Some(_)) => Err(None),
        _ => client.batch_execute(&migration()).await.map_err(Some),
    };
    match (created, usable) {
        (Ok(()), _) => {}
        // The owner of the schema can bring it up to date later.
        (Err(cause), Some(state)) => {
            let cause = cause.map(|error| error.to_string());
            tracing::debug!(cause, "an older version of the schema lock_runtime is used");
            return state.checked();
        }
        (Err(cause), None) => {
            let not_created = cause.map_or_else(StoreError::no_reply, |error| not_created(&error));
            let created = created_by_another(client, owners).await;
            return created.unwrap_or(Err(not_created));
        }
    }
    check_owners(client, owners).await?;
    match check_version(client).await {
        ControlFlow::Break(checked) => checked,
        ControlFlow::Continue(_) => Err(incompatible("the schema is still missing")),
    }
}

/// The migration as one transaction of a client. Any role can lock what it changes, by a statement
/// that is refused only then, for as long as it does not read the error.
fn migration() -> String {
    format!("select pg_catalog.set_config('lock_timeout', '2s', true); {MIGRATION}")
}

/// The server, if another process has created the schema meanwhile.
async fn created_by_another(
    client: &Client,
    owners: &[String],
) -> Option<Result<Server, StoreError>> {
    match check_owners(client, owners).await {
        Ok((true, _)) => {}
        Err(error) if error.kind() == StoreErrorKind::Forbidden => return Some(Err(error)),
        _ => return None,
    }
    match check_version(client).await {
        ControlFlow::Break(checked) => Some(checked),
        ControlFlow::Continue(older) => {
            let usable = older.filter(|state| state.version >= OLDEST);
            usable.map(DatabaseState::checked)
        }
    }
}

/// Returns whether there is a schema, and whether this user may create it or bring it up to date.
async fn check_owners(client: &Client, owners: &[String]) -> Result<(bool, bool), StoreError> {
    let rows = client
        .query_typed(OWNERS, &[(&owners, Type::TEXT_ARRAY)])
        .await;
    let rows = rows.map_err(|error| failed(&error))?;
    let Some(row) = rows.first() else {
        return Ok((true, false));
    };
    let read = |row: &Row| {
        let (stranger, may_create): (Option<String>, bool) = (row.try_get(0)?, row.try_get(1)?);
        Ok::<_, Error>((stranger, (row.try_get(2)?, may_create)))
    };
    match read(row).map_err(|error| failed(&error))? {
        (None, found) => Ok(found),
        (Some(stranger), _) => Err(foreign(&stranger)),
    }
}

fn foreign(stranger: &str) -> StoreError {
    let message = format!(
        "the schema lock_runtime, or a part of it, belongs to the role {stranger}, which could act \
         with the rights of this user; if you trust the role, name it with \
         PostgresOptions::schema_owner or the parameter schema_owner of the URL; otherwise drop \
         the schema, and ask who created it"
    );
    StoreError::new(StoreErrorKind::Forbidden, message)
}

/// Continues if the schema has to be created or brought up to date.
async fn check_version(
    client: &Client,
) -> ControlFlow<Result<Server, StoreError>, Option<DatabaseState>> {
    const MISSING: [SqlState; 2] = [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME];
    let rows = match client.query_typed(CHECK, &[]).await {
        Err(error) if error.code().is_some_and(|code| MISSING.contains(code)) => {
            return ControlFlow::Continue(None);
        }
        rows => rows,
    };
    let state = rows.and_then(|rows| rows.first().map(DatabaseState::read).transpose());
    match state {
        Ok(Some(state)) if state.version < VERSION && !state.is_read_only => {
            ControlFlow::Continue(Some(state))
        }
        Ok(Some(state)) => ControlFlow::Break(state.checked()),
        Ok(None) => ControlFlow::Continue(None),
        Err(error) => ControlFlow::Break(Err(failed(&error))),
    }
}

struct DatabaseState {
    server: Server,
    encoding: String,
    is_read_only: bool,
    version: i32,
    since: i32,
}

impl DatabaseState {
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
