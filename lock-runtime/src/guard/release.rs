//! The release of a guard in the caller's task: [`ReleaseFuture`]. The session decides.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::future::{JoinAll, join_all};
use pin_project::{pin_project, pinned_drop};

use super::{Entry, LockGuard, mismatch};
use crate::{
    error::{LockError, LockErrorKind},
    guard::view::View,
    observe::log,
    observe::watch::ReleaseSpan,
    protocol::{ReleaseError, ReleaseId, ReleaseStep, Released, Reply},
    shell::call::{ReleaseCall, within},
    shell::core::log_loss,
    shell::runtime,
};

impl LockGuard {
    /// Releases the lock and waits for the store's reply, for at most one call time-out
    /// (min(lease/6, 500 ms)).
    ///
    /// A lock that was re-entered is released with its last guard; the other guards
    /// release nothing.
    ///
    /// # Errors
    /// `Lost` if the lock was lost before; of several keys, one is enough. `ReleaseUnknown` if the
    /// store did not reply, or `NoRuntime`: the release continues in the background, and the lock
    /// ends with its lease at the latest.
    ///
    /// # Cancellation
    /// Dropping the future releases the lock in the background.
    pub fn release(self) -> ReleaseFuture {
        self.release_with(None)
    }

    /// Releases the lock of one key with the result of its work, which the store keeps for a time.
    pub(crate) fn complete(self, result: Arc<[u8]>, keep: Duration) -> ReleaseFuture {
        self.release_with(Some((result, keep)))
    }

    fn release_with(mut self, result: Option<(Arc<[u8]>, Duration)>) -> ReleaseFuture {
        let first = self.held.first();
        let span = ReleaseSpan::begin(first.name.as_ref(), &first.key, first.mode, first.fence);
        let mut entries = std::mem::take(&mut self.entries);
        let parts = match entries.pop() {
            Some(entry) if entries.is_empty() => Parts::One(Part::new(entry, result)),
            last => {
                entries.extend(last);
                // Concurrently, so that several keys do not take several times as long.
                Parts::Several(join_all(entries.into_iter().map(|it| Part::new(it, None))))
            }
        };
        ReleaseFuture { parts, span }
    }
}

/// The future of [`LockGuard::release`].
///
/// # Cancellation
/// Dropping it releases the lock in the background.
#[pin_project]
#[must_use = "the result of the release is lost without `.await`, and the lock is released in the background"]
pub struct ReleaseFuture {
    #[pin]
    parts: Parts,
    span: ReleaseSpan,
}

#[pin_project(project = Projected)]
enum Parts {
    One(#[pin] Part),
    Several(#[pin] JoinAll<Part>),
}

impl Future for ReleaseFuture {
    type Output = Result<(), LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let released = this.span.within(|| match this.parts.project() {
            Projected::One(part) => part.poll(cx),
            Projected::Several(parts) => parts.poll(cx).map(of_all),
        });
        if let Poll::Ready(released) = &released {
            this.span.ended(released);
        }
        released
    }
}

impl fmt::Debug for ReleaseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseFuture").finish_non_exhaustive()
    }
}

/// The release of one key. If it is dropped before the store has replied, the release continues in
/// the background.
#[pin_project(PinnedDrop)]
struct Part {
    entry: Entry,
    result: Option<(Arc<[u8]>, Duration)>,
    #[pin]
    call: Option<ReleaseCall>,
    in_flight: Option<ReleaseId>,
}

impl Part {
    fn new(entry: Entry, result: Option<(Arc<[u8]>, Duration)>) -> Self {
        Self {
            entry,
            result,
            call: None,
            in_flight: None,
        }
    }
}

impl Future for Part {
    type Output = Result<(), LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if !this.entry.has_left {
            match this.entry.leave(this.result.take())? {
                ReleaseStep::Done(released) => {
                    return Poll::Ready(outcome(&this.entry.view, released));
                }
                ReleaseStep::Call(id, release, timeout) => {
                    let store = this.entry.view.core.store.clone();
                    // First, as a release whose call panics is continued in the background.
                    *this.in_flight = Some(id);
                    let call = within(timeout, store.release_owned(release));
                    this.call.set(Some(call));
                }
            }
        }
        #[expect(
            clippy::panic,
            reason = "a future must not be polled after it was ready"
        )]
        let (Some(call), Some(id)) = (this.call.as_mut().as_pin_mut(), *this.in_flight) else {
            panic!("`ReleaseFuture` was polled after it was ready")
        };
        let answer = ready!(call.poll(cx)).map(Reply::Release);
        *this.in_flight = None;
        let view = &this.entry.view;
        let core = &view.core;
        let released = core.visit(|state, cx| state.session.release_replied(id, answer, cx));
        Poll::Ready(outcome(view, released))
    }
}

#[pinned_drop]
impl PinnedDrop for Part {
    fn drop(self: Pin<&mut Self>) {
        let mut this = self.project();
        this.call.set(None);
        if let Some(id) = *this.in_flight {
            let core = &this.entry.view.core;
            core.visit(|state, cx| state.session.release_dropped(id, cx));
        }
    }
}

impl Entry {
    /// Removes the guard from its lease, with the result of the work.
    ///
    /// # Errors
    /// `NoRuntime`, and `ModeMismatch` for a result of a lock that was entered again. Dropping the
    /// entry continues the release in the background, without the result.
    fn leave(&mut self, result: Option<(Arc<[u8]>, Duration)>) -> Result<ReleaseStep, LockError> {
        let View { core, id, key, .. } = &*self.view;
        if let Err(error) = runtime::check() {
            let error = error.with_key(key).with_name(self.view.name.as_ref());
            log_unconfirmed(&error);
            return Err(error);
        }
        let step = core.visit(|state, cx| match result {
            Some(result) => state.session.complete(*id, result, cx),
            None => Some(state.session.release(*id, cx)),
        });
        self.has_left = step.is_some();
        step.ok_or_else(|| {
            mismatch(
                &self.view,
                "a lock that was entered again records no result",
            )
        })
    }
}

/// Returns the result of several releases. A loss is certain, and so comes before other errors.
fn of_all(released: Vec<Result<(), LockError>>) -> Result<(), LockError> {
    let is_loss = |error: &LockError| matches!(error.kind(), LockErrorKind::Lost(_));
    let errors = released.into_iter().filter_map(Result::err);
    errors
        .min_by_key(|error| !is_loss(error))
        .map_or(Ok(()), Err)
}

/// Writes the log of a release, and returns its result.
fn outcome(view: &View, released: Result<Released, ReleaseError>) -> Result<(), LockError> {
    let (key, fence) = (&view.key, view.fence);
    match released {
        Ok(Released::Locally) => Ok(()),
        Ok(Released::AtStore) => {
            tracing::debug!(key = %key.shown(), %fence, "released");
            Ok(())
        }
        Err(ReleaseError::Lost(loss)) => Err(view.lost_error(loss)),
        Err(ReleaseError::NotHeld(loss)) => {
            let name = view.name();
            log_loss("lost before its release", name, key, fence, loss);
            view.watch.meter.lost(loss);
            Err(view.lost_error(loss))
        }
        Err(ReleaseError::Unknown(error)) => {
            let message = "release not confirmed; it continues in the background, and the lock ends with its lease or its min_hold at the latest";
            let error = LockError::new(LockErrorKind::ReleaseUnknown, message)
                .with_key(key)
                .with_name(view.name.as_ref())
                .with_source(Some(error));
            log_unconfirmed(&error);
            Err(error)
        }
    }
}

fn log_unconfirmed(error: &LockError) {
    let code = error.store_error().map_or_else(
        || error.code(),
        |cause| LockErrorKind::from(cause.kind()).code(),
    );
    log::summarise("release not confirmed", code, error.name(), |left_out| {
        let (name, key) = (error.name(), error.key().map(tracing::field::display));
        tracing::warn!(
            name,
            key,
            left_out,
            error = format_args!("{error:#}"),
            "release not confirmed; continuing in the background"
        );
    });
}
