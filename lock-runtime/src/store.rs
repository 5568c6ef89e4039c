//! What a place that keeps locks must do.
//!
//! [`MemoryStore`] is the reference: the same sequence of operations on it and on any other store gives the same answers.
//! The trait speaks of single acquisitions ([`Hold`]s) by their tokens; queues of waiters within this process, renewal and
//! retries are the runtime's. A store may be called from any task, and **any of its futures may be dropped** at any
//! await point: the outcome is then unknown to the caller, who follows with [`Store::abandon`].

use std::fmt;

use futures_util::future::BoxFuture;

use crate::{key::LockKey, spec::Family};

mod error;
mod event;
pub mod memory;
mod message;
#[cfg(feature = "redis")]
pub mod redis;

pub use error::{StoreError, StoreErrorKind};
pub use event::{Events, StoreEvent};
pub use memory::MemoryStore;
pub use message::{
    AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, Holder, IfBusy, Inspection, KeyRequest, PollReply,
    Release, ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope, Token,
};

/// A place that keeps locks: in this process, on a Redis server, on several. Held as `Arc<dyn Store>`.
///
/// Every operation is idempotent per (key, token): executed twice, it does no more than executed once, so that a call
/// whose reply was lost can be repeated. No operation waits for a lock to become free.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Grants, queues or refuses.
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> BoxFuture<'a, Result<AcquireReply, StoreError>>;

    /// Grants all or none, and never queues. The keys are different ones, sorted; no request is for permits.
    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>>;

    /// How a request that stood in line is doing. Never enqueues.
    fn poll<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<PollReply, StoreError>>;

    /// Keeps locks for longer; a reply for each renewal, in their order, so that one that cannot be renewed does not cost the
    /// others. Never shortens a lease, never creates one.
    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>>;

    /// Gives a lock back, if the token still holds it.
    fn release<'a>(&'a self, release: &'a Release) -> BoxFuture<'a, Result<ReleaseReply, StoreError>>;

    /// Makes a writer a reader, without a gap.
    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>>;

    /// Frees whatever the token may hold or be in line for.
    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Who holds the lock.
    fn inspect<'a>(&'a self, key: &'a LockKey, family: Family) -> BoxFuture<'a, Result<Inspection, StoreError>>;

    /// Takes the lock away from whoever holds it.
    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>>;

    /// What the store tells unasked, from now on. Each call opens a channel of its own.
    fn events(&self) -> Events;
}
