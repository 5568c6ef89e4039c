//! The pages of a list of locks.

use super::StoreError;
use crate::{request::key::LockKey, request::spec::LockKind};

/// A place in the list of a store's locks, in the store's own format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(Box<str>);

impl Cursor {
    /// Creates a cursor from the format of the store.
    pub fn new(place: impl Into<Box<str>>) -> Self {
        Self(place.into())
    }

    /// Returns the place in the format of the store.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Some of the locks of a store. The reply to [`Store::list`](super::Store::list).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Page {
    /// The locks, some of them perhaps more than once.
    pub locks: Vec<(LockKey, LockKind)>,
    /// The place of the next page. `None` after the last one.
    pub next: Option<Cursor>,
    /// The error of a part of the store that could not be read, such as a node of a cluster. The
    /// next page continues behind it.
    pub missing: Option<StoreError>,
}

impl Page {
    /// Creates a page.
    pub fn new(locks: Vec<(LockKey, LockKind)>, next: Option<Cursor>) -> Self {
        Self {
            locks,
            next,
            missing: None,
        }
    }

    /// Adds the error of a part that could not be read.
    #[must_use]
    pub fn missing(self, missing: Option<StoreError>) -> Self {
        Self { missing, ..self }
    }
}
