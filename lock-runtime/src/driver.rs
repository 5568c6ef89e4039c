//! The background task of a client. It renews leases, detects losses, and cleans up after dropped
//! guards and dropped requests.
//!
//! [`Driver`] is the state through which its users schedule work, and [`task`] does the work. The
//! task starts with the first lease. It ends when the last clone of its client is gone and no
//! work is left. When the Tokio runtime that it runs on ends, it continues on a runtime on which
//! a held lock was acquired, or on the next one on which the client is used.

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

/// The state shared by a client's task and its users.
#[derive(Default)]
pub(crate) struct Driver {
    desk: Mutex<Desk>,
    knock: Notify,
    idle: Notify,
}

#[derive(Default)]
struct Desk {
    running: bool,
    /// The last clone of the client is gone: the task ends when no work is left.
    orphaned: bool,
    schedule: BTreeMap<(Instant, u64), Arc<Holding>>,
    /// The task sleeps until this instant or until it is notified. `None` while it is awake.
    sleeps_until: Option<Instant>,
    clean_ups: VecDeque<Arc<CleanUp>>,
    /// The clean-ups in progress, by number. They are kept here so that they survive the task.
    under_way: HashMap<u64, Arc<CleanUp>>,
}

impl Driver {
    /// Moves a lease to its position in the schedule, the instant at which it is next due, or
    /// removes it when it is over.
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
            // The last lease of an orphaned client: there is nothing left to wait for.
            None => desk.orphaned && desk.schedule.is_empty(),
        };
        let start = if after.is_some() { desk.start() } else { None };
        drop(desk);
        Task::spawn(core, start);
        if knock {
            self.knock.notify_one();
        }
    }

    /// Runs `clean_up` in the background.
    pub(crate) fn clean_up(&self, core: &Arc<Core>, clean_up: CleanUp) {
        runtime::look();
        let mut desk = lock(&self.desk);
        desk.clean_ups.push_back(Arc::new(clean_up));
        let start = desk.start();
        drop(desk);
        Task::spawn(core, start);
        self.knock.notify_one();
    }

    /// Returns whether a clean-up of this token is pending. A grant for the token is then
    /// abandoned at once (PROTOCOL 6).
    pub(crate) fn is_given_up(&self, token: Token) -> bool {
        let desk = lock(&self.desk);
        let mut clean_ups = desk.clean_ups.iter().chain(desk.under_way.values());
        clean_ups.any(|clean_up| clean_up.token() == token)
    }

    /// Ensures that the task runs, on the current runtime if it runs on no other.
    pub(crate) fn revive(&self, core: &Arc<Core>) {
        runtime::look();
        let start = lock(&self.desk).start();
        Task::spawn(core, start);
    }

    /// Records that the last clone of the client is gone.
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
            // The clean-ups may have been added where there was no runtime.
            self.revive(core);
            idle.await;
        }
    }

    /// Returns whether a lease of this process surely excludes a request for `key` in `mode`.
    pub(crate) fn excludes(&self, key: &LockKey, mode: Mode) -> bool {
        self.holdings().iter().any(|holding| {
            let held = holding.hold();
            let excludes = held.mode == Mode::Exclusive || mode == Mode::Exclusive;
            held.key == *key
                && held.mode.kind() == mode.kind()
                && excludes
                && !holding.validity().is_zero()
        })
    }

    /// Returns the leases that the task currently manages.
    pub(crate) fn holdings(&self) -> Vec<Arc<Holding>> {
        lock(&self.desk).schedule.values().cloned().collect()
    }
}

impl Desk {
    /// Returns the runtime on which the task must be started, if any. The caller spawns the task
    /// after it has unlocked the desk: a runtime that is shutting down drops a new task at once,
    /// and the destructor of the task locks the desk.
    fn start(&mut self) -> Option<Handle> {
        if self.running {
            return None;
        }
        // The task cannot run outside of a runtime, nor in one without timers; the next
        // lease starts it.
        let runtime = runtime::current().ok()?;
        self.running = true;
        Some(runtime)
    }

    fn is_drained(&self) -> bool {
        self.clean_ups.is_empty() && self.under_way.is_empty()
    }
}
