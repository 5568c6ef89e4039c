//! Locks in etcd: [`EtcdRecords`] keeps them under the prefix of the namespace.
//!
//! | key | value |
//! |---|---|
//! | `<namespace>/format` | the format of the keys |
//! | `<namespace>/c` | the [clock](super::records::SharedClock): microseconds since 1970, 8 bytes |
//! | `<namespace>/r/<record>` | version, 8 bytes; a separator; the content |
//! | `<namespace>/m/<client>/<number>` | the latest messages to a client |
//!
//! Records and messages have an etcd lease that no call renews, so that old ones go by themselves.

mod calls;
mod error;
#[cfg(test)]
#[path = "../../../fuzz/etcd.rs"]
mod fuzz;
mod health;
mod layout;
mod members;
mod messages;
pub(crate) mod settings;
mod watch;

use std::{
    fmt,
    future::ready,
    num::NonZeroUsize,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;

use self::{calls::Calls, layout::Layout, settings::Target, watch::Watching};
use super::{
    ClientId, KeyPart, Limits, Replied, Replies,
    records::{
        Inbox, ReadReply, Record, RecordName, RecordStore, Records, Swap, SwapReply, groups,
    },
    remote::{Connecting, connect_within},
};
use crate::{
    error::LockError,
    observe::health::Health,
    shell::{keeper::Kept, runtime},
};

pub(crate) use self::settings::EtcdOptions;

/// The changes in one swap: two comparisons each.
const CHANGES: NonZeroUsize = NonZeroUsize::new(50).expect("it is not zero");
/// Replies show the time to some hundred milliseconds, for which a lock is kept longer.
const SHORTEST_LEASE: Duration = Duration::from_secs(1);
/// The time limit of connecting.
const CONNECT: Duration = Duration::from_secs(5);

/// Records of locks in an etcd cluster.
///
/// Tested with etcd 3.4 and 3.7. One member serves all calls, and the next one when it fails.
pub struct EtcdRecords {
    calls: Kept<Arc<Calls>>,
    watching: Watching,
    target: Target,
}

impl fmt::Debug for EtcdRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = self.target.members.iter().map(|(name, _)| name);
        f.debug_struct("EtcdRecords")
            .field("members", &members.collect::<Vec<_>>())
            .field("namespace", &self.calls.usual().layout.0)
            .finish_non_exhaustive()
    }
}

impl EtcdRecords {
    /// Connects to the cluster at `url`: `etcd://[user:password@]host[:port][,host[:port]..]`, or
    /// `etcds://` with TLS (feature `etcd-rustls`).
    ///
    /// # Errors
    /// - `InvalidUrl`: the URL is wrong, needs TLS that is not compiled in, or names a user
    ///   although the cluster has no authentication.
    /// - `InvalidSpec`: the namespace is invalid.
    /// - `NoRuntime`: the call is made outside of a Tokio runtime.
    /// - `Unavailable`: no member answers, or none knows a leader.
    /// - `Unauthenticated`: the cluster refused the user or the password.
    /// - `Forbidden`: the user has no right to the prefix of the namespace.
    /// - `Full`: the cluster has no room left.
    /// - `IncompatibleFormat`: the keys are those of another version of this library.
    /// - `ForeignKey`: the keys are those of another application.
    ///
    /// # Cancellation
    /// Dropping the future closes the connections.
    pub async fn connect(
        url: &str,
        namespace: &str,
        options: EtcdOptions,
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
        options: &EtcdOptions,
    ) -> Result<Self, LockError> {
        super::namespace::check_namespace(namespace)?;
        if namespace.contains('/') {
            // Locks of "a/r" would be those of "a" whose names begin with "r/".
            let message = format!(
                "the namespace {namespace:?} contains '/', which separates the parts of a key of etcd"
            );
            return Err(LockError::of_settings(&["namespace"], message));
        }
        runtime::check()?;
        let target = Target::new(url, options)?;
        let layout = Layout(namespace.into());
        let calls = Calls::new(&target, layout.clone(), Arc::default(), Arc::default());
        let (members, clock) = (calls.members.clone(), calls.clock.clone());
        Ok(Self {
            watching: Watching::new(members, layout, clock),
            calls: Kept::new(Arc::new(calls)),
            target,
        })
    }

    /// Makes it a store of locks.
    pub fn into_store(self) -> RecordStore {
        RecordStore::new(self)
    }

    /// The calls for the calling thread.
    fn calls(&self) -> &Arc<Calls> {
        let of_keeper = |usual: &Arc<Calls>| {
            let (clock, format) = (usual.clock.clone(), usual.format.clone());
            let calls = Calls::new(&self.target, usual.layout.clone(), clock, format);
            Arc::new(calls)
        };
        self.calls.here(of_keeper)
    }
}

impl Connecting for EtcdRecords {
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        let members = self.target.members.iter().map(|(name, _)| &**name);
        let members = members.collect::<Vec<_>>().join(", ");
        let calls = self.calls.usual();
        let ready = calls.of_any_member(|| calls.ready());
        Box::pin(connect_within(
            CONNECT,
            format!("in etcd at {members}"),
            ready,
        ))
    }
}

impl Records for EtcdRecords {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        Box::pin(async move {
            self.watching.start();
            groups::swap(self.calls(), swap).await
        })
    }

    fn swap_each<'a>(&'a self, swaps: &'a [Swap]) -> Replies<'a, SwapReply> {
        Box::pin(self.calls().swap_each(swaps))
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        // With the values that others write, the clock does not stand.
        self.watching.start();
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
            .shortest_lease(SHORTEST_LEASE)
            .keys_at_once(CHANGES)
    }

    fn serves_any_runtime(&self) -> bool {
        true
    }

    fn trusts_messages(&self) -> bool {
        true
    }

    fn listen(&self, inbox: Weak<dyn Inbox>) {
        self.calls.usual().clock.listen(inbox.clone());
        self.watching.inform(inbox);
    }

    fn expect_messages(&self, client: ClientId) -> BoxFuture<'_, ()> {
        match self.watching.expect(client) {
            Some(begun) => Box::pin(begun),
            None => Box::pin(ready(())),
        }
    }

    fn place_of(&self, name: &RecordName, _part: KeyPart) -> Option<String> {
        Some(format!("{}/r/{name}", self.calls.usual().layout.0))
    }

    fn health(&self) -> Option<BoxFuture<'_, Health>> {
        Some(Box::pin(self.calls.usual().health()))
    }
}
