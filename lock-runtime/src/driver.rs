//! The one background task of a client: it renews leases, notices losses, and gives back what dropped guards and dropped
//! requests leave behind.
//!
//! [`Driver`] is the desk at which its users leave work; [`task`] does it. The task starts with the first lease and ends with
//! the last clone of its client, when nothing is left to do. When the tokio runtime it runs on ends, it goes on on a runtime
//! that holds a lease, or on the next one that the client is used on.

mod clean_up;
mod task;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use tokio::{runtime::Handle, sync::Notify, time::Instant};

pub(crate) use self::clean_up::CleanUp;
#[cfg(test)]
pub(crate) use self::clean_up::{FIRST_PAUSE, LONGEST_PAUSE};
use self::task::Task;
use crate::{
    client::Core,
    holding::{Holding, Plan},
    key::LockKey,
    runtime,
    spec::Mode,
    store::Token,
    sync::lock,
};

/// What a client's task and its users share.
#[derive(Default)]
pub(crate) struct Driver {
    desk: Mutex<Desk>,
    knock: Notify,
    idle: Notify,
}

#[derive(Default)]
struct Desk {
    running: bool,
    /// The last clone of the client is gone: end when nothing is left.
    orphaned: bool,
    schedule: BTreeMap<(Instant, u64), Arc<Holding>>,
    /// The task sleeps until then, or until somebody knocks. `None` while it is awake.
    sleeps_until: Option<Instant>,
    clean_ups: VecDeque<Arc<CleanUp>>,
    /// Clean-ups under way, by number. They stand here so that they are not forgotten with the task.
    under_way: HashMap<u64, Arc<CleanUp>>,
}

impl Driver {
    /// Puts a lease where it belongs in the schedule: at the instant it is next due, or nowhere when it is over.
    pub(crate) fn plan(&self, core: &Arc<Core>, holding: &Arc<Holding>) {
        let mut desk = lock(&self.desk);
        let Plan { before, after } = holding.plan();
        if let Some(due) = before {
            desk.schedule.remove(&(due, holding.id()));
        }
        let knock = match after {
            Some(due) => {
                desk.schedule.insert((due, holding.id()), holding.clone());
                desk.sleeps_until.is_some_and(|until| due < until)
            }
            // The last lease of an orphan: there is nothing left to wait for.
            None => desk.orphaned && desk.schedule.is_empty(),
        };
        let start = if after.is_some() { desk.start() } else { None };
        drop(desk);
        Task::spawn(core, start);
        if knock {
            self.knock.notify_one();
        }
    }

    /// Does `clean_up` in the background.
    pub(crate) fn clean_up(&self, core: &Arc<Core>, clean_up: CleanUp) {
        runtime::look();
        let mut desk = lock(&self.desk);
        desk.clean_ups.push_back(Arc::new(clean_up));
        let start = desk.start();
        drop(desk);
        Task::spawn(core, start);
        self.knock.notify_one();
    }

    /// Is this token being given up? What is granted to it meanwhile is given up at once (PROTOCOL 6).
    pub(crate) fn is_given_up(&self, token: Token) -> bool {
        let desk = lock(&self.desk);
        let mut clean_ups = desk.clean_ups.iter().chain(desk.under_way.values());
        clean_ups.any(|clean_up| clean_up.token() == token)
    }

    /// Sees to it that the task runs, here if nowhere else.
    pub(crate) fn revive(&self, core: &Arc<Core>) {
        runtime::look();
        let start = lock(&self.desk).start();
        Task::spawn(core, start);
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
            if lock(&self.desk).is_drained() {
                return;
            }
            // They may have been left where no runtime was.
            self.revive(core);
            idle.await;
        }
    }

    /// Whether a lease of this process surely excludes a request for `key` in `mode`.
    pub(crate) fn excludes(&self, key: &LockKey, mode: Mode) -> bool {
        self.holdings().iter().any(|holding| {
            let held = holding.hold();
            let excludes = held.mode == Mode::Exclusive || mode == Mode::Exclusive;
            held.key == *key
                && held.mode.family() == mode.family()
                && excludes
                && !holding.validity().is_zero()
        })
    }

    /// The leases looked after now.
    pub(crate) fn holdings(&self) -> Vec<Arc<Holding>> {
        lock(&self.desk).schedule.values().cloned().collect()
    }
}

impl Desk {
    /// Where the task is to be started, if it must be. Not under the lock of the desk: a runtime that is shutting down drops
    /// a new task on the spot, and that task leaves word at the desk.
    fn start(&mut self) -> Option<Handle> {
        if self.running {
            return None;
        }
        // It cannot run outside of a runtime, nor in one without timers; the next lease will find it missing.
        let runtime = runtime::current().ok()?;
        self.running = true;
        Some(runtime)
    }

    fn is_drained(&self) -> bool {
        self.clean_ups.is_empty() && self.under_way.is_empty()
    }
}
