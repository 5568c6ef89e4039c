//! One connection to the server, from the first attempt to its end.

use std::{
    panic::resume_unwind,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use redis::aio::MultiplexedConnection;
use tokio::task::AbortHandle;

use super::{
    super::{error, sync::OnDrop, topology::quarantine::Tenure},
    Connection,
    connector::Connector,
    endpoint::Driver,
    login::Authentication,
    pushes::Pushes,
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreEvent},
};

/// The silence after which a connection is given up: calls have been sent, and none was answered.
const SILENCE: Duration = Duration::from_secs(2);
/// Longer than any attempt to connect takes on a runtime that is driven.
pub(super) const STALLED: Duration = Duration::from_secs(10);
/// A connection that is being established, is up, or is over. It is not re-established: a caller
/// that finds it over begins a new one.
pub(crate) struct Link {
    connected: Shared<BoxFuture<'static, Result<Connected, StoreError>>>,
    attempt: AbortHandle,
    begun: Instant,
    life: Arc<Life>,
    /// The silence after which it is given up.
    patience: Duration,
}

/// An established connection, and the server at its other end.
#[derive(Clone)]
pub(crate) struct Connected {
    pub(crate) connection: MultiplexedConnection,
    /// Set for a server of a quorum.
    pub(crate) tenure: Option<Arc<Tenure>>,
    /// Set for credentials that end.
    pub(super) _authentication: Option<Arc<Authentication>>,
    pub(super) _driver: Arc<Driver>,
}

/// Whether a connection is up. Shared with the task that reads from it.
pub(super) struct Life {
    /// Notified of the connection and its end, and of a failed attempt.
    pub(super) owner: Weak<Connection>,
    /// The number of the attempt to connect.
    pub(super) number: u64,
    /// The connection was established, so its end is reported.
    pub(super) stood: AtomicBool,
    pub(super) over: AtomicBool,
    /// Notified of the end of the connection.
    pub(super) pushes: Option<Arc<Pushes>>,
    /// The time since which calls have been sent without any answer; `None` after an answer.
    silent_since: Mutex<Option<Instant>>,
    /// The task that ends the connection when another server becomes the primary, where
    /// that can happen.
    pub(super) watch: OnceLock<AbortHandle>,
}

impl Life {
    pub(super) fn end(&self) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        self.watch.get().into_iter().for_each(AbortHandle::abort);
        let stood = self.stood.load(Ordering::Acquire);
        if let Some(owner) = self.owner.upgrade() {
            let silent_since = *lock(&self.silent_since);
            let silent_since = silent_since.unwrap_or_else(Instant::now);
            owner.ended(self.number, stood, silent_since);
        }
        if let (true, Some(pushes)) = (stood, &self.pushes) {
            pushes.listeners.notify(&StoreEvent::Disconnected);
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.watch.get().into_iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Link {
    /// The attempt has no caller any more. Aborting it closes the connection that it has opened.
    fn drop(&mut self) {
        self.attempt.abort();
    }
}

impl Link {
    /// Starts to connect in a separate task, as a caller may stop waiting for the connection. Its
    /// `owner` is notified of the outcome.
    pub(crate) fn begin(connector: &Connector, owner: &Weak<Connection>, number: u64) -> Self {
        let life = Arc::new(Life {
            owner: owner.clone(),
            number,
            stood: AtomicBool::new(false),
            over: AtomicBool::new(false),
            pushes: connector.listens.then(|| connector.pushes.clone()),
            silent_since: Mutex::default(),
            watch: OnceLock::new(),
        });
        // Only the result is shared. The attempt runs on the runtime that started it, and may end
        // with that runtime.
        let connecting = tokio::spawn(connector.clone().connect(life.clone()));
        let attempt = connecting.abort_handle();
        let connected = connecting.map(|connected| {
            connected.unwrap_or_else(|ended| match ended.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => Err(error::unavailable(
                    "no connection: the runtime on which it was connecting has ended",
                )),
            })
        });
        Self {
            connected: connected.boxed().shared(),
            attempt,
            begun: Instant::now(),
            life,
            patience: connector
                .unavailable_after
                .map_or(SILENCE, |after| after.min(SILENCE)),
        }
    }

    /// Waits for the connection to be established.
    pub(crate) async fn connected(&self) -> Result<Connected, StoreError> {
        self.connected.clone().await.map_err(|error| {
            // An attempt that ended with its runtime has not recorded that itself.
            self.end();
            error.with_unsent(true)
        })
    }

    /// Waits for the outcome of the attempt, which does not keep the connection open.
    pub(crate) fn outcome(&self) -> impl Future<Output = ()> + Send + use<> {
        let life = self.life.clone();
        self.connected.clone().map(move |connected| {
            // An attempt that ended with its runtime has not recorded that itself.
            if connected.is_err() {
                life.end();
            }
        })
    }

    /// Whether the attempt takes so long that its runtime cannot be driving it any more.
    pub(super) fn has_stalled(&self) -> bool {
        !self.life.stood.load(Ordering::Acquire) && self.begun.elapsed() > STALLED
    }

    /// Whether the attempt has established no connection.
    pub(super) fn has_failed(&self) -> bool {
        self.is_over() && !self.life.stood.load(Ordering::Acquire)
    }

    pub(super) fn is_over(&self) -> bool {
        self.life.over.load(Ordering::Acquire)
    }

    /// Whether the connection was established and is not known to be over.
    pub(crate) fn stands(&self) -> bool {
        self.life.stood.load(Ordering::Acquire) && !self.is_over()
    }

    /// Ends a connection that has turned out to be unusable. Messages that it would have
    /// delivered are lost.
    pub(crate) fn end(&self) {
        self.life.end();
    }

    /// Records that a call is about to be sent. If its caller stops waiting for it after a long
    /// silence, the connection is given up: TCP may be alive without a server at the other end.
    pub(crate) fn unanswered(&self) -> OnDrop<impl FnOnce()> {
        lock(&self.life.silent_since).get_or_insert_with(Instant::now);
        OnDrop::new(|| {
            let silent_since = *lock(&self.life.silent_since);
            if silent_since.is_some_and(|since| since.elapsed() >= self.patience) {
                self.end();
            }
        })
    }

    /// Records an answer.
    pub(crate) fn answered(&self) {
        *lock(&self.life.silent_since) = None;
    }
}
