//! The driver: the background task of a client. It makes the calls that no other task awaits:
//! renewals, releases of dropped guards, abandonments. It also detects losses.
//!
//! The task starts with the first use of the client. It ends when the last clone of its client is
//! gone and no work is left. When the Tokio runtime that it runs on ends, it continues on a runtime
//! on which a held lock was acquired, or on the next one on which the client is used.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    runtime::Runtime,
    time::{sleep, timeout},
};

#[cfg(test)]
use crate::shell::simulated::{self, Planted, planted};
use crate::{
    error::LockErrorKind,
    observe::log,
    protocol::{Call, DueRenewal, Job, Look},
    request::spec::{LockSpec, call_timeout},
    shell::call::{perform, within},
    shell::core::{ClientState, Core},
    shell::keeper::{self, Watched},
    shell::runtime,
    shell::sync::OnDrop,
    shell::time::{Instant, sleep_until},
    store::{Identity, StoreError},
};

/// The largest number of renewals that share a round trip.
const BATCH: usize = 96;
/// The largest number of batches in flight to a server, so that a burst does not time
/// out by itself.
const BATCHES_IN_FLIGHT: usize = 8;
/// The largest number of jobs in flight: after an outage there may be one for every lease.
const JOBS_IN_FLIGHT: usize = 256;
/// The pauses after the client was introduced to the store, and after an attempt failed.
const INTRODUCED_FOR: Duration = Duration::from_secs(Identity::TTL.as_secs() / 3);
const INTRODUCED_AGAIN: Duration = Duration::from_secs(10);
/// The largest number of readers and permits whose times are recorded with the client.
const GRANTS: usize = 256;
/// The pause before another look whether the name of a client has been sent.
const INTRODUCING: Duration = Duration::from_millis(5);

/// Starts the driver on the current runtime, unless it runs. Does nothing outside of a runtime, or
/// in one without timers.
///
/// The client is not locked when the task is spawned: a runtime that is shutting down drops a new
/// task at once, and the destructor of the task locks the client.
pub(crate) fn start(core: &Arc<Core>) {
    let Ok(runtime) = runtime::current() else {
        return;
    };
    // The keeper stands in for drivers, and does not replace them.
    if keeper::is_here() {
        return;
    }
    let starts = core.with_state(|state| {
        let starts = !std::mem::replace(&mut state.driver_runs, true);
        if starts {
            state.runtime = Some(runtime.clone());
        }
        starts
    });
    if starts {
        let task = Task {
            calls: Calls::new(core.clone()),
            ended: false,
        };
        let _driver = runtime.spawn(task.run());
        #[cfg(test)]
        simulated::started(_driver.abort_handle());
    }
}

impl Watched for Core {
    fn look(self: Arc<Self>, runtime: &Runtime, now: Instant) -> Option<Instant> {
        let (look, is_system_time) =
            self.with_state(|state| (state.session.look(now), state.has_system_time()));
        match look {
            Look::Idle => None,
            Look::Calm(next) => Some(next),
            Look::Late(next) => {
                if is_system_time && !self.is_relieved.swap(true, Ordering::AcqRel) {
                    runtime.spawn(relieve(self));
                }
                Some(next)
            }
        }
    }

    fn rouse(&self) {
        self.work.notify_one();
    }

    fn is_looked_at(&self) -> bool {
        self.with_state(|state| state.session.is_looked_at())
    }

    fn forget_keeper(&self) {
        self.with_state(|state| state.session.forget_keeper());
    }
}

/// Does the work that the driver is late with, on the keeper's runtime.
async fn relieve(core: Arc<Core>) {
    let relieved = core.clone();
    let _over = OnDrop::new(move || relieved.is_relieved.store(false, Ordering::Release));
    let makes_calls = core.store.serves_any_runtime();
    let overdue = core.visit(|state, cx| state.session.take_overdue(makes_calls, cx));
    if overdue.is_driver_late && core.with_state(|state| state.driver_runs) {
        log::summarise("blocked", "blocked", None, |left_out| {
            tracing::warn!(
                left_out,
                "a task has blocked its runtime, so that a thread of its own renews the locks of this process; move the work to `spawn_blocking`"
            );
        });
    }
    let mut calls = Calls::new(core);
    calls.begin(overdue.renewals, overdue.jobs);
    while calls.answered().await {}
}

impl ClientState {
    /// Returns whether the client's runtime has the time of the system, and not that of a test.
    fn has_system_time(&self) -> bool {
        let Some(runtime) = &self.runtime else {
            return true;
        };
        let _entered = runtime.enter();
        let before = std::time::Instant::now();
        #[expect(
            clippy::disallowed_types,
            reason = "a paused clock differs from that of `std`"
        )]
        let shown = tokio::time::Instant::now().into_std();
        (before..=std::time::Instant::now()).contains(&shown)
    }
}

/// Records that the last clone of the client is gone.
pub(crate) fn orphan(core: &Arc<Core>) {
    #[cfg(test)]
    if planted(Planted::StaysWithoutClient) {
        return;
    }
    core.visit(|state, cx| {
        state.orphaned = true;
        state.session.orphan(cx);
    });
    core.work.notify_one();
}

/// The background task. When dropped before its end, together with its runtime, its calls in
/// flight are planned again.
struct Task {
    calls: Calls,
    ended: bool,
}

/// The calls that no other task awaits.
struct Calls {
    core: Arc<Core>,
    /// The renewals to send, by server: a silent server must not delay the leases of the others.
    servers: BTreeMap<u64, Renewals>,
    jobs_in_flight: usize,
    in_flight: FuturesUnordered<BoxFuture<'static, Finished>>,
}

/// The renewals for one server.
#[derive(Default)]
struct Renewals {
    /// Grouped by call time-out: a short lease must not shorten the time-out of the others.
    waiting: BTreeMap<Duration, VecDeque<DueRenewal>>,
    batches_in_flight: usize,
}

enum Finished {
    Introduction,
    Job,
    Batch(u64),
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let core = &self.calls.core;
        // While the driver still counts as running: a task started here, on a runtime that is
        // ending, would be dropped again, and so on without end.
        core.visit(|state, cx| {
            state.introduce_by(cx.now);
            #[cfg(test)]
            if planted(Planted::ForgetsCallsInFlight) {
                return;
            }
            state.session.driver_died(cx);
        });
        // A lock that is granted from now on starts the driver itself.
        let runtimes = core.with_state(|state| {
            #[cfg(test)]
            if planted(Planted::CountsAsRunning) {
                return HashMap::new();
            }
            state.driver_runs = false;
            let runtimes = state.views().filter_map(|view| view.runtime.as_ref());
            let by_id: HashMap<_, _> = runtimes.map(|it| (it.id(), it.clone())).collect();
            by_id
        });
        // Tasks that wait for the end of the work check again, and restart the driver.
        core.notify_changed();
        // A lock that was acquired on another runtime may still be in use, so the driver
        // continues there.
        for runtime in runtimes.into_values() {
            let core = core.clone();
            runtime.spawn(async move { start(&core) });
        }
    }
}

impl Task {
    async fn run(mut self) {
        let core = self.calls.core.clone();
        while let Some(check_at) = self.begin_work() {
            // In this order, so that a simulation can repeat it. It starves nothing: each turn of
            // the loop does all that the other two branches ask for, while answers of calls would
            // wait as long as there is new work if they came last.
            tokio::select! {
                biased;
                true = self.calls.answered() => {}
                () = core.work.notified() => {}
                () = sleep_until(check_at) => {}
            }
        }
        self.ended = true;
    }

    /// Begins the work that is due, as many jobs as there is room for. Returns when to check again,
    /// or `None` if there can be no more work.
    fn begin_work(&mut self) -> Option<Instant> {
        let room = JOBS_IN_FLIGHT - self.calls.jobs_in_flight;
        let core = &self.calls.core;
        let (renewals, jobs, is_introduced, check_at) = core.visit(|state, cx| {
            let session = &mut state.session;
            let mut renewals = Vec::new();
            session.due_renewals(&mut renewals, cx);
            let due_jobs = std::iter::from_fn(|| session.due_job(cx));
            let jobs: Vec<_> = due_jobs.take(room).collect();
            // What is in flight may be dropped: introductions, and renewals of ended holds.
            if state.orphaned && !session.needs_driver() {
                state.driver_runs = false;
                return (renewals, jobs, true, None);
            }
            // What it held after its `shutdown` is over, and its name with it.
            if session.is_closed() && !session.holds_any() {
                state.introduce_at.take_if(|at| *at <= cx.now);
            }
            let is_introduced = state.introduce_at.is_none_or(|at| at > cx.now);
            if !is_introduced {
                state.is_introducing = true;
                state.introduce_at = Some(cx.now + INTRODUCED_FOR);
            }
            let introduce_at = state.introduce_at.into_iter();
            // A day stands for no limit, because the task is notified of new work.
            let check_at = session.check_at(jobs.len() < room);
            let check_at = check_at.unwrap_or_else(|| cx.now + crate::LockSpec::MAX_LEASE);
            let check_at = introduce_at.fold(check_at, Instant::min);
            (renewals, jobs, is_introduced, Some(check_at))
        });
        if !is_introduced {
            let introduction = introduce(core.clone());
            self.calls.in_flight.push(Box::pin(introduction));
        }
        self.calls.begin(renewals, jobs);
        check_at
    }
}

impl Calls {
    fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            servers: BTreeMap::new(),
            jobs_in_flight: 0,
            in_flight: FuturesUnordered::new(),
        }
    }

    fn begin(&mut self, renewals: Vec<DueRenewal>, jobs: Vec<(Job, Call)>) {
        for due in renewals {
            let hold = &due.renewal.hold;
            let server = self.core.store.server_of(&hold.key, hold.mode.kind());
            let waiting = &mut self.servers.entry(server).or_default().waiting;
            waiting.entry(due.timeout).or_default().push_back(due);
        }
        for (job, call) in jobs {
            self.jobs_in_flight += 1;
            self.in_flight
                .push(Box::pin(run_job(self.core.clone(), job, call)));
        }
        self.send_batches();
    }

    /// Sends the renewals that have waited longest, those with the shortest time-outs first.
    fn send_batches(&mut self) {
        for (server, renewals) in &mut self.servers {
            while renewals.batches_in_flight < BATCHES_IN_FLIGHT
                && let Some(mut first) = renewals.waiting.first_entry()
            {
                let (timeout, waiting) = (*first.key(), first.get_mut());
                let batch = waiting.drain(..waiting.len().min(BATCH)).collect();
                if waiting.is_empty() {
                    first.remove();
                }
                renewals.batches_in_flight += 1;
                let (core, server) = (self.core.clone(), *server);
                self.in_flight.push(Box::pin(async move {
                    renew(&core, batch, timeout).await;
                    Finished::Batch(server)
                }));
            }
        }
    }

    /// Waits for the next answer. Returns `false` if no call is in flight.
    async fn answered(&mut self) -> bool {
        let Some(done) = self.in_flight.next().await else {
            return false;
        };
        match done {
            Finished::Introduction => {}
            Finished::Job => self.jobs_in_flight -= 1,
            Finished::Batch(server) => {
                #[cfg(test)]
                if planted(Planted::CountsAnsweredBatch) {
                    return true;
                }
                if let Some(renewals) = self.servers.get_mut(&server) {
                    renewals.batches_in_flight -= 1;
                    if renewals.batches_in_flight == 0 && renewals.waiting.is_empty() {
                        self.servers.remove(&server);
                    }
                }
                self.send_batches();
            }
        }
        true
    }
}

/// Repeats to the store the name of the client, and since when it holds locks as a reader or with
/// permits.
async fn introduce(core: Arc<Core>) -> Finished {
    let own = core.clone();
    let _over = OnDrop::new(move || own.with_state(|state| state.is_introducing = false));
    if let Some(name) = &core.own_name {
        let grants = core.with_state(|state| state.session.oldest_shares(GRANTS, Instant::now()));
        let introduced = core.store.introduce(core.id, name, &grants, Identity::TTL);
        let introduced = within(call_timeout(LockSpec::DEFAULT_LEASE), introduced).await;
        if let Err(error) = introduced {
            tracing::debug!(%error, "the store does not have the name of this client yet");
            if error.is_transient() {
                core.with_state(|state| state.introduce_by(Instant::now() + INTRODUCED_AGAIN));
            }
        }
    }
    Finished::Introduction
}

/// Removes the name of a client that is shut down, unless it still holds a lock.
pub(crate) async fn dismiss(core: &Core) {
    let now = Instant::now();
    // Otherwise the store does not have it yet, or may have lost it.
    let is_introduced = |state: &mut ClientState| {
        let is_over = !state.session.holds_any();
        is_over && state.introduce_at.take().is_some_and(|at| at > now)
    };
    if let (Some(name), true) = (&core.own_name, core.with_state(is_introduced)) {
        // A call that is executed later would bring the name back.
        let until = now + call_timeout(LockSpec::DEFAULT_LEASE);
        while core.with_state(|state| state.is_introducing) && Instant::now() < until {
            sleep(INTRODUCING).await;
        }
        let dismissed = core.store.introduce(core.id, name, &[], Duration::ZERO);
        if let Err(error) = within(call_timeout(LockSpec::DEFAULT_LEASE), dismissed).await {
            tracing::debug!(%error, "the name of this client stays in the store until it expires");
        }
    }
}

async fn run_job(core: Arc<Core>, job: Job, call: Call) -> Finished {
    let answer = perform(&*core.store, &call).await;
    core.visit(|state, cx| state.session.job_replied(job, answer, cx));
    Finished::Job
}

/// Renews a batch in one round trip and records each reply.
async fn renew(core: &Arc<Core>, mut batch: Vec<DueRenewal>, patience: Duration) {
    // A lock may have been released or lost since its renewal was due.
    core.with_state(|state| batch.retain(|due| state.session.is_held(due.held)));
    if batch.is_empty() {
        return;
    }
    let leases = batch.len();
    let (ids, renewals): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|due| (due.held, due.renewal)).unzip();
    let sent = Instant::now();
    let replies = timeout(patience, core.store.renew(&renewals)).await;
    let mut replies = replies.unwrap_or_default().into_iter();
    let mut failed = None;
    let mut failures = Vec::new();
    core.visit(|state, cx| {
        for id in ids {
            let reply = replies.next();
            let reply = reply.unwrap_or_else(|| Err(StoreError::timed_out(patience)));
            if reply.is_err() {
                failures.extend(state.view(id).map(|view| view.watch.meter));
            }
            failed = reply.as_ref().err().cloned().or(failed.take());
            state.session.renewal_replied(id, reply, sent, cx);
        }
    });
    for hold in failures {
        hold.renewed(false);
    }
    // One message for the batch: an outage would fill the log.
    if let Some(error) = failed {
        let code = LockErrorKind::from(error.kind()).code();
        log::summarise("renewal failed", code, None, |left_out| {
            tracing::warn!(leases, left_out, %error, "renewal failed; trying again until validity ends");
        });
    }
}

#[cfg(test)]
#[path = "tests/driver.rs"]
mod tests;
