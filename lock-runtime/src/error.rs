//! The error type of the crate.

use std::{any::Any, borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use crate::{
    observe::text,
    request::key::LockKey,
    request::name::RequestName,
    store::error::{StoreError, StoreErrorKind},
};

/// The reason why a lock could not be acquired, or was lost.
///
/// Cloning is cheap. Match on [`kind`](Self::kind), and use [`code`](Self::code) in logs and wire
/// formats. The message contains the key and, if there is one, a remedy. It never contains a
/// token.
///
/// If the store caused the error, [`source`](Error::source) returns its [`StoreError`], and
/// `Display` leaves it to error reporters such as `anyhow` to print it. To print both in one line,
/// use the alternate form: `{error:#}`. `Debug` always prints both.
#[derive(Clone)]
pub struct LockError(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: LockErrorKind,
    key: Option<LockKey>,
    name: Option<RequestName>,
    message: Cow<'static, str>,
    free_in: Option<Duration>,
    /// The options that the error is about.
    settings: &'static [&'static str],
    source: Option<StoreError>,
    /// The result of the work under a lock that is done. Of any type, as that of the store needs
    /// errors itself.
    result: Option<Arc<dyn Any + Send + Sync>>,
}

/// The class of an error, which is a row of the [table](crate::web): its meaning for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The lock is held by another holder. The caller may retry.
    Busy,
    /// Too many requests wait or were given up. The caller may retry.
    Overloaded,
    /// Locks are not available at the moment.
    Unavailable,
    /// The lock was lost while the request was served. The request may have had effects, so the
    /// caller is not invited to retry.
    Lost,
    /// A part of the request that names the lock is missing or invalid.
    BadRequest,
    /// An internal error of the server.
    Internal,
}

impl From<LockErrorKind> for ErrorClass {
    fn from(kind: LockErrorKind) -> Self {
        kind.code_and_class().1
    }
}

/// The kinds of [`LockError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LockErrorKind {
    /// The lock is held, and the request does not wait.
    Contended,
    /// The lock was held for as long as the request could wait.
    WaitTimeout,
    /// Another request is at work that is done [once](crate::LockClient::once), and this one does
    /// not wait.
    Running,
    /// The lock is that of work that is done [once](crate::LockClient::once), and keeps its result.
    Done,
    /// The result of work that is done [once](crate::LockClient::once) is too long, cannot be
    /// serialized, or cannot be read by this version of the program.
    InvalidResult,
    /// More requests wait in this process than the client allows, or more that were given up are
    /// yet to be ended at the store.
    Overloaded,
    /// An enclosing scope already holds the lock, so waiting for it would never end. Make the
    /// request `reentrant`, or acquire the lock only once.
    WouldDeadlock,
    /// The lock was held and has been lost.
    Lost(Loss),
    /// The lock was held and has been released, such as by the guard of a view that is still used.
    Released,
    /// The store did not answer. For an acquire, the message contains the time waited and the
    /// number of attempts. The source is the last error of the store.
    Unavailable,
    /// The store answers, but another session of its database has locked the record of the lock.
    /// [`inspect`](crate::LockClient::inspect) names the session.
    Blocked,
    /// The release was sent and its outcome is unknown. The lock ends with its lease at the
    /// latest.
    ReleaseUnknown,
    /// The lock is held in a mode that does not match: for a downgrade, not as a writer; for
    /// permits, by an enclosing scope with another number; or its key holds data of another kind
    /// of lock.
    ModeMismatch,
    /// Foreign data is stored under the key of the lock. It was left untouched.
    ForeignKey,
    /// The key is invalid.
    InvalidKey,
    /// The spec or another setting is invalid, is beyond the [`Limits`](crate::store::Limits) of
    /// the store, or asks for what the store does not offer.
    InvalidSpec,
    /// No client is installed for the macro.
    NoClient,
    /// The call was made outside a Tokio runtime, or in one without timers. Missing timers are
    /// detected by catching a panic: with `panic = "abort"` they end the process.
    NoRuntime,
    /// The client was shut down.
    ShuttingDown,
    /// The URL does not name a store, names a database that the server does not have, or needs a
    /// feature that is not compiled in.
    InvalidUrl,
    /// The server requires a password, or refused the one it received.
    Unauthenticated,
    /// The access rules of the server forbid an operation that locks need.
    Forbidden,
    /// The server is not a Redis server, or its version is too old.
    WrongServer,
    /// The server is a read-only replica.
    ReadOnly,
    /// The database has no room left. The message names the remedy.
    Full,
    /// The keys of the namespace have a format that another version of this library writes. Choose
    /// another namespace, or use versions of one format for all its clients.
    IncompatibleFormat,
}

/// How a lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Loss {
    /// No renewal succeeded before the lease expired by the holder's own clock.
    Expired,
    /// The store replied that the lock is no longer held: it expired there, its data is gone, or
    /// it was deleted.
    Taken,
    /// The lock was revoked. See [`LockClient::revoke`](crate::LockClient::revoke).
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
            name: None,
            message: text::message(message),
            free_in: None,
            settings: &[],
            result: None,
            source: None,
        }))
    }

    /// Creates the error of invalid values of these options.
    pub(crate) fn of_settings(
        settings: &'static [&'static str],
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        let error = Self::new(LockErrorKind::InvalidSpec, message);
        error.edit(|inner| inner.settings = settings)
    }

    /// Returns the options that the error is about, if they are known.
    pub(crate) fn settings(&self) -> &'static [&'static str] {
        match &self.0.source {
            Some(error) if self.0.settings.is_empty() => error.settings(),
            _ => self.0.settings,
        }
    }

    pub(crate) fn from_store(error: StoreError) -> Self {
        let message = match error.kind() {
            _ if error.is_out_of_turn() => "not all keys were acquired in time",
            StoreErrorKind::Unavailable => UNAVAILABLE,
            StoreErrorKind::Blocked => "another session of the database has locked its record",
            StoreErrorKind::Unsupported => "the store does not offer this",
            _ => "the store refused",
        };
        Self::new(error.kind().into(), message).with_source(Some(error))
    }

    fn edit(mut self, edit: impl FnOnce(&mut Inner)) -> Self {
        edit(Arc::make_mut(&mut self.0));
        self
    }

    /// Names the lock, unless the error names one already or there is none.
    pub(crate) fn with_key<'a>(self, key: impl Into<Option<&'a LockKey>>) -> Self {
        match key.into() {
            Some(key) if self.0.key.is_none() => self.edit(|inner| inner.key = Some(key.clone())),
            _ => self,
        }
    }

    /// Adds the name of the request, if it has one.
    pub(crate) fn with_name(self, name: Option<&RequestName>) -> Self {
        match name {
            Some(name) if self.0.name.is_none() => {
                self.edit(|inner| inner.name = Some(name.clone()))
            }
            _ => self,
        }
    }

    pub(crate) fn with_result(self, result: Arc<dyn Any + Send + Sync>) -> Self {
        self.edit(|inner| inner.result = Some(result))
    }

    pub(crate) fn result<T: 'static>(&self) -> Option<&T> {
        self.0.result.as_deref()?.downcast_ref()
    }

    pub(crate) fn with_free_in(self, after: Option<Duration>) -> Self {
        self.edit(|inner| inner.free_in = after)
    }

    /// Adds a detail to the message.
    pub(crate) fn with_hint(self, hint: Option<&str>) -> Self {
        match hint {
            Some(hint) => {
                self.edit(|inner| inner.message = format!("{}; {hint}", inner.message).into())
            }
            None => self,
        }
    }

    pub(crate) fn with_source(self, source: Option<StoreError>) -> Self {
        self.edit(|inner| inner.source = source)
    }

    /// Prefixes the message with the setting that the error is about.
    pub(crate) fn with_context(self, setting: &str) -> Self {
        self.edit(|inner| inner.message = format!("{setting}: {}", inner.message).into())
    }

    /// Adds the effort of the request to the message. Affects only `Unavailable` and `Blocked`.
    pub(crate) fn with_effort(self, effort: impl fmt::Display) -> Self {
        if !matches!(
            self.kind(),
            LockErrorKind::Unavailable | LockErrorKind::Blocked
        ) {
            return self;
        }
        self.edit(|inner| {
            inner.message = match &inner.source {
                Some(_) => format!("{}: {effort}", inner.message),
                // The message itself is the last cause.
                None => format!("{UNAVAILABLE}: {effort}; last: {}", inner.message),
            }
            .into();
        })
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> LockErrorKind {
        self.0.kind
    }

    /// Returns a stable identifier of the kind, such as `wait_timeout`.
    pub fn code(&self) -> &'static str {
        self.0.kind.code()
    }

    /// Returns the lock that the error is about, if any.
    pub fn key(&self) -> Option<&LockKey> {
        self.0.key.as_ref()
    }

    /// Returns the name of the request, if it has one: the path of the function with the attribute,
    /// the policy of a layer, or that given to [`LockRequest::name`](crate::LockRequest::name).
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_ref().map(RequestName::as_str)
    }

    /// Returns the error of the store, if the store refused the call or did not answer.
    pub fn store_error(&self) -> Option<&StoreError> {
        self.0.source.as_ref()
    }

    /// Returns the time until the lock may be free if no holder renews its lease, if the store
    /// reported it.
    ///
    /// It is the rest of that lease, or the time until a dead waiter is skipped. It does not
    /// predict the end of the hold if the holder renews its lease.
    pub fn free_in(&self) -> Option<Duration> {
        self.0.free_in
    }
}

impl LockErrorKind {
    /// Returns a stable identifier of the kind, such as `wait_timeout`.
    pub fn code(self) -> &'static str {
        self.code_and_class().0
    }

    pub(crate) fn code_and_class(self) -> (&'static str, ErrorClass) {
        match self {
            Self::Contended => ("contended", ErrorClass::Busy),
            Self::WaitTimeout => ("wait_timeout", ErrorClass::Busy),
            Self::Running => ("running", ErrorClass::Busy),
            Self::Done => ("done", ErrorClass::Busy),
            Self::InvalidResult => ("invalid_result", ErrorClass::Internal),
            Self::Overloaded => ("overloaded", ErrorClass::Overloaded),
            Self::WouldDeadlock => ("would_deadlock", ErrorClass::Internal),
            Self::Lost(Loss::Expired) => ("lost_expired", ErrorClass::Lost),
            Self::Lost(Loss::Taken) => ("lost_taken", ErrorClass::Lost),
            Self::Lost(Loss::Revoked) => ("lost_revoked", ErrorClass::Lost),
            Self::Lost(Loss::MaxHold) => ("lost_max_hold", ErrorClass::Lost),
            Self::Released => ("released", ErrorClass::Internal),
            Self::Unavailable => ("unavailable", ErrorClass::Unavailable),
            // The holder of the record is not known to hold the lock.
            Self::Blocked => ("blocked", ErrorClass::Busy),
            Self::ReleaseUnknown => ("release_unknown", ErrorClass::Internal),
            Self::ModeMismatch => ("mode_mismatch", ErrorClass::Internal),
            Self::ForeignKey => ("foreign_key", ErrorClass::Internal),
            Self::InvalidKey => ("invalid_key", ErrorClass::BadRequest),
            Self::InvalidSpec => ("invalid_spec", ErrorClass::Internal),
            Self::NoClient => ("no_client", ErrorClass::Internal),
            Self::NoRuntime => ("no_runtime", ErrorClass::Internal),
            Self::ShuttingDown => ("shutting_down", ErrorClass::Unavailable),
            Self::InvalidUrl => ("invalid_url", ErrorClass::Internal),
            Self::Unauthenticated => ("unauthenticated", ErrorClass::Internal),
            Self::Forbidden => ("forbidden", ErrorClass::Internal),
            Self::WrongServer => ("wrong_server", ErrorClass::Internal),
            // A server is read-only while it fails over.
            Self::ReadOnly => ("read_only", ErrorClass::Unavailable),
            Self::Full => ("full", ErrorClass::Unavailable),
            Self::IncompatibleFormat => ("incompatible_format", ErrorClass::Internal),
        }
    }
}

impl From<StoreErrorKind> for LockErrorKind {
    fn from(kind: StoreErrorKind) -> Self {
        match kind {
            StoreErrorKind::Unavailable => Self::Unavailable,
            StoreErrorKind::Blocked => Self::Blocked,
            StoreErrorKind::Unauthenticated => Self::Unauthenticated,
            StoreErrorKind::Forbidden => Self::Forbidden,
            StoreErrorKind::WrongServer => Self::WrongServer,
            StoreErrorKind::ReadOnly => Self::ReadOnly,
            StoreErrorKind::Full => Self::Full,
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
            write!(f, "lock {}: ", key.shown())?;
        }
        f.write_str(&self.0.message)?;
        match &self.0.source {
            Some(source) if f.alternate() => write!(f, ": {source}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockError({}: {self:#})", self.code())
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.store_error().map(|error| error as _)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_leaves_the_cause_to_source() {
        let cause = StoreError::new(StoreErrorKind::Unavailable, "no answer");
        let error = LockError::from_store(cause).with_key(&LockKey::new("k").unwrap());
        assert_eq!(error.to_string(), "lock k: the store is unavailable");
        assert_eq!(error.source().unwrap().to_string(), "no answer");
        let both = "lock k: the store is unavailable: no answer";
        assert_eq!(format!("{error:#}"), both);
        let debugged = format!("LockError(unavailable: {both})");
        assert_eq!(format!("{error:?}"), debugged);
    }
}
