//! The span of a request, from the acquire attempt to the response.

use lock_runtime::{HeldLock, LockError, LockKey};
use tokio::time::Instant;
use tracing::{debug_span, field, field::Empty, span::EnteredSpan};

use crate::policy::Policy;

/// The span of a request. Always empty without the feature `tracing`, so that the span context of
/// events does not change.
pub(super) struct Span {
    span: tracing::Span,
    /// `None` if the span is disabled.
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
        let span = debug_span!(
            "lock",
            lock.name = policy.name(),
            lock.key = %key.shown(),
            lock.fence = Empty,
            lock.waited_ms = Empty,
            outcome = Empty,
            error.r#type = Empty,
        );
        let asked = (!span.is_disabled()).then(Instant::now);
        Self { span, asked }
    }

    pub(super) fn entered(&self) -> EnteredSpan {
        self.span.clone().entered()
    }

    pub(super) fn granted(&self, held: &HeldLock) {
        if let Some(asked) = self.asked {
            self.span.record("lock.fence", field::display(held.fence()));
            self.span.record(
                "lock.waited_ms",
                u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX),
            );
            self.span.record("outcome", "granted");
        }
    }

    pub(super) fn ended(&self, error: &LockError) {
        self.span.record("outcome", error.code());
        self.span.record("error.type", error.code());
    }
}
