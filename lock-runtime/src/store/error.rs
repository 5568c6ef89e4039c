//! Why a store could not do what it was asked.

use std::{error::Error, fmt, sync::Arc, time::Duration};

/// Why a store could not do what it was asked.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: Arc<str>,
    unsent: bool,
}

/// The kinds of [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No answer, or one that says "not now". Worth another try; the outcome of the call is unknown.
    Unavailable,
    /// The server asks for a password, or refused the one it got.
    Unauthenticated,
    /// The server's access rules forbid what a lock needs.
    Forbidden,
    /// What answered does not speak the store's protocol.
    NotRedis,
    /// The server is a read-only replica.
    ReadOnly,
    /// Somebody's data lie under a name that the lock needs, untouched.
    ForeignKey,
    /// The store does not offer what is asked for.
    Unsupported,
}

impl StoreError {
    /// An error whose message says what happened, what caused it and, where there is one, the remedy.
    pub fn new(kind: StoreErrorKind, message: impl Into<Arc<str>>) -> Self {
        Self { kind, message: message.into(), unsent: false }
    }

    pub(crate) fn late() -> Self {
        Self::new(StoreErrorKind::Unavailable, "the store came to execute the request too late, and did nothing")
    }

    pub(crate) fn timed_out(after: Duration) -> Self {
        Self::new(StoreErrorKind::Unavailable, format!("no answer within {after:?}"))
    }

    /// The same error; the request was sent, or was not, and the store will never execute it.
    #[must_use]
    pub fn with_unsent(self, unsent: bool) -> Self {
        Self { unsent, ..self }
    }

    /// Is it sure that the store will never execute the request?
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// What went wrong.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// May the same call succeed in a moment?
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unavailable | StoreErrorKind::ReadOnly)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for StoreError {}
