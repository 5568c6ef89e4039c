//! How to make it safe: fencing tokens compared by the resource.
//!
//! A holder that was paused may write after its lease has ended
//! ([`limits`](super::limits#a-paused-holder-still-writes)). The resource can refuse that write:
//! it remembers the largest [`FencingToken`](crate::FencingToken) it has seen, and compares in the
//! step that writes. A comparison before that step leaves the gap open.
//!
//! | Resource | Compared by |
//! |---|---|
//! | [PostgreSQL](#postgresql) | the function `lock_runtime.fenced` in your transaction |
//! | [PostgreSQL that also keeps the locks](#locks-in-the-same-database) | `lock_runtime.guard` |
//! | [SQLite, other SQL databases](#a-column-of-the-row) | a column of the row |
//! | [MySQL](#mysql) | a row lock and a comparison in the transaction |
//! | [Redis](#redis) | a script |
//! | [HTTP services, object stores](#http-services-and-object-stores) | the service, or an ETag |
//!
//! # PostgreSQL
//!
//! It does not matter where the locks are kept, or which client library the transaction uses. No
//! table of yours gets a column.
//!
//! Copy [`fencing.sql`] to your migrations, or execute [`fencing::MIGRATION`], which is the same
//! file. It creates the schema `lock_runtime` and may run in several processes at once, and again.
//! Then call `fenced` **first in the transaction**:
//!
//! ```sql
//! begin;
//! select lock_runtime.fenced('account:7', 1795456170925944);
//! update account set balance = balance - 10 where id = 7;
//! commit;
//! ```
//!
//! With `tokio-postgres` and the feature `postgres`:
//!
#![cfg_attr(feature = "postgres", doc = "```no_run")]
#![cfg_attr(not(feature = "postgres"), doc = "```ignore")]
//! use lock_runtime::{LockClient, LockGuard, fencing};
//! use tokio_postgres::{Client, NoTls};
//!
//! async fn withdraw(
//!     db: &mut Client, guard: &LockGuard, amount: i64,
//! ) -> Result<(), fencing::FencingError> {
//!     let transaction = db.transaction().await?;
//!     fencing::fenced(&transaction, "account:7", guard.fence()).await?;
//!     let update = "update account set balance = balance - $1 where id = 7";
//!     transaction.execute(update, &[&amount]).await?;
//!     Ok(transaction.commit().await?)
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockClient::connect("redis://127.0.0.1/").await?;
//! let (mut db, connection) = tokio_postgres::connect("postgres://127.0.0.1/shop", NoTls).await?;
//! tokio::spawn(connection);
//! fencing::install(&db).await?; // once; its comment names the rights of other roles
//!
//! let guard = locks.exclusive("account:7").acquire().await?;
//! match withdraw(&mut db, &guard, 10).await {
//!     Err(error) if error.is_stale() => println!("the lock was lost: {error:#}"),
//!     result => result?,
//! }
//! # Ok(()) }
//! ```
//!
//! With sqlx 0.8, as with any other library, by plain SQL. `sqlx::raw_sql` executes the migration:
//!
//! ```text
#![doc = include_str!("fencing/sqlx.rs")]
//! ```
//!
//! The promise: transactions of a resource are committed in the order of their tokens, and each
//! reads all that the earlier ones have written.
//!
//! - **A refusal** has SQLSTATE `LK001` ([`fencing::STALE`]). The transaction cannot commit. Do not
//!   repeat it: a later holder has written. Stop, and write nothing more under this lock.
//! - **Concurrent transactions** on one resource wait for each other. The second compares after the
//!   first has ended.
//! - **`repeatable read` and `serializable`**: if another transaction on the resource has been
//!   committed since the transaction began to read, the call fails with SQLSTATE 40001, as any
//!   other update does. Repeat the transaction as usual: it then passes or is refused.
//! - **A rollback**, also to a savepoint, takes the call back.
//! - **Outside of a transaction** the call is one of its own and protects no later statement. The
//!   functions of the module [`fencing`] therefore take a `Transaction`.
//! - **Called at the end**, it still stops a stale holder, but what the transaction has read before
//!   may lack the writes of an earlier holder that was late.
//! - **A token far ahead**: a token that is later than the clock of the database by more than a day
//!   is an error with SQLSTATE 22023, as it would refuse all later holders. Tokens are times in
//!   microseconds since 1970, of the clock of the store that keeps the locks.
//! - **Several resources**: call it for each in a fixed order, such as that of their names;
//!   otherwise two transactions may deadlock.
//! - **A holder** may call it in many transactions, and re-entered guards share one token.
//! - **Names**: one name for one resource in all services. It need not be the key of the lock, but
//!   all writers of the resource must hold the same lock, as tokens of different keys or stores
//!   have no order. A name has at most about 2,700 bytes.
//! - **Size**: one row for each resource. Tokens contain the time of the grant in microseconds
//!   since 1970, so the owner of the schema can remove rows of holders that cannot be alive:
//!
//! ```sql
//! delete from lock_runtime.seen
//!     where fence < extract(epoch from now() - interval '7 days') * 1000000;
//! ```
//!
//! Other roles need two rights, which the owner of the schema grants. Every role that has them can
//! refuse the holders of every resource for up to a day, with a token of tomorrow, or keep them
//! waiting for as long as its transaction lasts. There are no rights to single resources or
//! prefixes.
//!
//! ```sql
//! grant usage on schema lock_runtime to my_service;
//! grant execute on function lock_runtime.fenced to my_service;
//! ```
//!
//! The owner repairs resources whose token is in the future, or one of them by its name. Holders of
//! before are then refused, and those of later grants are not:
//!
//! ```sql
//! set search_path = pg_catalog, pg_temp;
//! update lock_runtime.seen set fence = extract(epoch from clock_timestamp()) * 1000000
//!     where fence > extract(epoch from clock_timestamp() + interval '24 hours') * 1000000;
//! ```
//!
//! # Locks in the same database
//!
//! Where PostgreSQL also keeps the locks, `guard` compares with the lock itself:
//!
//! ```sql
//! select lock_runtime.guard('lock:order:42', 1795456170925944)
//! ```
//!
//! While the transaction is open, the lock is granted to no other client, even after its lease.
//! After the release, after the end of the lease, or after the next grant to another client, the
//! holder is refused with `LK001`. Renewals pass.
//! End the transaction before you release the lock; [`postgres`](super::postgres) has the details.
//! In Rust: `fencing::guard(&transaction, name, token)`.
//!
//! # A column of the row
//!
//! In SQLite, and in every other SQL database, one statement compares and writes. With a column
//! `fence BIGINT NOT NULL DEFAULT 0`:
//!
//! ```sql
//! UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence <= :fence
//! ```
//!
//! If the statement changes no row, a later holder has written. Stop, and write nothing more
//! under this lock. The comparison is `<=`, because a holder may write more than once, and a
//! guard that re-entered has the token of the outer one. A row that may not exist yet is compared
//! in the same way:
//!
//! ```sql
//! INSERT INTO orders (id, state, fence) VALUES (:id, 'paid', :fence)
//!     ON CONFLICT (id) DO UPDATE SET state = excluded.state, fence = excluded.fence
//!         WHERE orders.fence <= excluded.fence
//! ```
//!
//! Deleting the row also deletes the record of its tokens. Mark the row as deleted instead.
//!
//! # MySQL
//!
//! The `UPDATE` above works, the `INSERT` does not: `ON DUPLICATE KEY UPDATE` takes no condition.
//! For several statements keep a table `seen (resource VARBINARY(512) PRIMARY KEY, fence BIGINT NOT
//! NULL)`. Begin the transaction with `INSERT IGNORE INTO seen VALUES (?, 0)`, read the row with
//! `SELECT fence FROM seen WHERE resource = ? FOR UPDATE`, roll back if it is larger than the
//! token, and otherwise write the token. This is not tested here.
//!
//! # Redis
//!
//! A script is one step. Keep the token beside the data, without an expiry, and on a Cluster in the
//! same slot, such as `{account:7}` and `{account:7}:fence`:
//!
//! ```lua
#![doc = include_str!("fencing/write.lua")]
//! ```
//!
//! All writers have to use the script. A server that loses its data also loses the tokens.
//!
//! # HTTP services and object stores
//!
//! Send the token in a header, and let the service compare it by one of these means. Object stores
//! compare no tokens: read the object's ETag under the lock and write with `If-Match`, which fails
//! if another holder has written since.
//!
//! # Nothing can compare
//!
//! Then a lock saves work, but it does not ensure correctness. Make the work idempotent.
//!
//! [`fencing`]: crate::fencing
//! [`fencing::MIGRATION`]: crate::guard::fencing::MIGRATION
//! [`fencing::STALE`]: crate::guard::fencing::STALE
//! [`fencing.sql`]: https://docs.rs/crate/lock-runtime/latest/source/src/fencing/fencing.sql
