//! The calls of `tokio-postgres`.

use std::{error::Error, fmt};

use tokio_postgres::{
    GenericClient, Transaction,
    error::DbError,
    types::{ToSql, Type},
};

use super::{MIGRATION, STALE};
use crate::{FencingToken, HeldLock};

const ELSEWHERE: &str = "do $$ begin raise exception using errcode = '22023', \
    message = 'the lock is not kept in PostgreSQL: call lock_runtime.fenced'; end $$";

/// Creates the schema `lock_runtime` in the database of the client, if it does not exist. Several
/// processes may call it at once, as the same role.
///
/// # Errors
/// If the role may not create the schema, or the database did not answer.
pub async fn install(client: &impl GenericClient) -> Result<(), FencingError> {
    Ok(client.batch_execute(MIGRATION).await?)
}

/// Refuses the transaction if one with a larger fencing token has been committed for the same
/// resource.
///
/// Call it first in the transaction: all that the transaction reads afterwards includes the writes
/// of earlier holders, and none of them is accepted later. It waits while another transaction on
/// the resource is open. A holder may call it in several transactions.
///
/// # Errors
/// [`is_stale`](FencingError::is_stale) if the token is refused. After any error roll the
/// transaction back.
pub async fn fenced(
    transaction: &Transaction<'_>,
    resource: &str,
    token: FencingToken,
) -> Result<(), FencingError> {
    call(
        transaction,
        "select lock_runtime.fenced($1, $2)",
        resource,
        token,
    )
    .await
}

/// Keeps a lock of the same database for the transaction, even if its lease ends, and refuses the
/// transaction if the lock is no longer held, or by another client.
///
/// It is for locks in the store for PostgreSQL, which creates the function `lock_runtime.guard`: a
/// call for each key of the lock, first in the transaction. End the transaction before the lock is
/// released, dropped or downgraded: tasks of one client are not kept apart.
///
/// # Errors
/// [`is_stale`](FencingError::is_stale) if the token is refused. A lock of another kind of store is
/// refused as well, with SQLSTATE 22023, and a snapshot that is older than the grant with 40001.
/// After any error roll the transaction back.
///
/// # Cancellation
/// If the future is dropped, some of the keys may be guarded until the transaction ends.
pub async fn guard(transaction: &Transaction<'_>, held: &HeldLock) -> Result<(), FencingError> {
    for view in held.views() {
        match view.guarded_name() {
            Some(name) => guard_named(transaction, &name, view.fence).await?,
            // By the server, so that the transaction cannot be committed.
            None => transaction.batch_execute(ELSEWHERE).await?,
        }
    }
    Ok(())
}

/// The same as [`guard`], for a lock that another process holds, such as the sender of a message.
/// `name` is the namespace and the key of the lock, such as `lock:order:42`.
///
/// # Errors
/// Same as [`guard`]. The name of another lock is refused, as the token is none of its own.
///
/// # Cancellation
/// Same as [`guard`].
pub async fn guard_named(
    transaction: &Transaction<'_>,
    name: &str,
    token: FencingToken,
) -> Result<(), FencingError> {
    call(
        transaction,
        "select lock_runtime.guard($1, $2)",
        name,
        token,
    )
    .await
}

/// With the types, so that it takes one round trip and works behind a pool that keeps no prepared
/// statements.
async fn call(
    transaction: &Transaction<'_>,
    statement: &str,
    name: &str,
    token: FencingToken,
) -> Result<(), FencingError> {
    let number = i64::from(token);
    let arguments: [(&(dyn ToSql + Sync), Type); 2] = [(&name, Type::TEXT), (&number, Type::INT8)];
    transaction.execute_typed(statement, &arguments).await?;
    Ok(())
}

/// A fencing token that was refused, or an error of the database that should compare it.
///
/// [`source`](Error::source) returns the error of `tokio-postgres`, which [`From`] returns by
/// value. `Display` leaves it to error reporters to print it; the alternate form, `{error:#}`,
/// prints both in one line.
#[derive(Debug)]
pub struct FencingError(tokio_postgres::Error);

impl FencingError {
    /// Returns whether the token was refused because the resource has seen a larger one, or because
    /// the lock is no longer held with it: the lock was lost. Repeating the transaction is of no
    /// use.
    pub fn is_stale(&self) -> bool {
        self.0.code().is_some_and(|code| code.code() == STALE)
    }
}

impl fmt::Display for FencingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_stale() {
            "the fencing token was refused"
        } else {
            "the fencing token was not compared"
        })?;
        match self.0.as_db_error().map(DbError::message) {
            _ if !f.alternate() => Ok(()),
            Some(message) => write!(f, ": {message}"),
            None => write!(f, ": {}", self.0),
        }
    }
}

impl Error for FencingError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

impl From<tokio_postgres::Error> for FencingError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self(error)
    }
}

impl From<FencingError> for tokio_postgres::Error {
    fn from(error: FencingError) -> Self {
        error.0
    }
}
