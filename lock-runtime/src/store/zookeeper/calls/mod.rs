//! The calls to an ensemble: changes and reads with a tick of the clock.

mod records;
pub(super) mod seen;
mod upkeep;

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::sync::{OnceCell, Semaphore};

use super::{
    ensemble::Ensemble,
    error,
    jute::{Change, Changed, Kind, Node},
    layout::{Content, Layout},
    session::Session,
    settings::Target,
};
use crate::store::{
    KeyPart, StoreError, StoreErrorKind,
    records::{Record, RecordName, Run, SharedClock, Tick, Ticked, Timestamp},
};

const FORMAT: &[u8] = b"1";
/// The swaps in flight.
const SWAPS: usize = 128;
/// The nodes that are read, or deleted, together.
pub(super) const PART: usize = 100;

/// The calls to an ensemble.
pub(super) struct Calls {
    pub(super) ensemble: Ensemble,
    /// The swaps that may be sent. A server executes those of a session one after the other, also
    /// for callers that have given up.
    room: Semaphore,
    pub(super) shared: Arc<Shared>,
}

/// The part that the calls of the keeper share with those of the application.
pub(super) struct Shared {
    pub(super) layout: Layout,
    pub(super) clock: SharedClock,
    /// Set when the format of the nodes is known to be this one.
    format: OnceCell<()>,
}

/// The reply to a call. Without `changed`, the changes were left out.
#[derive(Default)]
struct SwapOutcome {
    changed: Option<Changed>,
    nodes: Vec<Option<Node>>,
}

impl Shared {
    pub(super) fn new(layout: Layout) -> Self {
        Self {
            layout,
            clock: SharedClock::new(),
            format: OnceCell::new(),
        }
    }

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
    pub(super) fn value(
        &self,
        session: &Session,
        node: Option<Node>,
    ) -> Result<Option<u64>, StoreError> {
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
    pub(super) fn new(target: Target, shared: Arc<Shared>) -> Self {
        Self {
            ensemble: Ensemble::new(target),
            room: Semaphore::new(SWAPS),
            shared,
        }
    }

    /// Checks the format of the nodes before the first call.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
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
    ) -> Result<Run<SwapOutcome>, StoreError> {
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
            Ok(Ticked::new(value, is_taken, SwapOutcome { changed, nodes }))
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
}
