//! Locks in a database of your own.
//!
//! A database that can replace a record on condition that it has not changed can keep locks:
//! [`RecordStore`] builds them on the trait [`Records`]. All rules are in [`RecordStore`]: modes,
//! several keys, wait queues and hand-off, renewal, conversion, revocation, lists. They are the
//! rules of the in-memory store. PostgreSQL is such a database
//! ([`PostgresRecords`](crate::store::postgres::PostgresRecords)).
//!
//! # The trait
//!
//! A record has a name, a version and a content of some 100 bytes for a lock, and 40 bytes more for
//! each process that waits for it. The content is binary. A [name](RecordName) is UTF-8 text in
//! which any character may occur: compare the bytes, without regard to a collation or a
//! normalization. It contains no namespace. If a database has several sets of locks, prefix the
//! names, and remove the prefix in [`list`](Records::list).
//!
//! Two methods are required:
//!
//! - [`read`](Records::read) returns records, and the time by the clock of the database. It is also
//!   called without names, for the time.
//! - [`swap`](Records::swap) replaces the records of its [changes](Change) in one atomic step. Each
//!   of them must have its [known version](Change::known); `None` means that there must be no such
//!   record. The new version is in the change. Compare versions, and store them; do not make them
//!   up.
//!
//! The outcomes of a swap, in the order in which they are checked:
//!
//! | Condition | Outcome |
//! |---|---|
//! | The clock shows a time before [`Swap::not_before`] | [`Swapped::Early`] |
//! | A record has another version than its known one | [`Swapped::Conflict`] |
//! | otherwise | the records are replaced: [`Swapped::Done`] |
//!
//! `Conflict` contains the present records of all changes. The reply contains the time, too. Read
//! the clock and compare the versions within the atomic step. Nothing of a swap may take effect
//! with another outcome than `Done`.
//!
//! Methods are called concurrently, within a tokio runtime. They return a boxed future,
//! [`Replied`](crate::store::Replied). Blocking calls belong in `spawn_blocking`.
//!
//! # The clock
//!
//! All clients must use the same clock, in [microseconds since 1970](Timestamp). A lease ends when
//! that clock reaches its end, so it should be that of the server. If all clients run on one
//! machine, [`Timestamp::of_system`] will do. A clock that is set back makes leases longer. One
//! that is set forward ends leases early, before their holders notice. Fencing tokens keep
//! increasing in both cases, unless a clock is set back by more than a day, or by more than
//! [`keeping_fences_for`](RecordStore::keeping_fences_for).
//!
//! # Durability
//!
//! A swap that was answered with `Done` must not be undone, because a client relies on its lock
//! from then on. Swaps that are not [`durable`](Swap::durable) are an exception: they enqueue a
//! request, or release a lock for which no request waits. If a crash undoes one of these, all later
//! swaps must be undone as well, as with a log that is written in order. Otherwise treat all swaps
//! as durable.
//!
//! A record that is returned must be durable as well, in a reply to [`read`](Records::read) as in a
//! `Conflict`: a waiter that reads its grant relies on it. A change that is visible before it is
//! safe on disk must not be returned yet.
//!
//! # Messages
//!
//! Without messages, a waiter finds its grant by a poll, up to a second late. With them it gets its
//! lock at once. [`Swap::messages`] are sent if and when the swap takes effect, to the process with
//! the [client](Message::to), which passes them to its [`Inbox`]. They may be lost, doubled or
//! late. A database with messages returns [`Limits::push`](crate::store::Limits::push) as `true`
//! from [`limits`](Records::limits).
//!
//! # Old records
//!
//! The record of a free lock is still needed: it contains the latest fencing token, and it makes
//! delayed requests fail. It may be deleted after [`Change::needed_until`], by default a day after
//! its last use, by the clock of the database. Delete it in a step of its own or within a swap, and
//! only if its version is still the one with that time. Until it is deleted, it may be returned.
//!
//! # Optional methods
//!
//! [`list`](Records::list) makes the locks visible to [`LockClient::list`](crate::LockClient::list)
//! and to `lockctl ls`. It returns all records of the prefix, also those of free locks and those
//! that are no locks, in pages of a length of its choice. [`swap_each`](Records::swap_each) lets
//! the renewals of many locks share a round trip. [`update`](Records::update) serves clients in
//! turn that change the same record, where the database can lock it for a moment. Its caller may
//! have ended before ([`Decide::caller`]); then it changes nothing.
//!
//! # Errors
//!
//! An error means that the outcome is unknown, and the client acts accordingly: it abandons a
//! request, which changes the version of the record, so that the request has no effect any more if
//! it arrives late. Do not repeat a swap whose reply was lost; it would be a `Conflict` with
//! itself. Calls need no time-out: a client that has waited for min(lease/6, 500 ms) drops the
//! future.
//!
//! If another session of the database has locked the record, and the call would have to wait for
//! it, return [`Blocked`](crate::store::StoreErrorKind::Blocked): the client tries again, and it
//! does not count as an outage.
//!
//! If the request was certainly not sent, say so with
//! [`StoreError::with_unsent`](crate::store::StoreError::with_unsent).
//!
//! The [kind](crate::store::StoreErrorKind) decides about retries. `Unavailable` is for failures
//! that may pass: the client tries again. Use another kind only for a failure that an operator has
//! to repair.
//!
//! # Example
//!
//! Records in a file, for the processes of one machine:
//!
#![cfg_attr(unix, doc = "```")]
#![cfg_attr(not(unix), doc = "```ignore")]
#![doc = include_str!("stores/files.rs")]
//! ```
//!
//! # Testing it
//!
//! The [conformance suite](https://docs.rs/lock-conformance) is the test suite of the stores of
//! this crate:
//!
//! ```text
//! lock_conformance::conformance!(async || Arc::new(RecordStore::new(MyRecords::connect().await)));
//! lock_conformance::conformance!(records: async || Arc::new(MyRecords::connect().await));
//! ```

#[cfg(doc)]
use crate::store::records::{
    Change, Decide, Inbox, Message, RecordName, RecordStore, Records, Swap, Swapped, Timestamp,
};
