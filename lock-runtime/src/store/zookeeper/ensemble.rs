//! The servers of an ensemble: one session with one of them at a time.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Mutex as Queue;

use super::{error, jute::Access, session::Session, settings::Target};
use crate::{
    shell::{sync::OnDrop, sync::lock, time::Instant},
    store::StoreError,
};

/// A call that was given up after this time counts against its server, if that has been silent
/// since. Shorter than a call waits for the shortest lease.
const SLOW: Duration = Duration::from_millis(120);

pub(super) struct Ensemble {
    target: Target,
    current: AtomicUsize,
    /// The attempts to begin a session since the latest one that has succeeded.
    attempts: AtomicUsize,
    session: Mutex<Option<Arc<Session>>>,
    /// One call at a time connects.
    connecting: Queue<()>,
}

/// The time limit of beginning a session, which is a change on a majority; and that after many
/// servers have taken longer.
const CONNECT: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(4);

/// A call in flight. If it is dropped before its reply, and the server is silent, the next one
/// serves.
pub(super) struct Patience<'a> {
    ensemble: &'a Ensemble,
    session: &'a Arc<Session>,
    sent: Instant,
}

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        if Instant::now() >= self.sent + SLOW && self.session.is_silent_since(self.sent) {
            self.ensemble.leave(self.session);
        }
    }
}

impl Ensemble {
    pub(super) fn new(target: Target) -> Self {
        Self {
            // The clients of a fleet begin with different servers.
            current: AtomicUsize::new(rand::random_range(0..target.servers.len())),
            target,
            attempts: AtomicUsize::new(0),
            session: Mutex::default(),
            connecting: Queue::default(),
        }
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// The users that may use the nodes that this client creates.
    pub(super) fn access(&self) -> Access {
        match self.target.user {
            Some(_) => Access::Own,
            None => Access::Anyone,
        }
    }

    pub(super) fn watch<'a>(&'a self, session: &'a Arc<Session>) -> Patience<'a> {
        Patience {
            ensemble: self,
            session,
            sent: Instant::now(),
        }
    }

    fn present(&self) -> Option<Arc<Session>> {
        let session = lock(&self.session);
        session.as_ref().filter(|it| !it.is_over()).cloned()
    }

    /// Returns the session, and begins one if there is none, on the runtime of the caller.
    ///
    /// # Errors
    /// That of the last server, if none accepts a session.
    pub(super) async fn session(&self) -> Result<Arc<Session>, StoreError> {
        if let Some(session) = self.present() {
            return Ok(session);
        }
        let _turn = self.connecting.lock().await;
        if let Some(session) = self.present() {
            return Ok(session);
        }
        let servers = &self.target.servers;
        let mut failed = None;
        for _ in servers {
            let index = self.current.load(Ordering::Relaxed);
            let begun = Instant::now();
            // A caller that gives up does not leave a silent server to the next one.
            let given_up = OnDrop::new(|| {
                if Instant::now() >= begun + SLOW {
                    self.turn_from(index);
                }
            });
            let attempts = self.attempts.fetch_add(1, Ordering::Relaxed);
            let doubled = u32::try_from(attempts / servers.len()).unwrap_or(u32::MAX);
            let limit = CONNECT.saturating_mul(1 << doubled.min(3)).min(LONGEST);
            let user = self.target.user.as_deref();
            let session = Session::begin(&servers[index], user, limit).await;
            given_up.disarm();
            match session {
                Ok(session) => {
                    self.attempts.store(0, Ordering::Relaxed);
                    let session = Arc::new(session);
                    *lock(&self.session) = Some(session.clone());
                    return Ok(session);
                }
                Err(error) => failed = Some(error),
            }
            self.turn_from(index);
        }
        Err(failed.unwrap_or_else(error::no_reply))
    }

    /// Lets the next server serve.
    fn turn_from(&self, index: usize) {
        let next = (index + 1) % self.target.servers.len();
        self.current.store(next, Ordering::Relaxed);
    }

    /// Returns whether calls are made in this session.
    pub(super) fn serves(&self, session: &Arc<Session>) -> bool {
        self.present().is_some_and(|it| Arc::ptr_eq(&it, session))
    }

    /// Ends a session, unless it has ended, so that the next call goes to the next server.
    pub(super) fn leave(&self, session: &Arc<Session>) {
        let mut present = lock(&self.session);
        if present.as_ref().is_some_and(|it| Arc::ptr_eq(it, session)) {
            let earlier = present.take();
            self.turn_from(self.current.load(Ordering::Relaxed));
            drop(present);
            drop(earlier);
        }
    }
}
