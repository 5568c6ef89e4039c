//! Locks in ZooKeeper: [`ZooKeeperRecords`] keeps them below the node of the namespace.
//!
//! | node | data |
//! |---|---|
//! | `<namespace>/format` | the format of the nodes |
//! | `<namespace>/c` | the [clock](super::records::SharedClock): microseconds since 1970, 8 bytes |
//! | `<namespace>/r/<hash>/<record>` | version; end of its need; content. Or when it was removed |
//! | `<namespace>/a/<client>` | of a session: the client reads its messages |
//! | `<namespace>/m/<client>/<message>-<number>` | a message to a client, which deletes it |
//!
//! The condition on a record is the version of its node, which begins again when a node is deleted.
//! So the version of a node is remembered for less time than a removed record keeps its node, and
//! in one session: that of data which were restored begins after their loss.

mod calls;
mod ensemble;
mod error;
#[cfg(test)]
#[path = "../../../fuzz/zookeeper.rs"]
mod fuzz;
mod health;
mod jute;
mod layout;
mod mail;
mod session;
mod settings;

use std::{
    fmt,
    future::ready,
    num::NonZeroUsize,
    sync::{Arc, Weak},
    time::Duration,
};

use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use futures_util::{StreamExt as _, future::BoxFuture, stream};

use self::{
    calls::{Calls, Shared},
    layout::Layout,
    mail::Mail,
    settings::Target,
};
use super::{
    ClientId, KeyPart, Limits, Replied, Replies, StoreError,
    records::{Inbox, ReadReply, Record, RecordName, RecordStore, Records, Swap, SwapReply},
    remote::{Connecting, connect_within},
};
use crate::{
    error::LockError,
    observe::health::Health,
    shell::{keeper::Kept, runtime},
};

/// The changes in one swap.
const CHANGES: NonZeroUsize = NonZeroUsize::new(50).expect("it is not zero");
/// The swaps of one batch that are in flight, beside which others have room.
const BATCH: usize = 16;
/// The directories of records. A reply lists all nodes of one of them.
const DIRECTORIES: usize = 256;
/// Replies show the time to some hundred milliseconds, for which a lock is kept longer.
const SHORTEST_LEASE: Duration = Duration::from_secs(1);
/// The time limit of connecting.
const CONNECT: Duration = Duration::from_secs(5);

/// Records of locks in a ZooKeeper ensemble.
///
/// Tested with ZooKeeper 3.8. One server serves all calls, and the next one when it fails.
pub struct ZooKeeperRecords {
    calls: Kept<Arc<Calls>>,
    mail: Mail,
}

impl fmt::Debug for ZooKeeperRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeperRecords")
            .field("servers", &self.calls.usual().ensemble.target().servers)
            .field("node", &self.calls.usual().shared.layout.0)
            .finish_non_exhaustive()
    }
}

impl ZooKeeperRecords {
    /// Connects to the ensemble at `url`:
    /// `zookeeper://[user:password@]host[:port][,host[:port]..][/path]`. The path is that of the
    /// node below which that of the namespace is.
    ///
    /// With a user, only this user can use the nodes that the client creates.
    ///
    /// # Errors
    /// - `InvalidUrl`: the URL is wrong.
    /// - `InvalidSpec`: the namespace is invalid.
    /// - `NoRuntime`: the call is made outside of a Tokio runtime.
    /// - `Unavailable`: no server of the ensemble answers, or it has no quorum.
    /// - `Forbidden`: the user has no right to the nodes of the namespace.
    /// - `IncompatibleFormat`: the nodes are those of another version of this library.
    /// - `ForeignKey`: the nodes are those of another application.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(url: &str, namespace: &str) -> Result<Self, LockError> {
        let records = Self::open(url, namespace)?;
        records.ready().await?;
        Ok(records)
    }

    /// Connects when the first call is made.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect) that need no server.
    pub(crate) fn open(url: &str, namespace: &str) -> Result<Self, LockError> {
        super::namespace::check_namespace(namespace)?;
        if namespace.contains('/') || matches!(namespace, "." | "..") {
            let message = format!(
                "the namespace {namespace:?} is no name of a node of ZooKeeper; the URL may have a path"
            );
            return Err(LockError::of_settings(&["namespace"], message));
        }
        runtime::check()?;
        let target = Target::new(url)?;
        let shared = Shared::new(Layout(format!("{}/{namespace}", target.root)));
        let calls = Arc::new(Calls::new(target, Arc::new(shared)));
        Ok(Self {
            mail: Mail::new(calls.clone()),
            calls: Kept::new(calls),
        })
    }

    /// Makes it a store of locks.
    pub fn into_store(self) -> RecordStore {
        RecordStore::new(self)
    }

    /// Removes the records of locks that were not used for a day, and the nodes of those that were
    /// removed two hours before. Clients that run do so by themselves, in the course of a day.
    /// Returns the number of the records.
    ///
    /// # Errors
    /// Those of a call.
    pub async fn remove_old(&self) -> Result<u64, StoreError> {
        let calls = self.calls.usual();
        let mut removed = 0;
        for directory in 0..DIRECTORIES {
            removed += calls.remove_old(directory).await?;
        }
        calls.remove_unread().await?;
        Ok(removed)
    }

    /// The calls for the calling thread.
    fn calls(&self) -> &Arc<Calls> {
        let of_keeper = |usual: &Arc<Calls>| {
            let target = usual.ensemble.target().clone();
            Arc::new(Calls::new(target, usual.shared.clone()))
        };
        self.calls.here(of_keeper)
    }
}

impl Connecting for ZooKeeperRecords {
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        let calls = self.calls.usual();
        let servers = calls.ensemble.target().servers.join(", ");
        let place = format!("in ZooKeeper at {servers}");
        Box::pin(connect_within(CONNECT, place, calls.ready()))
    }
}

impl Records for ZooKeeperRecords {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        self.mail.start();
        Box::pin(self.calls().swap(swap))
    }

    fn swap_each<'a>(&'a self, swaps: &'a [Swap]) -> Replies<'a, SwapReply> {
        self.mail.start();
        let replies = swaps.iter().map(|swap| self.calls().swap(swap));
        Box::pin(stream::iter(replies).buffered(BATCH).collect())
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        // With the values that others write, the clock does not stand.
        self.mail.start();
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

    fn listen(&self, inbox: Weak<dyn Inbox>) {
        self.calls.usual().shared.clock.listen(inbox.clone());
        self.mail.inform(inbox);
    }

    fn expect_messages(&self, client: ClientId) -> BoxFuture<'_, ()> {
        match self.mail.expect(client) {
            Some(begun) => Box::pin(begun),
            None => Box::pin(ready(())),
        }
    }

    fn place_of(&self, name: &RecordName, _part: KeyPart) -> Option<String> {
        Some(self.calls.usual().shared.layout.record(name))
    }

    fn health(&self) -> Option<BoxFuture<'_, Health>> {
        Some(Box::pin(self.calls.usual().health()))
    }
}
