//! The span of a request, from when it asks for its lock until it is answered.

use lock_runtime::{HeldLock, LockError, LockKey};
use tokio::time::Instant;
use tracing::{debug_span, field, field::Empty, span::EnteredSpan};

use crate::policy::Policy;

/// Of no request where the feature `tracing` is off, so that events are in no more spans than before.
pub(super) struct Span {
    span: tracing::Span,
    /// None where nobody looks.
    asked: Option<Instant>,
}

impl Span {
    pub(super) fn none() -> Self {
        Self {
            span: tracing::Span::none(),
            asked: None,
        }
    }

    pub(super) fn of(policy: &Policy, key: &LockKey) -> Self {
        if !cfg!(feature = "tracing") {
            return Self::none();
        }
        let span = debug_span!("lock", policy = policy.name(), %key, fence = Empty, waited_ms = Empty, outcome = Empty);
        let asked = (!span.is_disabled()).then(Instant::now);
        Self { span, asked }
    }

    pub(super) fn entered(&self) -> EnteredSpan {
        self.span.clone().entered()
    }

    pub(super) fn granted(&self, held: &HeldLock) {
        if let Some(asked) = self.asked {
            self.span.record("fence", field::display(held.fence()));
            self.span.record(
                "waited_ms",
                u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX),
            );
            self.span.record("outcome", "granted");
        }
    }

    pub(super) fn ended(&self, error: &LockError) {
        self.span.record("outcome", error.code());
    }
}
