//! The client that the macro uses: one for the whole process, or one for a task.

use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    sync::OnceLock,
    task::{Context, Poll},
};

use pin_project::pin_project;
use tokio::task::futures::TaskLocalFuture;

use crate::{
    client::LockClient,
    error::{LockError, LockErrorKind},
};

static INSTALLED: OnceLock<LockClient> = OnceLock::new();

tokio::task_local! {
    static SCOPED: LockClient;
}

impl LockClient {
    /// Makes this the client of every `#[distributed_lock]` in the process that names no other
    /// client.
    ///
    /// Call it once, in `main`. It applies to the whole process, so tests use
    /// [`as_default`](Self::as_default) instead. Keep the client for
    /// [`shutdown`](Self::shutdown):
    ///
    /// ```
    /// # use lock_runtime::LockClient;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockClient::in_memory();
    /// locks.install()?;
    /// // ...
    /// locks.shutdown().await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If a client is installed already. That client stays installed.
    pub fn install(&self) -> Result<(), AlreadyInstalled> {
        INSTALLED
            .set(self.clone())
            .map_err(|_| AlreadyInstalled(()))
    }

    /// Makes this the client of every `#[distributed_lock]` within `future`, instead of the
    /// installed client.
    ///
    /// Tasks that are spawned within `future` do not inherit it.
    pub fn as_default<F: Future>(&self, future: F) -> AsDefaultFuture<F> {
        AsDefaultFuture {
            inner: SCOPED.scope(self.clone(), future),
        }
    }
}

/// Returns the client for `function`, which names none: that of the innermost `as_default`, or else
/// the installed one.
pub fn ambient(function: &str) -> Result<LockClient, LockError> {
    SCOPED.try_with(LockClient::clone).ok().or_else(|| INSTALLED.get().cloned()).ok_or_else(|| {
        let message = format!(
            "no client is installed for `{function}`, which is under #[distributed_lock]; write `let locks = \
             LockClient::connect(url).await?; locks.install()?;` at the start of `main` and \
             `locks.shutdown().await` at its end, or name a client in the attribute: `client = self.locks`"
        );
        LockError::new(LockErrorKind::NoClient, message)
    })
}

/// The error if a client is installed already. See [`LockClient::install`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AlreadyInstalled(());

impl fmt::Display for AlreadyInstalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a lock client is installed already; install one per process, and use `as_default` in tests",
        )
    }
}

impl Error for AlreadyInstalled {}

/// A future with its own client. See [`LockClient::as_default`].
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct AsDefaultFuture<F> {
    #[pin]
    inner: TaskLocalFuture<LockClient, F>,
}

impl<F: Future> Future for AsDefaultFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().inner.poll(cx)
    }
}

impl<F> fmt::Debug for AsDefaultFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsDefaultFuture").finish_non_exhaustive()
    }
}
