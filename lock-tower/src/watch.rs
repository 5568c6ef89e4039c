//! [`Watch`]: a request under its policy, with its span (feature `tracing`) and its metrics
//! (feature `metrics`).

#[cfg(feature = "metrics")]
mod meter;
mod span;

use std::{fmt, sync::Arc};

use lock_runtime::{HeldLock, LockError, LockKey};
use tracing::span::EnteredSpan;

#[cfg(feature = "metrics")]
pub(crate) use self::meter::Names;
use self::{meter::Meter, span::Span};
use crate::policy::Policy;

/// A request under its policy. It outlives the lock.
#[doc(hidden)]
pub struct Watch {
    policy: Arc<Policy>,
    meter: Meter,
    span: Span,
}

impl Watch {
    /// Creates the watch of a request that has not made an acquire attempt.
    pub(crate) fn new(policy: Arc<Policy>) -> Self {
        Self {
            meter: Meter::new(&policy),
            span: Span::none(),
            policy,
        }
    }

    /// Takes the watch, and leaves one without a lock.
    pub(crate) fn take(&mut self) -> Self {
        let none = Self::new(self.policy.clone());
        std::mem::replace(self, none)
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Enters the span of the request on this thread, until the returned value is dropped.
    pub(crate) fn entered(&self) -> EnteredSpan {
        self.span.entered()
    }

    /// Records that the acquire attempt begins.
    pub(crate) fn asks(&mut self, key: &LockKey) {
        self.meter.asks();
        self.span = Span::of(&self.policy, key);
    }

    /// Records that the lock was granted.
    pub(crate) fn granted(&mut self, held: &HeldLock) {
        self.meter.granted(held);
        self.span.granted(held);
    }

    /// Records that the acquire attempt failed. `served` means that the request is served without
    /// the lock.
    pub(crate) fn refused(&mut self, error: &LockError, served: bool) {
        self.meter.refused(error, served);
        self.span.ended(error);
    }

    /// Records that the lock was released or lost.
    pub(crate) fn released(&mut self, error: Option<&LockError>) {
        self.meter.released(error);
        if let Some(error) = error {
            self.span.ended(error);
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("policy", &self.policy.name())
            .finish_non_exhaustive()
    }
}

/// A meter that records nothing, without the feature `metrics`.
#[cfg(not(feature = "metrics"))]
mod meter {
    use super::{Arc, HeldLock, LockError, Policy};

    pub(super) struct Meter;

    impl Meter {
        pub(super) fn new(_policy: &Arc<Policy>) -> Self {
            Self
        }

        pub(super) fn asks(&self) {}

        pub(super) fn granted(&self, _held: &HeldLock) {}

        pub(super) fn refused(&self, _error: &LockError, _served: bool) {}

        pub(super) fn released(&self, _error: Option<&LockError>) {}
    }
}
