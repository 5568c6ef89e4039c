//! [`DetachLayer`]: requests that continue if their clients disconnect.

use std::{
    fmt,
    future::Future,
    panic::resume_unwind,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::task::JoinHandle;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument;

/// Layer that runs each request in a task of its own, which continues if the client disconnects.
///
/// When a client disconnects, a server drops the response future and with it the handler, at its
/// current await point. Outside of a [`LockLayer`](crate::LockLayer), this layer keeps both alive:
/// the handler finishes under its lock, within [`max_hold`](crate::LockLayer::max_hold), and the
/// lock is released afterwards. The response is then dropped without being sent, so with
/// [`HoldUntil::Body`](crate::HoldUntil::Body) the lock is released at that point. A request that
/// is still waiting for its lock keeps waiting, up to its [`wait`](crate::LockLayer::wait).
///
/// What limits the number of requests outside of this layer, such as the streams of a connection,
/// forgets a request whose client disconnects, while its handler goes on. A limit for each caller
/// belongs inside of it.
///
/// The task runs in the `tracing` span of the caller. It does not inherit task-locals, including
/// that of [`LockClient::as_default`](lock_runtime::LockClient::as_default). It requires a tokio
/// runtime. A graceful shutdown of the server does not wait for it.
///
#[cfg_attr(feature = "axum-08", doc = "```")]
#[cfg_attr(not(feature = "axum-08"), doc = "```ignore")]
/// use axum::{Router, body::Body, extract::Path, http::Request, routing::post};
/// use lock_tower::{DetachLayer, LockLayer, runtime::LockClient};
/// use tower::ServiceExt;
///
/// async fn pay(Path(id): Path<u64>) -> String {
///     format!("order {id} is paid")
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = LockClient::in_memory();
/// let lock = LockLayer::new(locks, "order:{id:int}")?;
/// // Outside of the lock: the lock is acquired and released in the detached task.
/// let app: Router = Router::new()
///     .route("/orders/{id}/pay", post(pay).layer((DetachLayer::new(), lock)));
///
/// let response = app.oneshot(Request::post("/orders/42/pay").body(Body::empty())?).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "a layer does nothing until it is put on a service"]
#[non_exhaustive]
pub struct DetachLayer {}

impl DetachLayer {
    /// Creates a new [`DetachLayer`].
    pub fn new() -> Self {
        Self::default()
    }
}

impl<S> Layer<S> for DetachLayer {
    type Service = Detach<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Detach { inner }
    }
}

/// Middleware that runs each request in a task of its own. See [`DetachLayer`].
#[derive(Clone, Copy, Debug)]
pub struct Detach<S> {
    inner: S,
}

impl<S> Detach<S> {
    inner_service!();
}

impl<S, Req> Service<Req> for Detach<S>
where
    S: Service<Req>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = DetachedFuture<S::Response, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Req) -> Self::Future {
        DetachedFuture {
            task: tokio::spawn(self.inner.call(req).in_current_span()),
        }
    }
}

/// Response future for [`Detach`].
///
/// # Cancellation
/// Dropping it does not cancel the request. The response is dropped when the request is done.
///
/// # Panics
/// If the inner service panics, or if it is polled while the runtime shuts down.
#[must_use = "the response is lost without it"]
pub struct DetachedFuture<Res, Err> {
    task: JoinHandle<Result<Res, Err>>,
}

impl<Res, Err> DetachedFuture<Res, Err> {
    /// The response of a request that runs in this task.
    #[cfg(feature = "once")]
    pub(crate) fn of(task: JoinHandle<Result<Res, Err>>) -> Self {
        Self { task }
    }
}

impl<Res, Err> Future for DetachedFuture<Res, Err> {
    type Output = Result<Res, Err>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match ready!(Pin::new(&mut self.task).poll(cx)) {
            Ok(result) => Poll::Ready(result),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                #[expect(
                    clippy::panic,
                    reason = "only this future could abort the task, and there is no response to return"
                )]
                Err(error) => panic!("the task of the request was dropped: {error}"),
            },
        }
    }
}

impl<Res, Err> fmt::Debug for DetachedFuture<Res, Err> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedFuture").finish_non_exhaustive()
    }
}
