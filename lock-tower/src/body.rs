//! [`LockBody`]: the inner service's body, or that of a refusal.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use pin_project::pin_project;

/// The body of a response that has passed a [`Lock`](crate::Lock). It does not box the inner one.
#[pin_project]
#[derive(Clone, Debug)]
pub struct LockBody<B> {
    #[pin]
    source: Source<B>,
}

#[pin_project(project = From)]
#[derive(Clone, Debug)]
enum Source<B> {
    Served(#[pin] B),
    Refused(#[pin] Full<Bytes>),
}

impl<B> LockBody<B> {
    pub(crate) fn served(body: B) -> Self {
        Self { source: Source::Served(body) }
    }

    pub(crate) fn refused(body: Bytes) -> Self {
        Self { source: Source::Refused(Full::new(body)) }
    }
}

impl<B: Body<Data = Bytes>> Body for LockBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        match self.project().source.project() {
            From::Served(body) => body.poll_frame(cx),
            From::Refused(body) => body.poll_frame(cx).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Served(body) => body.is_end_stream(),
            Source::Refused(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Served(body) => body.size_hint(),
            Source::Refused(body) => body.size_hint(),
        }
    }
}
