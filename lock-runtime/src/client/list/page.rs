//! [`LockPage`], a part of the list of locks in the order of their names.

use std::{collections::BTreeSet, future::IntoFuture, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};

use super::{ListedLock, Listing, Place};
use crate::{
    LockClient, error::LockError, request::key::LockKey, request::spec::LockKind,
    shell::time::Instant,
};

/// Longer than any list takes.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Some of the locks of a store in the order of their names, returned by
/// [`LockClient::list_page`].
///
/// With the feature `serde` it is serialized; an error as its `code` and text.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LockPage {
    /// The locks. Fewer than were asked for, if some became free in the meantime.
    pub locks: Vec<ListedLock>,
    /// The number of names with the prefix: locks, and foreign data in the namespace. About right
    /// beyond a million.
    pub total: usize,
    /// The number of names before this page.
    pub offset: usize,
    /// Where the next page begins: behind this lock. `None` on the last page.
    pub next: Option<(LockKey, LockKind)>,
    /// Whether the store was read to its end. If not, there may be locks that are not counted, also
    /// between those of this page.
    pub is_complete: bool,
    /// The errors of locks and of parts of the store that could not be read.
    #[cfg_attr(
        feature = "serde",
        serde(serialize_with = "crate::observe::fields::errors")
    )]
    pub errors: Vec<LockError>,
}

/// A request for a page of the list of locks, returned by [`LockClient::list_page`]. Await it, or
/// call `into_future` where a future is asked for.
#[derive(Clone, Debug)]
#[must_use = "pages are not read unless awaited"]
pub struct ListPage {
    client: LockClient,
    prefix: String,
    after: Option<(LockKey, LockKind)>,
    limit: usize,
    timeout: Duration,
}

impl LockClient {
    /// Returns the first locks whose names begin with `prefix`, in the order of their names.
    ///
    /// Each page reads the names of all locks in the store, as [`list`](Self::list) does, and the
    /// state of those on the page. In the meantime it keeps a hash of each name.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # use lock_runtime::LockClient;
    /// let locks = LockClient::in_memory();
    /// let guard = locks.all(["order:1", "order:2", "order:3"]).acquire().await?;
    /// let page = locks.list_page("order:").limit(2).await;
    /// assert_eq!(page.total, 3);
    /// assert_eq!(page.locks[1].key.as_str(), "order:2");
    /// let page = locks.list_page("order:").limit(2).after(page.next).await;
    /// assert_eq!(page.locks[0].key.as_str(), "order:3");
    /// # assert_eq!((page.offset, page.next), (2, None));
    /// # guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`LockPage::errors`] has those of [`list`](Self::list).
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub fn list_page(&self, prefix: impl Into<String>) -> ListPage {
        ListPage {
            client: self.clone(),
            prefix: prefix.into(),
            after: None,
            limit: 100,
            timeout: Duration::from_secs(2),
        }
    }
}

impl ListPage {
    /// Begins behind this lock, which is the [`next`](LockPage::next) of the page before.
    pub fn after(mut self, lock: impl Into<Option<(LockKey, LockKind)>>) -> Self {
        self.after = lock.into();
        self
    }

    /// Sets the number of locks on the page, 100 by default, and at least one.
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// Sets the time after which reading ends, or a call later; two seconds by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    async fn read(self) -> LockPage {
        let Self {
            client,
            prefix,
            after,
            limit,
            timeout,
        } = self;
        let after = after.as_ref();
        let mut listing = Listing::new(client, prefix);
        let until = Instant::now() + timeout.min(MAX_TIMEOUT);
        let at_most = limit.clamp(1, usize::MAX - 1);
        let mut page = LockPage {
            is_complete: true,
            ..LockPage::default()
        };
        // One more than the page has, to know whether there is a next one.
        let mut first = BTreeSet::new();
        while let Place::At(cursor) = &listing.place {
            if Instant::now() > until {
                page.is_complete = false;
                break;
            }
            let cursor = cursor.clone();
            listing.turn_page(cursor).await;
            for lock in listing.found.drain(..) {
                page.total += 1;
                if after.is_some_and(|after| lock <= *after) {
                    page.offset += 1;
                } else if first.len() <= at_most || first.last().is_some_and(|last| lock < *last) {
                    first.insert(lock);
                    if first.len() > at_most + 1 {
                        first.pop_last();
                    }
                }
            }
        }
        let has_next = first.len() > at_most;
        listing.found.extend(first.into_iter().take(at_most));
        page.next = listing.found.back().filter(|_| has_next).cloned();
        while !listing.found.is_empty() {
            listing.inspect_some().await;
        }
        page.is_complete &= !listing.ready.iter().any(Result::is_err);
        for lock in listing.ready {
            match lock {
                Ok(lock) => page.locks.push(lock),
                Err(error) => page.errors.push(error),
            }
        }
        page
    }
}

impl IntoFuture for ListPage {
    type Output = LockPage;
    type IntoFuture = BoxFuture<'static, LockPage>;

    fn into_future(self) -> Self::IntoFuture {
        self.read().boxed()
    }
}
