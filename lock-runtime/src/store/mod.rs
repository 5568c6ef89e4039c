//! Lock stores and their errors, and [`records`] for a database of your own.

// The contract of stores is the trait `Store`. `MemoryStore` is the reference: the same sequence of
// operations on it and on any other store gives the same replies. The trait deals with single
// acquisitions (`Hold`s), which are identified by their tokens. The wait queues within this
// process, renewal and retries are up to the runtime.
//
// A store may be called from any task, and any of its futures may be dropped at any await point.
// The outcome is then unknown to the caller, which calls `Store::abandon`.

use std::{
    any::Any,
    fmt,
    future::ready,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;

use crate::{
    guard::fence::FencingToken,
    observe::health::{self, Health},
    request::key::LockKey,
    request::spec::LockKind,
};

pub(crate) mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
mod event;
pub(crate) mod identity;
pub(crate) mod inspection;
mod limits;
mod listing;
mod memory;
mod message;
#[cfg(any(feature = "redis", feature = "records"))]
pub(crate) mod namespace;
#[cfg(feature = "postgres")]
pub mod postgres;
mod quorum;
#[cfg(feature = "records")]
pub mod records;
#[cfg(feature = "redis")]
pub mod redis;
pub(crate) mod remote;
pub(crate) mod table;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

pub use error::{StoreError, StoreErrorKind};
pub(crate) use identity::{ClientId, HolderId, Identity};
pub(crate) use identity::{default_name, presentable};
pub(crate) use inspection::{Holder, Inspection, Waiter};
pub use limits::Limits;
pub use message::KeyPart;
#[cfg(any(feature = "redis", feature = "records"))]
pub(crate) use message::MOST_RESERVED;
pub(crate) use message::RETAINED;
#[cfg(feature = "redis")]
pub(crate) use quorum::{check_count, majority};
#[cfg(feature = "records")]
pub use records::{RecordStore, Records};
// The contract between a client and a store, see `Store`. It may change in any minor release.
#[doc(hidden)]
pub use {
    event::{Listener, Listeners, StoreEvent},
    inspection::{RevokeReply, RevokeScope},
    listing::{Cursor, Page},
    memory::MemoryStore,
    message::{
        AcquireAllReply, AcquireReply, ConvertReply, Done, Grant, Hold, IfBusy, KeyRequest,
        MAX_PROPOSAL_SKEW, NextHolder, PollReply, RaiseReply, Release, ReleaseReply, RenewReply,
        Renewal, Token,
    },
    quorum::QuorumStore,
};

#[doc(hidden)]
pub use crate::shell::time::Instant;

/// A call in progress, with its reply or an error.
pub type Replied<'a, T> = BoxFuture<'a, Result<T, StoreError>>;
/// A call in progress for several locks, with a reply or an error for each of them.
pub type Replies<'a, T> = BoxFuture<'a, Vec<Result<T, StoreError>>>;

/// A store of locks: in this process, on a Redis server, or on several. Used as `Arc<dyn Store>`.
///
/// Every operation is idempotent per (key, token): executed twice, it does no more than executed
/// once, so a call whose reply was lost can be repeated. No operation waits for a lock to become
/// free.
///
/// # The wait queue
///
/// A store may keep a wait queue for each lock, first come, first served. A store without wait
/// queues replies `Busy` instead of `Queued`.
///
/// `acquire`, `acquire_all`, `poll`, `release`, `convert`, `abandon` and `revoke` *advance* the
/// queue in the same step, before they evaluate the request of the caller and after they have
/// released something. Beginning at the front, an entry whose waiter has been silent for
/// [`Waiter::STALE_AFTER`] is skipped, and it is removed after [`Waiter::TTL`]. The first of the
/// other entries is granted its lock if the current holders admit it, then the next one, and so on
/// until an entry is not admitted. A grant from the queue lasts min(lease,
/// [`Grant::HANDOFF_LEASE`]) and is sent to the [`Listener`] of its waiter. A new request is
/// granted its lock only if the queue has no entry left that comes before it.
///
/// A queue entry is identified by its token. Its waiter calls [`poll`](Store::poll) at least every
/// [`Waiter::POLL_INTERVAL`], and at the time at which the lock should be free according to the
/// latest reply. A store that learns of an earlier end sends [`StoreEvent::FreeIn`].
///
/// # Tests
///
/// The crate [`lock-conformance`](https://docs.rs/lock-conformance) tests these promises, for any
/// implementation.
///
/// # Stability
///
/// This trait and the types of its methods are **hidden**, and may change in any minor release:
/// each mode and each topology has added to them. For a database, implement [`records::Records`],
/// with the feature `records`.
#[doc(hidden)]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Grants the lock, queues the request or refuses it.
    ///
    /// After a refusal, the caller retries with a fresh token: of several servers, some may have
    /// granted the old token, which is then abandoned there.
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply>;

    /// Grants all requests or none, and never queues. The keys are distinct and sorted. No
    /// request is for permits.
    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply>;

    /// Returns the states of requests that were queued, and keeps their queue entries alive. Never
    /// queues a request, and never extends a grant.
    ///
    /// Returns a reply for each hold, in the same order, so that a poll that fails does not affect
    /// the others.
    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply>;

    /// Renews leases. Never creates a lease, and never shortens one but to
    /// [`at_most`](Renewal::at_most).
    ///
    /// Returns a reply for each renewal, in the same order, so that a renewal that fails does not
    /// affect the others.
    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply>;

    /// Releases a lock if the token still holds it, and hands it off to the next waiter.
    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply>;

    /// Same as [`release`](Self::release), with a future that borrows nothing. A store makes it in
    /// one allocation instead of the two of this implementation.
    #[doc(hidden)]
    fn release_owned(self: Arc<Self>, release: Release) -> Replied<'static, ReleaseReply> {
        Box::pin(async move { self.release(&release).await })
    }

    /// Converts a writer into a reader, without a gap.
    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply>;

    /// Releases any lock that the token may hold, and removes its queue entry.
    ///
    /// Once an abandon that was sent after the [`deadline`](KeyRequest::deadline) of the token's
    /// requests is acknowledged, none of them has an effect any more. A delayed request may be
    /// executed after an earlier abandon, so the caller repeats that one after the deadline.
    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()>;

    /// Returns the holders and the waiters of the lock.
    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection>;

    /// Returns the result of a lock that is done: see [`Release::result`]. `None` if it is not.
    ///
    /// # Errors
    /// `Unsupported` in this implementation, for a store that keeps no results.
    fn done<'a>(&'a self, key: &'a LockKey) -> Replied<'a, Option<Done>> {
        let _ = key;
        let message = "the store keeps no results";
        let error = StoreError::new(StoreErrorKind::Unsupported, message);
        Box::pin(ready(Err(error)))
    }

    /// Returns the sessions of the database that keep the lock from being granted until their
    /// transactions end, for [`Inspection::blocked_by`]. By default there are none.
    ///
    /// # Errors
    /// Same as [`inspect`](Self::inspect).
    fn blockers<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<String>> {
        let _ = (key, kind);
        Box::pin(ready(Ok(Vec::new())))
    }

    /// Returns the holders of a lock, for an error that describes them.
    ///
    /// By default, [`inspect`](Self::inspect) returns them.
    ///
    /// # Errors
    /// Same as [`inspect`](Self::inspect).
    fn holders<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<Holder>> {
        Box::pin(async move { Ok(self.inspect(key, kind).await?.holders) })
    }

    /// Takes the lock away from its holders, and hands it off to the next waiter.
    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply>;

    /// Records the name of a client for a time, [`Identity::TTL`] while it lives and none once it
    /// is shut down, so that holders and waiters are shown with it. `grants` are the readers and
    /// permits that it has held for the longest, each with the time since its grant, for a store
    /// that does not record the times of these grants itself. This implementation, for a store that
    /// keeps no names, does nothing.
    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        let _ = (client, name, grants, keep_for);
        Box::pin(ready(Ok(())))
    }

    /// Returns the names of clients, in the same order; `None` for those that are not known.
    fn names_of<'a>(&'a self, clients: &'a [ClientId]) -> Replied<'a, Vec<Option<String>>> {
        Box::pin(ready(Ok(vec![None; clients.len()])))
    }

    /// Returns some of the locks whose names begin with `prefix`, from `cursor` on.
    ///
    /// A caller that follows the cursors to the end has seen every lock that was held all the time,
    /// at least once. Locks that are not held any more, and foreign data, may be among them.
    ///
    /// # Errors
    /// `Unsupported` in this implementation, for a store that cannot list its locks.
    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Replied<'a, Page> {
        let _ = (prefix, cursor);
        let message = "the store cannot list its locks";
        let error = StoreError::new(StoreErrorKind::Unsupported, message);
        Box::pin(ready(Err(error)))
    }

    /// Returns the name under which the store keeps `part` of a lock, for messages. `None` if its
    /// keys have no names.
    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String>;

    /// Returns the name of a lock for `lock_runtime.guard` in the transactions of its holder.
    /// `None`, the default, for a store without that function.
    fn guarded_name(&self, key: &LockKey, kind: LockKind) -> Option<String> {
        let _ = (key, kind);
        None
    }

    /// Returns the store itself where transactions of the application can execute its operations.
    #[doc(hidden)]
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Returns a number that is shared by all locks on the same server. Always the same number,
    /// such as 0, for a store whose locks can only fail together.
    ///
    /// Renewals on different servers do not share a call, so that an unresponsive server costs no
    /// lock of another server. The number of a lock may change.
    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64;

    /// Returns the identifier that the client of this store takes, if the store addresses messages
    /// to it. `None` in this implementation: the client draws one. Several clients of one such
    /// store are one client to others, and do not ask each other for a lock that is retained.
    fn client(&self) -> Option<ClientId> {
        None
    }

    /// Returns the requests that the store supports, the same ones each time.
    ///
    /// The caller makes no request beyond these limits, and no renewal with a longer lease.
    fn limits(&self) -> Limits;

    /// Returns whether the waiters of this client get events about their grants at present:
    /// [`Limits::push`] in this implementation. While they do not, they poll sooner at first.
    fn sends_events(&self) -> bool {
        self.limits().push
    }

    /// Returns whether calls may be made on any Tokio runtime, also on one of this library that
    /// ends sooner than the application's.
    ///
    /// A task that blocks its runtime then loses no lock: a thread with a runtime of its own renews
    /// the leases meanwhile. `false` in this implementation, for a store whose connections belong
    /// to the runtime on which they were made.
    fn serves_any_runtime(&self) -> bool {
        false
    }

    /// Sends all further events to `listener`.
    fn listen(&self, listener: Weak<dyn Listener>);

    /// Waits for the calls to servers that continue after the store has replied to its callers.
    /// Ready at once for a store that makes no such calls.
    ///
    /// [`LockClient::shutdown`](crate::LockClient::shutdown) waits for this, for a bounded time.
    fn settled(&self) -> BoxFuture<'_, ()>;

    /// Returns the state of the store and of its servers, within about a second. Affects no lock.
    ///
    /// This implementation makes one call of [`inspect`](Self::inspect).
    fn health(&self) -> BoxFuture<'_, Health> {
        Box::pin(health::by_inspection(self))
    }
}

/// A store that can be one of the servers of a [`QuorumStore`]: it accepts fencing tokens from its
/// clients ([`KeyRequest::proposal`]), so that several stores can give the same number to the same
/// acquisition.
///
/// Implementing this trait is **unstable**: it may change in any minor release, also after 1.0,
/// until a store of another kind than Redis and memory implements it.
#[doc(hidden)]
pub trait QuorumMember: Store {
    /// Makes the fencing token of the lock's next grant larger than `fence`. Never makes it
    /// smaller.
    ///
    /// [`RaiseReply::Raised`] assigns the number `fence` to the caller: the store returns this
    /// reply for it only once, and uses the number for no grant. If the reply is lost and the call
    /// is repeated, the number is already taken, and the reply is [`RaiseReply::NotRaised`].
    ///
    /// # Errors
    /// Those of an acquire. A store that may have forgotten a number it has assigned refuses,
    /// because it does not vote.
    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> Replied<'a, RaiseReply>;
}
