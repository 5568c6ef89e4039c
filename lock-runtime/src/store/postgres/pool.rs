//! The connections to a database, and the state of its server.

use std::{
    mem::take,
    ops::ControlFlow,
    sync::{
        Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::{
    Manager, ManagerConfig, Object, PoolError, QueueMode, RecyclingMethod, Runtime, Timeouts,
};
use futures_util::{
    FutureExt as _,
    future::{join, try_join},
};
use tokio::time::Instant;
use tokio_postgres::{
    Client, Error, Row,
    error::SqlState,
    types::{ToSql, Type},
};

use super::{
    FORMAT, MIGRATION, PostgresOptions,
    error::{self, failed},
    settings::Target,
};
use crate::{
    error::{LockError, LockErrorKind},
    health::{Finding, Health, PATIENCE, ServerHealth, ServerRole, is_answer},
    store::{
        StoreError, StoreErrorKind,
        records::{Inbox, Timestamp},
    },
    sync::lock,
};

/// The longest time for which a call waits for a connection, and for its reply.
const CALL: Duration = Duration::from_secs(10);
/// A connection whose call was dropped after this time is not used again: its server may hang.
const HANGS: Duration = Duration::from_millis(500);

/// Arguments with their types, so that a call is one round trip without a prepared statement. A
/// pooler in front of the server may give each transaction another connection.
pub(super) type Arguments<'a> = [(&'a (dyn ToSql + Sync), Type)];

pub(super) struct Pool {
    target: Target,
    connections: deadpool_postgres::Pool,
    inboxes: Mutex<Vec<Weak<dyn Inbox>>>,
    /// The latest call got a reply, or none was made.
    is_up: AtomicBool,
}

/// The reason why a call has failed.
pub(super) enum Failure {
    /// There was no connection, so the call was not sent.
    NotSent(StoreError),
    Refused(Error),
    TimedOut,
}

impl Failure {
    pub(super) fn into_store_error(self) -> StoreError {
        match self {
            Self::NotSent(error) => error,
            Self::Refused(error) => failed(&error),
            Self::TimedOut => StoreError::timed_out(CALL),
        }
    }

    /// Returns whether a lock of a row was not available.
    pub(super) fn is_lock_not_available(&self) -> bool {
        matches!(self, Self::Refused(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE))
    }

    /// Returns whether the server has undone the call because of another one, so that it can be
    /// repeated.
    pub(super) fn is_conflict(&self) -> bool {
        let Self::Refused(refused) = self else {
            return false;
        };
        refused.code().is_some_and(|code| {
            *code == SqlState::T_R_SERIALIZATION_FAILURE
                || *code == SqlState::T_R_DEADLOCK_DETECTED
                || code.code() == error::CONFLICT
        })
    }

    fn is_outage(&self) -> bool {
        match self {
            Self::NotSent(error) => error.kind() == StoreErrorKind::Unavailable,
            Self::Refused(error) => error.is_closed() || error.code().is_none(),
            Self::TimedOut => true,
        }
    }
}

/// A connection with a call in flight. If the call is dropped, its reply is read before that of
/// the next one, unless the server seems to hang.
struct InFlight {
    connection: Option<Object>,
    since: Instant,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take()
            && self.since.elapsed() >= HANGS
        {
            drop(Object::take(connection));
        }
    }
}

const BEGIN: &str = "begin isolation level read committed";

/// A transaction in progress. When dropped before its end, its connection is closed.
pub(super) struct Transaction<'a> {
    pool: &'a Pool,
    connection: Option<Object>,
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            drop(Object::take(connection));
        }
    }
}

impl Transaction<'_> {
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
        // In one round trip. After an error, the commit undoes the transaction.
        let both = join(
            connection.query_typed(sql, arguments),
            connection.batch_execute("commit"),
        );
        let both = both.map(|(rows, committed)| rows.and_then(|rows| committed.map(|()| rows)));
        let rows = self.pool.within(both).await;
        if !matches!(rows, Err(Failure::TimedOut)) {
            drop(self.connection.take());
        }
        first(rows?)
    }

    /// Ends it without a change.
    pub(super) async fn end(mut self) {
        let ended = match self.connection() {
            Ok(connection) => self
                .pool
                .within(connection.batch_execute("rollback"))
                .await
                .is_ok(),
            Err(_) => false,
        };
        if ended {
            drop(self.connection.take());
        }
    }
}

fn first(mut rows: Vec<Row>) -> Result<Row, Failure> {
    rows.pop().ok_or_else(|| {
        let message = "the server returned no row";
        Failure::NotSent(StoreError::new(StoreErrorKind::WrongServer, message))
    })
}

impl Pool {
    pub(super) fn new(target: Target, options: &PostgresOptions) -> Result<Self, LockError> {
        let settings = ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        };
        let config = target.config.clone();
        let manager = match &target.tls {
            Tls::None => Manager::from_config(config, tokio_postgres::NoTls, settings),
            #[cfg(feature = "postgres-rustls")]
            Tls::Rustls(tls) => Manager::from_config(config, tls.clone(), settings),
        };
        let timeouts = Timeouts {
            wait: Some(CALL),
            create: Some(CALL),
            recycle: Some(CALL),
        };
        let connections = deadpool_postgres::Pool::builder(manager)
            .max_size(options.pool_size())
            .runtime(Runtime::Tokio1)
            // So that connections that are not needed stay closed.
            .queue_mode(QueueMode::Lifo)
            .timeouts(timeouts)
            .build();
        let connections = connections
            .map_err(|error| LockError::new(LockErrorKind::InvalidSpec, error.to_string()))?;
        Ok(Self {
            target,
            connections,
            inboxes: Mutex::default(),
            is_up: AtomicBool::new(true),
        })
    }

    pub(super) fn address(&self) -> String {
        self.target.address()
    }

    /// Informs an inbox of outages from now on.
    pub(super) fn inform(&self, inbox: Weak<dyn Inbox>) {
        lock(&self.inboxes).push(inbox);
    }

    /// Waits for the first connection, and checks its database.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        self.connection().await.map(drop)
    }

    async fn connection(&self) -> Result<Object, StoreError> {
        let got = self.connections.get().await;
        let connection = got.map_err(|error| unconnected(&error).with_unsent(true))?;
        if Object::metrics(&connection).recycle_count == 0 {
            let checked = tokio::time::timeout(CALL, check(&connection)).await;
            let checked = checked.unwrap_or_else(|_| Err(StoreError::timed_out(CALL)));
            if let Err(error) = checked {
                // The next call checks again.
                drop(Object::take(connection));
                return Err(error.with_unsent(true));
            }
        }
        Ok(connection)
    }

    pub(super) async fn query(
        &self,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<Vec<Row>, Failure> {
        let reply = self.call(sql, arguments).await;
        self.record(&reply);
        reply
    }

    /// Begins a transaction with a query that locks rows.
    pub(super) async fn begin(
        &self,
        sql: &str,
        arguments: &Arguments<'_>,
    ) -> Result<(Transaction<'_>, Row), Failure> {
        let connection = self.connection().await.map_err(Failure::NotSent)?;
        let transaction = Transaction {
            pool: self,
            connection: Some(connection),
        };
        let connection = transaction.connection()?;
        // In one round trip.
        let both = try_join(
            connection.batch_execute(BEGIN),
            connection.query_typed(sql, arguments),
        );
        let (_, rows) = self.within(both).await?;
        Ok((transaction, first(rows)?))
    }

    /// Waits for a reply, and records whether there was one.
    async fn within<T>(&self, reply: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
        let reply = tokio::time::timeout(CALL, reply).await;
        let reply = reply.map_err(|_| Failure::TimedOut);
        let reply = reply.and_then(|reply| reply.map_err(Failure::Refused));
        self.record(&reply);
        reply
    }

    fn record<T>(&self, reply: &Result<T, Failure>) {
        match reply {
            Ok(_) => self.set_up(true),
            Err(failure) if failure.is_outage() => self.set_up(false),
            Err(_) => {}
        }
    }

    async fn call(&self, sql: &str, arguments: &Arguments<'_>) -> Result<Vec<Row>, Failure> {
        let connection = self.connection().await.map_err(Failure::NotSent)?;
        let mut in_flight = InFlight {
            connection: Some(connection),
            since: Instant::now(),
        };
        let Some(connection) = &in_flight.connection else {
            return Err(Failure::TimedOut);
        };
        let rows = connection.query_typed(sql, arguments);
        let rows = tokio::time::timeout(CALL, rows).await;
        let rows = rows.map_err(|_| Failure::TimedOut)?;
        drop(take(&mut in_flight.connection));
        rows.map_err(Failure::Refused)
    }

    pub(super) async fn query_one(
        &self,
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

    pub(super) async fn health(&self) -> Health {
        let mut server = ServerHealth::new(self.address());
        let sent = Instant::now();
        let asked = tokio::time::timeout(PATIENCE, self.query_one(HEALTH, &[])).await;
        let asked = asked.unwrap_or(Err(Failure::TimedOut));
        let mut findings = Vec::new();
        match asked
            .map_err(Failure::into_store_error)
            .and_then(|row| facts(&row))
        {
            Ok((now, version)) => {
                let round_trip = sent.elapsed();
                let own = Timestamp::of_system().micros() as f64;
                let middle = own - round_trip.as_micros() as f64 / 2.0;
                server.clock_difference = Some((now as f64 - middle) / 1e6);
                server.round_trip = Some(round_trip);
                server.version = Some(format!("PostgreSQL {version}"));
                server.role = Some(ServerRole::Primary);
                (server.reachable, server.grants_locks) = (true, true);
            }
            Err(error) => {
                server.reachable = is_answer(&error);
                if error.kind() == StoreErrorKind::ReadOnly {
                    server.role = Some(ServerRole::Replica);
                }
                findings.push(Finding::failed(&error).about(&server.name));
            }
        }
        Health::new(vec![server], findings)
    }
}

const HEALTH: &str = "select lock_runtime.micros(), current_setting('server_version')";

fn facts(row: &Row) -> Result<(i64, String), StoreError> {
    let fact = row.try_get(0).and_then(|now| Ok((now, row.try_get(1)?)));
    fact.map_err(|error| failed(&error))
}

fn unconnected(error: &PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => failed(error),
        PoolError::Timeout(_) => {
            let message = format!(
                "no connection within {CALL:?}: all are in use, or the server does not answer"
            );
            StoreError::new(StoreErrorKind::Unavailable, message)
        }
        error => StoreError::new(StoreErrorKind::Unavailable, error.to_string()),
    }
}

const CHECK: &str = "select current_setting('transaction_read_only') = 'on', version, since from lock_runtime.format";

/// Checks the database of a new connection. Creates the schema if it is missing or older.
async fn check(client: &Client) -> Result<(), StoreError> {
    if let ControlFlow::Break(checked) = check_format(client).await {
        return checked;
    }
    client
        .batch_execute(MIGRATION)
        .await
        .map_err(|error| failed(&error))?;
    match check_format(client).await {
        ControlFlow::Break(checked) => checked,
        ControlFlow::Continue(()) => Err(incompatible("the schema is still missing")),
    }
}

/// Continues if the schema has to be created or brought up to date.
async fn check_format(client: &Client) -> ControlFlow<Result<(), StoreError>> {
    const MISSING: [SqlState; 2] = [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME];
    let rows = match client.query_typed(CHECK, &[]).await {
        Err(error) if error.code().is_some_and(|code| MISSING.contains(code)) => {
            return ControlFlow::Continue(());
        }
        rows => rows,
    };
    let format = rows.and_then(|rows| match rows.first() {
        Some(row) => Ok(Some((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))),
        None => Ok(None),
    });
    let (is_read_only, version, since): (bool, i32, i32) = match format {
        Ok(Some(format)) => format,
        Ok(None) => return ControlFlow::Continue(()),
        Err(error) => return ControlFlow::Break(Err(failed(&error))),
    };
    if is_read_only {
        let message = "the server is a standby, or allows no writes; connect to the primary, \
                       or add target_session_attrs=read-write and its address";
        return ControlFlow::Break(Err(StoreError::new(StoreErrorKind::ReadOnly, message)));
    }
    if since > FORMAT {
        let message = format!(
            "the schema lock_runtime has format {version}, and this version of the library has {FORMAT}"
        );
        return ControlFlow::Break(Err(incompatible(&message)));
    }
    match version < FORMAT {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(Ok(())),
    }
}

fn incompatible(message: &str) -> StoreError {
    let message = format!("{message}; use versions of one format");
    StoreError::new(StoreErrorKind::IncompatibleFormat, message)
}

/// TLS for connections, or none.
#[derive(Clone)]
pub(super) enum Tls {
    None,
    #[cfg(feature = "postgres-rustls")]
    Rustls(tokio_postgres_rustls::MakeRustlsConnect),
}

impl Tls {
    #[cfg(not(feature = "postgres-rustls"))]
    pub(super) fn new(
        root: Option<&[u8]>,
        mode: tokio_postgres::config::SslMode,
    ) -> Result<Self, String> {
        if root.is_some() || mode == tokio_postgres::config::SslMode::Require {
            let complaint = "it asks for TLS, which is not compiled in; enable the feature `postgres-rustls` of lock-runtime";
            return Err(complaint.into());
        }
        Ok(Self::None)
    }

    /// Uses the authorities in `root`, or those of the system.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn new(
        root: Option<&[u8]>,
        mode: tokio_postgres::config::SslMode,
    ) -> Result<Self, String> {
        use rustls::{
            ClientConfig, RootCertStore,
            pki_types::{CertificateDer, pem::PemObject as _},
        };
        // `prefer` is no protection, so it is not worth the authorities of the system.
        if root.is_none() && mode != tokio_postgres::config::SslMode::Require {
            return Ok(Self::None);
        }
        let mut roots = RootCertStore::empty();
        match root {
            Some(pem) => {
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate =
                        certificate.map_err(|error| format!("the root certificate: {error}"))?;
                    roots
                        .add(certificate)
                        .map_err(|error| format!("the root certificate: {error}"))?;
                }
                if roots.is_empty() {
                    return Err("the root certificate: there is none in the PEM".into());
                }
            }
            None => {
                let system = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(system.certs);
            }
        }
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            return Err("TLS needs a crypto provider; install one, such as rustls::crypto::ring::default_provider().install_default()".into());
        }
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self::Rustls(tokio_postgres_rustls::MakeRustlsConnect::new(
            config,
        )))
    }
}
