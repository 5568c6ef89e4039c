//! The keeper: a thread of this process that looks after the drivers of all clients.
//!
//! A task that blocks its runtime may keep a driver from running, or a connection from receiving
//! replies. Then the keeper renews the leases, on connections of its own, and makes the other calls
//! that are late.
//!
//! The thread runs while a client holds a lock or has calls to repeat, and a little longer. It
//! sleeps from one look to the next, and connects to a store when work is late for the first time.

use std::{
    cell::Cell,
    ptr,
    sync::{Arc, Mutex, Weak},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    sync::Notify,
};

use crate::{
    observe::log,
    shell::sync::OnDrop,
    shell::sync::lock,
    shell::time::{Instant, suspended, timeout_at},
};

/// The time that drivers have after the machine was suspended.
const WAKING: Duration = Duration::from_millis(100);
/// The time for which the thread goes on without a client to look after.
const IDLE: Duration = Duration::from_secs(10);

static KEEPER: Mutex<Keeper> = Mutex::new(Keeper {
    clients: Vec::new(),
    thread: None,
});

thread_local! {
    static IS_KEEPER: Cell<bool> = const { Cell::new(false) };
}

/// A client that the keeper watches.
pub(crate) trait Watched: Send + Sync {
    /// Finds out whether work is late, and begins to do it on the keeper's runtime. Returns the
    /// time of the next look, if there is one.
    fn look(self: Arc<Self>, runtime: &Runtime, now: Instant) -> Option<Instant>;

    /// Wakes the driver.
    fn rouse(&self);

    /// Returns whether the keeper is to look at the client.
    fn is_looked_at(&self) -> bool;

    /// Forgets the keeper, whose thread is gone.
    fn forget_keeper(&self);
}

/// The clients to look after, and the thread, if it runs.
struct Keeper {
    clients: Vec<Weak<dyn Watched>>,
    thread: Option<Arc<Notify>>,
}

/// Returns whether the caller runs on the keeper's thread. It has connections of its own.
pub(crate) fn is_here() -> bool {
    IS_KEEPER.get()
}

/// The parts of a store that make its calls. The keeper has its own, as those of the application
/// may depend on the runtime that is blocked.
#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
pub(crate) struct Kept<T> {
    usual: T,
    of_keeper: std::sync::OnceLock<T>,
}

#[cfg(any(feature = "postgres", feature = "etcd", feature = "zookeeper"))]
impl<T> Kept<T> {
    pub(crate) fn new(usual: T) -> Self {
        Self {
            usual,
            of_keeper: std::sync::OnceLock::new(),
        }
    }

    /// Those of the application.
    pub(crate) fn usual(&self) -> &T {
        &self.usual
    }

    /// Those for the calling thread. `make` creates those of the keeper.
    pub(crate) fn here(&self, make: impl FnOnce(&T) -> T) -> &T {
        match is_here() {
            true => self.of_keeper.get_or_init(|| make(&self.usual)),
            false => &self.usual,
        }
    }
}

/// Makes the keeper look at a client now, and then as often as is necessary.
pub(crate) fn watch(client: Arc<dyn Watched>) {
    #[cfg(test)]
    if super::simulated::is_simulated() {
        return;
    }
    let mut keeper = lock(&KEEPER);
    let is_client = |it: &Weak<dyn Watched>| ptr::addr_eq(it.as_ptr(), Arc::as_ptr(&client));
    if !keeper.clients.iter().any(is_client) {
        keeper.clients.push(Arc::downgrade(&client));
    }
    if let Some(thread) = &keeper.thread {
        thread.notify_one();
        return;
    }
    let notified = Arc::new(Notify::new());
    let started = start(notified.clone());
    match started {
        Ok(()) => keeper.thread = Some(notified),
        Err(error) => {
            drop(keeper);
            forget();
            log::summarise("no keeper", "keeper", None, |left_out| {
                tracing::warn!(left_out, %error, "cannot start the thread that renews locks while tasks block their runtime");
            });
        }
    }
}

fn start(notified: Arc<Notify>) -> std::io::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let thread = thread::Builder::new().name("lock-keeper".into());
    thread.spawn(move || {
        IS_KEEPER.set(true);
        let ended = OnDrop::new(forget);
        run(&runtime, &notified);
        ended.disarm();
        // Connections end without a wait for calls in flight.
        runtime.shutdown_background();
    })?;
    Ok(())
}

/// Lets the clients ask for a keeper again with the next lock, as the thread is gone.
fn forget() {
    let clients = {
        let mut keeper = lock(&KEEPER);
        keeper.thread = None;
        std::mem::take(&mut keeper.clients)
    };
    for client in clients.iter().filter_map(Weak::upgrade) {
        client.forget_keeper();
    }
}

fn run(runtime: &Runtime, notified: &Notify) {
    let (mut busy_at, mut suspended_for) = (Instant::now(), suspended());
    loop {
        let now = Instant::now();
        let clients = lock(&KEEPER).clients.clone();
        let before = std::mem::replace(&mut suspended_for, suspended());
        let was_suspended = suspended_for > before;
        // Each is dropped while no mutex is held, as those below are: a client may own guards.
        let look = |client: &Weak<dyn Watched>| {
            let client = client.upgrade()?;
            if was_suspended {
                // The timers of the driver are late by as much.
                client.rouse();
                return Some(now + WAKING);
            }
            client.look(runtime, now)
        };
        let next = clients.iter().filter_map(look).min();
        let mut looked_at = Vec::new();
        let mut keeper = lock(&KEEPER);
        // One that is busy again since the look has notified this thread, or will do so.
        keeper.clients.retain(|client| {
            looked_at.extend(client.upgrade());
            let living = looked_at
                .last()
                .filter(|it| ptr::addr_eq(Arc::as_ptr(it), client.as_ptr()));
            living.is_some_and(|client| client.is_looked_at())
        });
        if next.is_some() {
            busy_at = now;
        } else if keeper.clients.is_empty() && busy_at + IDLE <= now {
            keeper.thread = None;
            return;
        }
        drop(keeper);
        // Also before the pause: a client that the application drops ends.
        drop(looked_at);
        let next = next.unwrap_or(now + IDLE);
        // Meanwhile the calls that were late are made.
        let _ = runtime.block_on(async { timeout_at(next, notified.notified()).await });
    }
}
