//! The spans of requests, holds and releases.

use std::{
    future::Future,
    mem,
    sync::{Arc, Mutex},
    time::Instant,
};

use tracing::{
    Instrument, Span, debug_span, field, field::Empty, instrument::Instrumented,
    level_filters::LevelFilter,
};

use super::Grant;
use crate::{
    error::{LockError, LockErrorKind, Loss},
    guard::fence::FencingToken,
    request::key::LockKey,
    request::name::RequestName,
    request::spec::Mode,
    shell::sync::lock,
};

/// The span of a request.
pub(crate) struct AttemptSpan {
    span: Span,
    /// The span around the request, which is that around the hold.
    around: Span,
    /// `None` if the span is disabled, or has its outcome.
    since: Option<Instant>,
}

impl AttemptSpan {
    pub(super) fn begin(name: Option<&RequestName>, keys: &[LockKey], mode: Mode) -> Self {
        let span = debug_span!(
            "lock.acquire",
            lock.name = name.map(RequestName::as_str),
            lock.key = keys.first().map(|key| field::display(key.shown())),
            lock.mode = mode.as_str(),
            lock.fence = Empty,
            lock.waited_ms = Empty,
            outcome = Empty,
            error.r#type = Empty,
        );
        if span.is_disabled() {
            let (around, since) = (Span::none(), None);
            return Self {
                span,
                around,
                since,
            };
        }
        Self {
            span,
            around: Span::current(),
            since: Some(Instant::now()),
        }
    }

    pub(super) fn within<F: Future>(&self, request: F) -> Instrumented<F> {
        request.instrument(self.span.clone())
    }

    pub(super) fn ended(&mut self, outcome: Result<Grant, &LockError>) {
        if !self.waited() {
            return;
        }
        match outcome {
            Ok(grant) => {
                self.span.record("lock.fence", field::display(grant.fence));
                let is_new = !grant.is_reentered;
                self.span
                    .record("outcome", if is_new { "granted" } else { "reentered" });
            }
            Err(error) => record_error(&self.span, error),
        }
    }

    /// Records the end of the wait. Returns whether there was none before.
    fn waited(&mut self) -> bool {
        let Some(since) = self.since.take() else {
            return false;
        };
        let waited = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.span.record("lock.waited_ms", waited);
        true
    }
}

impl Drop for AttemptSpan {
    fn drop(&mut self) {
        if self.waited() {
            self.span.record("outcome", "cancelled");
        }
    }
}

fn record_error(span: &Span, error: &LockError) {
    span.record("outcome", error.code());
    // Work that has been done is what a request for it may find.
    if error.kind() != LockErrorKind::Done {
        span.record("error.type", error.code());
    }
}

/// The span of a hold. It is closed by the release or the loss, and not by the last of its views.
#[derive(Debug, Default)]
pub(crate) struct HoldSpan(Mutex<Hold>);

#[derive(Debug, Default)]
enum Hold {
    #[default]
    Begins,
    Lasts(Arc<Span>),
    /// A lock can be lost before its request has seen the grant.
    Over,
}

impl HoldSpan {
    pub(super) fn begun(
        &self,
        name: Option<&RequestName>,
        key: &LockKey,
        mode: Mode,
        fence: FencingToken,
        request: Option<&AttemptSpan>,
    ) {
        if LevelFilter::current() < LevelFilter::DEBUG {
            return;
        }
        let around = request.map_or_else(Span::current, |request| request.around.clone());
        let span = debug_span!(
            parent: around.id(),
            "lock.hold",
            lock.name = name.map(RequestName::as_str),
            lock.key = %key.shown(),
            lock.mode = mode.as_str(),
            lock.fence = %fence,
            outcome = Empty,
            error.r#type = Empty,
        );
        if !span.is_disabled() {
            if let Some(request) = request {
                span.follows_from(&request.span);
            }
            let mut hold = lock(&self.0);
            if matches!(*hold, Hold::Begins) {
                *hold = Hold::Lasts(Arc::new(span));
            }
        }
    }

    /// Runs `work` within the span, if the lock is held.
    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        if LevelFilter::current() < LevelFilter::DEBUG {
            return work();
        }
        let span = match &*lock(&self.0) {
            Hold::Lasts(span) => Some(span.clone()),
            Hold::Begins | Hold::Over => None,
        };
        match span {
            Some(span) => span.in_scope(work),
            None => work(),
        }
    }

    pub(super) fn ended(&self, loss: Option<Loss>) {
        let Hold::Lasts(span) = mem::replace(&mut *lock(&self.0), Hold::Over) else {
            return;
        };
        match loss {
            None => {
                span.record("outcome", "released");
            }
            Some(loss) => {
                let code = LockErrorKind::Lost(loss).code();
                span.record("outcome", code);
                span.record("error.type", code);
            }
        }
    }
}

/// The span of a release by a task that waits for it.
pub(crate) struct ReleaseSpan(Span);

impl ReleaseSpan {
    pub(crate) fn begin(
        name: Option<&RequestName>,
        key: &LockKey,
        mode: Mode,
        fence: FencingToken,
    ) -> Self {
        Self(debug_span!(
            "lock.release",
            lock.name = name.map(RequestName::as_str),
            lock.key = %key.shown(),
            lock.mode = mode.as_str(),
            lock.fence = %fence,
            outcome = Empty,
            error.r#type = Empty,
        ))
    }

    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        self.0.in_scope(work)
    }

    pub(crate) fn ended(&self, released: &Result<(), LockError>) {
        match released {
            Ok(()) => {
                self.0.record("outcome", "released");
            }
            Err(error) => record_error(&self.0, error),
        }
    }
}
