//! The background task: how it takes work from the desk, limits the work in progress, and returns
//! unfinished work when its runtime ends.

use std::{
    collections::{BTreeMap, HashMap, VecDeque, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until, timeout},
};

use super::CleanUp;
use crate::{
    client::Core,
    error::Loss,
    holding::Holding,
    lease::{Due, LONGEST_SLACK},
    spec::call_timeout,
    store::{Hold, RenewReply, StoreError},
    sync::lock,
};

/// The largest number of renewals that share a round trip.
const BATCH: usize = 100;
/// The largest number of batches in flight to a server, so that a burst does not time
/// out by itself.
const BATCHES_UNDER_WAY: usize = 8;
/// The largest number of clean-ups in progress: after an outage there may be one for every lease.
const CLEAN_UPS_UNDER_WAY: usize = 256;

/// The background task. When dropped before its end, together with its runtime, it marks itself
/// as not running and returns its work.
pub(super) struct Task {
    core: Arc<Core>,
    /// The leases to be renewed, by server: a silent server must not delay the leases
    /// of the others.
    renewals: HashMap<u64, Renewals>,
    clean_ups: u64,
    ended: bool,
}

/// The leases of one server that are to be renewed.
#[derive(Default)]
struct Renewals {
    /// Grouped by call time-out: a short lease must not shorten the time-out of the others.
    waiting: BTreeMap<Duration, Waiting>,
    batches_under_way: usize,
}

/// Leases to be renewed, in order.
#[derive(Default)]
struct Waiting {
    leases: VecDeque<Arc<Holding>>,
    /// The number of leases at the end that have just been taken off the schedule.
    unplanned: usize,
}

type Work = BoxFuture<'static, Done>;

enum Done {
    CleanUp(u64),
    Batch(u64),
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let driver = &self.core.driver;
        let holdings = driver.holdings();
        // While `running` is still set: a task started here, on a runtime that is ending, would
        // be dropped again, and so on without end.
        holdings.iter().for_each(|holding| holding.renewal_failed());
        let mut desk = lock(&driver.desk);
        desk.running = false;
        desk.sleeps_until = None;
        let under_way: Vec<_> = desk
            .under_way
            .drain()
            .map(|(_, clean_up)| clean_up)
            .collect();
        desk.clean_ups.extend(under_way);
        drop(desk);
        // Callers that wait for the end of the clean-ups check again, and restart the task.
        driver.idle.notify_waiters();
        // A lease that was acquired on another runtime may still be in use, so the task
        // continues there.
        let mut asked = Vec::new();
        for holding in holdings {
            let runtime = holding.runtime();
            if !asked.contains(&runtime.id()) {
                asked.push(runtime.id());
                let core = self.core.clone();
                runtime.spawn(async move { core.driver.revive(&core) });
            }
        }
    }
}

impl Task {
    pub(super) fn spawn(core: &Arc<Core>, runtime: Option<Handle>) {
        if let Some(runtime) = runtime {
            let task = Self {
                core: core.clone(),
                renewals: HashMap::new(),
                clean_ups: 0,
                ended: false,
            };
            runtime.spawn(task.run());
        }
    }

    async fn run(mut self) {
        let mut work: FuturesUnordered<Work> = FuturesUnordered::new();
        let core = self.core.clone();
        loop {
            for (number, clean_up) in self.open_desk() {
                let core = core.clone();
                work.push(Box::pin(async move {
                    clean_up.run(core).await;
                    Done::CleanUp(number)
                }));
            }
            while let Some((server, batch)) = self.next_batch() {
                let core = core.clone();
                work.push(Box::pin(async move {
                    renew(&core, batch).await;
                    Done::Batch(server)
                }));
            }
            self.plan_waiting();
            let Some(until) = self.close_desk(work.is_empty()) else {
                self.ended = true;
                return;
            };
            tokio::select! {
                () = core.driver.knock.notified() => {}
                () = sleep_until(until) => {}
                Some(done) = work.next() => self.finished(&done),
            }
        }
    }

    /// Takes the leases that are due off the schedule, and as many clean-ups as there is room
    /// for. Renewals are collected; losses are handled at once.
    fn open_desk(&mut self) -> Vec<(u64, Arc<CleanUp>)> {
        let now = Instant::now();
        let mut due = Vec::new();
        let mut desk = lock(&self.core.driver.desk);
        desk.sleeps_until = None;
        while let Some(entry) = desk.schedule.first_entry()
            && entry.key().0 <= now + LONGEST_SLACK
        {
            due.push(entry.remove());
        }
        let room = CLEAN_UPS_UNDER_WAY
            .saturating_sub(desk.under_way.len())
            .min(desk.clean_ups.len());
        let clean_ups: Vec<_> = (self.clean_ups..)
            .zip(desk.clean_ups.drain(..room))
            .collect();
        self.clean_ups += room as u64;
        desk.under_way.extend(clean_ups.iter().cloned());
        drop(desk);
        for holding in due {
            if holding.turn(now) == Some(Due::Renew) {
                let Hold { key, mode, .. } = holding.hold();
                let renewals = self
                    .renewals
                    .entry(self.core.store.server_of(key, mode.kind()))
                    .or_default();
                let waiting = renewals
                    .waiting
                    .entry(call_timeout(holding.terms().lease))
                    .or_default();
                waiting.leases.push_back(holding);
                waiting.unplanned += 1;
            } else {
                self.core.driver.plan(&self.core, &holding);
            }
        }
        clean_ups
    }

    /// Returns the renewals of one server that have waited longest, among those with the
    /// shortest time-out.
    fn next_batch(&mut self) -> Option<(u64, Batch)> {
        let mut ready = self
            .renewals
            .iter_mut()
            .filter(|(_, renewals)| renewals.batches_under_way < BATCHES_UNDER_WAY);
        let (server, under_way, mut first) = ready.find_map(
            |(
                server,
                Renewals {
                    waiting,
                    batches_under_way,
                },
            )| {
                waiting
                    .first_entry()
                    .map(|first| (*server, batches_under_way, first))
            },
        )?;
        let waiting = first.get_mut();
        let batch = Batch(
            waiting
                .leases
                .drain(..waiting.leases.len().min(BATCH))
                .collect(),
        );
        if waiting.leases.is_empty() {
            first.remove();
        }
        *under_way += 1;
        Some((server, batch))
    }

    /// Puts the leases that wait for their renewal back into the schedule, because they
    /// may be lost before it is sent. A renewal in flight puts its lease back with its
    /// reply, or without one.
    fn plan_waiting(&mut self) {
        for waiting in self
            .renewals
            .values_mut()
            .flat_map(|renewals| renewals.waiting.values_mut())
        {
            let unplanned = waiting
                .leases
                .iter()
                .rev()
                .take(std::mem::take(&mut waiting.unplanned));
            unplanned.for_each(|holding| self.core.driver.plan(&self.core, holding));
        }
    }

    /// Returns when to check again, or `None` if there can be no more work.
    fn close_desk(&self, at_rest: bool) -> Option<Instant> {
        let mut desk = lock(&self.core.driver.desk);
        let first = desk.schedule.first_key_value().map(|((due, _), _)| *due);
        if desk.orphaned && at_rest && first.is_none() && desk.is_drained() {
            desk.running = false;
            return None;
        }
        // A day stands for no limit, because the task is notified of new work. Clean-ups that
        // arrived in the meantime have already notified it.
        let until = first.unwrap_or_else(|| Instant::now() + crate::MAX_LEASE);
        desk.sleeps_until = Some(until);
        Some(until)
    }

    fn finished(&mut self, done: &Done) {
        match done {
            Done::Batch(server) => {
                if let Entry::Occupied(mut renewals) = self.renewals.entry(*server) {
                    renewals.get_mut().batches_under_way -= 1;
                    if renewals.get().batches_under_way == 0 && renewals.get().waiting.is_empty() {
                        renewals.remove();
                    }
                }
            }
            Done::CleanUp(number) => {
                let mut desk = lock(&self.core.driver.desk);
                desk.under_way.remove(number);
                let drained = desk.is_drained();
                drop(desk);
                if drained {
                    self.core.driver.idle.notify_waiters();
                }
            }
        }
    }
}

/// Leases with a renewal in flight. When dropped without a reply, with the runtime, they
/// return to the schedule.
struct Batch(Vec<Arc<Holding>>);

impl Drop for Batch {
    fn drop(&mut self) {
        self.0.iter().for_each(|holding| holding.renewal_failed());
    }
}

/// Renews a batch in one round trip and records each reply in its lease.
async fn renew(core: &Core, mut batch: Batch) {
    let Batch(holdings) = &mut batch;
    // Leases that have ended are no longer in the schedule.
    let mut renewals = Vec::with_capacity(holdings.len());
    holdings.retain(|holding| {
        holding.renewal().is_some_and(|renewal| {
            renewals.push(renewal);
            true
        })
    });
    let Some(patience) = holdings
        .iter()
        .map(|holding| call_timeout(holding.terms().lease))
        .min()
    else {
        return;
    };
    let sent = Instant::now();
    let replies = timeout(patience, core.store.renew(&renewals)).await;
    let mut replies = replies.unwrap_or_default().into_iter();
    let mut failed = None;
    let leases = holdings.len();
    for holding in std::mem::take(holdings) {
        match replies
            .next()
            .unwrap_or_else(|| Err(StoreError::timed_out(patience)))
        {
            Ok(RenewReply::Renewed { ttl }) => holding.renewed(sent, ttl),
            Ok(RenewReply::Gone) => holding.lose(Loss::Taken),
            Err(error) => {
                failed = Some(error);
                holding.renewal_failed();
            }
        }
    }
    // One message for the batch: an outage would fill the log.
    if let Some(error) = failed {
        tracing::warn!(leases, %error, "renewal failed; trying again until validity ends");
    }
}
