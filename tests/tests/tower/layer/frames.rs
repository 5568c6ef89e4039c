//! Bodies whose frames come from the test.

use std::convert::Infallible;

use axum::{
    body::{Body, Bytes},
    routing::{MethodRouter, post},
};
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::sync::mpsc;

/// The frames of a body, which ends when this is dropped. Closed when the body is dropped.
pub(super) type Frames = mpsc::Sender<Frame<Bytes>>;

pub(super) fn data(text: impl Into<Bytes>) -> Frame<Bytes> {
    Frame::data(text.into())
}

/// A body of the frames that are sent.
pub(super) fn body_of() -> (Frames, Body) {
    let (frames, receiver) = mpsc::channel(1);
    let next = async |mut receiver: mpsc::Receiver<_>| {
        Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
    };
    (
        frames,
        Body::new(StreamBody::new(stream::unfold(receiver, next))),
    )
}

/// A route that answers with such a body.
pub(super) fn streaming() -> (MethodRouter, mpsc::UnboundedReceiver<Frames>) {
    let (entered, entries) = mpsc::unbounded_channel();
    let handler = async move || {
        let (frames, body) = body_of();
        entered.send(frames).unwrap();
        body
    };
    (post(handler), entries)
}
