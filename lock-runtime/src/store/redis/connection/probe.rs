//! The outage of the server of a connection: notices from its links, probes in the background, and
//! calls that are refused meanwhile. [`Outage`](super::Outage) decides.

use std::{future::pending, sync::Weak};

use tokio::{runtime::Handle, time::sleep};

#[cfg(feature = "metrics")]
use super::metered;
use super::{
    super::{
        outage::{InOutage, Restored},
        sync::OnDrop,
        topology::sentinel::Named,
    },
    Connection, Failed,
    link::STALLED,
};
use crate::{
    error::LockErrorKind,
    observe::log,
    shell::keeper,
    shell::sync::lock,
    shell::time::{Instant, sleep_until},
    store::{StoreError, StoreEvent},
};

impl Connection {
    /// Admits a call, or refuses it because the server does not answer.
    pub(crate) fn admits(&self, in_outage: InOutage) -> Result<(), Failed> {
        self.outage
            .admits(in_outage, &self.connector.target)
            .map_err(|error| {
                // The runtime of the task that probes may have ended.
                self.probe();
                Failed::refused(error)
            })
    }

    /// Returns whether the server does not answer.
    pub(crate) fn is_in_outage(&self) -> bool {
        self.outage.lasts()
    }

    /// Returns whether the latest attempt to connect has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.outage.error().is_some()
    }

    /// Records an established connection, to the primary that the Sentinels have `named`.
    pub(crate) fn established(&self, attempt: u64, named: Option<&Named>) {
        let Some(restored) = self.outage.end(attempt, Instant::now()) else {
            return;
        };
        if !self.connector.listens {
            return;
        }
        #[cfg(feature = "metrics")]
        metered::connected(self.connector.server_label(), restored == Restored::First);
        let (server, primary) = (&self.connector.target, named.map(tracing::field::display));
        match restored {
            Restored::First => tracing::info!(%server, primary, "connected"),
            Restored::After(outage) => {
                let primary = named.map(ToString::to_string);
                self.log(
                    "connection restored",
                    "restored",
                    move |server, left_out| {
                        tracing::info!(server, primary, ?outage, left_out, "connection restored");
                    },
                );
                self.connector
                    .pushes
                    .listeners
                    .notify(&StoreEvent::Reconnected);
            }
        }
    }

    /// Records a failed attempt to connect.
    pub(crate) fn failed(&self, attempt: u64, error: &StoreError) {
        let is_news = self.outage.failed(attempt, error, Instant::now());
        if is_news && self.connector.listens {
            let error = error.clone();
            let code = LockErrorKind::from(error.kind()).code();
            self.log("no connection", code, move |server, left_out| {
                tracing::warn!(server, left_out, %error, "no connection; trying again in the background");
            });
        }
    }

    /// Records the end of a connection that `stood`, or of a failed attempt. The server has not
    /// answered since `since`.
    pub(crate) fn ended(&self, attempt: u64, stood: bool, since: Instant) {
        if self.outage.begin(attempt, since) && stood && self.connector.listens {
            self.log("connection lost", "lost", |server, left_out| {
                tracing::warn!(server, left_out, "connection lost");
            });
        }
        self.probe();
    }

    /// Writes a line about the server, which may come and go many times a second.
    fn log(
        &self,
        message: &'static str,
        code: &'static str,
        write: impl FnOnce(&str, Option<u64>),
    ) {
        let server = self.connector.target.to_string();
        log::summarise(message, code, Some(&server), |left_out| {
            write(&server, left_out);
        });
    }

    /// Connects again in the background, unless a task does so already.
    pub(super) fn probe(&self) {
        // The keeper connects when it has a call to make.
        if keeper::is_here() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let now = Instant::now();
        {
            let mut probing = lock(&self.probing);
            // A task on a runtime that is not driven any more takes no turns.
            if probing.is_some_and(|turn| now < turn + STALLED) {
                return;
            }
            *probing = Some(now);
        }
        let (this, ended) = (self.this.clone(), self.this.clone());
        let ended = OnDrop::new(move || {
            if let Some(connection) = ended.upgrade() {
                *lock(&connection.probing) = None;
            }
        });
        runtime.spawn(async move {
            probe_until_connected(&this).await;
            drop(ended);
            // The connection may have ended again meanwhile.
            if let Some(connection) = this.upgrade().filter(|it| it.is_in_outage()) {
                connection.probe();
            }
        });
    }
}

/// Attempts to connect until one succeeds or the connection is dropped, one attempt at a time. Once
/// the circuit breaker is open, waiting requests are notified.
async fn probe_until_connected(connection: &Weak<Connection>) {
    // The opening that waiting requests were notified of.
    let mut announced = None;
    loop {
        // The connection is not kept alive while this waits.
        let Some((outcome, opens_at)) = connection.upgrade().and_then(|it| {
            let opens_at = it.outage.opens_at().filter(|at| announced != Some(*at));
            *lock(&it.probing) = Some(Instant::now());
            it.is_in_outage()
                .then(|| (it.attempt().outcome(), opens_at))
        }) else {
            return;
        };
        let opens = async {
            match opens_at {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        let attempt = async {
            outcome.await;
            let connection = connection.upgrade().filter(|it| it.is_in_outage());
            if let Some(pause) =
                connection.map(|it| it.outage.pause(rand::random(), Instant::now()))
            {
                sleep(pause).await;
            }
        };
        tokio::select! {
            () = attempt => {}
            () = opens => {
                announced = opens_at;
                if let Some(connection) = connection.upgrade().filter(|it| it.is_in_outage()) {
                    // Waiting requests make a call, and are refused.
                    connection.connector.pushes.listeners.notify(&StoreEvent::Disconnected);
                }
            }
        }
    }
}
