//! What can go wrong, typed to the end.

use std::{borrow::Cow, fmt, sync::Arc, time::Duration};

use crate::{
    key::LockKey,
    store::{StoreError, StoreErrorKind},
};

/// Why a lock was not to be had, or was lost.
///
/// Cheap to clone. [`kind`](Self::kind) is for `match`, [`code`](Self::code) for logs and wire formats; the message names
/// the key and, where there is one, the remedy. It never holds a token.
#[derive(Clone)]
pub struct LockError(Arc<Inner>);

struct Inner {
    kind: LockErrorKind,
    key: Option<LockKey>,
    message: Cow<'static, str>,
    retry_after: Option<Duration>,
    source: Option<StoreError>,
}

/// The kinds of [`LockError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LockErrorKind {
    /// Somebody holds the lock, and the request does not wait.
    Contended,
    /// Somebody held the lock for as long as the request was ready to wait.
    WaitTimeout,
    /// More requests wait in this process than the client allows.
    Overloaded,
    /// An enclosing scope of this flow of work holds the lock: waiting for it would never end. Say `reentrant`, or take the lock once.
    WouldDeadlock,
    /// The lock was held and is no longer.
    Lost(Loss),
    /// The store did not answer. An acquire tells how long it waited, how often it asked, and the last cause.
    Unavailable,
    /// The release was sent and its outcome is not known; the lock ends with its lease at the latest.
    ReleaseUnknown,
    /// The key is held in a mode that does not fit: another number of permits, or a downgrade of what is not a writer.
    ModeMismatch,
    /// Somebody's data lies under the lock's name. It was left untouched.
    ForeignKey,
    /// The name of the lock is not valid.
    InvalidKey,
    /// The spec cannot be meant.
    InvalidSpec,
    /// No client was installed for the macro.
    NoClient,
    /// The call is made outside of a Tokio runtime, or in one without timers (which is found by a panic that is caught: with `panic =
    /// "abort"` it ends the process).
    NoRuntime,
    /// The client was shut down.
    ShuttingDown,
    /// The URL does not name a store, or names a database that the server does not have, or needs a feature that is not compiled in.
    InvalidUrl,
    /// The server asks for a password, or refused the one it got.
    Unauthenticated,
    /// The server's access rules forbid what a lock needs.
    Forbidden,
    /// What answered is not a Redis server, or one too old.
    NotRedis,
    /// The server is a read-only replica.
    ReadOnly,
    /// The keys of the namespace have a format that another version of this library writes. Choose
    /// another namespace, or use versions of one format for all its clients.
    IncompatibleFormat,
}

/// How a lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// Renewal did not succeed until the lease had run out by the holder's own clock.
    Expired,
    /// The store says that the lock is no longer ours: it expired there, its data are gone, or somebody deleted it.
    Taken,
    /// Somebody called `revoke`.
    Revoked,
    /// `max_hold` has passed.
    MaxHold,
}

const UNAVAILABLE: &str = "the store is unavailable";

impl LockError {
    pub(crate) fn new(kind: LockErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner {
            kind,
            key: None,
            message: message.into(),
            retry_after: None,
            source: None,
        }))
    }

    pub(crate) fn from_store(error: StoreError) -> Self {
        let message = match error.kind() {
            StoreErrorKind::Unavailable => UNAVAILABLE,
            StoreErrorKind::Unsupported => "the store does not offer this",
            _ => "the store refused",
        };
        Self::new(error.kind().into(), message).with_source(Some(error))
    }

    fn edit(self, edit: impl FnOnce(&mut Inner)) -> Self {
        let Inner {
            kind,
            ref key,
            ref message,
            retry_after,
            ref source,
        } = *self.0;
        let mut inner = Inner {
            kind,
            key: key.clone(),
            message: message.clone(),
            retry_after,
            source: source.clone(),
        };
        edit(&mut inner);
        Self(Arc::new(inner))
    }

    pub(crate) fn with_key(self, key: &LockKey) -> Self {
        if self.0.key.is_some() {
            self
        } else {
            self.edit(|inner| inner.key = Some(key.clone()))
        }
    }

    pub(crate) fn with_retry_after(self, after: Option<Duration>) -> Self {
        self.edit(|inner| inner.retry_after = after)
    }

    pub(crate) fn with_source(self, source: Option<StoreError>) -> Self {
        self.edit(|inner| inner.source = source)
    }

    /// What the request did to have an answer, in front of the last cause. Only where the store is `Unavailable`.
    pub(crate) fn with_effort(self, effort: impl fmt::Display) -> Self {
        if self.kind() != LockErrorKind::Unavailable {
            return self;
        }
        self.edit(|inner| {
            // The cause comes behind the message, unless it is the message itself.
            let cause = if inner.source.is_none() {
                format!(": {}", inner.message)
            } else {
                String::new()
            };
            inner.message = format!("{UNAVAILABLE}: {effort}; last{cause}").into();
        })
    }

    /// What went wrong.
    pub fn kind(&self) -> LockErrorKind {
        self.0.kind
    }

    /// A stable text for the kind, such as `wait_timeout`.
    pub fn code(&self) -> &'static str {
        self.0.kind.code()
    }

    /// The lock it is about, where there is one.
    pub fn key(&self) -> Option<&LockKey> {
        self.0.key.as_ref()
    }

    /// What the store said, if it was the store that refused or did not answer.
    pub fn store_error(&self) -> Option<&StoreError> {
        self.0.source.as_ref()
    }

    /// The time until the lock may be free if no holder renews its lease, where the store said so: what is left of that lease, or the
    /// time until a dead waiter is passed over. With renewal on it says nothing about the hold.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }
}

impl LockErrorKind {
    /// A stable text for the kind, such as `wait_timeout`.
    pub fn code(self) -> &'static str {
        match self {
            Self::Contended => "contended",
            Self::WaitTimeout => "wait_timeout",
            Self::Overloaded => "overloaded",
            Self::WouldDeadlock => "would_deadlock",
            Self::Lost(Loss::Expired) => "lost_expired",
            Self::Lost(Loss::Taken) => "lost_taken",
            Self::Lost(Loss::Revoked) => "lost_revoked",
            Self::Lost(Loss::MaxHold) => "lost_max_hold",
            Self::Unavailable => "unavailable",
            Self::ReleaseUnknown => "release_unknown",
            Self::ModeMismatch => "mode_mismatch",
            Self::ForeignKey => "foreign_key",
            Self::InvalidKey => "invalid_key",
            Self::InvalidSpec => "invalid_spec",
            Self::NoClient => "no_client",
            Self::NoRuntime => "no_runtime",
            Self::ShuttingDown => "shutting_down",
            Self::InvalidUrl => "invalid_url",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::NotRedis => "not_redis",
            Self::ReadOnly => "read_only",
            Self::IncompatibleFormat => "incompatible_format",
        }
    }
}

impl From<StoreErrorKind> for LockErrorKind {
    fn from(kind: StoreErrorKind) -> Self {
        match kind {
            StoreErrorKind::Unavailable => Self::Unavailable,
            StoreErrorKind::Unauthenticated => Self::Unauthenticated,
            StoreErrorKind::Forbidden => Self::Forbidden,
            StoreErrorKind::NotRedis => Self::NotRedis,
            StoreErrorKind::ReadOnly => Self::ReadOnly,
            StoreErrorKind::ForeignKey => Self::ForeignKey,
            StoreErrorKind::Unsupported => Self::InvalidSpec,
            StoreErrorKind::InvalidUrl => Self::InvalidUrl,
            StoreErrorKind::IncompatibleFormat => Self::IncompatibleFormat,
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(key) = &self.0.key {
            write!(f, "lock {key}: ")?;
        }
        f.write_str(&self.0.message)?;
        // The remedy is the store's to know, and one line is all that most logs show.
        match &self.0.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockError({}: {self})", self.code())
    }
}

// The message names the cause already, so that one line tells all; a chain would tell it twice.
impl std::error::Error for LockError {}

impl From<LockError> for std::io::Error {
    fn from(error: LockError) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            LockErrorKind::Contended => ErrorKind::WouldBlock,
            LockErrorKind::WaitTimeout => ErrorKind::TimedOut,
            LockErrorKind::WouldDeadlock => ErrorKind::Deadlock,
            LockErrorKind::InvalidKey | LockErrorKind::InvalidSpec | LockErrorKind::InvalidUrl => {
                ErrorKind::InvalidInput
            }
            LockErrorKind::Unauthenticated | LockErrorKind::Forbidden => {
                ErrorKind::PermissionDenied
            }
            _ => ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
