//! The task itself: what it takes from the desk, how much of it is under way at a time, and what it leaves when it ends.

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

/// So many renewals share a round trip.
const BATCH: usize = 100;
/// So many batches are under way to a server at a time, so that a burst does not time itself out.
const BATCHES_UNDER_WAY: usize = 8;
/// So many clean-ups are: after an outage there may be one for every lease.
const CLEAN_UPS_UNDER_WAY: usize = 256;

/// The task. Dropped before it has ended, with its runtime, it leaves word that it is gone.
pub(super) struct Task {
    core: Arc<Core>,
    /// Leases to be renewed, by who keeps them: a server that is silent must not cost the others' leases their turn.
    renewals: HashMap<u64, Renewals>,
    clean_ups: u64,
    ended: bool,
}

/// Leases of one server to be renewed.
#[derive(Default)]
struct Renewals {
    /// By how long the call may take: a short lease must not cost the others their patience.
    waiting: BTreeMap<Duration, Waiting>,
    batches_under_way: usize,
}

/// Leases to be renewed, in order.
#[derive(Default)]
struct Waiting {
    leases: VecDeque<Arc<Holding>>,
    /// So many of the last have just been taken off the schedule.
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
        // While the desk still says "running": a task started here, on a runtime that ends, would end here again, for ever.
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
        // Whoever waits for the end of the clean-ups looks again, and goes on with them.
        driver.idle.notify_waiters();
        // A lease that was taken on another runtime is still somebody's: go on there.
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

    /// Takes what is due off the schedule, renewals aside and losses at once, and the clean-ups there is room for.
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
                    .entry(self.core.store.server_of(key, mode.family()))
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

    /// The renewals of one server that have waited longest, among those with the least patience.
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

    /// A renewal that is under way comes back to the schedule with its answer, or for want of one. One that has to wait for its
    /// turn may be overtaken by its loss.
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

    /// When to look again; `None` if there will be nothing to look for.
    fn close_desk(&self, at_rest: bool) -> Option<Instant> {
        let mut desk = lock(&self.core.driver.desk);
        let first = desk.schedule.first_key_value().map(|((due, _), _)| *due);
        if desk.orphaned && at_rest && first.is_none() && desk.is_drained() {
            desk.running = false;
            return None;
        }
        // A day is "for ever" here: somebody will knock. Clean-ups that were left meanwhile have knocked already.
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

/// Leases that are being renewed. Dropped without an answer, with the runtime, they come back to the schedule.
struct Batch(Vec<Arc<Holding>>);

impl Drop for Batch {
    fn drop(&mut self) {
        self.0.iter().for_each(|holding| holding.renewal_failed());
    }
}

/// Renews a batch in one round trip and tells each lease its reply.
async fn renew(core: &Core, mut batch: Batch) {
    let Batch(holdings) = &mut batch;
    // What is over by now is on no schedule any more.
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
    // Once for the batch: an outage would fill the log.
    if let Some(error) = failed {
        tracing::warn!(leases, %error, "renewal failed; trying again until validity ends");
    }
}
