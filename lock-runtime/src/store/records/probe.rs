//! The outage of the database: notices from its calls, probes in the background, and operations
//! that are refused meanwhile. [`Outage`] decides.

use std::{
    future::pending,
    pin::pin,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{sleep, timeout},
};

use super::adapter::Shared;
use crate::{
    error::LockErrorKind,
    observe::log,
    shell::{
        keeper,
        sync::OnDrop,
        sync::lock,
        time::{Instant, sleep_until},
    },
    store::{
        StoreError, StoreErrorKind, StoreEvent,
        error::Shows,
        remote::outage::{InOutage, Outage, Restored},
    },
};

/// The silence after which a database that was asked seems not to answer, at most.
const SILENCE: Duration = Duration::from_secs(2);
/// The time in which a database that answers other calls answers a probe: the call that was given
/// up may have waited for a change of its record.
const ANSWERS: Duration = Duration::from_millis(300);
/// Longer than any turn of the task that probes, on a runtime that is driven.
const STALLED: Duration = Duration::from_secs(10);
/// The time limit of a probe in an outage.
const PROBE: Duration = Duration::from_secs(1);

/// Whether the database answers.
#[derive(Debug)]
pub(super) struct Presence {
    outage: Outage,
    silence: Mutex<Silence>,
    /// The latest turn of the task that probes the database, if there is one.
    probing: Mutex<Option<Instant>>,
}

/// The calls without an answer.
#[derive(Clone, Copy, Debug, Default)]
struct Silence {
    /// The time since which calls have been in flight without any answer; `None` after an answer.
    since: Option<Instant>,
    in_flight: usize,
    /// The number of answers.
    answers: u64,
}

/// A call in flight.
pub(super) struct Asked<'a> {
    presence: &'a Presence,
    pub(super) sent: Instant,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        lock(&self.presence.silence).in_flight -= 1;
    }
}

impl Default for Presence {
    fn default() -> Self {
        let now = Instant::now();
        let outage = Outage::new(None, now);
        // No call has been made, so there is no silence.
        outage.end(0, now);
        Self {
            outage,
            silence: Mutex::default(),
            probing: Mutex::default(),
        }
    }
}

impl Presence {
    pub(super) fn set_unavailable_after(&self, unavailable_after: Option<Duration>) {
        self.outage.set_unavailable_after(unavailable_after);
    }

    /// Records that a call is about to be made, which is in flight until the result is dropped.
    pub(super) fn asked(&self) -> Asked<'_> {
        let sent = Instant::now();
        let mut silence = lock(&self.silence);
        if silence.in_flight == 0 {
            // Calls that were given up long ago say nothing about the time between.
            silence.since = None;
        }
        silence.since.get_or_insert(sent);
        silence.in_flight += 1;
        drop(silence);
        Asked {
            presence: self,
            sent,
        }
    }
}

impl Shared {
    /// Admits an operation, or refuses it because the database does not answer.
    pub(super) fn admits(self: &Arc<Self>, in_outage: InOutage) -> Result<(), StoreError> {
        let outage = &self.presence.outage;
        let shared = || outage.shared_error(Instant::now()).map_or(Ok(()), Err);
        let admitted = outage.admits(in_outage, &"the database");
        let admitted = admitted.and_then(|()| shared());
        if admitted.is_err() {
            // The runtime of the task that probes may have ended.
            self.probe(None);
        }
        admitted
    }

    /// Records the reply to a call.
    pub(super) fn replied<T>(self: &Arc<Self>, reply: &Result<T, StoreError>) {
        let error = match reply {
            Err(error) if error.shows() == Shows::Nothing => return,
            Err(error) if is_silence(error) => error,
            _ => return self.answered(),
        };
        // If it is not known, another call was answered after this one was sent.
        let since = lock(&self.presence.silence).since;
        self.presence
            .outage
            .begin(0, since.unwrap_or_else(Instant::now));
        self.failed(error);
        self.probe(None);
    }

    fn answered(&self) {
        {
            let mut silence = lock(&self.presence.silence);
            silence.since = None;
            silence.answers += 1;
        }
        if !self.presence.outage.lasts() {
            return;
        }
        let restored = self.presence.outage.end(0, Instant::now());
        if let Some(Restored::After(outage)) = restored {
            log::summarise("connection restored", "restored", None, |left_out| {
                tracing::info!(?outage, left_out, "connection restored");
            });
            self.listeners.notify(&StoreEvent::Reconnected);
        }
    }

    fn failed(&self, error: &StoreError) {
        if self.presence.outage.failed(0, error, Instant::now()) {
            let code = LockErrorKind::from(error.kind()).code();
            log::summarise("no answer of the database", code, None, |left_out| {
                tracing::warn!(left_out, %error, "no answer of the database; trying again in the background");
            });
        }
    }

    /// If the caller of an operation stops waiting for it after a long silence, the database may
    /// not answer any more.
    pub(super) fn unanswered(self: &Arc<Self>) -> OnDrop<impl FnOnce() + use<>> {
        let shared = self.clone();
        OnDrop::new(move || {
            let Silence { since, answers, .. } = *lock(&shared.presence.silence);
            let Some(since) = since else { return };
            let patience = shared.presence.outage.patience(SILENCE);
            if since.elapsed() >= patience && !shared.presence.outage.lasts() {
                shared.probe(Some((since, answers)));
            }
        })
    }

    /// Probes the database in the background, unless a task does so already. If it has been silent
    /// since a time, after a number of answers, the first probe decides whether this is an outage.
    fn probe(self: &Arc<Self>, suspected: Option<(Instant, u64)>) {
        // The keeper finds out with its calls.
        if keeper::is_here() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let now = Instant::now();
        {
            let mut probing = lock(&self.presence.probing);
            // A task on a runtime that is not driven any more takes no turns.
            if probing.is_some_and(|turn| now < turn + STALLED) {
                return;
            }
            *probing = Some(now);
        }
        let (this, ended) = (Arc::downgrade(self), Arc::downgrade(self));
        let ended = OnDrop::new(move || {
            if let Some(shared) = ended.upgrade() {
                *lock(&shared.presence.probing) = None;
            }
        });
        runtime.spawn(async move {
            if is_outage(&this, suspected).await {
                probe_until_answered(&this).await;
            }
            drop(ended);
            // It may be silent again meanwhile.
            if let Some(shared) = this.upgrade().filter(|it| it.presence.outage.lasts()) {
                shared.probe(None);
            }
        });
    }
}

/// Returns whether the error may mean that the database does not answer.
fn is_silence(error: &StoreError) -> bool {
    use StoreErrorKind::{Unauthenticated, Unavailable};
    let is_kind = matches!(error.kind(), Unavailable | Unauthenticated);
    is_kind && error.is_transient() && error.shows() == Shows::ByKind
}

async fn is_outage(shared: &Weak<Shared>, suspected: Option<(Instant, u64)>) -> bool {
    let (Some((since, answers)), Some(shared)) = (suspected, shared.upgrade()) else {
        return suspected.is_none();
    };
    if let Ok(Ok(_)) = timeout(ANSWERS, shared.read(&[])).await {
        return false;
    }
    if lock(&shared.presence.silence).answers != answers {
        // The probe may have met a dead connection among others.
        return false;
    }
    shared.presence.outage.begin(0, since);
    true
}

/// Probes the database until it answers or the store is dropped, one call at a time. Once the
/// circuit breaker is open, waiting requests are notified.
async fn probe_until_answered(this: &Weak<Shared>) {
    // The opening that waiting requests were notified of.
    let mut announced = None;
    // The call that has failed may have met a dead connection among others.
    let mut is_first = true;
    loop {
        let lasting = || this.upgrade().filter(|it| it.presence.outage.lasts());
        let turn = |it: Arc<Shared>| {
            *lock(&it.presence.probing) = Some(Instant::now());
            it.presence.outage.opens_at()
        };
        let Some(opens_at) = lasting().map(turn) else {
            return;
        };
        let mut probed = pin!(async {
            let Some(pause) =
                lasting().map(|it| it.presence.outage.pause(rand::random(), Instant::now()))
            else {
                return;
            };
            if !std::mem::take(&mut is_first) {
                sleep(pause).await;
            }
            if let Some(shared) = lasting()
                && timeout(PROBE, shared.read(&[])).await.is_err()
            {
                shared.failed(&StoreError::timed_out(PROBE));
            }
        });
        let opens = async {
            match opens_at.filter(|_| announced != opens_at) {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = &mut probed => continue,
            () = opens => {}
        }
        announced = opens_at;
        if let Some(shared) = lasting() {
            // Waiting requests make a call, and are refused.
            shared.listeners.notify(&StoreEvent::Disconnected);
        }
        probed.await;
    }
}
