//! Calls to the store with a time-out.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    slice,
    task::Poll,
    time::Duration,
};

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
pub(crate) async fn only<T>(
    call: impl Future<Output = Vec<Result<T, StoreError>>>,
) -> Result<T, StoreError> {
    call.await.pop().ok_or_else(StoreError::late)?
}

/// Makes a call to the store.
pub(crate) async fn perform(store: &dyn Store, call: &Call) -> Answer {
    match &call.request {
        Request::Acquire(request) => within(call.timeout, store.acquire(request))
            .await
            .map(Reply::Acquire),
        Request::Release(release) => within(call.timeout, store.release(release))
            .await
            .map(Reply::Release),
        // Boxed: these are rare, and would enlarge the future of every other call.
        _ => Box::pin(perform_rare(store, call)).await,
    }
}

async fn perform_rare(store: &dyn Store, Call { request, timeout }: &Call) -> Answer {
    let timeout = *timeout;
    match request {
        Request::Acquire(_) | Request::Release(_) => Err(StoreError::late()),
        Request::Poll(hold) => within(timeout, only(store.poll(slice::from_ref(hold))))
            .await
            .map(Reply::Poll),
        Request::Renew(renewal) => within(timeout, only(store.renew(slice::from_ref(renewal))))
            .await
            .map(Reply::Renew),
        Request::Abandon(hold) => within(timeout, store.abandon(hold))
            .await
            .map(|()| Reply::Abandoned),
        Request::Convert(hold) => within(timeout, store.convert(hold))
            .await
            .map(Reply::Convert),
    }
}
