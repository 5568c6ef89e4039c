//! The removal of what is needed no more.

use std::{collections::HashSet, time::Duration};

use super::{
    super::{
        jute::{Change, Node},
        layout::Content,
        session::Session,
    },
    Calls, PART,
};
use crate::store::{StoreError, records::Timestamp};

/// The time for which a removed record keeps its node. Longer than versions are remembered, by
/// clocks of different rates.
const REMOVED_FOR: Duration = Duration::from_secs(7200);

impl Calls {
    /// Removes the messages to clients that read them no more.
    pub(in super::super) async fn remove_unread(&self) -> Result<(), StoreError> {
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

    /// Removes the records of one directory that are needed no more, and then their nodes. Returns
    /// the number of the records.
    pub(in super::super) async fn remove_old(&self, directory: usize) -> Result<u64, StoreError> {
        let mut removed = 0;
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
                    removed += u64::from(self.remove(&session, path, node, now).await?);
                }
            }
        }
        Ok(removed)
    }

    /// Returns whether a record was removed.
    async fn remove(
        &self,
        session: &Session,
        path: String,
        node: Node,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
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
            _ => return Ok(false),
        };
        let is_of_record = matches!(change, Change::Set { .. });
        // Refused if another client has changed it.
        Ok(session.change(change).await?.is_ok() && is_of_record)
    }
}
