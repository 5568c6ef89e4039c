//! Stores of small records, on which [`RecordStore`] builds locks.
//!
//! [`Records`] is the trait for a database that can replace a record if it has not changed. All
//! rules of locks are in [`RecordStore`]: modes, wait queues, hand-offs, renewal, revocation.

mod adapter;
mod execution;
#[cfg(test)]
#[path = "../../../fuzz/records.rs"]
mod fuzz;
#[cfg(any(feature = "postgres", feature = "etcd"))]
pub(super) mod groups;
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
pub(super) mod inboxes;
mod name;
mod news;
mod probe;
pub(crate) mod shared_clock;
mod step;
mod store;
#[cfg(test)]
mod tests;

/// Access for the simulators.
#[cfg(test)]
pub(crate) mod sim {
    pub(crate) use super::{
        Record, Timestamp,
        step::{
            body::{Body, Origin},
            clock::Now,
            evaluation::{Caused, Lock, Terms, Writes, evaluate},
            outcome::{Outcome, Passed},
        },
    };
}

use std::{
    fmt,
    future::ready,
    num::NonZeroU64,
    ops::RangeInclusive,
    sync::Weak,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::{BoxFuture, join_all};

use super::{ClientId, KeyPart, Limits, Replied, Replies, StoreError, StoreErrorKind};
use crate::{guard::fence::FencingToken, observe::health::Health};

pub use self::{
    adapter::RecordStore,
    name::RecordName,
    shared_clock::{Run, SharedClock, Tick, Ticked},
};

/// A database of small records with versions, which all clients share. [`RecordStore`] makes it a
/// store of locks. The guide has a [page](crate::guide::stores) about it.
///
/// A future may be dropped at any await point. The database may or may not execute its call then.
///
/// The [conformance suite](https://docs.rs/lock-conformance) tests an implementation.
pub trait Records: fmt::Debug + Send + Sync + 'static {
    /// Replaces all records of `swap` and sends its messages, or does nothing.
    ///
    /// The records are replaced in one atomic step, and only if the clock has reached
    /// [`Swap::not_before`] and every record has the version [`Change::known`]. The step is
    /// complete, and survives a crash of the database, when the reply is sent. Only a swap that is
    /// not [`durable`](Swap::durable) may be undone by a crash, together with all swaps after it.
    ///
    /// # Errors
    /// Any error means that the outcome is unknown, unless the error
    /// [is unsent](StoreError::is_unsent).
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply>;

    /// Makes independent swaps, which may share a round trip. Returns a reply for each of them, in
    /// the same order.
    fn swap_each<'a>(&'a self, swaps: &'a [Swap]) -> Replies<'a, SwapReply> {
        Box::pin(join_all(swaps.iter().map(|swap| self.swap(swap))))
    }

    /// Makes the swap that [`decide`](Decide::decide) returns for the present records, and lets no
    /// other client change them in between. It returns `None` to change nothing.
    ///
    /// [`RecordStore`] calls it for records that other clients change at the same time, so that
    /// each of them succeeds in its turn. `None`, the default, makes it repeat its swaps instead.
    #[doc(hidden)]
    fn update<'a>(
        &'a self,
        names: &'a [RecordName],
        decide: Decide<'a>,
    ) -> Option<Replied<'a, Option<SwapReply>>> {
        let _ = (names, decide);
        None
    }

    /// Returns the present records, in the same order. `names` may be empty, for the time alone.
    ///
    /// A read that begins after the reply to a swap returns the result of that swap or of a later
    /// one. A crash must not undo a swap whose result was returned, except as it may undo a swap
    /// that is not [`durable`](Swap::durable).
    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply>;

    /// Returns some of the records whose names begin with `prefix` and come after `after`, in
    /// ascending order of the bytes of their names. No records mean that there are no more.
    ///
    /// `after` is the last name of the previous reply. Its record may be deleted by now.
    ///
    /// # Errors
    /// `Unsupported` in this implementation, for a database that cannot list its records.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a RecordName>,
    ) -> Replied<'a, Vec<(RecordName, Record)>> {
        let _ = (prefix, after);
        let message = "the store cannot list its locks";
        let error = StoreError::new(StoreErrorKind::Unsupported, message);
        Box::pin(ready(Err(error)))
    }

    /// Returns the requests that the store supports, the same ones each time.
    /// [`Limits::keys_at_once`] is the largest number of changes in one swap.
    ///
    /// By default, all requests are supported and there are no messages, so that waiters poll.
    fn limits(&self) -> Limits {
        Limits::new().push(false)
    }

    /// Returns whether messages arrive at present: [`Limits::push`] by default.
    fn sends_messages(&self) -> bool {
        self.limits().push
    }

    /// Returns whether calls may be made on any Tokio runtime, also on one of this library that
    /// ends sooner than the application's; `false` by default, for connections that belong to the
    /// runtime on which they were made.
    ///
    /// A task that blocks its runtime then loses no lock: a thread with a runtime of its own renews
    /// the leases meanwhile.
    fn serves_any_runtime(&self) -> bool {
        false
    }

    /// Returns whether only those who may replace a record can send messages about it. A message
    /// that grants a lock contains the record then, which saves the new holder a call. If others
    /// can send messages, they can take away every lock. `false` by default.
    fn trusts_messages(&self) -> bool {
        false
    }

    /// Passes messages and interruptions to `inbox` from now on. Does nothing by default.
    fn listen(&self, inbox: Weak<dyn Inbox>) {
        let _ = inbox;
    }

    /// Prepares for messages to `client`. They are passed to the inbox once the returned future is
    /// ready, and for ten seconds at least. It is ready at once if nothing has to be prepared.
    fn expect_messages(&self, client: ClientId) -> BoxFuture<'_, ()> {
        let _ = client;
        Box::pin(ready(()))
    }

    /// Returns the sessions of the database, other than clients, that have locked the record until
    /// their transactions end, in words for an operator. By default there are none.
    fn blockers<'a>(&'a self, name: &'a RecordName) -> Replied<'a, Vec<String>> {
        let _ = name;
        Box::pin(ready(Ok(Vec::new())))
    }

    /// Returns the name under which the database keeps a part of a lock, for messages.
    fn place_of(&self, name: &RecordName, part: KeyPart) -> Option<String> {
        let _ = (name, part);
        None
    }

    /// Returns the name of a record for `lock_runtime.guard` in the transactions of a holder.
    #[doc(hidden)]
    fn guarded_name(&self, name: &RecordName) -> Option<String> {
        let _ = name;
        None
    }

    /// Makes a swap in a transaction of the application, with which it takes effect.
    #[cfg(feature = "postgres")]
    #[doc(hidden)]
    fn swap_in<'a>(
        &'a self,
        swap: &'a Swap,
        transaction: &'a tokio_postgres::Transaction<'a>,
    ) -> Replied<'a, SwapReply> {
        let _ = (swap, transaction);
        Box::pin(ready(Err(StoreError::elsewhere())))
    }

    /// Returns the state of the database, within about a second. `None`, the default, lets
    /// [`RecordStore`] make a call and report its result.
    fn health(&self) -> Option<BoxFuture<'_, Health>> {
        None
    }
}

/// A choice of a swap by the present records, for [`Records::update`].
#[doc(hidden)]
pub struct Decide<'a> {
    caller: Caller,
    choose: Box<dyn FnOnce(ReadReply) -> Option<Swap> + Send + 'a>,
}

impl<'a> Decide<'a> {
    pub(super) fn new(
        caller: Caller,
        choose: impl FnOnce(ReadReply) -> Option<Swap> + Send + 'a,
    ) -> Self {
        Self {
            caller,
            choose: Box::new(choose),
        }
    }

    /// Returns the caller of the operation.
    pub fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Returns the swap to make for the present records, if there is one to make.
    pub fn decide(self, present: ReadReply) -> Option<Swap> {
        (self.choose)(present)
    }
}

impl fmt::Debug for Decide<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decide")
            .field("caller", &self.caller)
            .finish_non_exhaustive()
    }
}

/// The caller of an operation.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Caller(pub(super) Weak<()>);

impl Caller {
    /// Returns whether it waits for the result. If not, the operation changes nothing, and the
    /// records need not be locked for it.
    pub fn is_waiting(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// A receiver of messages.
pub trait Inbox: Send + Sync {
    /// Handles a message, and returns at once. Messages may be lost, duplicated or late.
    fn deliver(&self, message: &[u8]);

    /// Handles the end or the return of the connection to the database. After its end, messages
    /// may have been lost, and the database may be another one that has less data.
    fn connected(&self, is_connected: bool);
}

/// A change of several records in one atomic step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Swap {
    /// The changes, of different records. No more than [`Limits::keys_at_once`].
    pub changes: Vec<Change>,
    /// The messages to send if the records are replaced.
    pub messages: Vec<Message>,
    /// The time before which the records are not replaced. It has normally passed; a clock that was
    /// set back, or that is behind the clock of an earlier server, has not reached it.
    pub not_before: Timestamp,
    /// Whether the swap must survive a crash. Ignored by a database whose swaps always do.
    ///
    /// If `false`, a crash that undoes the swap costs waiting and never safety.
    pub durable: bool,
}

impl Swap {
    /// Creates a durable swap without messages.
    pub fn new(changes: Vec<Change>, not_before: Timestamp) -> Self {
        Self {
            changes,
            messages: Vec::new(),
            not_before,
            durable: true,
        }
    }
}

/// A change of one record.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Change {
    /// The name of the record.
    pub name: RecordName,
    /// The version that the record must have. `None`: there must be no record.
    pub known: Option<Version>,
    /// The new record.
    pub record: Record,
    /// The fencing tokens with which the present holders write, or wrote last, from the oldest to
    /// the latest. Empty once these were revoked. For a database that can compare them within a
    /// transaction of the user.
    pub fences: Option<RangeInclusive<FencingToken>>,
    /// The time after which the database may delete the record, and should.
    pub needed_until: Timestamp,
}

impl Change {
    /// Creates a change without fencing tokens.
    pub fn new(
        name: RecordName,
        known: Option<Version>,
        record: Record,
        needed_until: Timestamp,
    ) -> Self {
        Self {
            name,
            known,
            record,
            fences: None,
            needed_until,
        }
    }
}

/// A record and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The version.
    pub version: Version,
    /// The content.
    pub body: Vec<u8>,
}

impl Record {
    /// Creates a record from its parts, which the database keeps.
    pub fn new(version: Version, body: Vec<u8>) -> Self {
        Self { version, body }
    }
}

/// The version of a record: a random number, chosen anew for each change. So no version ever comes
/// back, not even after a database has lost its latest changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(NonZeroU64);

impl Version {
    pub(in crate::store) fn random() -> Self {
        // It stays below `i64::MAX`.
        Self(NonZeroU64::MIN.saturating_add(rand::random::<u64>() >> 2))
    }

    /// Wraps the number of a version. Returns `None` for zero and for numbers above [`i64::MAX`].
    pub fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number)
            .filter(|number| i64::try_from(number.get()).is_ok())
            .map(Self)
    }

    /// Returns the number, which fits a signed 64-bit column.
    pub fn number(self) -> u64 {
        self.0.get()
    }
}

/// A message to a client: a hint, which may be lost, duplicated or late.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Message {
    /// The addressee.
    pub to: ClientId,
    /// The content, at most [`MAX_BYTES`](Self::MAX_BYTES).
    pub body: Vec<u8>,
}

impl Message {
    /// The longest content, in bytes.
    pub const MAX_BYTES: usize = 4096;

    /// Creates a message.
    pub fn new(to: ClientId, body: Vec<u8>) -> Self {
        Self { to, body }
    }
}

/// A time by the clock of the database, in microseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Creates a time from microseconds since 1970.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns the present time by the clock of this machine, for a database whose clients all run
    /// on it.
    pub fn of_system() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(since.map_or(0, |since| since.as_micros() as u64))
    }

    /// Returns the microseconds since 1970.
    pub const fn micros(self) -> u64 {
        self.0
    }

    pub(crate) fn later(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by.as_micros() as u64))
    }

    pub(crate) fn earlier(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by.as_micros() as u64))
    }

    /// Returns the time since `earlier`, zero if that is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// The reply to [`Records::swap`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SwapReply {
    /// The time by the clock of the database, read while it executed the call.
    pub now: Timestamp,
    /// A time that this clock had not passed, `now` if it is exact.
    pub latest: Timestamp,
    /// The outcome.
    pub outcome: Swapped,
}

impl SwapReply {
    /// Creates a reply with the exact time.
    pub fn new(now: Timestamp, outcome: Swapped) -> Self {
        Self {
            now,
            latest: now,
            outcome,
        }
    }

    /// Sets a time that the clock had not passed. Without it, a database whose time is known less
    /// precisely than its calls take grants a lock before it is free.
    #[must_use]
    pub fn latest(self, latest: Timestamp) -> Self {
        Self { latest, ..self }
    }
}

/// The outcome of a swap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Swapped {
    /// All records were replaced.
    Done,
    /// At least one record has another version than the known one. Nothing was changed. Contains
    /// the present records, in the order of the changes.
    Conflict(Vec<Option<Record>>),
    /// The clock has not reached [`Swap::not_before`]. Nothing was changed.
    Early,
    /// A change of [`Change::fences`] has to wait until a transaction of the user ends, which has
    /// compared its fencing token. Nothing was changed. Never the outcome where users cannot
    /// compare tokens within their transactions.
    Guarded,
}

/// The reply to [`Records::read`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReadReply {
    /// The time by the clock of the database, read while it executed the call.
    pub now: Timestamp,
    /// A time that this clock had not passed, `now` if it is exact.
    pub latest: Timestamp,
    /// The records, in the order of the names. `None` for a name without a record.
    pub records: Vec<Option<Record>>,
}

impl ReadReply {
    /// Creates a reply with the exact time.
    pub fn new(now: Timestamp, records: Vec<Option<Record>>) -> Self {
        Self {
            now,
            latest: now,
            records,
        }
    }

    /// Sets a time that the clock had not passed. See [`SwapReply::latest`].
    #[must_use]
    pub fn latest(self, latest: Timestamp) -> Self {
        Self { latest, ..self }
    }
}
