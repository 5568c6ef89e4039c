//! What a place that keeps locks must do.
//!
//! [`MemoryStore`] is the reference: the same sequence of operations on it and on any other store gives the same answers.
//! The trait speaks of single acquisitions ([`Hold`]s) by their tokens; queues of waiters within this process, renewal and
//! retries are the runtime's. A store may be called from any task, and **any of its futures may be dropped** at any
//! await point: the outcome is then unknown to the caller, who follows with [`Store::abandon`].

use std::{fmt, sync::Weak};

use futures_util::future::BoxFuture;

use crate::{fence::FencingToken, key::LockKey, spec::Family};

mod error;
mod event;
pub mod memory;
mod message;
mod quorum;
#[cfg(feature = "redis")]
pub mod redis;

pub use error::{StoreError, StoreErrorKind};
pub use event::{Listener, Listeners, StoreEvent};
pub use memory::MemoryStore;
pub use message::{
    AcquireAllReply, AcquireReply, ConvertReply, FORESIGHT, FORGOTTEN, Grant, HANDED_OVER, Hold,
    Holder, IfBusy, Inspection, KeyPart, KeyRequest, LONGEST_POLL, Next, PollReply, RaiseReply,
    Release, ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope, STALE, Token, Waiter,
};
pub use quorum::QuorumStore;
#[cfg(feature = "redis")]
pub(crate) use quorum::{check_count, majority};

/// A place that keeps locks: in this process, on a Redis server, on several. Held as `Arc<dyn Store>`.
///
/// Every operation is idempotent per (key, token): executed twice, it does no more than executed once, so that a call
/// whose reply was lost can be repeated. No operation waits for a lock to become free.
///
/// # The line
///
/// A store may keep a line for each lock, first come first served; one that keeps none answers `Busy` instead of `Queued`.
/// `acquire`, `acquire_all`, `poll`, `release`, `convert`, `abandon` and `revoke` each *advance* the line in the same step, before they
/// judge their caller and after they have given something back (PROTOCOL 15): from the front on, whoever was not heard of for
/// [`STALE`] is passed over, and removed after [`FORGOTTEN`]; the first of the others is granted its lock if the lock's holders let it
/// in, and so on until one is not let in. A grant from the line lasts min(lease, [`HANDED_OVER`]) and is told to the
/// [`Listener`] of whoever asked. A newcomer is granted its lock only if nobody is left in line whose turn would be before.
///
/// A place in line is kept by its token. Its waiter asks at least every [`LONGEST_POLL`] by [`poll`](Store::poll), and
/// when the latest reply expects the lock to be free; a store that knows of an earlier end sends [`StoreEvent::Kept`].
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Grants, queues or refuses. Whoever is refused asks again under a fresh token: of several servers some may have granted the
    /// old one, which is being given up there.
    fn acquire<'a>(
        &'a self,
        request: &'a KeyRequest,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>>;

    /// Grants all or none, and never queues. The keys are different ones, sorted; no request is for permits.
    fn acquire_all<'a>(
        &'a self,
        requests: &'a [KeyRequest],
    ) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>>;

    /// How a request that stood in line is doing; that it asks keeps its place. Never enqueues, and never makes a grant last longer.
    fn poll<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<PollReply, StoreError>>;

    /// Keeps locks for longer; a reply for each renewal, in their order, so that one that cannot be renewed does not cost the
    /// others. Never shortens a lease, never creates one.
    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>>;

    /// Gives a lock back, if the token still holds it, and hands it over to whoever is first in line.
    fn release<'a>(
        &'a self,
        release: &'a Release,
    ) -> BoxFuture<'a, Result<ReleaseReply, StoreError>>;

    /// Makes a writer a reader, without a gap.
    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>>;

    /// Frees whatever the token may hold, and gives up its place in line.
    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Makes the fencing token of the lock's next grant larger than `fence`; never smaller.
    ///
    /// [`RaiseReply::Raised`] gives the number `fence` away: the store answers it to one caller,
    /// once, and to no grant. So several stores can give the same number to the same acquisition
    /// ([`QuorumStore`]). A call that is repeated because its reply was lost finds its own number
    /// taken, and is answered [`RaiseReply::NotRaised`].
    ///
    /// # Errors
    /// `Unsupported` by default: only a store that is to be one of several needs it. Otherwise those of an acquire; a store
    /// that may have forgotten a number it has given away refuses, as it does not vote.
    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
        fence: FencingToken,
    ) -> BoxFuture<'a, Result<RaiseReply, StoreError>> {
        let _ = (key, family, fence);
        let message =
            "the store cannot be one of several: it does not take fencing tokens from others";
        Box::pin(std::future::ready(Err(StoreError::new(
            StoreErrorKind::Unsupported,
            message,
        ))))
    }

    /// Who holds the lock, and who waits for it.
    fn inspect<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>>;

    /// Takes the lock away from whoever holds it, and hands it over to whoever is first in line.
    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>>;

    /// The name under which the store keeps `part` of a lock, for messages; `None` where the keys have no names.
    fn name_of(&self, key: &LockKey, family: Family, part: KeyPart) -> Option<String> {
        let _ = (key, family, part);
        None
    }

    /// A number that the locks of one server share, where a store has several that may fail one by one: renewals of different servers do not
    /// share a call, so that a silent server costs no lock that another one keeps. The number of a lock may change.
    fn server_of(&self, key: &LockKey, family: Family) -> u64 {
        let _ = (key, family);
        0
    }

    /// Tells `listener` what happens unasked, from now on.
    fn listen(&self, listener: Weak<dyn Listener>);

    /// Waits for what the store still says to its servers after it has answered its callers.
    /// [`LockClient::shutdown`](crate::LockClient::shutdown) waits for it, for a bounded time.
    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
