//! [`Policy`]: the configuration of locks and refusals, without the key.

use std::time::Duration;

use http::StatusCode;
use lock_runtime::{ErrorClass, LockClient, LockSpec, RequestName};

use crate::key::KeyError;

/// A mistake, as a caller that does not read would hold the lock without end.
pub(crate) const ENDLESS: &str = "a lock that is held until the end of the body needs a max_hold, as a caller that does not read would hold it \
                                  without end; set one, or hold the lock until the response";

/// How long the lock of an HTTP request is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HoldUntil {
    /// Until the inner service has responded. The release is awaited before the *head* of the
    /// response is sent. A streamed body is sent without the lock.
    #[default]
    Response,
    /// Until the last frame of the body, including trailers, or until the body is dropped. The
    /// last frame is sent after the release. If the lock is lost before that, the body ends with
    /// an error, and a gRPC stream ends with trailers that carry it: at once, or after its last
    /// frame with [`OnLost::Error`](lock_runtime::OnLost::Error). With
    /// [`OnLost::Ignore`](lock_runtime::OnLost::Ignore) it ends as the inner service ends it.
    ///
    /// A response that switches protocols (101, WebSockets) has no body, and its lock is released
    /// with the head of the response.
    ///
    /// A client that does not read keeps the lock until [`max_hold`](crate::LockLayer::max_hold),
    /// a minute by default. Without one, each request is refused with 500, and an error event is
    /// emitted when the layer is put on a service. While the client does not read, the server does
    /// not poll the body: other clients get the lock, and the body ends as above with the next
    /// frame.
    /// Over HTTP/1.0, where the end of the connection is the end of the body, a client cannot
    /// distinguish an error from the end.
    Body,
}

/// How long a [`OnceLayer`](crate::OnceLayer) keeps a response, and the longest bodies, in bytes.
#[cfg(feature = "once")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OnceTerms {
    pub(crate) keep: Duration,
    pub(crate) most_of_request: usize,
    pub(crate) most_of_response: usize,
}

#[cfg(feature = "once")]
impl OnceTerms {
    pub(crate) const KEEP: Duration = lock_runtime::OnceRequest::DEFAULT_KEEP;
    pub(crate) const MOST_OF_REQUEST: usize = 1024 * 1024;
    pub(crate) const MOST_OF_RESPONSE: usize = lock_runtime::OnceRequest::DEFAULT_MAX_BYTES;
}

#[cfg(feature = "once")]
impl Default for OnceTerms {
    fn default() -> Self {
        Self {
            keep: Self::KEEP,
            most_of_request: Self::MOST_OF_REQUEST,
            most_of_response: Self::MOST_OF_RESPONSE,
        }
    }
}

/// A configuration of locks and refusals: the lock options, how long the lock is held, and how
/// requests are refused.
///
/// Each [`LockLayer`](crate::LockLayer) has one, which its setters modify. A
/// [`PolicyLayer`](crate::PolicyLayer) chooses among several for each request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    name: RequestName,
    #[cfg(feature = "metrics")]
    unlocked: metrics::Key,
    spec: LockSpec,
    hold_until: HoldUntil,
    retry_after: Duration,
    fail_open: bool,
    statuses: Vec<(ErrorClass, StatusCode)>,
    #[cfg(feature = "once")]
    once: Option<OnceTerms>,
}

impl Policy {
    /// The wait for a lock if none is configured. Shorter than in lock-runtime, because a caller
    /// waits for the response.
    pub const DEFAULT_WAIT: Duration = Duration::from_secs(2);

    /// The `max_hold` if none is configured, unless the lease or the `min_hold` is longer. It
    /// bounds how long a caller that sends its request slowly, or does not read the response, holds
    /// a lock.
    pub const DEFAULT_MAX_HOLD: Duration = Duration::from_secs(60);

    /// Creates a new [`Policy`] with a name for metrics and refusals. It acquires an exclusive
    /// lock, waits up to 2 s, and holds the lock until the inner service has responded, for a
    /// minute at most.
    pub fn new(name: impl Into<RequestName>) -> Self {
        let name = name.into();
        Self {
            #[cfg(feature = "metrics")]
            unlocked: crate::metrics::unlocked_key(&name),
            name,
            spec: LockSpec::exclusive().wait(Self::DEFAULT_WAIT),
            hold_until: HoldUntil::default(),
            retry_after: ErrorClass::DEFAULT_RETRY_AFTER,
            fail_open: false,
            statuses: Vec::new(),
            #[cfg(feature = "once")]
            once: None,
        }
    }

    /// The policy of requests without a route, where there is no other name.
    pub(crate) fn unrouted() -> Self {
        Self::new("unrouted")
    }

    /// Replaces the name.
    #[must_use]
    pub fn with_name(self, name: impl Into<RequestName>) -> Self {
        let named = Self::new(name);
        Self {
            name: named.name,
            #[cfg(feature = "metrics")]
            unlocked: named.unlocked,
            ..self
        }
    }

    /// Replaces the lock options. See [`LockLayer::spec`](crate::LockLayer::spec).
    #[must_use]
    pub fn with_spec(self, spec: LockSpec) -> Self {
        Self {
            spec: spec.or(&LockSpec::exclusive().wait(Self::DEFAULT_WAIT)),
            ..self
        }
    }

    pub(crate) fn set_spec(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        Self {
            spec: set(self.spec),
            ..self
        }
    }

    /// See [`LockLayer::hold_until`](crate::LockLayer::hold_until). It has no effect on services
    /// that do not speak HTTP.
    #[must_use]
    pub fn hold_until(self, hold_until: HoldUntil) -> Self {
        Self { hold_until, ..self }
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
    pub fn status(mut self, class: ErrorClass, status: StatusCode) -> Self {
        self.statuses.retain(|(other, _)| *other != class);
        self.statuses.push((class, status));
        self
    }

    #[cfg(all(feature = "once", feature = "policy"))]
    pub(crate) fn served_once(self, terms: OnceTerms) -> Self {
        Self {
            once: Some(terms),
            ..self
        }
    }

    #[cfg(feature = "once")]
    pub(crate) fn once(&self) -> Option<OnceTerms> {
        self.once
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns the lock options.
    pub fn spec(&self) -> &LockSpec {
        &self.spec
    }

    /// Returns the options of a request by this client, with the defaults of the client and then
    /// of this crate.
    pub(crate) fn spec_for(&self, locks: &LockClient) -> Result<LockSpec, KeyError> {
        let spec = self.spec.clone().or(locks.defaults());
        if spec.is_unlimited() && self.is_held_for_the_body() {
            return Err(KeyError::misconfigured(ENDLESS));
        }
        Ok(spec.or_max_hold(Self::DEFAULT_MAX_HOLD))
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn unlocked(&self) -> &metrics::Key {
        &self.unlocked
    }

    pub(crate) fn shared_name(&self) -> RequestName {
        self.name.clone()
    }

    pub(crate) fn is_held_for_the_body(&self) -> bool {
        self.hold_until == HoldUntil::Body
    }

    pub(crate) fn longest_retry_after(&self) -> Duration {
        self.retry_after
    }

    pub(crate) fn fails_open(&self) -> bool {
        self.fail_open
    }

    /// Returns the HTTP status for a row of the table of refusals.
    pub(crate) fn status_of(&self, class: ErrorClass) -> StatusCode {
        let own = self.statuses.iter().find(|(other, _)| *other == class);
        own.map_or_else(|| class.into(), |(_, status)| *status)
    }
}
