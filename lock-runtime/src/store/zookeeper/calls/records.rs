//! Swaps, reads and lists of records.

use std::{collections::BTreeSet, sync::Arc};

use base64::Engine as _;
use futures_util::future::{join_all, try_join_all};

use super::{
    super::{
        BASE64, DIRECTORIES, error,
        jute::{Change, Kind},
        layout::Layout,
        session::Session,
    },
    Calls, PART, SwapOutcome,
};
use crate::store::{
    StoreError,
    records::{
        self, Message, ReadReply, Record, RecordName, Run, Swap, SwapReply, Swapped, Timestamp,
    },
};

/// The messages of one swap. Waiters beyond them poll.
const MESSAGES: usize = 200;
/// The records in one page of a list.
const PAGE: usize = 1000;

impl Calls {
    /// Reads records, with the times that the clock has reached and not passed.
    pub(super) async fn look(
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

    pub(in super::super) async fn swap(&self, swap: &Swap) -> Result<SwapReply, StoreError> {
        self.ready().await?;
        let _room = self.room.acquire().await;
        let shared = &self.shared;
        let mut messages: Vec<_> = swap.messages.iter().take(MESSAGES).collect();
        // Each round ends with a reply of the server by which nothing was done.
        loop {
            let session = self.ensemble.session().await?;
            let node =
                |change: &records::Change| session.seen().node_of(&change.name, change.known);
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
            // Read behind the changes, so that the reply to a conflict contains the records. In
            // vain if there is none.
            let mut names = swap.changes.iter().map(|it| &it.name);
            let is_contended = names.any(|name| session.seen().is_contended(name));
            let paths = swap.changes.iter().filter(|_| is_contended);
            let paths: Vec<_> = paths.map(|it| shared.layout.record(&it.name)).collect();
            let run = self
                .run(&session, swap.not_before, &changes, &paths)
                .await?;
            let (now, latest, SwapOutcome { changed, nodes }) = match run {
                Run::Early { now, latest } => {
                    return Ok(SwapReply::new(now, Swapped::Early).latest(latest));
                }
                Run::Done { now, latest, reply } => (now, latest, reply),
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
                            let late = swap.changes.iter();
                            late.for_each(|it| session.seen().was_late(&it.name));
                            let conflict = if is_contended {
                                let nodes = nodes.into_iter().zip(&swap.changes);
                                let records =
                                    nodes.map(|(node, it)| shared.record(&session, &it.name, node));
                                let present = records.collect::<Result<_, _>>()?;
                                conflict(swap, now, latest, present)
                            } else {
                                self.conflict(&session, swap).await?
                            };
                            if let Some(conflict) = conflict {
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
        Ok(conflict(swap, now, latest, present))
    }

    pub(in super::super) async fn read(
        &self,
        names: &[RecordName],
    ) -> Result<ReadReply, StoreError> {
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
    pub(super) async fn names_in(
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

    pub(in super::super) async fn list(
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
}

/// Returns the conflict of a swap, unless the records are those that it expects.
fn conflict(
    swap: &Swap,
    now: Timestamp,
    latest: Timestamp,
    present: Vec<Option<Record>>,
) -> Option<SwapReply> {
    let versions = present.iter().map(|it| it.as_ref().map(|it| it.version));
    let is_expected = versions.eq(swap.changes.iter().map(|change| change.known));
    let conflict = || SwapReply::new(now, Swapped::Conflict(present)).latest(latest);
    (!is_expected).then(conflict)
}
