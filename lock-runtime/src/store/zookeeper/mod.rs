//! Locks in ZooKeeper: [`ZooKeeperRecords`] keeps them below the node of the namespace.
//!
//! | node | data |
//! |---|---|
//! | `<namespace>/format` | the format of the nodes |
//! | `<namespace>/c` | the [shared clock](SharedClock): microseconds since 1970, 8 bytes |
//! | `<namespace>/r/<hash>/<record>` | version; end of its need; content. Or when it was removed |
//! | `<namespace>/a/<client>` | of a session: the client reads its messages |
//! | `<namespace>/m/<client>/<message>-<number>` | a message to a client, which deletes it |
//!
//! The condition on a record is the version of its node, which begins again when a node is deleted.
//! So the version of a node is remembered for less time than a removed record keeps its node, and
//! in one session: that of data which were restored begins after their loss.

mod ensemble;
mod error;
#[cfg(test)]
#[path = "../../../fuzz/zookeeper.rs"]
mod fuzz;
mod health;
mod jute;
mod mail;
mod seen;
mod session;
mod settings;

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    future::ready,
    num::NonZeroUsize,
    sync::{Arc, Weak},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use futures_util::{
    StreamExt as _,
    future::{BoxFuture, join_all, try_join_all},
    stream,
};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use tokio::sync::{OnceCell, Semaphore};

use self::{
    ensemble::Ensemble,
    jute::{Change, Changed, Kind, Node},
    mail::Mail,
    session::Session,
    settings::Target,
};
use super::{
    ClientId, KeyPart, Limits, Replied, Replies, StoreError, StoreErrorKind,
    records::{
        Inbox, Message, ReadReply, Record, RecordName, RecordStore, Records, Run, SharedClock,
        Swap, SwapReply, Swapped, Tick, Ticked, Timestamp, Version,
    },
};
use crate::{
    error::{LockError, LockErrorKind},
    observe::health::Health,
    shell::{keeper::Kept, runtime},
};

const FORMAT: &[u8] = b"1";
/// The changes in one swap.
const CHANGES: NonZeroUsize = NonZeroUsize::new(50).expect("it is not zero");
/// The swaps in flight.
const SWAPS: usize = 128;
/// Those of one batch, beside which others have room.
const BATCH: usize = 16;
/// The messages of one swap. Waiters beyond them poll.
const MESSAGES: usize = 200;
/// The time for which a removed record keeps its node. Longer than versions are remembered, by
/// clocks of different rates.
const REMOVED_FOR: Duration = Duration::from_secs(7200);
/// The directories of records. A reply lists all nodes of one of them.
const DIRECTORIES: usize = 256;
/// The records in one page of a list.
const PAGE: usize = 1000;
/// The nodes that are read, or deleted, together.
const PART: usize = 100;
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

/// The calls to an ensemble.
struct Calls {
    ensemble: Ensemble,
    /// The swaps that may be sent. A server executes those of a session one after the other, also
    /// for callers that have given up.
    room: Semaphore,
    shared: Arc<Shared>,
}

/// The part that the calls of the keeper share with those of the application.
struct Shared {
    layout: Layout,
    clock: SharedClock,
    /// Set when the format of the nodes is known to be this one.
    format: OnceCell<()>,
}

/// The nodes of a namespace.
struct Layout(String);

impl Layout {
    fn format(&self) -> String {
        format!("{}/format", self.0)
    }

    fn clock(&self) -> String {
        format!("{}/c", self.0)
    }

    fn directory(&self, number: usize) -> String {
        format!("{}/r/{number:02x}", self.0)
    }

    fn directory_of(&self, name: &RecordName) -> String {
        let hash = sha1_smol::Sha1::from(name.as_str()).digest().bytes();
        self.directory(hash[0].into())
    }

    fn record(&self, name: &RecordName) -> String {
        // Else a name could have several parts, or be `.`.
        let encoded = utf8_percent_encode(name.as_str(), NON_ALPHANUMERIC);
        format!("{}/{encoded}", self.directory_of(name))
    }

    fn name(child: &str) -> Option<RecordName> {
        Some(RecordName::new(
            percent_decode_str(child).decode_utf8().ok()?,
        ))
    }

    /// The node that shows that a client reads its messages.
    fn reader(&self, client: ClientId) -> String {
        format!("{}/a/{client}", self.0)
    }

    fn messages_to(&self, client: ClientId) -> String {
        format!("{}/m/{client}", self.0)
    }
}

/// The data of a node for a record.
enum Content {
    Record { needed_until: u64, record: Record },
    Removed { at: u64 },
}

impl Content {
    fn of(data: &[u8]) -> Option<Self> {
        let (first, rest) = data.split_first_chunk::<8>()?;
        let first = u64::from_be_bytes(*first);
        let Some((needed_until, body)) = rest.split_first_chunk::<8>() else {
            return rest.is_empty().then_some(Self::Removed { at: first });
        };
        Some(Self::Record {
            needed_until: u64::from_be_bytes(*needed_until),
            record: Record::new(Version::from_number(first)?, body.to_vec()),
        })
    }
}

/// The reply to a call. Without `changed`, the changes were left out.
#[derive(Default)]
struct Reply {
    changed: Option<Changed>,
    nodes: Vec<Option<Node>>,
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
        let records = Self::connect_lazy(url, namespace)?;
        let calls = records.calls.usual();
        let ready = tokio::time::timeout(CONNECT, calls.ready()).await;
        let ready = ready.unwrap_or_else(|_| Err(StoreError::timed_out(CONNECT)));
        ready.map_err(|error| {
            let servers = calls.ensemble.target().servers.join(", ");
            let message = format!("cannot keep locks in ZooKeeper at {servers}");
            LockError::new(error.kind().into(), message).with_source(Some(error))
        })?;
        Ok(records)
    }

    /// Connects when the first call is made.
    ///
    /// # Errors
    /// `InvalidUrl`, `InvalidSpec` and `NoRuntime` as with [`connect`](Self::connect).
    pub fn connect_lazy(url: &str, namespace: &str) -> Result<Self, LockError> {
        super::namespace::check_namespace(namespace)?;
        if namespace.contains('/') || matches!(namespace, "." | "..") {
            let message = format!(
                "the namespace {namespace:?} is no name of a node of ZooKeeper; the URL may have a path"
            );
            return Err(LockError::new(LockErrorKind::InvalidSpec, message));
        }
        runtime::check()?;
        let target = Target::new(url)?;
        let shared = Shared {
            layout: Layout(format!("{}/{namespace}", target.root)),
            clock: SharedClock::new(),
            format: OnceCell::new(),
        };
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
    ///
    /// # Errors
    /// Those of a call.
    pub async fn remove_old(&self) -> Result<(), StoreError> {
        let calls = self.calls.usual();
        for directory in 0..DIRECTORIES {
            calls.remove_old(directory).await?;
        }
        calls.remove_unread().await
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

impl Shared {
    /// Returns the record in a node.
    fn record(
        &self,
        session: &Session,
        name: &RecordName,
        node: Option<Node>,
    ) -> Result<Option<Record>, StoreError> {
        let Some(node) = node else {
            session.seen().forget(name);
            return Ok(None);
        };
        let record = match Content::of(&node.data) {
            Some(Content::Record { record, .. }) => Some(record),
            Some(Content::Removed { .. }) => None,
            None => {
                let path = self.layout.record(name);
                return Err(StoreError::foreign(Some(&path), KeyPart::Lock));
            }
        };
        let version = record.as_ref().map(|it| it.version);
        session.seen().remember(name, version, node.version);
        Ok(record)
    }

    /// Returns the value of the clock.
    fn value(&self, session: &Session, node: Option<Node>) -> Result<Option<u64>, StoreError> {
        let Some(node) = node else {
            session.seen().value = None;
            return Ok(None);
        };
        let Ok(value) = <[u8; 8]>::try_from(&*node.data) else {
            let message = format!(
                "the node {}, in which ZooKeeper keeps the clock of the locks, contains foreign data and was left \
                 untouched: choose another namespace, or move the data",
                self.layout.clock()
            );
            return Err(StoreError::new(StoreErrorKind::ForeignKey, message));
        };
        let value = u64::from_be_bytes(value);
        let mut seen = session.seen();
        // Replies are handled in any order.
        if seen.value.is_none_or(|(latest, _)| latest <= value) {
            seen.value = Some((value, node.version));
        }
        Ok(Some(value))
    }
}

impl Calls {
    fn new(target: Target, shared: Arc<Shared>) -> Self {
        Self {
            ensemble: Ensemble::new(target),
            room: Semaphore::new(SWAPS),
            shared,
        }
    }

    /// Checks the format of the nodes before the first call.
    async fn ready(&self) -> Result<(), StoreError> {
        let check = || async {
            let checked = self.check_format().await;
            checked.map_err(|error| error.with_unsent(true))
        };
        self.shared.format.get_or_try_init(check).await.copied()
    }

    /// Reads the format of the nodes, and creates them if there is none.
    async fn check_format(&self) -> Result<(), StoreError> {
        let session = self.ensemble.session().await?;
        let _patience = self.ensemble.watch(&session);
        let layout = &self.shared.layout;
        let format = layout.format();
        let mut found = session.get(&format, false).await?;
        if found.is_none() {
            // Those above may exist, without a right to create one beside them.
            let mut missing = vec![&*layout.0];
            while let Some((above, _)) = missing[missing.len() - 1].rsplit_once('/')
                && !above.is_empty()
                && session.get(above, false).await?.is_none()
            {
                missing.push(above);
            }
            for node in missing.into_iter().rev() {
                self.create(&session, node.to_owned(), b"").await?;
            }
            for part in ["r", "a", "m"] {
                let path = format!("{}/{part}", layout.0);
                self.create(&session, path, b"").await?;
            }
            self.create(&session, format.clone(), FORMAT).await?;
            found = session.get(&format, false).await?;
        }
        match found {
            Some(node) if node.data != FORMAT => {
                let message = format!(
                    "the nodes below {} have another format: choose another namespace, or use versions of this \
                     library with one format",
                    layout.0
                );
                Err(StoreError::new(StoreErrorKind::IncompatibleFormat, message))
            }
            _ => Ok(()),
        }
    }

    /// Creates a node, unless it exists.
    async fn create(&self, session: &Session, path: String, data: &[u8]) -> Result<(), StoreError> {
        let create = Change::Create {
            path,
            data: data.to_vec(),
            access: self.ensemble.access(),
            kind: Kind::Lasting,
        };
        match session.change(create).await? {
            Ok(()) | Err(error::NODE_EXISTS) => Ok(()),
            Err(code) => Err(error::of_call(&session.server, code)),
        }
    }

    /// Makes changes, and then reads nodes, with a tick of the clock.
    ///
    /// Changes that are refused undo a tick that is made with them. So a tick on which the call
    /// depends is made alone, and the changes are left out.
    async fn run(
        &self,
        session: &Arc<Session>,
        not_before: Timestamp,
        changes: &[Change],
        paths: &[String],
    ) -> Result<Run<Reply>, StoreError> {
        let shared = &self.shared;
        let path = shared.layout.clock();
        let call = async |tick: Tick| {
            let _patience = self.ensemble.watch(session);
            let known = session.seen().value;
            // What a refused change of an older value says is not that the latest one was replaced.
            let latest = known.filter(|(value, _)| shared.clock.value() <= Some(*value));
            let set = |to: u64, version| Change::Set {
                path: path.clone(),
                data: to.to_be_bytes().to_vec(),
                version: Some(version),
            };
            let (mut is_taken, is_start) = (false, matches!(tick, Tick::Start(_)));
            let (tick, is_required) = match (tick, known, latest) {
                (Tick::Start(to), ..) => {
                    let create = Change::Create {
                        path: path.clone(),
                        data: to.to_be_bytes().to_vec(),
                        access: self.ensemble.access(),
                        kind: Kind::Lasting,
                    };
                    (Some(create), true)
                }
                (Tick::Replace { known, to }, Some((value, version)), _) if value == known => {
                    (Some(set(to, version)), true)
                }
                // The value is another one by now. It is only read.
                (Tick::Replace { .. }, ..) => {
                    session.seen().value = None;
                    (None, true)
                }
                (Tick::Raise(to), _, Some((value, version))) if value < to => {
                    (Some(set(to, version)), false)
                }
                (Tick::Raise(to), _, None) => {
                    is_taken = self.raise(session, to).await?;
                    (None, false)
                }
                (Tick::Raise(_) | Tick::Keep, ..) => (None, false),
            };
            let ticked = tick.map(|change| session.change(change));
            let changes = if is_required { &[] } else { changes };
            // What is read after a write is the latest state.
            let check = || Change::Check {
                path: shared.layout.0.clone(),
            };
            let multi = match changes {
                [] => (ticked.is_none()).then(|| session.multi(vec![check()])),
                changes => Some(session.multi(changes.to_vec())),
            };
            let nodes = paths.iter().map(|path| session.get(path, false));
            let nodes: Vec<_> = nodes.collect();
            let value = session.get(&path, false);
            let ticked = match ticked {
                Some(ticked) => ticked.await?,
                None => Err(error::BAD_VERSION),
            };
            let changed = match multi {
                Some(multi) => multi.await?,
                None => Ok(Vec::new()),
            };
            let rest = async {
                match ticked {
                    Ok(()) => is_taken = true,
                    // Of the namespace, which was removed.
                    Err(error::NO_NODE) if is_start => {
                        return Err(error::of_call(&session.server, error::NO_NODE));
                    }
                    Err(error::BAD_VERSION | error::NODE_EXISTS | error::NO_NODE) => {}
                    Err(code) => return Err(error::of_call(&session.server, code)),
                }
                if let (Err((_, code)), []) = (&changed, changes) {
                    return Err(error::of_call(&session.server, *code));
                }
                let nodes = join_all(nodes)
                    .await
                    .into_iter()
                    .collect::<Result<_, _>>()?;
                Ok((shared.value(session, value.await?)?, nodes))
            };
            // The changes may have been made.
            let is_unsent = changes.is_empty();
            let (value, nodes) =
                (rest.await).map_err(|error: StoreError| error.with_unsent(is_unsent))?;
            let changed = (!is_required).then_some(changed);
            Ok(Ticked::new(value, is_taken, Reply { changed, nodes }))
        };
        shared.clock.run(not_before, call).await
    }

    /// Raises the clock to this value, or finds it there. Returns whether it has changed it.
    async fn raise(&self, session: &Session, to: u64) -> Result<bool, StoreError> {
        let path = self.shared.layout.clock();
        loop {
            let check = Change::Check {
                path: self.shared.layout.0.clone(),
            };
            // What is read after a write is the latest state.
            let (checked, node) = (session.multi(vec![check]), session.get(&path, false));
            if let Err((_, code)) = checked.await? {
                return Err(error::of_call(&session.server, code).with_unsent(true));
            }
            let version = node.await?;
            let version =
                version.map(|node| (node.version, self.shared.value(session, Some(node))));
            let Some((version, value)) = version else {
                // The call finds that it is gone.
                return Ok(false);
            };
            if value? >= Some(to) {
                return Ok(false);
            }
            let set = Change::Set {
                path: path.clone(),
                data: to.to_be_bytes().to_vec(),
                version: Some(version),
            };
            match session.change(set).await? {
                Ok(()) => return Ok(true),
                Err(error::BAD_VERSION | error::NO_NODE) => {}
                Err(code) => return Err(error::of_call(&session.server, code)),
            }
        }
    }

    /// Reads records, with the times that the clock has reached and not passed.
    async fn look(
        &self,
        session: &Arc<Session>,
        names: &[RecordName],
    ) -> Result<(Timestamp, Timestamp, Vec<Option<Record>>), StoreError> {
        let paths: Vec<_> = names
            .iter()
            .map(|name| self.shared.layout.record(name))
            .collect();
        let run = self.run(session, Timestamp::default(), &[], &paths).await?;
        let Run::Done { now, latest, reply } = run else {
            return Err(error::no_reply());
        };
        let records = reply.nodes.into_iter().zip(names);
        let records = records.map(|(node, name)| self.shared.record(session, name, node));
        Ok((now, latest, records.collect::<Result<_, _>>()?))
    }

    async fn swap(&self, swap: &Swap) -> Result<SwapReply, StoreError> {
        self.ready().await?;
        let _room = self.room.acquire().await;
        let shared = &self.shared;
        let mut messages: Vec<_> = swap.messages.iter().take(MESSAGES).collect();
        // Each round ends with a reply of the server by which nothing was done.
        loop {
            let session = self.ensemble.session().await?;
            let node = |change: &super::records::Change| {
                session.seen().node_of(&change.name, change.known)
            };
            let nodes: Option<Vec<_>> = swap.changes.iter().map(node).collect();
            let Some(nodes) = nodes else {
                match self.conflict(&session, swap).await? {
                    Some(conflict) => return Ok(conflict),
                    None => continue,
                }
            };
            let changes = swap.changes.iter().zip(nodes).map(|(change, version)| {
                let path = shared.layout.record(&change.name);
                let number = change.record.version.number().to_be_bytes();
                let needed_until = change.needed_until.micros().to_be_bytes();
                let data = [&number[..], &needed_until, &change.record.body].concat();
                match version {
                    Some(version) => Change::Set {
                        path,
                        data,
                        version: Some(version),
                    },
                    None => Change::Create {
                        path,
                        data,
                        access: self.ensemble.access(),
                        kind: Kind::Lasting,
                    },
                }
            });
            let sent = messages.iter().flat_map(|message| {
                let directory = shared.layout.messages_to(message.to);
                let create = Change::Create {
                    // As a name, it is read with those of all others at once.
                    path: format!("{directory}/{}-", BASE64.encode(&message.body)),
                    data: Vec::new(),
                    access: self.ensemble.access(),
                    kind: Kind::Numbered,
                };
                let path = shared.layout.reader(message.to);
                [Change::Check { path }, create]
            });
            let changes: Vec<_> = changes.chain(sent).collect();
            let run = self.run(&session, swap.not_before, &changes, &[]).await?;
            let (now, latest, changed) = match run {
                Run::Early { now, latest } => {
                    return Ok(SwapReply::new(now, Swapped::Early).latest(latest));
                }
                Run::Done { now, latest, reply } => (now, latest, reply.changed),
            };
            match changed {
                // The clock alone was advanced.
                None => {}
                Some(Ok(versions)) if versions.len() != changes.len() => {
                    return Err(error::no_reply().with_unsent(false));
                }
                Some(Ok(versions)) => {
                    for (change, node) in swap.changes.iter().zip(versions) {
                        let version = Some(change.record.version);
                        session.seen().remember(&change.name, version, node);
                    }
                    return Ok(SwapReply::new(now, Swapped::Done).latest(latest));
                }
                Some(Err((index, error::NO_NODE))) if index >= swap.changes.len() => {
                    // Its process has ended, as perhaps those of others.
                    let (place, count) = ((index - swap.changes.len()) / 2, messages.len());
                    messages = self.with_readers(&session, messages).await?;
                    // Its nodes were removed, and are about to be created again.
                    if messages.len() == count && place < count {
                        messages.remove(place);
                    }
                }
                Some(Err((index, code))) if index >= swap.changes.len() => {
                    let place = (index - swap.changes.len()) / 2;
                    if place >= messages.len() {
                        return Err(error::of_call(&session.server, code));
                    }
                    // Such as for a quota. The waiter polls.
                    messages.remove(place);
                }
                Some(Err((index, code))) => {
                    let change = swap.changes.get(index);
                    match (code, change) {
                        (error::NO_NODE, Some(change)) if change.known.is_none() => {
                            session.seen().forget(&change.name);
                            let directory = shared.layout.directory_of(&change.name);
                            self.create(&session, directory, b"").await?;
                        }
                        (error::NO_NODE | error::BAD_VERSION | error::NODE_EXISTS, Some(_)) => {
                            if let Some(conflict) = self.conflict(&session, swap).await? {
                                return Ok(conflict);
                            }
                        }
                        _ => return Err(error::of_call(&session.server, code)),
                    }
                }
            }
        }
    }

    /// Returns the messages to clients that read them.
    async fn with_readers<'a>(
        &self,
        session: &Session,
        messages: Vec<&'a Message>,
    ) -> Result<Vec<&'a Message>, StoreError> {
        let reader = |message: &&Message| self.shared.layout.reader(message.to);
        let readers = messages.iter().map(|it| session.get(&reader(it), false));
        let readers = join_all(readers).await.into_iter();
        let readers = readers.collect::<Result<Vec<_>, _>>()?;
        let present = messages.into_iter().zip(readers);
        let present = present.filter(|(_, reader)| reader.is_some());
        Ok(present.map(|(message, _)| message).collect())
    }

    /// Returns the conflict of a swap, unless the records are those that it expects.
    async fn conflict(
        &self,
        session: &Arc<Session>,
        swap: &Swap,
    ) -> Result<Option<SwapReply>, StoreError> {
        let names: Vec<_> = swap.changes.iter().map(|it| it.name.clone()).collect();
        let (now, latest, present) = self.look(session, &names).await?;
        let versions = present.iter().map(|it| it.as_ref().map(|it| it.version));
        let is_expected = versions.eq(swap.changes.iter().map(|change| change.known));
        let conflict = || SwapReply::new(now, Swapped::Conflict(present)).latest(latest);
        Ok((!is_expected).then(conflict))
    }

    async fn read(&self, names: &[RecordName]) -> Result<ReadReply, StoreError> {
        self.ready().await?;
        let session = self.ensemble.session().await?;
        let (first, rest) = names.split_at(names.len().min(PART));
        let (now, mut latest, mut records) = self.look(&session, first).await?;
        // In parts, between which the calls of others are executed.
        for part in rest.chunks(PART) {
            let (_, last, more) = self.look(&session, part).await?;
            // The records of the first part may have changed since then.
            latest = last;
            records.extend(more);
        }
        Ok(ReadReply::new(now, records).latest(latest))
    }

    /// Returns the names of all records in a directory.
    async fn names_in(
        &self,
        session: &Session,
        directory: usize,
    ) -> Result<Vec<RecordName>, StoreError> {
        let path = self.shared.layout.directory(directory);
        let children = session.children(&path, false).await?.unwrap_or_default();
        Ok(children
            .iter()
            .filter_map(|child| Layout::name(child))
            .collect())
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&RecordName>,
    ) -> Result<Vec<(RecordName, Record)>, StoreError> {
        self.ready().await?;
        let session = self.ensemble.session().await?;
        // What is read after it is the latest state.
        self.look(&session, &[]).await?;
        let directories = (0..DIRECTORIES).map(|number| self.names_in(&session, number));
        let names = try_join_all(directories).await?.into_iter().flatten();
        let is_listed = |name: &RecordName| {
            name.as_str().starts_with(prefix) && after.is_none_or(|after| after < name)
        };
        let names: BTreeSet<_> = names.filter(is_listed).collect();
        let names: Vec<_> = names.into_iter().collect();
        for page in names.chunks(PAGE) {
            let (_, _, records) = self.look(&session, page).await?;
            let records = page.iter().cloned().zip(records);
            let records: Vec<_> = records
                .filter_map(|(name, record)| Some((name, record?)))
                .collect();
            // A page of records that were removed is not the end.
            if !records.is_empty() {
                return Ok(records);
            }
        }
        Ok(Vec::new())
    }

    /// Removes the messages to clients that read them no more.
    async fn remove_unread(&self) -> Result<(), StoreError> {
        let session = self.ensemble.session().await?;
        let layout = &self.shared.layout;
        let messages = format!("{}/m", layout.0);
        let clients = session.children(&messages, false);
        // Afterwards: a reader is there before its messages.
        let readers = session.children(&format!("{}/a", layout.0), false);
        let clients = clients.await?.unwrap_or_default();
        let readers: HashSet<_> = readers.await?.unwrap_or_default().into_iter().collect();
        for client in clients {
            if readers.contains(&client) {
                continue;
            }
            let directory = format!("{messages}/{client}");
            let names = session.children(&directory, false).await?;
            let names = names.unwrap_or_default().into_iter();
            let paths = names.map(|name| format!("{directory}/{name}"));
            for path in paths.chain([directory.clone()]) {
                let delete = Change::Delete {
                    path,
                    version: None,
                };
                // Refused if another client has done so, or there is a message more.
                let _ = session.change(delete).await?;
            }
        }
        Ok(())
    }

    /// Removes the records of one directory that are needed no more, and then their nodes.
    async fn remove_old(&self, directory: usize) -> Result<(), StoreError> {
        let session = self.ensemble.session().await?;
        let (now, _, _) = self.look(&session, &[]).await?;
        let names = self.names_in(&session, directory).await?;
        for part in names.chunks(PART) {
            let paths: Vec<_> = part
                .iter()
                .map(|name| self.shared.layout.record(name))
                .collect();
            let nodes = paths.iter().map(|path| session.get(path, false));
            let nodes: Vec<_> = nodes.collect();
            for (path, node) in paths.into_iter().zip(nodes) {
                if let Some(node) = node.await? {
                    self.remove(&session, path, node, now).await?;
                }
            }
        }
        Ok(())
    }

    async fn remove(
        &self,
        session: &Session,
        path: String,
        node: Node,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let version = Some(node.version);
        let change = match Content::of(&node.data) {
            Some(Content::Record { needed_until, .. }) if needed_until < now.micros() => {
                let data = now.micros().to_be_bytes().to_vec();
                Change::Set {
                    path,
                    data,
                    version,
                }
            }
            Some(Content::Removed { at })
                if Timestamp::from_micros(at).later(REMOVED_FOR) < now =>
            {
                Change::Delete { path, version }
            }
            _ => return Ok(()),
        };
        // Refused if another client has changed it.
        let _ = session.change(change).await?;
        Ok(())
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
