//! [`Watch`]: a request under its policy, and what operators see of it: a span (feature `tracing`) and metrics (feature
//! `metrics`).

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
    /// A request that does not ask for a lock, or not yet.
    pub(crate) fn new(policy: Arc<Policy>) -> Self {
        Self {
            meter: Meter::new(&policy),
            span: Span::none(),
            policy,
        }
    }

    /// What is left is of no lock any more.
    pub(crate) fn take(&mut self) -> Self {
        let none = Self::new(self.policy.clone());
        std::mem::replace(self, none)
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Makes the request's span that of the thread, until what is returned is dropped.
    pub(crate) fn entered(&self) -> EnteredSpan {
        self.span.entered()
    }

    /// It asks for its lock.
    pub(crate) fn asks(&mut self, key: &LockKey) {
        self.meter.asks();
        self.span = Span::of(&self.policy, key);
    }

    /// It has its lock.
    pub(crate) fn granted(&mut self, held: &HeldLock) {
        self.meter.granted(held);
        self.span.granted(held);
    }

    /// It does not get its lock. Is it `served` all the same?
    pub(crate) fn refused(&mut self, error: &LockError, served: bool) {
        self.meter.refused(error, served);
        self.span.ended(error);
    }

    /// Its lock is free again, or was lost.
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

/// Nobody counts.
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
