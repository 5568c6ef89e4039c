//! [`Policy`]: how requests are locked, whatever their keys.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use lock_runtime::{
    LockSpec,
    web::{Answer, DEFAULT_RETRY_AFTER},
};

use crate::protocol::Hold;

/// How long a request waits for its lock where nothing else is said. Shorter than in the runtime: a caller is waiting.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(2);

/// How requests are locked: what is asked of the lock, how long it is held, and how refusals are told.
///
/// A [`LockLayer`](crate::LockLayer) has one, which its setters set. Whoever chooses among several, for each request, is a
/// [`KeyExtractor`](crate::KeyExtractor) that gives a [`Target::LockAs`](crate::Target::LockAs):
///
/// ```
/// use std::sync::Arc;
/// use http::{Method, Request};
/// use lock_tower::{LockLayer, Policy, Target, runtime::{LockClient, LockKey, LockSpec}};
///
/// let read = Arc::new(Policy::new("catalog-read").spec(LockSpec::shared()));
/// let write = Arc::new(Policy::new("catalog-write"));
/// let layer = LockLayer::with_key(LockClient::in_memory(), move |request: &Request<()>| {
///     let policy = if request.method() == Method::GET { &read } else { &write };
///     LockKey::new("catalog").map(|key| Target::LockAs(key, policy.clone()))
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    name: Arc<str>,
    #[cfg(feature = "metrics")]
    names: crate::watch::Names,
    spec: LockSpec,
    hold: Hold,
    retry_after: Duration,
    fail_open: bool,
    statuses: Vec<(Answer, StatusCode)>,
}

impl Policy {
    /// A policy that says nothing but its name, by which metrics and refusals call it: an exclusive lock, a wait of 2 s,
    /// held until the response is there.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        let name = name.into();
        Self {
            #[cfg(feature = "metrics")]
            names: crate::watch::Names::of(&name),
            name,
            spec: LockSpec::exclusive().wait(DEFAULT_WAIT),
            hold: Hold::default(),
            retry_after: DEFAULT_RETRY_AFTER,
            fail_open: false,
            statuses: Vec::new(),
        }
    }

    /// Another name.
    #[must_use]
    pub fn named(self, name: impl Into<Arc<str>>) -> Self {
        let Self {
            spec,
            hold,
            retry_after,
            fail_open,
            statuses,
            ..
        } = self;
        Self {
            spec,
            hold,
            retry_after,
            fail_open,
            statuses,
            ..Self::new(name)
        }
    }

    /// Locks as `spec` says, in place of all that was said before. What it leaves open comes from the client's defaults, but
    /// for the wait, which is then 2 s.
    #[must_use]
    pub fn spec(self, spec: LockSpec) -> Self {
        Self {
            spec: spec.or(&LockSpec::exclusive().wait(DEFAULT_WAIT)),
            ..self
        }
    }

    pub(crate) fn with_spec(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        Self {
            spec: set(self.spec),
            ..self
        }
    }

    /// See [`LockLayer::hold`](crate::LockLayer::hold). It means nothing to services that do not speak HTTP.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self {
        Self { hold, ..self }
    }

    /// See [`LockLayer::retry_after`](crate::LockLayer::retry_after).
    #[must_use]
    pub fn retry_after(self, retry_after: Duration) -> Self {
        Self {
            retry_after,
            ..self
        }
    }

    /// See [`LockLayer::fail_open`](crate::LockLayer::fail_open).
    #[must_use]
    pub fn fail_open(self) -> Self {
        Self {
            fail_open: true,
            ..self
        }
    }

    /// See [`LockLayer::status`](crate::LockLayer::status).
    #[must_use]
    pub fn status(mut self, answer: Answer, status: StatusCode) -> Self {
        self.statuses.retain(|(other, _)| *other != answer);
        self.statuses.push((answer, status));
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is asked of the lock.
    pub fn lock_spec(&self) -> &LockSpec {
        &self.spec
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn names(&self) -> &crate::watch::Names {
        &self.names
    }

    pub(crate) fn is_held_for_the_body(&self) -> bool {
        self.hold == Hold::Body
    }

    pub(crate) fn longest_retry_after(&self) -> Duration {
        self.retry_after
    }

    pub(crate) fn fails_open(&self) -> bool {
        self.fail_open
    }

    /// The HTTP status for a row of the table of refusals.
    pub(crate) fn status_of(&self, answer: Answer) -> StatusCode {
        let own = self.statuses.iter().find(|(other, _)| *other == answer);
        own.map_or_else(|| answer.into(), |(_, status)| *status)
    }
}
