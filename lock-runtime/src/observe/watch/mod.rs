//! The metrics (feature `metrics`) and spans (feature `tracing`) of requests and holds. Without a
//! feature its part is empty.

#[cfg(feature = "metrics")]
pub(crate) mod meter;
#[cfg(not(feature = "metrics"))]
#[path = "no_meter.rs"]
pub(crate) mod meter;
#[cfg(feature = "tracing")]
mod span;
#[cfg(not(feature = "tracing"))]
#[path = "no_span.rs"]
mod span;

use std::future::Future;

use crate::{
    error::{LockError, Loss},
    guard::fence::FencingToken,
    protocol::Source,
    request::key::LockKey,
    request::name::RequestName,
    request::spec::Mode,
};
pub(crate) use span::ReleaseSpan;

/// What a request was granted, as far as it is recorded.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(feature = "tracing"),
    expect(dead_code, reason = "only spans have the fencing token")
)]
pub(crate) struct Grant {
    pub(crate) fence: FencingToken,
    pub(crate) is_reentered: bool,
    pub(crate) was_contended: bool,
}

/// A request, from the first poll of its future to its outcome. If it is dropped before, the
/// request was cancelled.
pub(crate) struct WatchedRequest {
    meter: meter::WatchedRequest,
    span: span::AttemptSpan,
}

impl WatchedRequest {
    pub(crate) fn begin(name: Option<&RequestName>, keys: &[LockKey], mode: Mode) -> Self {
        Self {
            meter: meter::WatchedRequest::begin(name, mode),
            span: span::AttemptSpan::begin(name, keys, mode),
        }
    }

    /// Runs the request within its span.
    pub(crate) fn within<F: Future>(&self, request: F) -> impl Future<Output = F::Output> + use<F> {
        self.span.within(request)
    }

    pub(crate) fn ended(mut self, outcome: Result<Grant, &LockError>) {
        self.meter.ended(outcome);
        self.span.ended(outcome);
    }

    /// Creates the watch of a lock that was just granted. To be called under the client's mutex, so
    /// it records nothing yet.
    pub(crate) fn granted(&self, source: Source) -> Watch {
        Watch {
            meter: self.meter.granted(source),
            span: span::HoldSpan::default(),
        }
    }
}

/// Counts a request that was refused before its future was created.
pub(crate) fn refused(name: Option<&RequestName>, mode: Mode, error: &LockError) {
    meter::refused(name, mode, error);
}

/// The outcomes of a request for work that is done once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnceOutcome {
    Ran,
    Unrecorded,
    Replayed,
    Running,
    Conflict,
}

#[cfg_attr(
    not(feature = "metrics"),
    expect(dead_code, reason = "only metrics have labels")
)]
impl OnceOutcome {
    pub(crate) const ALL: [Self; 5] = [
        Self::Ran,
        Self::Unrecorded,
        Self::Replayed,
        Self::Running,
        Self::Conflict,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ran => "ran",
            Self::Unrecorded => "unrecorded",
            Self::Replayed => "replayed",
            Self::Running => "running",
            Self::Conflict => "conflict",
        }
    }
}

/// Counts a request for work that is done once, and the bytes that it has recorded.
pub(crate) fn once(name: Option<&RequestName>, outcome: OnceOutcome, stored: usize) {
    meter::once(name, outcome, stored);
}

/// The watch of a held lock.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) meter: meter::Hold,
    pub(crate) span: span::HoldSpan,
}

impl Watch {
    /// Returns the watch of the reader that replaces this writer.
    pub(crate) fn downgraded(&self, name: Option<&RequestName>) -> Self {
        Self {
            meter: self.meter.downgraded(name),
            span: span::HoldSpan::default(),
        }
    }

    /// Records that the hold begins, after the client's mutex is unlocked.
    pub(crate) fn begun(
        &self,
        name: Option<&RequestName>,
        key: &LockKey,
        mode: Mode,
        fence: FencingToken,
        request: Option<&WatchedRequest>,
    ) {
        self.meter.begun();
        let request = request.map(|request| &request.span);
        self.span.begun(name, key, mode, fence, request);
    }

    /// Records the end of the hold: its release, or its loss.
    pub(crate) fn ended(&self, loss: Option<Loss>) {
        self.meter.ended(loss);
        self.span.ended(loss);
    }
}
