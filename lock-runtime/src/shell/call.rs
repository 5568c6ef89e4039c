//! Calls to the store with a time-out.

use std::{
    future::Future,
    pin::{Pin, pin},
    slice,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::FutureExt as _;
use pin_project::pin_project;
use tokio::time::{Sleep, sleep};

use crate::{
    protocol::{Answer, Call, Reply, Request},
    store::{ReleaseReply, Replied, Store, StoreError},
};

/// A call whose reply is awaited for at most `patience`. It sets no timer if the reply is ready at
/// once.
#[pin_project]
pub(crate) struct Within<F> {
    #[pin]
    call: F,
    patience: Duration,
    /// Boxed: it would enlarge the futures of all callers, most of which are moved.
    timer: Option<Pin<Box<Sleep>>>,
}

pub(crate) fn within<F>(patience: Duration, call: F) -> Within<F> {
    Within {
        call,
        patience,
        timer: None,
    }
}

impl<T, F: Future<Output = Result<T, StoreError>>> Future for Within<F> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let patience = *this.patience;
        if let Poll::Ready(reply) = this.call.poll(cx) {
            return Poll::Ready(reply);
        }
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(patience)));
        let timer = timer.as_mut().poll(cx);
        timer.map(|()| Err(StoreError::timed_out(patience)))
    }
}

/// A release that borrows nothing, so that a future with a name contains it.
pub(crate) type ReleaseCall = Within<Replied<'static, ReleaseReply>>;

/// Returns the reply to a call with a single hold.
pub(crate) fn only<T>(
    call: impl Future<Output = Vec<Result<T, StoreError>>>,
) -> impl Future<Output = Result<T, StoreError>> {
    call.map(|mut replies| replies.pop().ok_or_else(StoreError::no_reply)?)
}

/// Makes a call to the store.
pub(crate) async fn perform(store: &dyn Store, call: &Call) -> Answer {
    // Pinned here, because `within` would store it twice: as its argument and where it is pinned.
    let reply = pin!(async {
        Ok(match &call.request {
            Request::Acquire(request) => Reply::Acquire(store.acquire(request).await?),
            Request::Release(release) => Reply::Release(store.release(release).await?),
            Request::Poll(hold) => Reply::Poll(only(store.poll(slice::from_ref(hold))).await?),
            Request::Renew(due) => Reply::Renew(only(store.renew(slice::from_ref(due))).await?),
            Request::Abandon(hold) => store.abandon(hold).await.map(|()| Reply::Abandoned)?,
            Request::Convert(hold) => Reply::Convert(store.convert(hold).await?),
        })
    });
    within(call.timeout, reply).await
}
