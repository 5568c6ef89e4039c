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
//! | `sslmode=require` | TLS, with the feature `postgres-rustls` |
//! | `sslrootcert=file` | the authorities to trust (PEM), instead of those of the system |
//! | `target_session_attrs=read-write` | of several hosts, use the one that is no standby |
//! | `connect_timeout=2` | in seconds; 2 by default |
//!
//! With TLS the certificate of the server is always verified, so `sslmode=verify-full` means the
//! same as `require`.
//!
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
//! waits for a lock.
//!
//! # Schema and rights
//!
//! Locks are rows of the table `lock_runtime.record`. The first client creates the schema, if its
//! user may do so. Otherwise execute
//! [`MIGRATION`](crate::store::postgres::MIGRATION) as the owner of the database, and grant:
//!
//! ```sql
//! grant usage on schema lock_runtime to app;
//! grant select, insert, update, delete on all tables in schema lock_runtime to app;
//! ```
//!
//! The row of a lock is named `<namespace>:<key>`. It stays for a day after the last use of the
//! lock. An hourly clean-up by one of the clients deletes it then. Updates are heap-only, because
//! no index contains a column that changes, so a hot lock needs no vacuum to stay fast.
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
//! is granted to no other client, not even after its lease has ended. If the lock was granted to
//! another client before, `guard` fails with SQLSTATE `LK001`, and the transaction cannot commit. A
//! holder that was paused between the check and its write can do no harm: there is no time between
//! them. The table of the orders needs no column for it.
//!
//! - Renewals go on during the transaction.
//! - End the transaction before you release the lock. Otherwise the next waiter is served by its
//!   next poll, up to a second after the end of the transaction, instead of at once.
//! - Call `guard` first in a transaction with the isolation level `repeatable read` or
//!   `serializable`. If the lock was renewed or granted after the snapshot of the transaction, it
//!   fails with SQLSTATE 40001, as updates do there, and can be repeated. After `LK001` it cannot.
//! - `guard` holds an advisory lock of the database, in shared mode, until the end of the
//!   transaction. A grant tries the same lock, without waiting for it.
//! - `guard` is for exclusive locks and for readers and writers. Permits do not exclude each other.
//!
//! # Commits
//!
//! Grants, hand-offs and renewals are on the disk when the call returns. Commits whose loss costs
//! waiting and no more do not wait for the disk (`synchronous_commit = off`): enqueuing, polls,
//! abandonments, and releases for which no request waits. A crash of the server may undo the last
//! ones. The lock is then with its previous holder until that lease ends, and the waiters enqueue
//! again.
//!
//! # Standbys
//!
//! With asynchronous replication, a standby that is promoted may lack the last grants, and grants
//! them to other clients as well: two holders until the first one notices, at most a third of its
//! lease later. Fencing tokens keep increasing if the clocks of the servers differ by less than the
//! duration of the failover. With `synchronous_standby_names`, a grant is on the standby before it
//! is returned, and nothing is lost. `guard` protects the data of the same database in both cases,
//! because a promoted standby that lacks the grant also lacks the holder's transactions after it.
//!
//! # Poolers
//!
//! PgBouncer works in session mode, and in transaction mode as well: each call is one transaction
//! without prepared statements. In transaction mode no notifications arrive. Waiters then find
//! their grants by a poll, up to a second late.
//!
//! # Notifications
//!
//! Up to version 18, PostgreSQL wakes every listening connection of the database for each
//! notification. Only hand-offs to waiting processes notify, and only processes with waiting
//! requests listen, so idle clients cost nothing. A lock for which dozens of processes wait costs
//! their wake-ups with each hand-off.
