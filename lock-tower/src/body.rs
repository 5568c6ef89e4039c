//! [`LockBody`]: the inner service's body, under its lock if the layer says so, or that of a refusal.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use lock_runtime::{HeldLock, LockError, LockErrorKind, LockGuard, Lost};
use pin_project::pin_project;

use crate::{
    policy::Policy,
    protocol::{Caller, Wire},
    reject::{Reason, Refusal},
    watch::Watch,
};

/// An error of any kind, as bodies have it.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// The body of a response that has passed a [`Lock`](crate::Lock). It does not box the inner one.
///
/// With [`Hold::Body`](crate::Hold::Body) it keeps the lock until its last frame, or until it is dropped. When the lock
/// is lost before, it ends with the [`LockError`] as its error; for gRPC, with trailers that say so.
#[pin_project]
pub struct LockBody<B> {
    #[pin]
    source: Source<B>,
}

#[pin_project(project = From)]
enum Source<B> {
    Served(#[pin] B),
    Refused(#[pin] Full<Bytes>),
    Held(#[pin] Held<B>),
}

impl<B> LockBody<B> {
    pub(crate) fn served(body: B) -> Self {
        Self {
            source: Source::Served(body),
        }
    }

    pub(crate) fn refused(body: Bytes) -> Self {
        Self {
            source: Source::Refused(Full::new(body)),
        }
    }

    pub(crate) fn held(body: B, guard: LockGuard, watch: Watch, wire: Wire) -> Self {
        let stage = Stage::Streaming {
            body,
            lost: guard.lost(),
            guard: Some(guard),
        };
        Self {
            source: Source::Held(Held {
                stage,
                watch: Box::new(watch),
                wire,
            }),
        }
    }
}

/// Empty, for layers further out that answer in the inner service's stead, such as the time-out of tower-http.
impl<B> Default for LockBody<B> {
    fn default() -> Self {
        Self::refused(Bytes::new())
    }
}

impl<B> Body for LockBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().source.project() {
            From::Served(body) => body.poll_frame(cx).map_err(Into::into),
            From::Refused(body) => body.poll_frame(cx).map_err(|never| match never {}),
            From::Held(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Served(body) => body.is_end_stream(),
            Source::Refused(body) => body.is_end_stream(),
            Source::Held(body) => matches!(body.stage, Stage::Done),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Served(body) => body.size_hint(),
            Source::Refused(body) => body.size_hint(),
            Source::Held(Held {
                stage: Stage::Streaming { body, .. },
                ..
            }) => body.size_hint(),
            Source::Held(Held {
                stage: Stage::Releasing { .. },
                ..
            }) => SizeHint::default(),
            Source::Held(Held {
                stage: Stage::Done, ..
            }) => SizeHint::with_exact(0),
        }
    }
}

impl<B> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.source {
            Source::Served(_) => "served",
            Source::Refused(_) => "refused",
            Source::Held(_) => "held",
        };
        f.debug_struct("LockBody")
            .field("source", &format_args!("{source}"))
            .finish_non_exhaustive()
    }
}

/// A body that keeps its lock.
#[pin_project]
struct Held<B> {
    #[pin]
    stage: Stage<B>,
    /// Dropped after the guard. Boxed, as every response that passes has room for it.
    watch: Box<Watch>,
    wire: Wire,
}

#[pin_project(project = Projected)]
enum Stage<B> {
    /// The body is dropped before the guard.
    Streaming {
        #[pin]
        body: B,
        lost: Lost,
        guard: Option<LockGuard>,
    },
    /// The last frame goes out when the lock is free.
    Releasing {
        release: BoxFuture<'static, Result<(), LockError>>,
        last: Option<Frame<Bytes>>,
    },
    Done,
}

/// What an inner body has come to.
enum Step {
    /// A frame, and more to come.
    Frame(Frame<Bytes>),
    /// The end, with the last frame if there is one.
    End(Option<Frame<Bytes>>),
    Failed(BoxError),
    Lost(LockError),
}

impl<B> Held<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        let _entered = this.watch.entered();
        let mut stage = this.stage;
        loop {
            let next = match stage.as_mut().project() {
                Projected::Streaming { body, lost, guard } => {
                    // It is taken below only, where the stage is left for good.
                    let Some(held) = guard.as_deref() else {
                        return Poll::Ready(None);
                    };
                    match ready!(step(body, lost, held, cx)) {
                        Step::Frame(frame) => return Poll::Ready(Some(Ok(frame))),
                        Step::End(last) => match guard.take() {
                            Some(guard) => Stage::Releasing {
                                release: Box::pin(guard.release()),
                                last,
                            },
                            None => Stage::Done,
                        },
                        Step::Failed(error) => {
                            stage.set(Stage::Done);
                            return Poll::Ready(Some(Err(error)));
                        }
                        Step::Lost(error) => {
                            this.watch.released(Some(&error));
                            stage.set(Stage::Done);
                            return Poll::Ready(Some(lost_frame(
                                error,
                                this.watch.policy(),
                                *this.wire,
                            )));
                        }
                    }
                }
                Projected::Releasing { release, last } => {
                    let released = ready!(release.as_mut().poll(cx));
                    this.watch.released(released.as_ref().err());
                    let last = last.take();
                    stage.set(Stage::Done);
                    return Poll::Ready(match released {
                        // The body was whole, but what it says may not hold.
                        Err(error) if matches!(error.kind(), LockErrorKind::Lost(_)) => {
                            Some(lost_frame(error, this.watch.policy(), *this.wire))
                        }
                        // What else went wrong has been traced.
                        _ => last.map(Ok),
                    });
                }
                Projected::Done => return Poll::Ready(None),
            };
            stage.set(next);
        }
    }
}

fn step<B>(
    mut body: Pin<&mut B>,
    lost: &mut Lost,
    held: &HeldLock,
    cx: &mut Context<'_>,
) -> Poll<Step>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    // First, as a process that was paused must not go on with work whose lock has ended meanwhile.
    if let Poll::Ready(error) = Pin::new(&mut *lost).poll(cx) {
        return Poll::Ready(Step::Lost(error));
    }
    match held.in_scope(|| body.as_mut().poll_frame(cx)) {
        Poll::Pending => Pin::new(lost).poll(cx).map(Step::Lost),
        Poll::Ready(None) => Poll::Ready(Step::End(None)),
        Poll::Ready(Some(Err(error))) => Poll::Ready(Step::Failed(error.into())),
        // Whoever sends the body may not ask for more after what says it is the last.
        Poll::Ready(Some(Ok(frame))) if frame.is_trailers() || body.is_end_stream() => {
            Poll::Ready(Step::End(Some(frame)))
        }
        Poll::Ready(Some(Ok(frame))) => Poll::Ready(Step::Frame(frame)),
    }
}

/// The end of a body whose lock was lost, which nobody may take for a clean one.
fn lost_frame(error: LockError, policy: &Policy, wire: Wire) -> Result<Frame<Bytes>, BoxError> {
    let reason = Reason::Lock(error.clone());
    let refusal = Refusal::new(
        &reason,
        Caller {
            wire,
            http2: true,
            hurried: false,
        },
        policy,
    );
    refusal.trace();
    match wire {
        Wire::Http => Err(error.into()),
        Wire::Grpc => Ok(Frame::trailers(refusal.trailers())),
    }
}
