//! [`LockList`], the locks of a store as a stream.

mod page;

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    hash::BuildHasher as _,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use foldhash::fast::RandomState;
use futures_util::{
    FutureExt as _, Stream, StreamExt as _,
    future::join_all,
    stream::{BoxStream, unfold},
};
use tokio::time::sleep;

pub use self::page::{ListPage, LockPage};
use super::LockClient;
use crate::{
    error::{LockError, LockErrorKind},
    request::key::LockKey,
    request::spec::LockKind,
    shell::time::Instant,
    store::{Cursor, Inspection},
};

/// The number of locks that are inspected at a time: enough to share round trips, few enough not to
/// delay other calls.
const AT_ONCE: usize = 64;
/// The number of locks that are remembered so that none is returned twice.
const REMEMBERED: usize = 1 << 20;
/// The time for which a lock that is being moved between the nodes of a cluster is inspected again,
/// and the pause between two attempts.
const MOVING: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(25);

/// A lock in a [`LockList`].
///
/// With the feature `serde` it is serialized, with the fields of `state` beside the others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ListedLock {
    /// The name of the lock.
    pub key: LockKey,
    /// Whether it is a lock, or permits of this name.
    pub kind: LockKind,
    /// Its holders and waiters.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub state: Inspection,
}

/// The stream of [`LockClient::list`].
///
/// It reads ahead by one page of the store and makes no call while it is not polled.
#[must_use = "streams do nothing unless polled"]
pub struct LockList(BoxStream<'static, Result<ListedLock, LockError>>);

impl LockList {
    pub(super) fn new(client: LockClient, prefix: String) -> Self {
        let listing = Listing::new(client, prefix);
        let each = |mut listing: Listing| async move { Some((listing.next().await?, listing)) };
        Self(unfold(listing, each).boxed())
    }

    /// Returns the next lock, or `None` after the last one.
    ///
    /// # Errors
    /// That of a lock, or of a part of the store, that could not be read. The list continues behind
    /// it. If the store cannot be listed at all, the error is the last item.
    ///
    /// # Cancellation
    /// Dropping the future loses no lock.
    pub async fn next(&mut self) -> Option<Result<ListedLock, LockError>> {
        self.0.next().await
    }
}

impl Stream for LockList {
    type Item = Result<ListedLock, LockError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next_unpin(cx)
    }
}

impl fmt::Debug for LockList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockList").finish_non_exhaustive()
    }
}

enum Place {
    /// `None` for the beginning.
    At(Option<Cursor>),
    End,
}

/// A list in progress.
struct Listing {
    client: LockClient,
    prefix: String,
    place: Place,
    /// Locks that are not inspected yet.
    found: VecDeque<(LockKey, LockKind)>,
    ready: VecDeque<Result<ListedLock, LockError>>,
    seen: Seen,
    /// The store did not answer for any of the locks that were inspected last.
    is_away: bool,
}

impl Listing {
    fn new(client: LockClient, prefix: String) -> Self {
        Self {
            client,
            prefix,
            place: Place::At(None),
            found: VecDeque::new(),
            ready: VecDeque::new(),
            seen: Seen::default(),
            is_away: false,
        }
    }

    async fn next(&mut self) -> Option<Result<ListedLock, LockError>> {
        loop {
            if let Some(lock) = self.ready.pop_front() {
                return Some(lock);
            }
            if self.found.is_empty() {
                match &self.place {
                    Place::End => return None,
                    Place::At(cursor) => {
                        let cursor = cursor.clone();
                        self.turn_page(cursor).await;
                    }
                }
            } else {
                self.inspect_some().await;
            }
        }
    }

    async fn turn_page(&mut self, cursor: Option<Cursor>) {
        let store = &self.client.core.store;
        let page = match self
            .client
            .core
            .bounded(None, store.list(&self.prefix, cursor))
            .await
        {
            Ok(page) => page,
            Err(error) => {
                self.place = Place::End;
                return self.ready.push_back(Err(error));
            }
        };
        self.place = page.next.map_or(Place::End, |next| Place::At(Some(next)));
        self.ready
            .extend(page.missing.map(|error| Err(LockError::from_store(error))));
        let locks = page.locks.into_iter();
        self.found
            .extend(locks.filter(|lock| self.seen.insert(lock)));
    }

    async fn inspect_some(&mut self) {
        let some = self.found.len().min(AT_ONCE);
        let moving = if self.is_away { Duration::ZERO } else { MOVING };
        let inspections = self.found.iter().take(some).map(async |(key, kind)| {
            let until = Instant::now() + moving;
            loop {
                let seen = self.client.inspected(key, *kind).await;
                let is_moving = |error: &LockError| error.kind() == LockErrorKind::Unavailable;
                if Instant::now() > until || !seen.as_ref().is_err_and(is_moving) {
                    return seen;
                }
                sleep(PAUSE).await;
            }
        });
        let inspections = join_all(inspections).boxed().await;
        let unavailable = |seen: &Result<_, LockError>| {
            let error = seen.as_ref().err().map(LockError::kind);
            error == Some(LockErrorKind::Unavailable)
        };
        self.is_away = inspections.iter().all(unavailable);
        let (mut seen, mut locks) = (Vec::with_capacity(some), Vec::with_capacity(some));
        for (lock, inspection) in self.found.drain(..some).zip(inspections) {
            match inspection {
                Ok(state) if state.holders.is_empty() && state.waiters.is_empty() => {}
                Ok(state) => {
                    seen.push(state);
                    locks.push(lock);
                }
                // Other data in the namespace.
                Err(error) if error.kind() == LockErrorKind::ForeignKey => {}
                Err(error) => self.ready.push_back(Err(error)),
            }
        }
        self.client.core.names.add_names(&mut seen).await;
        let listed = locks.into_iter().zip(seen);
        let listed = listed.map(|((key, kind), state)| Ok(ListedLock { key, kind, state }));
        self.ready.extend(listed);
    }
}

/// The locks that were returned last, as hashes.
#[derive(Default)]
struct Seen {
    hasher: RandomState,
    hashes: HashSet<u64, RandomState>,
    order: VecDeque<u64>,
}

impl Seen {
    /// Remembers a lock. Returns whether it is new.
    fn insert(&mut self, lock: &(LockKey, LockKind)) -> bool {
        let hash = self.hasher.hash_one(lock);
        if !self.hashes.insert(hash) {
            return false;
        }
        self.order.push_back(hash);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.hashes.remove(&oldest);
        }
        true
    }
}
