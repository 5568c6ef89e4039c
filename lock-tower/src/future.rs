//! [`ResponseFuture`]: the life of one request, from the acquire attempt to the release.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use lock_runtime::{
    LockError, LockErrorKind, OnLost,
    future::{AcquireFuture, ReleaseFuture, WhileHeldFuture},
    log,
    store::StoreError,
};
use pin_project::pin_project;
use tower::util::Oneshot;
use tower_service::Service;

use crate::{
    protocol::{Caller, Protocol, reject::Reason},
    watch::Watch,
};

/// Response future for [`Lock`](crate::Lock).
///
/// # Cancellation
/// Dropping it while it waits for the lock leaves the wait queue. Dropping it later drops the
/// inner future, and then releases the lock in the background.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture<S: Service<Req>, Req, P> {
    #[pin]
    state: State<S, Req>,
    protocol: P,
    watch: Watch,
    caller: Caller,
}

#[pin_project(project = Stage)]
pub(crate) enum State<S: Service<Req>, Req> {
    Acquiring {
        acquire: AcquireFuture,
        /// Taken when this stage is left.
        call: Option<(S, Req)>,
    },
    Locked {
        #[pin]
        inner: WhileHeldFuture<Oneshot<S, Req>>,
    },
    Releasing {
        #[pin]
        release: ReleaseFuture,
        on_lost: OnLost,
        /// Taken when the lock is free.
        result: Option<Result<S::Response, S::Error>>,
    },
    Skipped {
        #[pin]
        inner: Oneshot<S, Req>,
        is_meant: bool,
    },
    Refused(Option<Reason>),
    Done,
}

impl<S: Service<Req>, Req> State<S, Req> {
    pub(crate) fn acquiring(acquire: AcquireFuture, inner: S, req: Req) -> Self {
        Self::Acquiring {
            acquire,
            call: Some((inner, req)),
        }
    }

    /// A request that is served without a lock. `is_meant` is false if no route has matched it.
    pub(crate) fn skipped(inner: S, req: Req, is_meant: bool) -> Self {
        Self::Skipped {
            inner: Oneshot::new(inner, req),
            is_meant,
        }
    }

    pub(crate) fn refused(reason: impl Into<Reason>) -> Self {
        Self::Refused(Some(reason.into()))
    }
}

impl<S: Service<Req>, Req, P> ResponseFuture<S, Req, P> {
    pub(crate) fn new(state: State<S, Req>, protocol: P, watch: Watch, caller: Caller) -> Self {
        Self {
            state,
            protocol,
            watch,
            caller,
        }
    }
}

impl<S, Req, P> Future for ResponseFuture<S, Req, P>
where
    S: Service<Req>,
    P: Protocol<Req, S::Response, S::Error>,
{
    type Output = Result<P::Response, P::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let _entered = this.watch.entered();
        loop {
            let next = match this.state.as_mut().project() {
                Stage::Acquiring { acquire, call } => match ready!(Pin::new(acquire).poll(cx)) {
                    Ok(guard) => {
                        let Some((inner, mut req)) = call.take() else {
                            continue;
                        };
                        let held = guard.held();
                        this.watch.granted(&held);
                        P::enter(&mut req, held);
                        State::Locked {
                            inner: guard.while_held_unless(Oneshot::new(inner, req), P::is_failure),
                        }
                    }
                    // Not if the wait was cut short, unless no call was sent: the store may only be
                    // slow, and the caller is about to give up.
                    Err(error)
                        if this.watch.policy().fails_open()
                            && (!this.caller.hurried || was_not_sent(&error))
                            && is_out_of_reach(&error) =>
                    {
                        let (code, policy) = (error.code(), this.watch.policy().name());
                        log::summarise("served without its lock", code, Some(policy), |left_out| {
                            tracing::warn!(
                                code,
                                policy,
                                left_out,
                                error = format_args!("{error:#}"),
                                "served without its lock"
                            );
                        });
                        this.watch.refused(&error, true);
                        let Some((inner, mut req)) = call.take() else {
                            continue;
                        };
                        P::leave(&mut req);
                        State::skipped(inner, req, true)
                    }
                    Err(error) => {
                        this.watch.refused(&error, false);
                        State::refused(error)
                    }
                },
                Stage::Locked { inner } => match ready!(inner.poll(cx)) {
                    Ok((result, guard)) => {
                        let policy = this.watch.policy();
                        // A lock that was lost already would only end the body.
                        if !guard.is_lost()
                            && result
                                .as_ref()
                                .is_ok_and(|response| this.protocol.keeps(response, policy))
                        {
                            this.state.set(State::Done);
                            let watch = this.watch.take();
                            return Poll::Ready(this.protocol.served(
                                result,
                                Some((guard, watch)),
                                *this.caller,
                            ));
                        }
                        State::Releasing {
                            on_lost: guard.on_lost(),
                            release: guard.release(),
                            result: Some(result),
                        }
                    }
                    Err(error) => {
                        this.watch.released(Some(&error));
                        State::refused(error)
                    }
                },
                Stage::Releasing {
                    release,
                    on_lost,
                    result,
                } => {
                    // An error of the release has been traced. It replaces the response only if it
                    // is a loss, which the store has noticed first.
                    let released = ready!(release.poll(cx));
                    this.watch.released(released.as_ref().err());
                    let (result, on_lost) = (result.take(), *on_lost);
                    let replaces = |error| {
                        on_lost.replaces_output(error, result.as_ref().is_none_or(P::is_failure))
                    };
                    match (released.err().and_then(replaces), result) {
                        (Some(error), _) => State::refused(error),
                        (None, result) => {
                            this.state.set(State::Done);
                            let Some(result) = result else { continue };
                            return Poll::Ready(this.protocol.served(result, None, *this.caller));
                        }
                    }
                }
                Stage::Skipped { inner, is_meant } => {
                    let result = ready!(inner.poll(cx));
                    if !*is_meant && P::has_route(&result) {
                        this.watch.unlocked();
                    }
                    this.state.set(State::Done);
                    return Poll::Ready(this.protocol.served(result, None, *this.caller));
                }
                Stage::Refused(reason) => {
                    let reason = reason.take();
                    this.state.set(State::Done);
                    let Some(reason) = reason else { continue };
                    return Poll::Ready(this.protocol.refused(
                        reason,
                        *this.caller,
                        this.watch.policy(),
                    ));
                }
                #[expect(
                    clippy::panic,
                    reason = "a future must not be polled after it was ready"
                )]
                Stage::Done => panic!("`ResponseFuture` was polled after it was ready"),
            };
            this.state.set(next);
        }
    }
}

/// Whether the store is known not to answer.
fn was_not_sent(error: &LockError) -> bool {
    error.store_error().is_some_and(StoreError::is_unsent)
}

/// Whether locks are unavailable for a reason that lies outside of this process. `ShuttingDown` is
/// a decision of the application, and so is not one of them.
fn is_out_of_reach(error: &LockError) -> bool {
    matches!(
        error.kind(),
        LockErrorKind::Unavailable | LockErrorKind::ReadOnly | LockErrorKind::Full
    )
}

impl<S: Service<Req>, Req, P> fmt::Debug for ResponseFuture<S, Req, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Acquiring { .. } => "acquiring",
            State::Locked { .. } => "locked",
            State::Releasing { .. } => "releasing",
            State::Skipped { .. } => "skipped",
            State::Refused(_) => "refused",
            State::Done => "done",
        };
        f.debug_struct("ResponseFuture")
            .field("state", &format_args!("{state}"))
            .finish_non_exhaustive()
    }
}
