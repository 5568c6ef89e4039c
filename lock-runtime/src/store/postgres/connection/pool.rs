//! The connections to a database, and the state of its server.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool::{
    Runtime,
    managed::{PoolError, QueueMode, TimeoutType, Timeouts},
};
use smallvec::SmallVec;
use tokio::{
    runtime::Handle,
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_postgres::{
    Error, Row, Statement,
    types::{ToSql, Type},
};

use super::{
    super::{
        PostgresOptions,
        failure::{CALL, Failure, Unconnected},
        settings::Target,
        transaction::Transaction,
    },
    check::{Server, check},
    connector::{Connector, Object},
    direct::is_direct,
};
use crate::{
    error::{LockError, LockErrorKind},
    shell::{sync::lock, time::Instant},
    store::{
        StoreError, StoreErrorKind,
        records::{Caller, Inbox},
    },
};

/// A server that does not reply within this time to a call that was dropped seems to hang, so its
/// connection is not used again.
const HANGS: Duration = Duration::from_millis(500);
/// The pause before a connection is taken again, where the server has none left.
const PAUSE: Duration = Duration::from_millis(20);

/// Arguments with their types, so that a call needs no round trip to prepare its statement.
pub(crate) type Arguments<'a> = [(&'a (dyn ToSql + Sync), Type)];

pub(crate) struct Pool {
    connections: deadpool::managed::Pool<Connector>,
    /// Transactions in progress. They may wait for each other, so one connection is for the other
    /// calls.
    transactions: Arc<Semaphore>,
    inboxes: Mutex<Vec<Weak<dyn Inbox>>>,
    /// The latest call got a reply, or none was made.
    is_up: AtomicBool,
    /// The start of the server that was connected last.
    server: Mutex<Option<String>>,
    /// There is a pooler between the client and the server. It may give each transaction another
    /// connection, so statements cannot be prepared and messages do not arrive.
    is_pooled: AtomicBool,
}

/// A connection with a call in flight. If the call is dropped, the connection is used again once
/// its reply has come, unless the server seems to hang.
struct InFlight {
    pool: Arc<Pool>,
    connection: Option<Object>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        let (pool, mut connection) = (self.pool.clone(), Unreturned(Some(connection)));
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            let drained = match &connection.0 {
                // The reply to an empty query comes after that of the call.
                Some(connection) => timeout(HANGS, connection.batch_execute("")).await,
                None => return,
            };
            match drained {
                Ok(Ok(())) => drop(connection.0.take()),
                _ => pool.set_up(false),
            }
        });
    }
}

pub(crate) fn first(mut rows: Vec<Row>) -> Result<Row, Failure> {
    rows.pop().ok_or_else(|| {
        let message = "the server returned no row";
        Failure::NoReply(StoreError::new(StoreErrorKind::WrongServer, message))
    })
}

impl Pool {
    pub(crate) fn new(target: Target, options: &PostgresOptions) -> Result<Self, LockError> {
        let connector = Connector { target };
        let connections = deadpool::managed::Pool::builder(connector)
            .max_size(options.pool_size())
            .runtime(Runtime::Tokio1)
            // So that connections that are not needed stay closed.
            .queue_mode(QueueMode::Lifo)
            .timeouts(Timeouts {
                wait: Some(CALL),
                create: Some(CALL),
                recycle: Some(CALL),
            })
            .build();
        let connections = connections
            .map_err(|error| LockError::new(LockErrorKind::InvalidSpec, error.to_string()))?;
        let transactions = options.pool_size().saturating_sub(1).max(1);
        Ok(Self {
            connections,
            transactions: Arc::new(Semaphore::new(transactions)),
            inboxes: Mutex::default(),
            is_up: AtomicBool::new(true),
            server: Mutex::default(),
            is_pooled: AtomicBool::new(false),
        })
    }

    pub(crate) fn address(&self) -> String {
        self.connections.manager().target.address()
    }

    /// The roles that may own the schema.
    fn owners(&self) -> &[String] {
        &self.connections.manager().target.owners
    }

    /// Informs an inbox of outages from now on.
    pub(crate) fn inform(&self, inbox: Weak<dyn Inbox>) {
        let mut inboxes = lock(&self.inboxes);
        inboxes.retain(|inbox| inbox.strong_count() > 0);
        inboxes.push(inbox);
    }

    pub(crate) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// Waits for the first connection, and checks its database.
    pub(crate) async fn ready(self: &Arc<Self>) -> Result<(), StoreError> {
        let connected = self.connection().await.map(drop);
        connected.map_err(|unconnected| Failure::NotSent(unconnected).into_store_error())
    }

    /// Takes a connection from the pool.
    ///
    /// A new one is made in a task of its own. That may take longer than its caller waits, and the
    /// next one uses it.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<Object, Unconnected> {
        let present = Timeouts {
            wait: Some(CALL),
            create: Some(Duration::ZERO),
            recycle: Some(CALL),
        };
        let status = self.connections.status();
        if status.available > 0 || status.size >= status.max_size {
            match self.connections.timeout_get(&present).await {
                // It has ended.
                Err(PoolError::Timeout(TimeoutType::Create)) => {}
                Err(error) => return Err(error.into()),
                Ok(connection) if Object::metrics(&connection).recycle_count > 0 => {
                    return Ok(connection);
                }
                // A server that is this near has connected at once.
                Ok(connection) => return self.checked(connection).await,
            }
        }
        match tokio::spawn(self.clone().connect()).await {
            Ok(connected) => connected,
            // The runtime is shutting down.
            Err(_) => Err(Unconnected::new(StoreError::timed_out(CALL))),
        }
    }

    async fn connect(self: Arc<Self>) -> Result<Object, Unconnected> {
        let until = Instant::now() + CALL;
        loop {
            match self.connections.get().await {
                Ok(connection) if Object::metrics(&connection).recycle_count > 0 => {
                    return Ok(connection);
                }
                Ok(connection) => return self.checked(connection).await,
                Err(PoolError::Backend(error))
                    if error.is_full
                        && self.connections.status().size > 0
                        && Instant::now() < until =>
                {
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Checks the database of a new connection. It is not in the pool before, also if this future
    /// is dropped.
    async fn checked(&self, connection: Object) -> Result<Object, Unconnected> {
        let mut unchecked = Unreturned(Some(connection));
        let checked = match &unchecked.0 {
            Some(connection) => timeout(CALL, check(connection, self.owners())).await,
            None => Ok(Err(StoreError::no_reply())),
        };
        let checked = checked.unwrap_or_else(|_| Err(StoreError::timed_out(CALL)));
        let Server { start, process } = checked.map_err(Unconnected::new)?;
        let is_direct = match &unchecked.0 {
            Some(connection) => is_direct(connection, process).await,
            None => false,
        };
        if !is_direct {
            self.is_pooled.store(true, Ordering::Relaxed);
        }
        let before = lock(&self.server).replace(start.clone());
        if before.is_some_and(|before| before != start) {
            // It may have less data, and the earlier connections may not have noticed.
            self.set_up(false);
        }
        let connection = unchecked.0.take();
        connection.ok_or_else(|| Unconnected::new(StoreError::no_reply()))
    }

    /// Executes a query, and records whether the server has replied.
    pub(crate) async fn query(
        self: &Arc<Self>,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Vec<Row>, Failure> {
        let reply = self.call(sql, arguments).await;
        self.record(&reply);
        reply
    }

    /// Begins a transaction with a query that locks rows, if its caller still waits once there is a
    /// connection.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        sql: &str,
        arguments: &Arguments<'_>,
        caller: &Caller,
    ) -> Result<(Transaction, Row), Failure> {
        if !caller.is_waiting() {
            return Err(Failure::NotSent(Unconnected::unwanted()));
        }
        let permit = timeout(CALL, self.transactions.clone().acquire_owned()).await;
        let permit = permit.map_err(|_| Failure::NotSent(Unconnected::all_in_use()))?;
        // The semaphore is never closed.
        let begun = Transaction::begin(self, permit.ok(), sql, arguments, caller);
        let begun = timeout(CALL, begun).await;
        let begun = begun.unwrap_or(Err(Failure::TimedOut));
        self.record(&begun);
        begun
    }

    /// Records whether a call got a reply.
    pub(crate) fn record<T>(&self, reply: &Result<T, Failure>) {
        match reply {
            Ok(_) => self.set_up(true),
            Err(failure) if failure.is_outage() => self.set_up(false),
            Err(_) => {}
        }
    }

    /// The same, and no outage of the server if it fails.
    pub(crate) async fn call(
        self: &Arc<Self>,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Vec<Row>, Failure> {
        let connection = self.connection().await.map_err(Failure::NotSent)?;
        let mut in_flight = InFlight {
            pool: self.clone(),
            connection: Some(connection),
        };
        let Some(connection) = &in_flight.connection else {
            return Err(Failure::TimedOut);
        };
        let rows = timeout(CALL, self.execute(connection, sql, arguments)).await;
        let rows = rows.map_err(|_| Failure::TimedOut)?;
        let rows = rows.map_err(Failure::Refused);
        let connection = in_flight.connection.take();
        if rows.as_ref().is_err_and(Failure::spoils_connection) {
            drop(connection.map(Object::take));
        }
        rows
    }

    /// Executes a query on a connection.
    pub(crate) async fn execute(
        &self,
        connection: &Object,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Vec<Row>, Error> {
        let statement = self.prepare(connection, sql, arguments).await?;
        execute(connection, sql, statement.as_ref(), arguments).await
    }

    /// Prepares a query once for each connection, where that is possible: parsing and planning it
    /// takes the server longer than its execution.
    pub(crate) async fn prepare(
        &self,
        connection: &Object,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Option<Statement>, Error> {
        if self.is_pooled() {
            return Ok(None);
        }
        let types: SmallVec<[Type; 12]> = arguments.iter().map(|(_, it)| it.clone()).collect();
        let statement = connection.prepare_typed_cached(sql, &types).await?;
        Ok(Some(statement))
    }

    pub(crate) async fn query_one(
        self: &Arc<Self>,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Row, Failure> {
        first(self.query(sql, arguments).await?)
    }

    fn set_up(&self, is_up: bool) {
        if self.is_up.swap(is_up, Ordering::Relaxed) == is_up {
            return;
        }
        let inboxes: Vec<_> = lock(&self.inboxes)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        inboxes.iter().for_each(|inbox| inbox.connected(is_up));
    }
}

/// Executes a query that is prepared or not, in one round trip.
pub(crate) async fn execute(
    connection: &Object,
    sql: &str,
    statement: Option<&Statement>,
    arguments: &Arguments<'_>,
) -> Result<Vec<Row>, Error> {
    let Some(statement) = statement else {
        return connection.query_typed(sql, arguments).await;
    };
    let values: SmallVec<[&(dyn ToSql + Sync); 12]> =
        arguments.iter().map(|(value, _)| *value).collect();
    connection.query(statement, &values).await
}

/// A connection that is not returned to the pool when it is dropped.
struct Unreturned(Option<Object>);

impl Drop for Unreturned {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Object::take(connection));
        }
    }
}
