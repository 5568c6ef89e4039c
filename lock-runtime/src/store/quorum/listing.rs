//! The list of the locks of several servers.

use std::sync::Arc;

use super::PATIENCE;
use crate::{
    protocol::majority::majority,
    shell::call::within,
    store::{Cursor, Page, QuorumMember, StoreError, StoreErrorKind},
};

/// A place in the list. Its text is `server listed place`.
struct Place {
    /// The server that is being listed.
    server: usize,
    /// The number of servers that were listed to the end.
    listed: usize,
    /// The place within the server, if not its beginning.
    inner: Option<String>,
}

impl Place {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.splitn(3, ' ');
        Some(Self {
            server: words.next()?.parse().ok()?,
            listed: words.next()?.parse().ok()?,
            inner: words.next().map(str::to_owned),
        })
    }

    fn cursor(&self) -> Cursor {
        let Self {
            server,
            listed,
            inner,
        } = self;
        Cursor::new(match inner {
            Some(inner) => format!("{server} {listed} {inner}"),
            None => format!("{server} {listed}"),
        })
    }
}

/// Lists one server after the other, until a majority has been listed: each lock that is held is
/// held there by one of them at least. A server that does not answer is left out.
pub(super) async fn page(
    servers: &[Arc<dyn QuorumMember>],
    prefix: &str,
    cursor: Option<Cursor>,
) -> Result<Page, StoreError> {
    let text = cursor.as_ref().map_or("0 0", Cursor::as_str);
    let unknown = || {
        StoreError::new(
            StoreErrorKind::Unsupported,
            "the cursor is of another store",
        )
    };
    let place = Place::parse(text).ok_or_else(unknown)?;
    let server = servers.get(place.server).ok_or_else(unknown)?;
    let inner = place.inner.as_deref().map(Cursor::new);
    let mut next = Place {
        inner: None,
        ..place
    };
    let mut page = match within(PATIENCE, server.list(prefix, inner)).await {
        Ok(mut page) => {
            if let Some(further) = page.next.take() {
                next.inner = Some(further.as_str().to_owned());
                page.next = Some(next.cursor());
                return Ok(page);
            }
            next.listed += 1;
            page
        }
        // The servers that are left have to make a majority with those that were listed.
        Err(error) if servers.len() - next.server - 1 + next.listed < majority(servers.len()) => {
            return Err(error);
        }
        Err(_) => Page::default(),
    };
    next.server += 1;
    page.next = (next.listed < majority(servers.len())).then(|| next.cursor());
    Ok(page)
}
