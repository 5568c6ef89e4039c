//! Why a store could not do what it was asked.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use super::KeyPart;

/// Why a store could not do what it was asked.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: Arc<str>,
    unsent: bool,
    timed_out: bool,
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
    /// Other data lie in the place of a key of the lock, untouched; the message names the key.
    ForeignKey,
    /// The store does not offer what is asked for.
    Unsupported,
    /// The URL names what the server does not have, such as a database.
    InvalidUrl,
    /// The keys of the namespace have a format that another version of this library writes.
    IncompatibleFormat,
}

impl StoreError {
    /// An error whose message says what happened, what caused it and, where there is one, the remedy.
    pub fn new(kind: StoreErrorKind, message: impl Into<Arc<str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            unsent: false,
            timed_out: false,
        }
    }

    pub(crate) fn late() -> Self {
        Self::new(
            StoreErrorKind::Unavailable,
            "the store came to execute the request too late, and did nothing",
        )
    }

    pub(crate) fn timed_out(after: Duration) -> Self {
        let silent = Self::new(
            StoreErrorKind::Unavailable,
            format!("no answer within {after:.1?}"),
        );
        Self {
            timed_out: true,
            ..silent
        }
    }

    /// Other data lie in the place of a key of the lock, which is called `name` if it has one.
    pub(crate) fn foreign(name: Option<&str>, part: KeyPart) -> Self {
        let kept = match part {
            KeyPart::Lock => "its holder",
            KeyPart::Fence => "its latest fencing token",
            KeyPart::Queue => "its wait queue",
        };
        let name = name.map(|name| format!(" {name}")).unwrap_or_default();
        let message = format!(
            "the key{name}, in which a lock keeps {kept}, holds data that are no lock's, and was left untouched: choose \
             another name or namespace, or move the data"
        );
        Self::new(StoreErrorKind::ForeignKey, message)
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

    /// Is the caller's patience all that is known to have ended?
    pub(crate) fn is_timed_out(&self) -> bool {
        self.timed_out
    }

    /// What went wrong.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// May the same call succeed in a moment?
    pub fn is_transient(&self) -> bool {
        matches!(
            self.kind,
            StoreErrorKind::Unavailable | StoreErrorKind::ReadOnly
        )
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for StoreError {}
