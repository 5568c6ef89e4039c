//! [`DetachLayer`]: a request that has begun is finished, whoever still waits for its response.

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

/// Runs each request of the services it is put on in a task of its own, which goes on when the caller is gone.
///
/// A server drops the future of a request whose caller has hung up, and with it the handler, at whatever await point it
/// stands. Outside of a [`LockLayer`](crate::LockLayer) this layer keeps both alive: the handler finishes under its lock,
/// and the lock is given back when it is done. The response is then dropped unsent, so that with
/// [`Hold::Body`](crate::Hold::Body) the lock ends there. A request that still waits for its lock goes on waiting, for no
/// longer than its [`wait`](crate::LockLayer::wait).
///
/// The task is within the caller's `tracing` span. It is in no task-local scope of the caller's, that of
/// [`LockClient::scope`](lock_runtime::LockClient::scope) included. It needs a tokio runtime. A graceful shutdown of the
/// server does not wait for it.
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::{Router, body::Body, extract::Path, http::Request, routing::post};
/// use lock_tower::{DetachLayer, LockLayer, runtime::LockClient};
/// use tower::ServiceExt;
///
/// async fn pay(Path(id): Path<u64>) -> String {
///     format!("order {id} is paid")
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = LockClient::in_memory();
/// let lock = LockLayer::new(locks, "order:{id:int}")?;
/// // Outside of the lock, which is then taken and given back in the task that nobody can drop.
/// let app: Router = Router::new().route("/orders/{id}/pay", post(pay).layer((DetachLayer::new(), lock)));
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
    /// The layer.
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

/// A service whose requests go on when the caller is gone; see [`DetachLayer`].
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

/// The future of [`Detach`].
///
/// # Cancellation
/// Dropping it lets the request go on without anybody who waits for the response.
///
/// # Panics
/// If the inner service does, and if it is polled while the runtime shuts down.
#[must_use = "the response is lost without it"]
pub struct DetachedFuture<Res, Err> {
    task: JoinHandle<Result<Res, Err>>,
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
                    reason = "nobody else can abort the task, and there is no response to give"
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
