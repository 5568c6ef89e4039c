//! The decisions of the driver and of the keeper that stands in for it, step by step.

use std::sync::{Mutex, Weak, atomic::AtomicUsize};

use futures_util::FutureExt as _;
use tokio::{
    runtime::Builder,
    sync::Semaphore,
    task::yield_now,
    time::{advance, sleep},
};
use tracing::{Level, Metadata, Subscriber, span};

use super::*;
use crate::{
    LockClient, LockGuard,
    request::{key::LockKey, spec::LockKind},
    shell::{
        simulated::{Simulation, drivers},
        sync::lock,
    },
    store::{
        AcquireAllReply, AcquireReply, ClientId, ConvertReply, Hold, HolderId, Inspection, KeyPart,
        KeyRequest, Limits, Listener, MemoryStore, PollReply, Release, ReleaseReply, RenewReply,
        Renewal, Replied, Replies, RevokeReply, RevokeScope, Store, StoreErrorKind,
    },
};

const SECOND: Duration = Duration::from_secs(1);

/// A store that makes releases and renewals wait.
#[derive(Debug)]
struct Gated {
    store: MemoryStore,
    /// A permit for each call that is to be answered.
    gate: Semaphore,
    waiting: AtomicUsize,
    /// Whether releases and introductions fail.
    fails: Mutex<Option<StoreErrorKind>>,
    /// The times for which the client was introduced.
    introduced: Mutex<Vec<Duration>>,
}

impl Gated {
    fn new(answered: usize) -> Arc<Self> {
        Arc::new(Self {
            store: MemoryStore::new(),
            gate: Semaphore::new(answered),
            waiting: AtomicUsize::new(0),
            fails: Mutex::default(),
            introduced: Mutex::default(),
        })
    }

    /// Creates a client whose driver is the test.
    fn client(self: &Arc<Self>, name: Option<&str>) -> LockClient {
        let builder = match name {
            Some(name) => LockClient::builder().identity(name),
            None => LockClient::builder().without_identity(),
        };
        let client = builder.build_with_store(self.clone()).unwrap();
        client.core.with_state(|state| state.driver_runs = true);
        client
    }

    async fn answers(&self) -> Result<(), StoreError> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waits = OnDrop::new(|| {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        });
        self.gate.acquire().await.expect("it is open").forget();
        self.failure()
    }

    fn failure(&self) -> Result<(), StoreError> {
        let kind = *lock(&self.fails);
        kind.map_or(Ok(()), |kind| Err(StoreError::new(kind, "refused")))
    }

    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    fn introduced(&self) -> Vec<Duration> {
        lock(&self.introduced).clone()
    }
}

impl Store for Gated {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        self.store.acquire(request)
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        self.store.acquire_all(requests)
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        self.store.poll(holds)
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        Box::pin(async move {
            match self.answers().await {
                Ok(()) => self.store.renew(renewals).await,
                Err(error) => vec![Err(error); renewals.len()],
            }
        })
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        Box::pin(async move {
            self.answers().await?;
            self.store.release(release).await
        })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        self.store.convert(hold)
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        self.store.abandon(hold)
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        self.store.inspect(key, kind)
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        self.store.revoke(key, kind, scope)
    }

    fn introduce<'a>(
        &'a self,
        _client: ClientId,
        _name: &'a str,
        _grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        Box::pin(async move {
            lock(&self.introduced).push(keep_for);
            self.failure()
        })
    }

    fn name_of(&self, _key: &LockKey, _kind: LockKind, _part: KeyPart) -> Option<String> {
        None
    }

    fn server_of(&self, _key: &LockKey, _kind: LockKind) -> u64 {
        0
    }

    fn limits(&self) -> Limits {
        self.store.limits()
    }

    fn serves_any_runtime(&self) -> bool {
        true
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.store.listen(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        self.store.settled()
    }
}

async fn acquired(client: &LockClient, number: usize) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for key in 0..number {
        let guard = client.exclusive(format!("k{key}")).acquire().await;
        guards.push(guard.unwrap());
    }
    guards
}

fn task_of(client: &LockClient) -> Task {
    Task {
        calls: Calls::new(client.core.clone()),
        ended: true,
    }
}

/// Takes the renewals that are due half a lease from now.
fn renewals(client: &LockClient) -> Vec<DueRenewal> {
    let half = LockSpec::DEFAULT_LEASE / 2;
    let mut due = Vec::new();
    client.core.visit_at(Instant::now() + half, |state, cx| {
        state.session.due_renewals(&mut due, cx);
    });
    due
}

#[tokio::test(start_paused = true)]
async fn no_more_than_256_dropped_locks_are_released_at_a_time() {
    let _simulation = Simulation::new(0, None);
    let store = Gated::new(0);
    let client = store.client(None);
    drop(acquired(&client, 300).await);
    let mut task = task_of(&client);
    for _ in 0..2 {
        // The others are due, and wait for an answer.
        let check_at = task.begin_work().expect("the client is in use");
        assert!(check_at > Instant::now());
        assert_eq!(task.calls.jobs_in_flight, 256);
        assert_eq!(task.calls.answered().now_or_never(), None);
        assert_eq!(store.waiting(), 256);
    }
    store.gate.add_permits(300);
    for number in [256, 44] {
        task.begin_work();
        assert_eq!(task.calls.jobs_in_flight, number);
        while task.calls.jobs_in_flight > 0 {
            assert!(task.calls.answered().await);
        }
    }
    assert!(client.core.with_state(|state| state.session.is_drained()));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_has_failed_is_repeated_soon() {
    let _simulation = Simulation::new(0, None);
    let store = Gated::new(10);
    let client = store.client(None);
    let guards = acquired(&client, 1).await;
    *lock(&store.fails) = Some(StoreErrorKind::Unavailable);
    drop(guards);
    let mut task = task_of(&client);
    task.begin_work();
    assert!(task.calls.answered().await);
    let again = task.begin_work().expect("the client is in use");
    assert!(again < Instant::now() + SECOND);
    *lock(&store.fails) = None;
    sleep(again - Instant::now()).await;
    task.begin_work();
    assert!(task.calls.answered().await);
    assert!(client.core.with_state(|state| state.session.is_drained()));
}

#[tokio::test(start_paused = true)]
async fn no_more_than_eight_batches_of_renewals_are_in_flight() {
    let _simulation = Simulation::new(0, None);
    let store = Gated::new(0);
    let client = store.client(None);
    let guards = acquired(&client, 16).await;
    let mut due = renewals(&client);
    assert_eq!(due.len(), 16);
    // So each of them is a batch of its own.
    for (place, due) in due.iter_mut().enumerate() {
        due.timeout = 60 * SECOND + SECOND * place as u32;
    }
    let (mut last, mut calls) = (due.split_off(9), Calls::new(client.core.clone()));
    let begin = |calls: &mut Calls, renewals| {
        calls.begin(renewals, Vec::new());
        assert_eq!(calls.answered().now_or_never(), None);
        assert_eq!(store.waiting(), 8);
    };
    begin(&mut calls, due);
    // The ninth one takes the place of the first.
    store.gate.add_permits(1);
    assert!(calls.answered().await);
    begin(&mut calls, Vec::new());
    // Seven are in flight, and none waits.
    store.gate.add_permits(1);
    assert!(calls.answered().await);
    assert_eq!(store.waiting(), 7);
    begin(&mut calls, std::mem::take(&mut last));
    store.gate.add_permits(100);
    while calls.answered().await {}
    assert!(guards.iter().all(|guard| guard.renewals() == 1));
    assert!(calls.servers.is_empty());
}

/// One that is shut down is known until it has given its last lock up.
#[tokio::test(start_paused = true)]
async fn a_client_is_introduced_while_it_is_in_use() {
    let _simulation = Simulation::new(0, None);
    let now = Instant::now();
    let (again, later) = (Some(now + INTRODUCED_FOR), Some(now + SECOND));
    for (is_closed, holds, due, expected) in [
        (false, false, Some(now), (1, again)),
        (false, false, later, (0, later)),
        (false, true, Some(now), (1, again)),
        (true, true, Some(now), (1, again)),
        (true, false, Some(now), (0, None)),
        (true, false, later, (0, later)),
    ] {
        let client = Gated::new(0).client(Some("worker"));
        let _guards = acquired(&client, usize::from(holds)).await;
        let core = &client.core;
        if is_closed {
            core.visit(|state, cx| state.session.close(cx));
        }
        core.with_state(|state| state.introduce_at = due);
        let mut task = task_of(&client);
        let check_at = task.begin_work().expect("the client is in use");
        let introduce_at = core.with_state(|state| state.introduce_at);
        let found = (task.calls.in_flight.len(), introduce_at);
        assert_eq!(found, expected, "closed: {is_closed}, holds: {holds}");
        assert!(introduce_at.is_none_or(|at| check_at <= at));
    }
}

#[tokio::test(start_paused = true)]
async fn an_introduction_that_has_failed_is_repeated_after_ten_seconds() {
    let planned = Instant::now() + 3600 * SECOND;
    for (fails, expected) in [
        (None, planned),
        (Some(StoreErrorKind::Forbidden), planned),
        (
            Some(StoreErrorKind::Unavailable),
            Instant::now() + 10 * SECOND,
        ),
    ] {
        let store = Gated::new(0);
        *lock(&store.fails) = fails;
        let client = store.client(Some("worker"));
        let core = &client.core;
        core.with_state(|state| state.introduce_at = Some(planned));
        introduce(core.clone()).await;
        let introduce_at = core.with_state(|state| state.introduce_at);
        assert_eq!(introduce_at, Some(expected), "{fails:?}");
        assert_eq!(store.introduced(), [Identity::TTL]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_name_of_a_client_that_is_shut_down_is_removed_if_the_store_has_it() {
    let _simulation = Simulation::new(0, None);
    let now = Instant::now();
    for (holds, at, is_removed) in [
        (false, now + SECOND, true),
        // It was never sent, or the store may have lost it.
        (false, now, false),
        (false, now - SECOND, false),
        (true, now + SECOND, false),
    ] {
        let store = Gated::new(0);
        let client = store.client(Some("worker"));
        let _guards = acquired(&client, usize::from(holds)).await;
        let core = &client.core;
        core.with_state(|state| state.introduce_at = Some(at));
        dismiss(core).await;
        let removed = store.introduced();
        assert_eq!(removed == [Duration::ZERO], is_removed, "{removed:?}");
        let introduce_at = core.with_state(|state| state.introduce_at);
        assert_eq!(introduce_at, holds.then_some(at));
        assert_eq!(Instant::now(), now);
    }
}

/// A call that is executed later would bring the name back.
#[tokio::test(start_paused = true)]
async fn the_removal_of_a_name_waits_half_a_second_for_an_introduction_in_flight() {
    for (ends_after, waited) in [(50, 50), (60_000, 500)] {
        let began = Instant::now();
        let store = Gated::new(0);
        let client = store.client(Some("worker"));
        let core = client.core.clone();
        core.with_state(|state| {
            state.is_introducing = true;
            state.introduce_at = Some(began + SECOND);
        });
        let introducing = async {
            sleep(Duration::from_millis(ends_after)).await;
            core.with_state(|state| state.is_introducing = false);
        };
        let dismissed = async {
            dismiss(&core).await;
            began.elapsed()
        };
        let (_, took) = tokio::join!(introducing, dismissed);
        assert_eq!(took, Duration::from_millis(waited));
        assert_eq!(store.introduced(), [Duration::ZERO]);
    }
}

/// Another one takes over, and renews the locks.
#[tokio::test(start_paused = true)]
async fn a_driver_that_ends_with_its_runtime_has_a_successor() {
    let _simulation = Simulation::new(0, None);
    let client = LockClient::in_memory();
    let guard = client.exclusive("k").lease(SECOND).acquire().await.unwrap();
    yield_now().await;
    let [driver] = &drivers()[..] else {
        panic!("one driver");
    };
    driver.abort();
    sleep(5 * SECOND).await;
    assert!(!guard.is_lost() && guard.renewals() > 1);
}

#[tokio::test(start_paused = true)]
async fn the_keeper_looks_at_a_client_that_holds_a_lock() {
    let _simulation = Simulation::new(0, None);
    let client = Gated::new(0).client(None);
    let core = &client.core;
    assert!(!core.is_looked_at());
    let _guards = acquired(&client, 1).await;
    assert!(core.is_looked_at());
    core.forget_keeper();
    assert!(!core.is_looked_at());
    // The grant was work for the driver.
    core.work.notified().now_or_never();
    assert_eq!(core.work.notified().now_or_never(), None);
    core.rouse();
    assert_eq!(core.work.notified().now_or_never(), Some(()));
}

/// The time of a test's paused clock says nothing about the time that has passed.
#[test]
fn the_keeper_begins_the_work_that_is_late_once_by_the_time_of_the_system() {
    for is_paused in [false, true] {
        let _simulation = Simulation::new(0, None);
        let runtime = || Builder::new_current_thread().enable_time().build().unwrap();
        let app = Builder::new_current_thread()
            .enable_time()
            .start_paused(is_paused)
            .build()
            .unwrap();
        let client = LockClient::in_memory();
        let guard = app.block_on(client.exclusive("k").acquire()).unwrap();
        let (core, keeper) = (&client.core, runtime());
        let look = |at| core.clone().look(&keeper, at).expect("a lock is held");
        let begun = || keeper.metrics().num_alive_tasks();
        let now = Instant::now();
        assert!(look(now) > now);
        assert_eq!(begun(), 0);
        // The lock is not renewed meanwhile, as nothing drives its runtime.
        let mut late = now + LockSpec::DEFAULT_LEASE * 3 / 4;
        for _ in 0..2 {
            late = look(late);
            assert_eq!(begun(), usize::from(!is_paused));
        }
        keeper.block_on(async {
            for _ in 0..10 {
                yield_now().await;
            }
        });
        assert_eq!(begun(), 0);
        assert!(!core.is_relieved.load(Ordering::Acquire));
        app.block_on(guard.release()).unwrap();
    }
}

/// Counts the lines of a test.
struct Lines(Arc<AtomicUsize>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, _event: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// Calls without an answer are no reason for the warning.
#[tokio::test(start_paused = true)]
async fn the_keeper_renews_the_locks_of_a_driver_that_is_late_and_warns_of_it() {
    let lines = Arc::new(AtomicUsize::new(0));
    let _listens = tracing::subscriber::set_default(Lines(lines.clone()));
    let store = Gated::new(10);
    let client = store.client(None);
    let guards = acquired(&client, 1).await;
    for (passed, renewals, warnings) in [
        (Duration::ZERO, 0, 0),
        (LockSpec::DEFAULT_LEASE * 3 / 4, 1, 1),
    ] {
        advance(passed).await;
        relieve(client.core.clone()).await;
        assert_eq!(guards[0].renewals(), renewals);
        assert_eq!(lines.load(Ordering::Relaxed), warnings);
    }
}
