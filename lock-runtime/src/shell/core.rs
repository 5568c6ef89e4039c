//! The shared state of a client: its session behind one mutex, and the performance of the
//! session's effects.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Waker,
};

use slotmap::SecondaryMap;
use smallvec::SmallVec;
use tokio::{runtime::Handle, sync::Notify};

#[cfg(test)]
use crate::shell::simulated::{Planted, planted};
use crate::{
    client::clients::ClientNames,
    error::{LockError, LockErrorKind, Loss},
    guard::fence::FencingToken,
    guard::view::View,
    observe::activity::Recorded,
    observe::log,
    observe::watch::meter,
    protocol::{AcquireId, Cx, Effect, Effects, Entropy, HeldId, Note, Session, WaiterLimits},
    request::key::LockKey,
    request::spec::{LockKind, LockSpec, call_timeout},
    shell::call::within,
    shell::driver,
    shell::keeper,
    shell::random::random,
    shell::runtime,
    shell::sync::lock,
    shell::time::Instant,
    store::{ClientId, KeyPart, Limits, Listener, Store, StoreError, Token},
};

/// State shared by a client, its requests and its guards.
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) defaults: LockSpec,
    pub(crate) limits: Limits,
    state: Mutex<ClientState>,
    /// Notifies the driver of work.
    pub(crate) work: Notify,
    /// Notified of changes of the session after the shutdown, and when the driver has ended.
    changed: Notify,
    /// The instant from which the views count.
    pub(crate) epoch: Instant,
    listeners: AtomicU64,
    /// The keeper is making calls that were late.
    pub(crate) is_relieved: AtomicBool,
    /// The identifier in the tokens of this client.
    pub(crate) id: ClientId,
    /// The name under which the store shows it.
    pub(crate) own_name: Option<Arc<str>>,
    /// The names of other clients.
    pub(crate) names: Arc<ClientNames>,
    pub(crate) activity: Recorded,
    /// Keeps the listener alive; the store has only a weak reference to it.
    _listener: Arc<dyn Listener>,
}

/// The session, and the parts of its users that it refers to by number.
#[derive(Default)]
pub(crate) struct ClientState {
    pub(crate) session: Session,
    /// The wakers of waiting requests.
    wakers: SecondaryMap<AcquireId, Waker>,
    /// Wakers to be dropped after the state is unlocked: the last waker of a task may own it, and
    /// with it a guard of this client.
    discarded: Vec<Waker>,
    /// The views of held locks.
    views: SecondaryMap<HeldId, Arc<View>>,
    pub(crate) driver_runs: bool,
    /// The runtime of the driver, also after its end.
    pub(crate) runtime: Option<Handle>,
    /// When the driver introduces the client to the store again. `None` for a client without a
    /// name.
    pub(crate) introduce_at: Option<Instant>,
    /// The name of the client is being sent.
    pub(crate) is_introducing: bool,
    /// The last clone of the client is gone: the driver ends when no work is left.
    pub(crate) orphaned: bool,
}

/// The random numbers of the thread's generator. Tokens begin with the identifier of their client.
struct ThreadEntropy(ClientId);

impl Entropy for ThreadEntropy {
    fn token(&mut self) -> Token {
        Token::of(self.0)
    }

    fn fraction(&mut self) -> f64 {
        random()
    }
}

/// How often a locked state is tried again before the thread sleeps.
const SPINS: u32 = 1_000;

impl Core {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        defaults: LockSpec,
        waiters: WaiterLimits,
        own_name: Option<Arc<str>>,
        listener: Arc<dyn Listener>,
    ) -> Self {
        let introduce_at = own_name.is_some().then(Instant::now);
        let id = store.client().unwrap_or_else(ClientId::random);
        let own = own_name.clone().map(|name| (id, name));
        let names = ClientNames::new(store.clone(), own);
        Self {
            limits: store.limits(),
            store,
            defaults,
            state: Mutex::new(ClientState {
                session: Session::new(waiters),
                introduce_at,
                is_introducing: false,
                ..ClientState::default()
            }),
            work: Notify::new(),
            changed: Notify::new(),
            epoch: Instant::now(),
            listeners: AtomicU64::new(0),
            is_relieved: AtomicBool::new(false),
            id,
            own_name,
            names: Arc::new(names),
            activity: Recorded::default(),
            _listener: listener,
        }
    }

    /// Awaits a call that affects no hold of this client, for a limited time.
    pub(crate) async fn bounded<'a, T>(
        &self,
        key: impl Into<Option<&'a LockKey>>,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, LockError> {
        let key = key.into();
        let named = |error: LockError| error.with_key(key);
        runtime::check().map_err(named)?;
        let reply = within(call_timeout(LockSpec::DEFAULT_LEASE), call).await;
        reply.map_err(|error| named(LockError::from_store(error)))
    }

    /// Passes one input to the session, then performs its effects on other tasks.
    pub(crate) fn visit<T>(
        self: &Arc<Self>,
        input: impl FnOnce(&mut ClientState, &mut Cx<'_>) -> T,
    ) -> T {
        self.visit_at(Instant::now(), input)
    }

    /// The same for a caller that has just read the time.
    pub(crate) fn visit_at<T>(
        self: &Arc<Self>,
        now: Instant,
        input: impl FnOnce(&mut ClientState, &mut Cx<'_>) -> T,
    ) -> T {
        let mut effects = Effects::new();
        let mut cx = Cx {
            now,
            entropy: &mut ThreadEntropy(self.id),
            out: &mut effects,
            polls: !self.store.sends_events(),
            is_debugged: tracing::enabled!(tracing::Level::DEBUG),
            #[cfg(test)]
            mutation: None,
        };
        let mut state = self.lock();
        #[cfg(test)]
        VISITS.with(|visits| visits.set(visits.get() + 1));
        let output = input(&mut state, &mut cx);
        if !effects.is_empty() || state.needs_care() {
            self.perform(effects, state);
        }
        output
    }

    /// Performs the effects of an input.
    fn perform(self: &Arc<Self>, effects: Effects, mut state: MutexGuard<'_, ClientState>) {
        let mut wakers = SmallVec::<[Waker; 2]>::new();
        let mut notes = SmallVec::<[Box<Note>; 2]>::new();
        // The holds that have ended, and the renewed ones. Their ends are recorded later, as
        // recorders and subscribers must not run under the mutex.
        let mut ended = SmallVec::<[(Arc<View>, Option<Loss>); 1]>::new();
        let mut renewed = SmallVec::<[meter::Hold; 1]>::new();
        let (mut has_work, mut is_watched) = (false, false);
        for effect in effects {
            match effect {
                #[cfg(test)]
                Effect::Wake(_) if planted(Planted::LosesWakeUp) => {}
                Effect::Wake(id) => wakers.extend(state.wakers.remove(id)),
                #[cfg(test)]
                Effect::Rouse if planted(Planted::RousesNobody) => {}
                Effect::Rouse => has_work = true,
                Effect::Watch => is_watched = true,
                Effect::Note(note) => notes.push(note),
                Effect::Extended {
                    held,
                    valid_until,
                    is_renewal,
                } => {
                    if let Some(view) = state.views.get(held) {
                        view.extended(valid_until, is_renewal);
                        if is_renewal {
                            renewed.push(view.watch.meter);
                        }
                    }
                }
                Effect::Lost(held, loss) => {
                    if let Some(view) = state.views.remove(held) {
                        let told = view.lost(loss);
                        #[cfg(test)]
                        let told = told.into_iter().filter(|_| !planted(Planted::TellsNoLoss));
                        wakers.extend(told);
                        ended.push((view, Some(loss)));
                    }
                }
                Effect::Released(held) => {
                    #[cfg(test)]
                    let held = match planted(Planted::EndsWrongView) {
                        true => state.views.keys().last().unwrap_or(held),
                        false => held,
                    };
                    if let Some(view) = state.views.remove(held) {
                        view.released();
                        ended.push((view, None));
                    }
                }
            }
        }
        // The driver of a client that is gone ends with its last work.
        has_work |= state.orphaned && state.driver_runs && !state.session.needs_driver();
        let must_start = !state.driver_runs
            && (state.session.needs_driver() || state.introduce_at.is_some() && !state.orphaned);
        let is_closed = state.session.is_closed();
        let discarded = std::mem::take(&mut state.discarded);
        drop(state);
        drop(discarded);
        for (view, loss) in &ended {
            if let Some(loss) = loss {
                let name = view.name.as_ref();
                self.activity.lost(name, &view.key, view.fence, *loss);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
        if has_work {
            self.work.notify_one();
        }
        if must_start {
            driver::start(self);
        }
        if is_watched {
            keeper::watch(self.clone());
        }
        #[cfg(test)]
        let is_closed = is_closed && !planted(Planted::TellsNoEnd);
        if is_closed {
            self.changed.notify_waiters();
        }
        // Last, because subscribers and recorders may panic.
        for note in notes {
            let of = |(view, _): &&(Arc<View>, _)| note.is_loss_of(&view.key, view.fence);
            match ended.iter().find(of) {
                Some((view, _)) => view.watch.span.within(|| write(*note, view.name())),
                None => write(*note, None),
            }
        }
        for hold in renewed {
            hold.renewed(true);
        }
        for (view, loss) in ended {
            view.watch.ended(loss);
        }
    }

    /// Locks the state. Inputs take less than a microsecond, so a task spins for a few of them
    /// before its thread sleeps, which costs more.
    fn lock(&self) -> MutexGuard<'_, ClientState> {
        for _ in 0..SPINS {
            match self.state.try_lock() {
                Ok(state) => return state,
                Err(TryLockError::Poisoned(_)) => break,
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        lock(&self.state)
    }

    /// Calls `f` with the state, outside of any input.
    pub(crate) fn with_state<T>(&self, f: impl FnOnce(&mut ClientState) -> T) -> T {
        f(&mut lock(&self.state))
    }

    /// Waits until `is_done` holds for the session of a client that was shut down.
    pub(crate) async fn until(self: &Arc<Self>, is_done: impl Fn(&Session) -> bool) {
        loop {
            let changed = self.changed.notified();
            if self.with_state(|state| is_done(&state.session)) {
                return;
            }
            // The work may have been added where there was no runtime.
            driver::start(self);
            changed.await;
        }
    }

    /// Wakes the tasks that wait for changes of the session.
    pub(crate) fn notify_changed(&self) {
        self.changed.notify_waiters();
    }

    /// Returns a number that identifies a listener of this client.
    pub(crate) fn next_listener(&self) -> u64 {
        self.listeners.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the time since the client was created.
    pub(crate) fn nanos(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.epoch);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the error for foreign data under one of the lock's keys.
    pub(crate) fn foreign(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> LockError {
        let name = self.store.name_of(key, kind, part);
        LockError::from_store(StoreError::foreign(name.as_deref(), part)).with_key(key)
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

impl ClientState {
    /// Adds the view of a lock that was just granted.
    pub(crate) fn add_view(&mut self, view: Arc<View>) -> Arc<View> {
        #[cfg(test)]
        if planted(Planted::ForgetsView) {
            return view;
        }
        self.views.insert(view.id, view.clone());
        view
    }

    /// Returns whether there may be work after an input without effects.
    fn needs_care(&self) -> bool {
        let is_calm = self.driver_runs && !self.orphaned && !self.session.is_closed();
        !is_calm || !self.discarded.is_empty()
    }

    /// Returns the view of a lock that is held.
    pub(crate) fn view(&self, id: HeldId) -> Option<&Arc<View>> {
        self.views.get(id)
    }

    /// Returns the views of all locks that are held.
    pub(crate) fn views(&self) -> impl Iterator<Item = &Arc<View>> {
        self.views.values()
    }

    /// Makes the driver introduce the client to the store at `at` or before.
    pub(crate) fn introduce_by(&mut self, at: Instant) {
        let planned = self.introduce_at.iter_mut();
        planned.for_each(|planned| *planned = at.min(*planned));
    }

    /// Registers a waiting request to be woken.
    pub(crate) fn set_waker(&mut self, id: AcquireId, waker: &Waker) {
        match self.wakers.get_mut(id) {
            #[cfg(test)]
            Some(_) if planted(Planted::KeepsFirstWaker) => {}
            Some(old) if old.will_wake(waker) => {}
            _ => self.discarded.extend(self.wakers.insert(id, waker.clone())),
        }
    }

    #[cfg(test)]
    pub(crate) fn has_waker(&self, id: AcquireId) -> bool {
        self.wakers.contains_key(id)
    }

    /// Removes the waker of a request whose wait has ended: it would keep its task alive.
    pub(crate) fn discard_waker(&mut self, id: AcquireId) {
        self.discarded.extend(self.wakers.remove(id));
    }
}

fn write(note: Note, name: Option<&str>) {
    match note {
        Note::Behind(key) => {
            tracing::debug!(key = %key.shown(), "waiting behind others in this process")
        }
        Note::Queued(key, holder_ttl) => {
            tracing::debug!(key = %key.shown(), ?holder_ttl, queued = true, "waiting for its holder");
        }
        Note::Waiting(key, holder_ttl) => {
            tracing::debug!(key = %key.shown(), ?holder_ttl, queued = false, "waiting for its holder");
        }
        Note::Unavailable(key, error) => {
            tracing::debug!(key = %key.shown(), %error, "waiting for the store")
        }
        Note::HandedOff(key, fence) => {
            tracing::debug!(key = %key.shown(), %fence, "handed off in this process");
        }
        Note::Renewed(key, fence, ttl) => {
            tracing::trace!(key = %key.shown(), %fence, ?ttl, "renewed")
        }
        Note::Lost(key, fence, loss) => log_loss("lost", name, &key, fence, loss),
        Note::HeldLong(key, lease) => {
            tracing::warn!(key = %key.shown(), ?lease, "held for ten leases; if its holder may hang, set `max_hold`");
        }
        Note::Released(key) => tracing::debug!(key = %key.shown(), "released"),
        Note::GaveUp(hold, error) => {
            let code = LockErrorKind::from(error.kind()).code();
            log::summarise("gave up releasing", code, None, |left_out| {
                tracing::warn!(key = %hold.key.shown(), left_out, %error, "gave up releasing a lock; it ends with its lease");
            });
        }
    }
}

/// Logs a loss. An outage loses many locks at once; the line has the first of those that it stands
/// for.
pub(crate) fn log_loss(
    message: &'static str,
    name: Option<&str>,
    key: &LockKey,
    fence: FencingToken,
    loss: Loss,
) {
    log::summarise(
        message,
        LockErrorKind::Lost(loss).code(),
        name,
        |left_out| {
            tracing::warn!(name, key = %key.shown(), %fence, ?loss, left_out, "{message}");
        },
    );
}

#[cfg(test)]
thread_local! {
    /// The number of visits on this thread.
    pub(crate) static VISITS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, sync::Arc, time::Duration};

    use super::VISITS;
    use crate::{
        LockClient, LockError,
        store::{MemoryStore, Store},
    };

    /// The number of visits of this thread since the last call.
    fn visits() -> u32 {
        VISITS.with(std::cell::Cell::take)
    }

    /// Each visit locks the mutex that all requests of the client share.
    #[tokio::test]
    async fn an_uncontended_request_visits_the_session_twice() -> Result<(), LockError> {
        let client = LockClient::in_memory();
        for _ in 0..3 {
            visits();
            let guard = client.exclusive("k").acquired().await?;
            let acquired = visits();
            assert!(acquired <= 2, "{acquired} visits for the acquire");
            guard.release().await?;
            let released = visits();
            assert!(released <= 2, "{released} visits for the release");
            assert!(acquired > 0 && released > 0);
            // The driver runs on the same thread, between requests.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// The client's task introduces the client again after some minutes, but not one that is gone.
    #[tokio::test(start_paused = true)]
    async fn the_driver_of_a_client_that_is_gone_sleeps_between_renewals() -> Result<(), LockError>
    {
        let client = LockClient::in_memory();
        let guard = client.exclusive("k").acquire().await?;
        drop(client);
        visits();
        tokio::time::sleep(Duration::from_secs(8 * 60 * 60)).await;
        let visits = visits();
        assert!(visits < 20_000, "{visits}");
        guard.release().await
    }

    /// The last work may end between the check and the wait.
    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_work_during_the_check_is_not_missed() -> Result<(), LockError> {
        let client = LockClient::in_memory();
        let core = &client.core;
        let is_done = Cell::new(false);
        let checked = core.until(|_| {
            core.notify_changed();
            is_done.replace(true)
        });
        let day = Duration::from_secs(24 * 60 * 60);
        assert!(tokio::time::timeout(day, checked).await.is_ok());
        Ok(())
    }

    /// The client's task keeps the store alive, so it ends with the last lock of a client that is
    /// gone, and not at the time of its next renewal.
    #[tokio::test(start_paused = true)]
    async fn the_driver_of_a_client_that_is_gone_ends_at_once() -> Result<(), LockError> {
        for revoked in [false, true] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
            let client = LockClient::with_store(store.clone());
            let guard = client.exclusive("k").acquire().await?;
            tokio::task::yield_now().await;
            if revoked {
                client.revoke("k").await?;
                // Until the token is abandoned.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            drop(client);
            // The task sleeps until the next renewal.
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert_eq!(guard.release().await.is_err(), revoked);
            // The paused clock stands still meanwhile. The keeper has a reference for a moment.
            let waited = std::time::Instant::now();
            while Arc::strong_count(&store) > 1 {
                assert!(waited.elapsed() < Duration::from_secs(5), "{revoked}");
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }
}
