//! [`Watch`]: a request under its policy, with its span (feature `tracing`) and the metric of
//! requests without lock (feature `metrics`).

#[cfg(feature = "metrics")]
mod meter;
mod span;

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use lock_runtime::{HeldLock, LockError, LockKey};
use tracing::span::EnteredSpan;

use self::span::Span;
use crate::policy::Policy;

/// A request under its policy. It outlives the lock.
#[doc(hidden)]
pub struct Watch {
    policy: Arc<Policy>,
    span: Span,
}

impl Watch {
    /// Creates the watch of a request that has not made an acquire attempt.
    pub(crate) fn new(policy: Arc<Policy>) -> Self {
        Self {
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
        #[cfg(feature = "metrics")]
        meter::unlocked(&self.policy, false);
        self.span = Span::of(&self.policy, key);
    }

    /// Records that the lock was granted.
    pub(crate) fn granted(&mut self, held: &HeldLock) {
        self.span.granted(held);
    }

    /// Records that the acquire attempt failed. `served` means that the request is served without
    /// the lock.
    pub(crate) fn refused(&mut self, error: &LockError, served: bool) {
        #[cfg(feature = "metrics")]
        meter::unlocked(&self.policy, served);
        #[cfg(not(feature = "metrics"))]
        let _ = served;
        self.span.ended(error);
    }

    /// Records that a request without a route was answered as if it had one, once for each name.
    pub(crate) fn unlocked(&self) {
        static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let name = self.policy.name();
        let is_first = SAID
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.to_owned());
        if is_first {
            tracing::error!(
                name,
                "served without its lock: no route has matched, and the response is neither 404 nor 405; if a router \
                 behind `nest_service` or the fallback needs the lock, put the layer on its routes"
            );
        }
    }

    /// Records that the lock was released or lost.
    pub(crate) fn released(&mut self, error: Option<&LockError>) {
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
