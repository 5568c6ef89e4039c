//! A transaction that locks records until its swap is made.

use std::sync::Arc;

use futures_util::{
    FutureExt as _,
    future::{join, try_join},
};
use tokio::{sync::OwnedSemaphorePermit, time::timeout};
use tokio_postgres::{Error, Row};

use super::{
    connection::{
        connector::Object,
        pool::{Arguments, Pool, execute, first},
    },
    failure::{CALL, Failure, Unconnected},
};
use crate::store::records::Caller;

const BEGIN: &str = "begin isolation level read committed";

/// A transaction in progress. When dropped before its end, its connection is closed.
pub(super) struct Transaction {
    pool: Arc<Pool>,
    connection: Option<Object>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            drop(Object::take(connection));
        }
    }
}

impl Transaction {
    /// Begins with a query, in one round trip.
    pub(super) async fn begin(
        pool: &Arc<Pool>,
        permit: Option<OwnedSemaphorePermit>,
        sql: &str,
        arguments: &Arguments<'_>,
        caller: &Caller,
    ) -> Result<(Self, Row), Failure> {
        let connection = pool.connection().await.map_err(Failure::NotSent)?;
        if !caller.is_waiting() {
            return Err(Failure::NotSent(Unconnected::unwanted()));
        }
        let transaction = Self {
            pool: pool.clone(),
            connection: Some(connection),
            _permit: permit,
        };
        let connection = transaction.connection()?;
        let statement = pool.prepare(connection, sql, arguments).await;
        let statement = statement.map_err(Failure::Refused)?;
        let both = try_join(
            connection.batch_execute(BEGIN),
            execute(connection, sql, statement.as_ref(), arguments),
        );
        match both.await.map_err(Failure::Refused) {
            Ok((_, rows)) => Ok((transaction, first(rows)?)),
            Err(failure) => {
                if failure.is_locked() {
                    transaction.end().await;
                }
                Err(failure)
            }
        }
    }

    fn connection(&self) -> Result<&Object, Failure> {
        self.connection.as_ref().ok_or(Failure::TimedOut)
    }

    /// Executes a query and commits.
    pub(super) async fn commit(
        mut self,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Row, Failure> {
        let connection = self.connection()?;
        let statement = self.within(self.pool.prepare(connection, sql, arguments));
        let statement = statement.await?;
        // In one round trip. After an error, the commit undoes the transaction.
        let both = join(
            execute(connection, sql, statement.as_ref(), arguments),
            connection.batch_execute("commit"),
        );
        let both = both.map(|(rows, committed)| rows.and_then(|rows| committed.map(|()| rows)));
        let rows = self.within(both).await;
        if !rows.as_ref().is_err_and(Failure::spoils_connection) {
            drop(self.connection.take());
        }
        first(rows?)
    }

    /// Ends it without a change.
    pub(super) async fn end(mut self) {
        let ended = match self.connection() {
            Ok(connection) => self
                .within(connection.batch_execute("rollback"))
                .await
                .is_ok(),
            Err(_) => false,
        };
        if ended {
            drop(self.connection.take());
        }
    }

    async fn within<T>(&self, reply: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
        let reply = timeout(CALL, reply).await;
        let reply = reply.map_err(|_| Failure::TimedOut);
        let reply = reply.and_then(|reply| reply.map_err(Failure::Refused));
        self.pool.record(&reply);
        reply
    }
}
