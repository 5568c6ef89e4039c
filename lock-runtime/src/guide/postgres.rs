//! PostgreSQL as the store.
//!
//! # Connecting
//!
//! `postgres://[user[:password]@]host[:port][,host[:port]..]/database[?parameter=value&..]`, with
//! the feature `postgres`. `postgresql://` means the same. The parameters are those of `libpq` that
//! `tokio-postgres` supports. Some of them:
//!
//! | Parameter | Meaning |
//! |---|---|
//! | `sslmode=require` | TLS, with the feature `postgres-rustls`; the certificate is verified |
//! | `sslmode=prefer` | the default: TLS if it is compiled in and the server offers it |
//! | `sslrootcert=file` | the authorities to trust (PEM), instead of those of the system |
//! | `sslcert=file`, `sslkey=file` | the certificate of the client and its private key (PEM) |
//! | `target_session_attrs=read-write` | of several hosts, use the one that is no standby |
//! | `connect_timeout=2` | in seconds; 2 by default |
//! | `schema_owner=role` | also trust [the schema](#schema-and-rights) of this role |
//!
//! `sslmode=verify-full` means the same as `require`. With `prefer`, as with `libpq`, the
//! certificate is not verified, and a connection is made without TLS if the server refuses it: it
//! keeps out those who only read the network. An application that has not installed a crypto
//! provider for rustls connects without TLS. `sslmode=disable` saves a round trip for each
//! connection.
//!
//! Write the characters `@`, `:`, `/`, `?`, `#` and `&` of a password as `%40` and so on.
//! [`PostgresOptions`](crate::store::postgres::PostgresOptions) has the other settings.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::connect("postgres://app:secret@10.0.0.1/shop").await?;
//! # Ok(()) }
//! ```
//!
//! PostgreSQL 15 is tested. Older versions may work, and are not tested. A client opens up to 4
//! connections when it needs them, and another one for notifications while one of its requests
//! waits for a lock. Acquires and releases that are made while all connections are in use share
//! a transaction, unless they hand a lock on, and so do renewals.
//!
//! # Credentials that change
//!
//! [`PostgresOptions::credentials`](crate::store::postgres::PostgresOptions::credentials) asks the
//! application for the user and the password of each new connection, and the variable
//! `LOCK_PASSWORD_FILE` names a file that is read for each. So are the files of the URL.
//!
//! ```no_run
//! # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! use lock_runtime::{Credentials, LockClient, store::postgres::PostgresOptions};
//!
//! // A token of a cloud's IAM, such as that of RDS, which is valid for 15 minutes.
//! let options = PostgresOptions::new()
//!     .credentials(async || Ok(Credentials::new("app", token().await?)));
//! let builder = LockClient::builder().postgres(options);
//! let locks = builder.connect("postgres://db.example/shop?sslmode=require").await?;
//! # Ok(()) }
//! ```
//!
//! PostgreSQL checks a password when a connection begins, and accepts the connection for as long as
//! it lasts. Where a proxy ends it earlier, set
//! [`valid_for`](crate::Credentials::valid_for): a connection is replaced after about three
//! quarters of that time. A password that is refused after others were accepted is waited for
//! [as with Redis](super::redis#credentials-that-change).
//!
//! # Schema and rights
//!
//! Locks are rows of the table `lock_runtime.record`. The first client creates the schema, if its
//! user may do so. Otherwise execute
//! [`MIGRATION`](crate::store::postgres::MIGRATION) as the owner of the database, and grant:
//!
//! ```sql
//! grant usage on schema lock_runtime to app;
//! grant select on lock_runtime.format to app;
//! grant select, insert, update, delete on lock_runtime.record to app;
//! grant execute on all functions in schema lock_runtime to app;
//! ```
//!
//! A role that only calls `guard` needs less, and one that only calls `fenced` needs
//! [as much](super::fencing#postgresql):
//!
//! ```sql
//! grant usage on schema lock_runtime to holder;
//! grant execute on function lock_runtime.guard to holder;
//! ```
//!
//! No function can be executed by `PUBLIC`. The rights are those to all locks of all namespaces:
//!
//! - A role with `connect` alone can cost waiters a poll by notifications. If it knows the id of a
//!   waiting client, it can read the messages to it, with the names of locks and the tokens of
//!   grants that were made, and end those holds. It can use up the connections, the disk or the
//!   queue of notifications.
//! - With `usage` on the schema it can stop all calls to a table by a statement that waits for the
//!   table before its rights are checked, until leases end and holders lose their locks.
//! - With `execute` on `guard` it can keep a lock that is held, for as long as a transaction lasts,
//!   if it knows or finds the fencing token, and make the table of locks large. It cannot keep a
//!   lock that is free.
//! - With `execute` on `fenced` it can refuse the holders of any resource for up to a day, keep
//!   them waiting for as long as its own transaction lasts, and fill the table of resources.
//! - With the rights of a client it can grant, revoke and keep all locks.
//!
//! There are no rights to single namespaces or prefixes. Services that must not touch the locks of
//! each other need databases of their own.
//!
//! The owner of the schema, or of an object in it, can make its functions act with the rights of
//! their callers. A client refuses a schema (`Forbidden`) unless each owner is its own user, the
//! owner of the database, a superuser, or the role that
//! [`PostgresOptions::schema_owner`](crate::store::postgres::PostgresOptions::schema_owner) or the
//! parameter `schema_owner` of the URL names. A role with `create` on the database could otherwise
//! create the schema first.
//!
//! The encoding of the database must be UTF-8.
//!
//! `lock_runtime.format` contains the version of the schema, and the oldest version whose clients
//! work with it. A newer client whose user owns the schema brings it up to date, while older ones
//! work with it. Others use it as it is, and `doctor` reports the difference. A client that is too
//! old is refused with `IncompatibleFormat`. Version 2 took the right to execute the functions from
//! `PUBLIC`. Roles with `usage` on the schema at that time got it instead. Version 3 made `guard`
//! faster.
//!
//! The row of a lock is named `<namespace>:<key>`. It stays for a day after the last use of the
//! lock, or for [`keep_fences_for`](crate::LockClientBuilder::keep_fences_for). An hourly clean-up
//! by one of the clients deletes it then, or
//! [`remove_old`](crate::store::postgres::PostgresRecords::remove_old). Updates are heap-only while
//! their page has room, because no index contains a column that changes. Autovacuum is set to
//! follow soon.
//!
//! A row has some 100 bytes, and 40 bytes more for each process (not task) that waits for the lock.
//! Above about 50 waiting processes it is stored out of line, and each hand-off costs more. Locks
//! for which thousands of processes wait at once belong in Redis.
//!
//! # The holder's transaction
//!
//! ```sql
//! begin;
//! select lock_runtime.guard('lock:order:42', 1795456170925944);
//! update orders set state = 'paid' where id = 42;
//! commit;
//! ```
//!
//! `guard(name, token)` makes the lock more than a lease. While this transaction is open, the lock
//! is granted to no other client, not even after its lease has ended. If the lock was released
//! before the call, its lease has ended, or another client has got it, `guard` fails with SQLSTATE
//! `LK001`, and the transaction cannot commit. A
//! holder that was paused between the check and its write can do no harm: there is no time between
//! them. The table of the orders needs no column for it.
//!
//! - Renewals go on during the transaction.
//! - It costs a round trip. A transaction of one statement saves that with a condition
//!   `and lock_runtime.guard('lock:order:42', 1795456170925944) is not null`, which is evaluated
//!   only for rows that fulfil the others.
//! - End the transaction before you release, drop or downgrade the guard of the lock. Otherwise a
//!   waiter in another process polls until the end of the transaction, and is served some 50 ms
//!   after it, instead of at once. Tasks of one process hand a lock off without the database,
//!   and readers join a downgraded lock, also while the transaction is open. A task that is
//!   cancelled drops both: its transaction ends when the server has processed the rollback.
//! - Call `guard` first in a transaction with the isolation level `repeatable read` or
//!   `serializable`. If the lock was granted after the snapshot of the transaction, or the lease
//!   that the snapshot shows has ended, it fails with SQLSTATE 40001, as updates do there, and can
//!   be repeated. After `LK001` it cannot.
//! - After a revocation of all holders, `guard` refuses them at once, unless one of their
//!   transactions with `guard` was open then. While readers overlap, the tokens of those that were
//!   revoked or have released the lock still pass, and so does that of a writer that was
//!   downgraded.
//! - A transaction that stays open keeps the lock from all other clients. `inspect` names its
//!   session ([`blocked_by`](crate::Inspection::blocked_by)). Set
//!   `idle_in_transaction_session_timeout`, and `tcp_keepalives_idle` for clients that vanish, on
//!   the sessions that call `guard`. A prepared transaction has no session: see
//!   `pg_prepared_xacts`.
//! - `guard` locks the row of the lock `for key share`.
//! - `guard` is for exclusive locks and for readers and writers. Permits do not exclude each other.
//!
//! # Other sessions
//!
//! A session that has locked the row of a lock, such as that of an operator after
//! `select .. for update`, delays the requests for that lock alone. They fail with
//! [`Blocked`](crate::LockErrorKind::Blocked), which is no outage: the HTTP status is 409, and the
//! circuit breaker stays closed. A request that waits tries again until its wait is over. The lock
//! is renewed once the row is free, and is lost if its lease ends before. `inspect` names the
//! session, and `health` (`lockctl doctor`) those whose transactions have lasted for two seconds,
//! as `blocked_records`; of sessions of other roles only with the right `pg_read_all_stats`.
//!
//! The server keeps each version of a row for the oldest transaction of the database that may read
//! it. Beside a report of a minute, a lock that is acquired hundreds of times a second loses two
//! thirds of its rate, and more beside a longer one: any transaction that stays open, a replication
//! slot, a prepared transaction, and a standby with `hot_standby_feedback` have this effect, in the
//! same database only. Where `guard` is not needed, keep busy locks in a database of their own.
//! `health` reports a transaction that is 20,000 others behind as `old_horizon`.
//!
//! # Outages
//!
//! What [the page on Redis](super::redis#outages) says about requests in an outage, and
//! [`unavailable_after`](crate::LockClientBuilder::unavailable_after), hold here as well, and for
//! any [store of records](super::stores). A server is away if calls fail without a reply, or get
//! none for two seconds or `unavailable_after`, and a probe gets none either.
//!
//! # Commits
//!
//! Grants, hand-offs and renewals are on the disk when the call returns. Commits whose loss costs
//! waiting and no more do not wait for the disk (`synchronous_commit = off`): enqueuing, polls,
//! abandonments, names of clients, and releases for which no request waits. A crash of the server
//! may undo the last ones. The lock is then with its previous holder until that lease ends, and the
//! waiters enqueue again. The other commits wait even if the server, the database or the user has
//! `synchronous_commit = off`; a level such as `remote_apply` is kept.
//!
//! # Standbys
//!
//! With asynchronous replication, a standby that is promoted may lack the last grants, and grants
//! them to other clients as well: two holders until the first one notices by its next renewal, or
//! at the end of its lease without renewals. Fencing tokens keep increasing if the clocks of the
//! servers differ by less than the duration of the failover. With `synchronous_standby_names`, and
//! unless `synchronous_commit` is `local`, a grant is on the standby before it is returned, so no
//! holder loses its lock. With exclusive locks, `guard` protects the data of the same database in
//! both cases, because a promoted standby that lacks the grant also lacks the holder's transactions
//! after it. A writer whose grant was lost may have a token between those of readers that overlap,
//! and passes until it notices the loss.
//!
//! # Poolers
//!
//! PgBouncer works in session mode, and in transaction mode as well: each call is one transaction.
//! A client prepares statements and listens only on connections to the server itself, which it
//! recognizes by the process that the server has announced. Behind a pooler, waiters find their
//! grants by a poll: the first after 20 ms, each next one after twice as long, up to a second.
//! Hand-offs are that much later. Connect to the server itself to avoid that: four
//! connections per process are enough for most services. A pooler also hides a failover of the
//! server from a client, which notices it by the failure of a call.
//!
//! # Notifications
//!
//! Up to version 18, PostgreSQL wakes every listening connection of the database for each
//! notification. Only hand-offs to waiting processes notify, and only processes with waiting
//! requests listen, so idle clients cost nothing. A lock for which dozens of processes wait costs
//! their wake-ups with each hand-off. Commits with notifications take one lock of the server, so
//! the hand-offs of all locks follow one another.
//!
//! A holder whose process has no waiting request does not listen. It notices a revocation at its
//! next renewal, and a lock without renewals at the end of its lease. `guard` refuses its
//! transactions before that.
