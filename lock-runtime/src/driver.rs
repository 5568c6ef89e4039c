//! The one background task of a client: it renews leases, notices losses, and gives back what dropped guards and dropped
//! requests leave behind.
//!
//! The task starts with the first lease and ends with the last clone of its client, when nothing is left to do. It is
//! started again wherever a later lease finds it gone, so a client may outlive the tokio runtime that it was first used on.

use std::{
    collections::BTreeMap,
    future::pending,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    client::Core,
    error::Loss,
    holding::{Holding, Plan},
    lease::Due,
    spec::call_timeout,
    store::{Events, Hold, Release, RenewReply, Renewal, StoreError, StoreEvent},
    sync::lock,
};

/// So many renewals share a round trip.
const BATCH: usize = 100;
/// So many batches are under way at a time, so that a burst does not time itself out.
const BATCHES_IN_FLIGHT: usize = 8;
/// Leases that fall due so close together are renewed together.
const SLACK: Duration = Duration::from_millis(10);
/// How long a clean-up waits after its first failure; twice as long after each further one, up to the longest.
const CLEAN_UP_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_CLEAN_UP_PAUSE: Duration = Duration::from_secs(5);
/// After a broken connection every lease is asked for within this time.
const CHECK_WITHIN: Duration = Duration::from_millis(200);

/// What a client's task and its users share.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    desk: Mutex<Desk>,
    knock: Notify,
    idle: Notify,
}

#[derive(Debug, Default)]
struct Desk {
    running: bool,
    /// The last clone of the client is gone: end when nothing is left.
    orphaned: bool,
    schedule: BTreeMap<(Instant, u64), Arc<Holding>>,
    /// The task sleeps until then, or until somebody knocks. `None` while it is awake.
    sleeps_until: Option<Instant>,
    clean_ups: Vec<CleanUp>,
    /// Clean-ups that are not done, those under way included.
    unfinished: usize,
}

/// What must still be said to the store about a token that nobody uses any more.
#[derive(Debug)]
pub(crate) struct CleanUp {
    what: What,
    /// A straggling request may be executed until then: say it once more afterwards (PROTOCOL 8).
    straggler_until: Option<Instant>,
    /// By then the lease has run out in any case.
    give_up_at: Instant,
}

#[derive(Debug)]
enum What {
    Release(Release),
    Abandon(Hold),
}

impl CleanUp {
    /// The release of a lock whose lease ends by itself within `lease`.
    pub(crate) fn release(release: Release, lease: Duration) -> Self {
        Self { what: What::Release(release), straggler_until: None, give_up_at: Instant::now() + lease }
    }

    /// Gives up a token. `straggler_until` is the deadline of a request whose outcome is not known.
    pub(crate) fn abandon(hold: Hold, lease: Duration, straggler_until: Option<Instant>) -> Self {
        let give_up_at = straggler_until.unwrap_or_else(Instant::now) + lease;
        Self { what: What::Abandon(hold), straggler_until, give_up_at }
    }

    fn hold(&self) -> &Hold {
        match &self.what {
            What::Release(release) => &release.hold,
            What::Abandon(hold) => hold,
        }
    }

    async fn say(&self, core: &Core) -> Result<(), StoreError> {
        let patience = call_timeout(crate::DEFAULT_LEASE);
        let said = async {
            match &self.what {
                What::Release(release) => core.store.release(release).await.map(drop),
                What::Abandon(hold) => core.store.abandon(hold).await,
            }
        };
        timeout(patience, said).await.unwrap_or_else(|_| Err(StoreError::timed_out(patience)))
    }

    async fn run(self, core: Arc<Core>) {
        let Hold { key, mode, .. } = self.hold();
        let mut pause = CLEAN_UP_PAUSE;
        loop {
            let sent = Instant::now();
            match (self.say(&core).await, self.straggler_until) {
                (Ok(()), Some(deadline)) if sent <= deadline => {
                    core.gates.released(key, mode.family());
                    sleep_until(deadline + Duration::from_millis(1)).await;
                }
                (Ok(()), _) => break,
                (Err(error), _) if !error.is_transient() || Instant::now() >= self.give_up_at => {
                    tracing::warn!(%key, %error, "gave up giving a lock back; its lease ends it");
                    break;
                }
                (Err(_), _) => {
                    // Many may have failed together; they need not come again together.
                    sleep(pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
                    pause = (pause * 2).min(LONGEST_CLEAN_UP_PAUSE);
                }
            }
        }
        core.gates.released(key, mode.family());
    }
}

impl Driver {
    /// Puts a lease where it belongs in the schedule: at the instant it is next due, or nowhere when it is over.
    pub(crate) fn plan(&self, core: &Arc<Core>, holding: &Arc<Holding>) {
        let mut desk = lock(&self.desk);
        let Plan { before, after } = holding.plan();
        // Dropped after the desk is let go.
        let _forgotten = before.and_then(|due| desk.schedule.remove(&(due, holding.id())));
        let Some(due) = after else { return };
        desk.schedule.insert((due, holding.id()), holding.clone());
        let oversleeps = desk.sleeps_until.is_some_and(|until| due < until);
        self.ensure_running(core, &mut desk);
        drop(desk);
        if oversleeps {
            self.knock.notify_one();
        }
    }

    /// Does `clean_up` in the background.
    pub(crate) fn clean_up(&self, core: &Arc<Core>, clean_up: CleanUp) {
        let mut desk = lock(&self.desk);
        desk.clean_ups.push(clean_up);
        desk.unfinished += 1;
        self.ensure_running(core, &mut desk);
        drop(desk);
        self.knock.notify_one();
    }

    /// The last clone of the client is gone.
    pub(crate) fn orphan(&self) {
        lock(&self.desk).orphaned = true;
        self.knock.notify_one();
    }

    /// Waits until no clean-up is left.
    pub(crate) async fn drained(&self, core: &Arc<Core>) {
        loop {
            let idle = self.idle.notified();
            if self.is_drained(core) {
                return;
            }
            idle.await;
        }
    }

    fn is_drained(&self, core: &Arc<Core>) -> bool {
        let mut desk = lock(&self.desk);
        if desk.unfinished > 0 {
            // It may have been left where no runtime was.
            self.ensure_running(core, &mut desk);
        }
        desk.unfinished == 0
    }

    /// The leases looked after now.
    pub(crate) fn holdings(&self) -> Vec<Arc<Holding>> {
        lock(&self.desk).schedule.values().cloned().collect()
    }

    fn ensure_running(&self, core: &Arc<Core>, desk: &mut Desk) {
        // Outside of a runtime there is nobody to run it; the next lease will find it missing.
        if !desk.running
            && let Ok(runtime) = Handle::try_current()
        {
            desk.running = true;
            runtime.spawn(Task::new(core.clone()).run());
        }
    }
}

/// The task. Dropped before it has ended, with its runtime, it leaves word that it is gone.
struct Task {
    core: Arc<Core>,
    events: Option<Events>,
    under_way: usize,
    ended: bool,
}

type Work = BoxFuture<'static, Done>;

enum Done {
    CleanUp,
    Batch,
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let driver = &self.core.driver;
        // While the desk still says "running": a task started here, on a runtime that ends, would end here again, for ever.
        driver.holdings().iter().for_each(|holding| holding.renewal_failed());
        let mut desk = lock(&driver.desk);
        desk.running = false;
        desk.sleeps_until = None;
        // What was under way is gone with the runtime.
        desk.unfinished = desk.clean_ups.len();
        drop(desk);
        driver.idle.notify_waiters();
    }
}

impl Task {
    fn new(core: Arc<Core>) -> Self {
        let events = Some(core.store.events());
        Self { core, events, under_way: 0, ended: false }
    }

    async fn run(mut self) {
        let mut work: FuturesUnordered<Work> = FuturesUnordered::new();
        let mut renewals: Vec<Arc<Holding>> = Vec::new();
        let core = self.core.clone();
        loop {
            for clean_up in self.open_desk(&mut renewals) {
                let core = core.clone();
                work.push(Box::pin(async move {
                    clean_up.run(core).await;
                    Done::CleanUp
                }));
            }
            while self.under_way < BATCHES_IN_FLIGHT && !renewals.is_empty() {
                let batch = renewals.split_off(renewals.len().saturating_sub(BATCH));
                self.under_way += 1;
                let core = core.clone();
                work.push(Box::pin(async move {
                    renew(&core, batch).await;
                    Done::Batch
                }));
            }
            let Some(until) = self.close_desk(work.is_empty()) else {
                self.ended = true;
                return;
            };
            tokio::select! {
                () = core.driver.knock.notified() => {}
                () = sleep_until(until) => {}
                Some(done) = work.next() => self.finished(&done),
                event = next(&mut self.events) => self.told(event),
            }
        }
    }

    /// Takes what is due off the schedule: renewals into `renewals`, losses at once.
    fn open_desk(&self, renewals: &mut Vec<Arc<Holding>>) -> Vec<CleanUp> {
        let now = Instant::now();
        let mut due = Vec::new();
        let mut desk = lock(&self.core.driver.desk);
        desk.sleeps_until = None;
        while let Some(entry) = desk.schedule.first_entry()
            && entry.key().0 <= now + SLACK
        {
            due.push(entry.remove());
        }
        let clean_ups = std::mem::take(&mut desk.clean_ups);
        drop(desk);
        for holding in due {
            if holding.turn(now, SLACK) == Some(Due::Renew) {
                renewals.push(holding.clone());
            }
            self.core.driver.plan(&self.core, &holding);
        }
        clean_ups
    }

    /// When to look again; `None` if there will be nothing to look for.
    fn close_desk(&self, at_rest: bool) -> Option<Instant> {
        let mut desk = lock(&self.core.driver.desk);
        let first = desk.schedule.first_key_value().map(|((due, _), _)| *due);
        if desk.orphaned && at_rest && first.is_none() && desk.clean_ups.is_empty() {
            desk.running = false;
            return None;
        }
        // A day is "for ever" here: somebody will knock.
        let until = first.unwrap_or_else(|| Instant::now() + crate::MAX_LEASE);
        desk.sleeps_until = Some(until);
        // A lease whose renewal is in flight is due at its loss only, so a due instant in the past cannot spin.
        Some(if desk.clean_ups.is_empty() { until } else { Instant::now() })
    }

    fn finished(&mut self, done: &Done) {
        match done {
            Done::Batch => self.under_way -= 1,
            Done::CleanUp => {
                let mut desk = lock(&self.core.driver.desk);
                desk.unfinished = desk.unfinished.saturating_sub(1);
                let idle = desk.unfinished == 0;
                drop(desk);
                if idle {
                    self.core.driver.idle.notify_waiters();
                }
            }
        }
    }

    fn told(&mut self, event: Option<StoreEvent>) {
        match event {
            // What is pushed for a token that nobody waits for belongs to nobody (PROTOCOL 6).
            Some(StoreEvent::Granted { hold, grant }) => {
                self.core.driver.clean_up(&self.core, CleanUp::abandon(hold, grant.ttl, None));
            }
            Some(StoreEvent::Revoked { token }) => {
                let revoked = self.core.driver.holdings().into_iter().find(|holding| holding.hold().token == token);
                if let Some(holding) = revoked {
                    holding.lose(Loss::Revoked);
                }
            }
            Some(StoreEvent::Disconnected) => {
                for holding in self.core.driver.holdings() {
                    holding.hurry(CHECK_WITHIN.mul_f64(rand::random()));
                }
            }
            None => self.events = None,
        }
    }
}

async fn next(events: &mut Option<Events>) -> Option<StoreEvent> {
    match events {
        Some(events) => events.next().await,
        None => pending().await,
    }
}

/// Renews a batch in one round trip and tells each lease its reply.
async fn renew(core: &Core, batch: Vec<Arc<Holding>>) {
    let batch: Vec<_> = batch.into_iter().filter_map(|holding| Some((holding.renewal()?, holding))).collect();
    let (renewals, holdings): (Vec<Renewal>, Vec<Arc<Holding>>) = batch.into_iter().unzip();
    let Some(patience) = renewals.iter().map(|renewal| call_timeout(renewal.lease)).min() else { return };
    let sent = Instant::now();
    let answer = timeout(patience, core.store.renew(&renewals)).await;
    let replies = match answer {
        Ok(Ok(replies)) => replies,
        Ok(Err(error)) => {
            tracing::warn!(leases = holdings.len(), %error, "renewal failed; trying again until validity ends");
            return holdings.iter().for_each(|holding| holding.renewal_failed());
        }
        Err(_) => {
            tracing::warn!(
                leases = holdings.len(),
                ?patience,
                "renewal got no answer; trying again until validity ends"
            );
            return holdings.iter().for_each(|holding| holding.renewal_failed());
        }
    };
    for (holding, reply) in holdings.iter().zip(replies) {
        match reply {
            RenewReply::Renewed { ttl } => holding.confirm(sent, ttl),
            RenewReply::Gone => holding.lose(Loss::Taken),
        }
    }
}
