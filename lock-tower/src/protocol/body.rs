//! [`LockBody`]: the body of the inner service, optionally sent under its lock, or of a refusal.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use lock_runtime::{
    LockError, LockGuard, OnLost,
    future::{LostFuture, ReleaseFuture},
};
use pin_project::pin_project;

use super::{
    reject::{Reason, Refusal},
    wire::{Caller, Wire, is_grpc_error},
};
use crate::{policy::Policy, watch::Watch};

/// The boxed error type of response bodies.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// A body that has been read up to a length.
#[cfg(any(feature = "inspector", feature = "once"))]
#[cfg_attr(
    not(feature = "once"),
    expect(
        dead_code,
        reason = "a form has no trailers, and is no longer than this"
    )
)]
pub(crate) struct Buffered<B: Body> {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<http::HeaderMap>,
    /// The frame that goes beyond the length, or an error.
    pub(crate) next: Option<Result<Frame<B::Data>, BoxError>>,
    /// What follows that frame. Without one, the body has ended.
    pub(crate) rest: Pin<Box<B>>,
}

#[cfg(any(feature = "inspector", feature = "once"))]
impl<B: Body<Error: Into<BoxError>>> Buffered<B> {
    /// Reads a body to its end, or up to `most` bytes. The data is copied: a frame of a byte keeps
    /// a whole buffer of its connection. Nothing follows the trailers: tonic would repeat those of
    /// an error.
    pub(crate) async fn read(body: B, most: usize) -> Self {
        use bytes::{Buf as _, BufMut as _};
        let mut rest = Box::pin(body);
        let (mut data, mut trailers, mut next) = (bytes::BytesMut::new(), None, None);
        while next.is_none() && trailers.is_none() {
            // Frames that are there already must not keep the thread from other tasks.
            tokio::task::consume_budget().await;
            let Some(frame) = http_body_util::BodyExt::frame(&mut rest).await else {
                break;
            };
            match frame.map(Frame::into_data) {
                Ok(Ok(bytes)) if data.len() + bytes.remaining() <= most => data.put(bytes),
                Ok(Ok(bytes)) => next = Some(Ok(Frame::data(bytes))),
                Ok(Err(frame)) => trailers = frame.into_trailers().ok(),
                Err(error) => next = Some(Err(error.into())),
            }
        }
        Self {
            data: data.freeze(),
            trailers,
            next,
            rest,
        }
    }
}

/// Response body for [`Lock`](crate::Lock). It does not box the inner body.
///
/// With [`HoldUntil::Body`](crate::HoldUntil::Body), it holds the lock until its last frame, or
/// until it is dropped. If the lock is lost before that, the body ends with the [`LockError`]; a
/// gRPC body ends with trailers that carry the error. [`OnLost`] sets other treatments.
#[pin_project]
pub struct LockBody<B> {
    #[pin]
    source: Source<B>,
}

#[pin_project(project = ProjectedSource)]
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
        let on_lost = guard.on_lost();
        let stage = Stage::Streaming {
            body,
            lost: (on_lost == OnLost::Cancel).then(|| guard.lost()),
            guard: Some(guard),
        };
        Self {
            source: Source::Held(Held {
                stage,
                watch: Box::new(watch),
                wire,
                on_lost,
            }),
        }
    }
}

/// An empty body, for outer middleware that responds instead of the inner service, such as the
/// `Timeout` of tower-http.
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
            ProjectedSource::Served(body) => body.poll_frame(cx).map_err(Into::into),
            ProjectedSource::Refused(body) => body.poll_frame(cx).map_err(|never| match never {}),
            ProjectedSource::Held(body) => body.poll_frame(cx),
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

/// A body that holds its lock.
#[pin_project]
struct Held<B> {
    #[pin]
    stage: Stage<B>,
    /// Dropped after the guard. Boxed because it would enlarge every response.
    watch: Box<Watch>,
    wire: Wire,
    on_lost: OnLost,
}

#[pin_project(project = Projected)]
enum Stage<B> {
    /// The body is declared, and so dropped, before the guard.
    Streaming {
        #[pin]
        body: B,
        /// `None` for a body that is sent to its end despite a loss.
        lost: Option<LostFuture>,
        guard: Option<LockGuard>,
    },
    /// The lock is being released; the last frame is sent after that.
    Releasing {
        /// Boxed so that the body is `Unpin` if that of the inner service is.
        release: Pin<Box<ReleaseFuture>>,
        last: Option<Frame<Bytes>>,
    },
    Done,
}

/// The result of polling an inner body.
enum Step {
    /// A frame that is not the last one.
    Frame(Frame<Bytes>),
    /// The end of the body, with the last frame if there is one.
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
                    // Only the `End` arm below takes the guard, and it leaves this stage.
                    let Some(guarded) = guard.as_ref() else {
                        return Poll::Ready(None);
                    };
                    match ready!(step(body, lost, guarded, cx)) {
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
                    // The body is complete, but its contents may be invalid. Other errors of the
                    // release have been traced.
                    let loss = released.err().and_then(|error| {
                        this.on_lost
                            .replaces_output(error, is_failure(last.as_ref()))
                    });
                    return Poll::Ready(match loss {
                        Some(error) => Some(lost_frame(error, this.watch.policy(), *this.wire)),
                        None => last.map(Ok),
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
    lost: &mut Option<LostFuture>,
    guard: &LockGuard,
    cx: &mut Context<'_>,
) -> Poll<Step>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    let mut poll_loss = |cx: &mut Context<'_>| {
        let lost = lost.as_mut();
        lost.map_or(Poll::Pending, |lost| Pin::new(lost).poll(cx))
    };
    // Checked before the body, because a process that was paused must not go on with work whose
    // lock has expired in the meantime.
    if let Poll::Ready(error) = poll_loss(cx) {
        return Poll::Ready(Step::Lost(error));
    }
    let end = match guard.in_scope(|| body.as_mut().poll_frame(cx)) {
        Poll::Pending => return poll_loss(cx).map(Step::Lost),
        Poll::Ready(None) => Step::End(None),
        Poll::Ready(Some(Err(error))) => Step::Failed(error.into()),
        // The sender of the body may not poll again after a frame that it recognizes as the last.
        Poll::Ready(Some(Ok(frame))) if frame.is_trailers() || body.is_end_stream() => {
            Step::End(Some(frame))
        }
        Poll::Ready(Some(Ok(frame))) => return Poll::Ready(Step::Frame(frame)),
    };
    let loss = guard.loss_at_end(match &end {
        Step::End(last) => is_failure(last.as_ref()),
        _ => true,
    });
    Poll::Ready(loss.map_or(end, Step::Lost))
}

/// Returns whether the body ends with an error of the inner service.
fn is_failure(last: Option<&Frame<Bytes>>) -> bool {
    last.and_then(Frame::trailers_ref)
        .is_some_and(is_grpc_error)
}

/// The last frame of a body whose lock was lost. It never looks like a clean end.
fn lost_frame(error: LockError, policy: &Policy, wire: Wire) -> Result<Frame<Bytes>, BoxError> {
    let reason = Reason::Lock(error.clone());
    let refusal = Refusal::new(
        &reason,
        Caller {
            wire,
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
