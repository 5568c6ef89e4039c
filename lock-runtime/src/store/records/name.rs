//! The names of records.

use std::{fmt, sync::Arc};

use crate::{
    request::key::LockKey,
    request::spec::LockKind,
    store::{ClientId, StoreError, StoreErrorKind},
};

/// A prefix that no name of a lock has.
const PERMITS: &str = "permits:";
/// Names of locks contain no control characters.
const CLIENT: &str = "client\t";

/// The name of a record: at most 520 bytes, unique among all records of the locks.
///
/// For a lock it is the name of the lock, for permits `permits:` and their name, for the name of a
/// client `client`, a tab and its number. Names are equal if their bytes are equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordName(Arc<str>);

impl RecordName {
    /// Wraps a name that was read from the database.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// Returns the beginning of the names of all locks whose keys begin with `prefix`.
    pub(super) fn prefix(kind: LockKind, prefix: &str) -> String {
        match kind {
            LockKind::Lock => prefix.to_owned(),
            LockKind::Permits => format!("{PERMITS}{prefix}"),
        }
    }

    pub(super) fn of_lock(key: &LockKey, kind: LockKind) -> Self {
        Self(Self::prefix(kind, key.as_str()).into())
    }

    pub(super) fn of_client(client: ClientId) -> Self {
        Self(format!("{CLIENT}{client}").into())
    }

    /// Returns the text with which the names of all clients begin, if the record is that of one.
    #[cfg(feature = "postgres")]
    pub(in crate::store) fn first_client(&self) -> Option<&'static str> {
        self.0.starts_with(CLIENT).then_some(CLIENT)
    }

    /// Returns the lock that the record belongs to, if it is one.
    pub(super) fn lock(&self) -> Option<(LockKey, LockKind)> {
        let (name, kind) = match self.0.strip_prefix(PERMITS) {
            Some(name) => (name, LockKind::Permits),
            None => (&*self.0, LockKind::Lock),
        };
        Some((LockKey::new(name).ok()?, kind))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RecordName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Creates the error for a record that cannot be read.
pub(super) fn unreadable(name: &RecordName, cause: &str) -> StoreError {
    let message = format!(
        "the record {name} has a format of another version of this library ({cause}); use versions of one format"
    );
    StoreError::new(StoreErrorKind::IncompatibleFormat, message)
}
