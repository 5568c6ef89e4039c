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
    client::Core,
    store::{Hold, PollReply, RenewReply, Renewal, StoreError},
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

/// Renews one lock.
pub(crate) async fn renew_one(
    core: &Core,
    patience: Duration,
    renewal: &Renewal,
) -> Result<RenewReply, StoreError> {
    within(patience, only(core.store.renew(slice::from_ref(renewal)))).await
}

/// Polls one queue entry.
pub(crate) async fn poll_one(
    core: &Core,
    patience: Duration,
    hold: &Hold,
) -> Result<PollReply, StoreError> {
    within(patience, only(core.store.poll(slice::from_ref(hold)))).await
}
