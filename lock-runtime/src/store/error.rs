//! The error type of stores.

use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use super::KeyPart;
use crate::observe::text;

/// The reason why a store could not execute a call.
// Boxed: errors are rare, and all replies would be larger.
#[derive(Clone, Debug)]
pub struct StoreError {
    parts: Box<Parts>,
}

#[derive(Clone, Debug)]
struct Parts {
    kind: StoreErrorKind,
    message: Arc<str>,
    unsent: bool,
    timed_out: bool,
    ends_waits: bool,
    /// The index of the key of a call for several keys that it is about.
    key: Option<usize>,
    /// The store has replied, but the time was over.
    out_of_turn: bool,
    passes: bool,
    settings: &'static [&'static str],
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "no other store tells")
    )]
    shows: Shows,
}

/// Whether an error shows that the store answers.
#[cfg_attr(
    not(feature = "postgres"),
    allow(dead_code, reason = "no other store tells")
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shows {
    /// Its kind tells.
    #[default]
    ByKind,
    /// The store has answered with it.
    Answer,
    /// It says nothing: no call was made.
    Nothing,
}

/// The kinds of [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store did not answer, or cannot serve the call now. A retry may succeed. The
    /// outcome of the call is unknown.
    Unavailable,
    /// The store answers, but another session of the database, such as that of an operator, has
    /// locked the record of the lock. A retry succeeds once its transaction has ended.
    Blocked,
    /// The server requires a password, or refused the one it received.
    Unauthenticated,
    /// The access rules of the server forbid an operation that locks need.
    Forbidden,
    /// The server does not speak the protocol of the store.
    WrongServer,
    /// The server is a read-only replica.
    ReadOnly,
    /// The database has no room left: it answers reads and refuses changes. The message names the
    /// remedy.
    Full,
    /// Foreign data is stored under one of the lock's keys. It was left untouched. The message
    /// names the key.
    ForeignKey,
    /// The store does not support the request.
    Unsupported,
    /// The URL names something that the server does not have, such as a database.
    InvalidUrl,
    /// The keys of the namespace have a format that another version of this library writes.
    IncompatibleFormat,
}

impl StoreError {
    /// Creates an error. The message states the failure, its cause and, if there is one, the
    /// remedy. Control characters in it are escaped, and it is cut off after 8000 bytes.
    pub fn new(kind: StoreErrorKind, message: impl Into<Arc<str>>) -> Self {
        let message = message.into();
        let shown = match text::message(&*message) {
            Cow::Borrowed(_) => None,
            Cow::Owned(shown) => Some(shown.into()),
        };
        let parts = Parts {
            kind,
            message: shown.unwrap_or(message),
            unsent: false,
            timed_out: false,
            ends_waits: false,
            key: None,
            out_of_turn: false,
            passes: false,
            settings: &[],
            shows: Shows::ByKind,
        };
        Self {
            parts: Box::new(parts),
        }
    }

    /// The lock is not where the transaction of the application is.
    #[cfg(feature = "postgres")]
    pub(crate) fn elsewhere() -> Self {
        let message = "the lock is not kept in PostgreSQL";
        Self::new(StoreErrorKind::Unsupported, message)
    }

    pub(crate) fn late() -> Self {
        Self::new(
            StoreErrorKind::Unavailable,
            "the deadline had passed when the store executed the request; nothing was done",
        )
    }

    pub(crate) fn no_reply() -> Self {
        Self::new(
            StoreErrorKind::Unavailable,
            "the store gave no usable reply; it is unknown whether it executed the call",
        )
    }

    #[cfg(any(feature = "redis", feature = "records"))]
    pub(crate) fn interrupted() -> Self {
        Self::new(
            StoreErrorKind::Unavailable,
            "the task of the call ended before its reply, as when its runtime ends",
        )
    }

    pub(crate) fn timed_out(after: Duration) -> Self {
        let message = format!("no answer within {after:.1?}");
        let mut error = Self::new(StoreErrorKind::Unavailable, message);
        error.parts.timed_out = true;
        error
    }

    /// Creates the error of a call that acquires several keys one after the other, and had acquired
    /// this number of them when its time was over.
    pub(crate) fn out_of_turn(acquired: usize, keys: usize) -> Self {
        let message = format!(
            "{acquired} of {keys} keys were acquired, one after the other, when half of the lease \
             was over: give a longer lease or fewer keys"
        );
        let mut error = Self::new(StoreErrorKind::Unavailable, message).of_key(acquired);
        error.parts.out_of_turn = true;
        error
    }

    /// Names the options of the client that the error is about.
    #[cfg(feature = "redis")]
    pub(crate) fn of_settings(mut self, settings: &'static [&'static str]) -> Self {
        self.parts.settings = settings;
        self
    }

    pub(crate) fn settings(&self) -> &'static [&'static str] {
        self.parts.settings
    }

    /// Names the key of a call for several keys that the error is about. The keys before it may be
    /// held.
    pub(crate) fn of_key(mut self, index: usize) -> Self {
        self.parts.unsent &= index == 0;
        self.parts.key = Some(index);
        self
    }

    /// Returns the index of the key of a call for several keys, if it is known.
    pub(crate) fn key(&self) -> Option<usize> {
        self.parts.key
    }

    /// Returns whether the store has replied, and the time for several keys was over.
    pub(crate) fn is_out_of_turn(&self) -> bool {
        self.parts.out_of_turn
    }

    /// Creates the error for foreign data under one of the lock's keys, with the `name` of that
    /// key if it has one.
    pub(crate) fn foreign(name: Option<&str>, part: KeyPart) -> Self {
        let kept = match part {
            KeyPart::Lock => "its holder",
            KeyPart::Fence => "its latest fencing token",
            KeyPart::Queue => "its wait queue",
        };
        let name = name.map(|name| format!(" {name}")).unwrap_or_default();
        let message = format!(
            "the key{name}, in which a lock keeps {kept}, contains foreign data and was left untouched: choose \
             another name or namespace, or move the data"
        );
        Self::new(StoreErrorKind::ForeignKey, message)
    }

    /// Sets whether the request was not sent, so that the store will never execute it.
    #[must_use]
    pub fn with_unsent(mut self, unsent: bool) -> Self {
        self.parts.unsent = unsent;
        self
    }

    /// Returns whether the store will certainly never execute the request.
    pub fn is_unsent(&self) -> bool {
        self.parts.unsent
    }

    /// Returns whether nothing is known except that the caller's time-out has elapsed.
    pub(crate) fn is_timed_out(&self) -> bool {
        self.parts.timed_out
    }

    /// Sets whether a request that gets this error stops waiting: the circuit breaker is open.
    pub(crate) fn ending_waits(mut self, ends_waits: bool) -> Self {
        self.parts.ends_waits = ends_waits;
        self
    }

    /// Returns whether a request that gets this error stops waiting.
    pub(crate) fn ends_waits(&self) -> bool {
        self.parts.ends_waits
    }

    /// Sets whether the same call may succeed later, whatever the kind of the error: a server that
    /// has accepted the client before refuses its password.
    pub(crate) fn passing(mut self, passes: bool) -> Self {
        self.parts.passes = passes;
        self
    }

    /// Sets whether it shows that the store answers.
    #[cfg(feature = "postgres")]
    pub(crate) fn showing(mut self, shows: Shows) -> Self {
        self.parts.shows = shows;
        self
    }

    /// Returns whether it shows that the store answers.
    #[cfg(feature = "records")]
    pub(crate) fn shows(&self) -> Shows {
        self.parts.shows
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> StoreErrorKind {
        self.parts.kind
    }

    /// Returns whether the same call may succeed a moment later.
    pub fn is_transient(&self) -> bool {
        self.parts.passes
            || matches!(
                self.parts.kind,
                StoreErrorKind::Unavailable
                    | StoreErrorKind::Blocked
                    | StoreErrorKind::ReadOnly
                    | StoreErrorKind::Full
            )
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.parts.message)
    }
}

impl Error for StoreError {}
