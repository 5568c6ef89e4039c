//! Calls to the store with a time-out.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    slice,
    task::Poll,
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::time::timeout;

use crate::{
    protocol::{Answer, Call, Reply, Request},
    store::{Store, StoreError},
};

/// Waits for the store's reply for at most `patience`. Sets no timer if the reply is
/// ready at once.
pub(crate) async fn within<T>(
    patience: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let mut call = pin!(call);
    match poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
        Poll::Ready(reply) => reply,
        Poll::Pending => timeout(patience, call)
            .await
            .unwrap_or_else(|_| Err(StoreError::timed_out(patience))),
    }
}

/// Returns the reply to a call with a single hold.
pub(crate) fn only<T>(
    call: impl Future<Output = Vec<Result<T, StoreError>>>,
) -> impl Future<Output = Result<T, StoreError>> {
    call.map(|mut replies| replies.pop().ok_or_else(StoreError::late)?)
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
