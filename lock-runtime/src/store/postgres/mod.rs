//! Locks in PostgreSQL: [`PostgresRecords`] keeps them in a table of the schema `lock_runtime`.

mod connection;
mod error;
mod failure;
#[cfg(test)]
#[path = "../../../fuzz/postgres.rs"]
mod fuzz;
mod health;
mod locked;
pub(crate) mod settings;
mod statements;
mod transaction;
mod upkeep;

use std::{
    fmt,
    future::ready,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::{BoxFuture, join_all};
use tokio_postgres::{
    Row,
    types::{ToSql, Type},
};

use self::{
    connection::{listener::Listening, pool::Pool},
    failure::Failure,
    locked::Locked,
    settings::Target,
    statements::{
        Arguments, LIST, LOCK, READ, SWAP, field, present, record, swap_replies, swap_reply,
        timestamp,
    },
};
use super::{
    ClientId, KeyPart, Limits, Replied, Replies, StoreError,
    records::{
        Decide, Inbox, ReadReply, Record, RecordName, RecordStore, Records, Swap, SwapReply,
        Swapped,
        groups::{self, Group, Grouping},
    },
    remote::{Connecting, connect_within},
};
use crate::{
    error::LockError,
    observe::health::Health,
    shell::keeper::Kept,
    shell::runtime,
    shell::time::{Instant, timeout_at},
};

pub(crate) use self::settings::PostgresOptions;

/// The statements that create the schema of the locks, and the function `guard`. Those of the
/// function `fenced` are apart ([`fencing::MIGRATION`](crate::fencing::MIGRATION)), as not every
/// role that uses locks may compare the tokens of all resources.
///
/// A client executes them when it connects, if its user may create a schema. Execute them in a
/// migration otherwise. They are one statement, which can be repeated.
pub const MIGRATION: &str = include_str!("schema.sql");

/// The version of [`MIGRATION`].
const VERSION: i32 = 7;
/// The records in one page of a list.
const PAGE: i64 = 500;

/// The time for which a call waits for records that another session has locked. Shorter than its
/// caller waits, who would otherwise take it for an outage.
const BLOCKED: Duration = Duration::from_millis(390);

/// The time limit of connecting.
const CONNECT: Duration = Duration::from_secs(5);

/// Records of locks in a PostgreSQL database.
///
/// Tested with PostgreSQL 15. Few connections serve all calls. Another one listens for messages
/// while a request waits for its lock.
pub struct PostgresRecords {
    calls: Kept<Arc<Calls>>,
    listening: Listening,
    target: Target,
    options: PostgresOptions,
}

/// The calls to a database.
struct Calls {
    pool: Arc<Pool>,
    namespace: String,
    group: Group,
    locked: Locked,
}

impl fmt::Debug for PostgresRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresRecords")
            .field("address", &self.calls.usual().pool.address())
            .field("namespace", &self.calls.usual().namespace)
            .finish_non_exhaustive()
    }
}

impl PostgresRecords {
    /// Connects to the database at `url`, and creates the schema if it is missing.
    ///
    /// The URL is `postgres://[user[:password]@]host[:port][,host..]/database[?parameter=..]`, with
    /// the parameters of `libpq` that `tokio-postgres` supports, such as
    /// `target_session_attrs=read-write` for several hosts.
    ///
    /// # Errors
    /// - `InvalidUrl`: the URL is wrong, needs TLS that is not compiled in, or names a database
    ///   that does not exist.
    /// - `InvalidSpec`: the namespace is invalid.
    /// - `NoRuntime`: the call is made outside of a Tokio runtime.
    /// - `Unavailable`: the server does not answer, or has no connection left.
    /// - `Unauthenticated`: the server refused the user or the password.
    /// - `Forbidden`: the user may not use the schema, or not create it, or another role owns it
    ///   ([`PostgresOptions::schema_owner`]).
    /// - `ReadOnly`: the server is a standby.
    /// - `IncompatibleFormat`: the schema is that of another version of this library.
    ///
    /// # Cancellation
    /// Dropping the future closes the connections.
    pub async fn connect(
        url: &str,
        namespace: &str,
        options: PostgresOptions,
    ) -> Result<Self, LockError> {
        let records = Self::open(url, namespace, &options)?;
        records.ready().await?;
        Ok(records)
    }

    /// Connects when the first call is made.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect) that need no server.
    pub(crate) fn open(
        url: &str,
        namespace: &str,
        options: &PostgresOptions,
    ) -> Result<Self, LockError> {
        super::namespace::check_namespace(namespace)?;
        runtime::check()?;
        let target = Target::new(url, options)?;
        Ok(Self {
            listening: Listening::new(target.clone()),
            calls: Kept::new(Arc::new(Calls::new(target.clone(), namespace, options)?)),
            target,
            options: options.clone(),
        })
    }

    /// The calls for the calling thread.
    fn calls(&self) -> &Arc<Calls> {
        self.calls.here(|usual| {
            let of_keeper = Calls::new(self.target.clone(), &usual.namespace, &self.options);
            // The same settings have been accepted before.
            of_keeper.map_or_else(|_| usual.clone(), Arc::new)
        })
    }

    /// Makes it a store of locks.
    pub fn into_store(self) -> RecordStore {
        RecordStore::new(self)
    }

    /// Removes the records that are no longer needed, of all namespaces. Returns their number.
    ///
    /// A record is needed for a day after the last use of its lock, or the time that the client is
    /// given. One of the clients of a database removes the others every hour, so this is not
    /// necessary unless each client lives for less than a minute. Those remove the names of clients
    /// only.
    ///
    /// # Errors
    /// Those of a call. Some records may have been removed then.
    ///
    /// # Cancellation
    /// Dropping the future ends the removal, after some of the records.
    pub async fn remove_old(&self) -> Result<u64, StoreError> {
        let removed = upkeep::remove(&self.calls.usual().pool).await;
        removed.map_err(Failure::into_store_error)
    }
}

impl Connecting for PostgresRecords {
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        let pool = &self.calls.usual().pool;
        let connect = async {
            pool.ready().await?;
            self.begin();
            Ok(())
        };
        Box::pin(connect_within(
            CONNECT,
            format!("at {}", pool.address()),
            connect,
        ))
    }

    /// A minute later it connects, to remove old records.
    fn begin(&self) {
        upkeep::start(&self.calls.usual().pool);
    }
}

/// Returns the name of a record in the table.
fn full_name(namespace: &str, name: &RecordName) -> String {
    format!("{namespace}:{name}")
}

impl Grouping for Calls {
    fn group(&self) -> &Group {
        &self.group
    }

    async fn swap_alone(&self, swap: &Swap) -> Result<SwapReply, StoreError> {
        let arguments = Arguments::new(&self.namespace, [swap]);
        match self.pool.query_one(SWAP, &arguments.typed()).await {
            Ok(row) => swap_reply(&row),
            Err(error) => self.refused(error, swap).await,
        }
    }

    async fn swap_group(&self, swaps: &[Swap]) -> Vec<Result<SwapReply, StoreError>> {
        self.swap_each(swaps).await
    }
}

impl Calls {
    fn new(target: Target, namespace: &str, options: &PostgresOptions) -> Result<Self, LockError> {
        Ok(Self {
            pool: Arc::new(Pool::new(target, options)?),
            namespace: namespace.to_owned(),
            group: Group::new(options.pool_size()),
            locked: Locked::default(),
        })
    }

    fn name(&self, name: &RecordName) -> String {
        full_name(&self.namespace, name)
    }

    /// Makes the swaps in one transaction if each of them is of one record, and otherwise one by
    /// one.
    async fn swap_each(&self, swaps: &[Swap]) -> Vec<Result<SwapReply, StoreError>> {
        if swaps.len() > 1 && swaps.iter().all(groups::fits) {
            // All transactions lock records in this order.
            let mut order: Vec<_> = (0..swaps.len()).collect();
            order.sort_by_key(|index| &swaps[*index].changes[0].name);
            let ordered = order.iter().map(|index| &swaps[*index]);
            let mut arguments = Arguments::new(&self.namespace, ordered);
            arguments.each = true;
            match self.pool.query_one(SWAP, &arguments.typed()).await {
                Ok(row) => {
                    return match swap_replies(&row, swaps.len()) {
                        Ok(replies) => {
                            let mut replies: Vec<_> = order.into_iter().zip(replies).collect();
                            replies.sort_by_key(|(index, _)| *index);
                            replies.into_iter().map(|(_, reply)| Ok(reply)).collect()
                        }
                        Err(error) => vec![Err(error); swaps.len()],
                    };
                }
                // One of them has undone the others.
                Err(error) if error.is_undone() => {}
                Err(error) => return vec![Err(error.into_store_error()); swaps.len()],
            }
        }
        join_all(swaps.iter().map(|swap| self.swap_alone(swap))).await
    }

    /// Turns an error of a swap that had no effect into its outcome.
    async fn refused(&self, error: Failure, swap: &Swap) -> Result<SwapReply, StoreError> {
        if error.is_guarded() {
            let now = self.read(&[]).await?.now;
            return Ok(SwapReply::new(now, Swapped::Guarded));
        }
        if error.is_conflict() {
            let names: Vec<_> = swap
                .changes
                .iter()
                .map(|change| change.name.clone())
                .collect();
            let ReadReply { now, records, .. } = self.read(&names).await?;
            return Ok(SwapReply::new(now, Swapped::Conflict(records)));
        }
        Err(error.into_store_error())
    }

    /// Locks the rows of the present records until its swap is made.
    async fn update(
        &self,
        names: &[RecordName],
        decide: Decide<'_>,
    ) -> Result<Option<SwapReply>, StoreError> {
        let full_names: Vec<_> = names.iter().map(|name| self.name(name)).collect();
        let arguments: [(&(dyn ToSql + Sync), Type); 1] = [(&full_names, Type::TEXT_ARRAY)];
        let caller = decide.caller();
        let until = Instant::now() + BLOCKED;
        let begun = loop {
            let Ok(_turn) = timeout_at(until, self.locked.turn(&full_names)).await else {
                return Err(Failure::blocked());
            };
            let begun = self.pool.begin(LOCK, &arguments, &caller).await;
            let is_locked = begun.as_ref().is_err_and(Failure::is_locked);
            if is_locked || begun.is_ok() {
                self.locked.set(&full_names, is_locked);
            }
            if !is_locked || until <= Instant::now() {
                break begun;
            }
        };
        let (transaction, row) = begun.map_err(Failure::into_store_error)?;
        let mut records = present(&row, 1)?;
        records.resize(names.len(), None);
        let now = timestamp(&row)?;
        let Some(swap) = decide.decide(ReadReply::new(now, records)) else {
            transaction.end().await;
            return Ok(None);
        };
        let arguments = Arguments::new(&self.namespace, [&swap]);
        let reply = match transaction.commit(SWAP, &arguments.typed()).await {
            Ok(row) => swap_reply(&row)?,
            Err(error) => self.refused(error, &swap).await?,
        };
        Ok(Some(reply))
    }

    async fn read(&self, names: &[RecordName]) -> Result<ReadReply, StoreError> {
        let names: Vec<_> = names.iter().map(|name| self.name(name)).collect();
        let row = self
            .pool
            .query_one(READ, &[(&names, Type::TEXT_ARRAY)])
            .await;
        let row = row.map_err(Failure::into_store_error)?;
        let mut records = present(&row, 1)?;
        records.resize(names.len(), None);
        Ok(ReadReply::new(timestamp(&row)?, records))
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&RecordName>,
    ) -> Result<Vec<(RecordName, Record)>, StoreError> {
        if prefix.contains('\0') {
            // No text of the server contains it.
            return Ok(Vec::new());
        }
        let own = format!("{}:", self.namespace);
        let prefix = format!("{own}{prefix}");
        let after = after.map_or_else(|| own.clone(), |after| self.name(after));
        let arguments: [(&(dyn ToSql + Sync), Type); 3] = [
            (&prefix, Type::TEXT),
            (&after, Type::TEXT),
            (&PAGE, Type::INT8),
        ];
        let rows = self.pool.query(LIST, &arguments).await;
        let rows = rows.map_err(Failure::into_store_error)?;
        let named = |row: &Row| {
            let name: &str = field(row, 0)?;
            let name = name.strip_prefix(&own).unwrap_or(name);
            let record = record(Some(field(row, 1)?), Some(field(row, 2)?));
            Ok(record.map(|record| (RecordName::new(name), record)))
        };
        rows.iter()
            .filter_map(|row| named(row).transpose())
            .collect()
    }
}

impl Records for PostgresRecords {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        Box::pin(async move {
            let calls = self.calls();
            let reply = groups::swap(calls, swap).await?;
            if let (Swapped::Done, [name]) = (&reply.outcome, &swap.changes[..])
                && name.needed_until <= reply.now
                && let Some(first) = name.name.first_client()
            {
                // The client ends. Where each of them is as brief as a job of cron, no other one
                // lives until the next removal.
                let first = format!("{}:{first}", calls.namespace);
                upkeep::remove_after(&calls.pool, &first).await;
            }
            Ok(reply)
        })
    }

    fn swap_in<'a>(
        &'a self,
        swap: &'a Swap,
        transaction: &'a tokio_postgres::Transaction<'a>,
    ) -> Replied<'a, SwapReply> {
        Box::pin(async move {
            let arguments = Arguments::new(&self.calls().namespace, [swap]);
            let row = transaction.query_typed(SWAP, &arguments.typed()).await;
            let rows = row.map_err(|error| Failure::Refused(error).into_store_error())?;
            swap_reply(rows.first().ok_or_else(StoreError::no_reply)?)
        })
    }

    fn swap_each<'a>(&'a self, swaps: &'a [Swap]) -> Replies<'a, SwapReply> {
        Box::pin(self.calls().swap_each(swaps))
    }

    fn update<'a>(
        &'a self,
        names: &'a [RecordName],
        decide: Decide<'a>,
    ) -> Option<Replied<'a, Option<SwapReply>>> {
        Some(Box::pin(self.calls().update(names, decide)))
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        Box::pin(self.calls().read(names))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a RecordName>,
    ) -> Replied<'a, Vec<(RecordName, Record)>> {
        Box::pin(self.calls().list(prefix, after))
    }

    fn limits(&self) -> Limits {
        Limits::new()
    }

    fn sends_messages(&self) -> bool {
        !self.calls.usual().pool.is_pooled()
    }

    fn serves_any_runtime(&self) -> bool {
        true
    }

    fn listen(&self, inbox: Weak<dyn Inbox>) {
        self.calls.usual().pool.inform(inbox.clone());
        self.listening.inform(inbox);
    }

    fn expect_messages(&self, client: ClientId) -> BoxFuture<'_, ()> {
        if self.calls.usual().pool.is_pooled() {
            // Its connections would go on to listen for others, and the waiters poll anyway.
            return Box::pin(ready(()));
        }
        Box::pin(self.listening.expect(client))
    }

    fn place_of(&self, name: &RecordName, _part: KeyPart) -> Option<String> {
        Some(format!(
            "lock_runtime.record, name {}",
            self.calls.usual().name(name)
        ))
    }

    fn guarded_name(&self, name: &RecordName) -> Option<String> {
        Some(self.calls.usual().name(name))
    }

    fn blockers<'a>(&'a self, name: &'a RecordName) -> Replied<'a, Vec<String>> {
        Box::pin(async move {
            let calls = self.calls();
            calls.pool.blockers(&calls.name(name)).await
        })
    }

    fn health(&self) -> Option<BoxFuture<'_, Health>> {
        Some(Box::pin(self.calls.usual().pool.health()))
    }
}
