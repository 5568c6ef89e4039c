//! What the simulated clients share: the store, the record of who holds and who waits, and the
//! invariants.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt as _;

use super::super::explore;
use crate::{
    HeldLock, LockError, LockErrorKind, Loss,
    request::key::LockKey,
    request::spec::{LockKind, Mode},
    shell::sync::lock,
    shell::time::Instant,
    store::{ClientId, Identity, MemoryStore, Store as _},
};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two guards that exclude each other say that they are valid.
    TwoHolders,
    /// A fencing token is not larger than those of earlier grants.
    Fence,
    /// A request waits for a lock that has been free for long.
    Stuck,
    /// A request is answered long after its wait.
    Late,
    /// A request, a release or an extension failed without a fault that explains it.
    Refusal,
    /// A lock was lost, and the reason is not true.
    Loss,
    /// A task that waits for the loss of its lock was not woken.
    Untold,
    /// The store keeps a lock, or a queue entry, of a client that has given it up.
    Left,
    /// `shutdown` took too long, or returned before the releases.
    Shutdown,
    /// A task or a client is left at the end.
    Leak,
    /// A task has panicked.
    Panic,
}

/// A violation, with what has happened.
pub(super) struct Violation {
    pub(super) wrong: Wrong,
    pub(super) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.wrong, self.what)
    }
}

/// The longest lease, also of an extension.
pub(super) const LONGEST_LEASE: Duration = Duration::from_secs(4);
/// A lock that no guard has is granted within this time after the last fault: a lease, that of a
/// hand-off, and a poll of the next waiter.
const FREE_WITHIN: Duration = Duration::from_secs(10);
/// Without faults, the store has released within this time what a client gave up.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(1);
/// The time after a fault in which the store may keep a queue entry that is not abandoned.
const QUEUED: Duration = Duration::from_secs(12);
/// The time in which a renewal that failed is repeated, beside half of its lease.
const REPEATED: Duration = Duration::from_millis(400);
/// The time in which a fault may have other effects.
const AFTERMATH: Duration = Duration::from_secs(6);
/// The time after the wait of a request until its answer: calls in flight, and one for an error
/// that names the holder.
const LATE: Duration = Duration::from_secs(3);
/// The longest time until a loss wakes its waiters.
const TOLD_WITHIN: Duration = Duration::from_millis(300);
/// The time that `shutdown` takes at most.
const SHUTDOWN: Duration = Duration::from_millis(3_010);

pub(super) const KEYS: [&str; 3] = ["a", "bb", "c"];

/// A guard.
struct Held {
    id: u64,
    client: usize,
    view: HeldLock,
    mode: Mode,
    since: Instant,
    lease: Duration,
    max_hold: Option<Duration>,
    is_renewed: bool,
    /// Its task waits for a loss.
    listens: bool,
    lost_at: Option<Instant>,
    /// Its release has begun.
    is_leaving: bool,
}

/// A request that waits.
struct Waiting {
    id: u64,
    client: usize,
    keys: Vec<LockKey>,
    until: Instant,
}

/// What a guard was asked for.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) mode: Mode,
    pub(super) lease: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) is_renewed: bool,
    pub(super) since: Instant,
}

#[derive(Default)]
struct State {
    found: Option<Violation>,
    history: Vec<String>,
    ids: u64,
    held: Vec<Held>,
    waiting: Vec<Waiting>,
    /// The clients, and the time of the last fault of each.
    clients: Vec<(ClientId, Instant, bool)>,
    /// When a driver last ended. The calls that it had planned are made by the next one, which
    /// starts when its client is used again.
    driver_ended: Option<Instant>,
    /// The largest fencing token of a writer, and of any holder.
    fences: BTreeMap<(LockKind, LockKey), (u64, u64)>,
    first_fence: Option<i64>,
    revoked: BTreeMap<LockKey, Instant>,
    /// When a client last held a lock or asked for it.
    used: BTreeMap<(usize, LockKey), Instant>,
    /// When any client last had a guard.
    busy: BTreeMap<LockKey, Instant>,
}

/// The world of one schedule.
pub(super) struct World {
    pub(super) store: Arc<MemoryStore>,
    begin: Instant,
    is_recorded: bool,
    /// The time of the last fault, and the probability of a fault in a thousand calls until then.
    faults: (Instant, usize),
    only: Option<Wrong>,
    state: Mutex<State>,
}

impl World {
    pub(super) fn new(
        faults: (Duration, usize),
        is_recorded: bool,
        only: Option<Wrong>,
    ) -> Arc<Self> {
        let begin = Instant::now();
        Arc::new(Self {
            store: Arc::new(MemoryStore::new()),
            begin,
            is_recorded,
            faults: (begin + faults.0, faults.1),
            only,
            state: Mutex::default(),
        })
    }

    /// The probability of a fault at present, in a thousand.
    pub(super) fn faults(&self) -> usize {
        let (until, faults) = self.faults;
        if Instant::now() < until { faults } else { 0 }
    }

    pub(super) fn joins(&self, client: ClientId) {
        let clients = &mut lock(&self.state).clients;
        clients.push((client, self.begin, false));
    }

    pub(super) fn driver_ends(&self) {
        self.note(|| "a driver ends".into());
        lock(&self.state).driver_ended = Some(Instant::now());
    }

    pub(super) fn fault(&self, client: usize) {
        self.fault_until(client, Duration::ZERO);
    }

    pub(super) fn fault_until(&self, client: usize, delay: Duration) {
        let mut state = lock(&self.state);
        if let Some((_, at, _)) = state.clients.get_mut(client) {
            *at = (*at).max(Instant::now() + delay);
        }
    }

    pub(super) fn revoked(&self, key: &LockKey) {
        // The call may take until its time-out.
        let until = Instant::now() + Duration::from_secs(2);
        lock(&self.state).revoked.insert(key.clone(), until);
    }

    /// Adds a line to the history.
    pub(super) fn note(&self, line: impl FnOnce() -> String) {
        if self.is_recorded {
            let (at, line) = (self.begin.elapsed(), line());
            let history = &mut lock(&self.state).history;
            history.push(format!("{:>12.6} {line}", at.as_secs_f64()));
        }
    }

    /// A reply, with fencing tokens that begin with 0: those of the store depend on the date.
    pub(super) fn shown(&self, reply: &impl fmt::Debug) -> String {
        const FENCE: &str = "FencingToken(";
        let text = format!("{reply:?}");
        let first = &mut lock(&self.state).first_fence;
        let mut parts = text.split(FENCE);
        let mut shown = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (number, rest) = part.split_once(')').unwrap_or((part, ""));
            let number: i64 = number.parse().unwrap_or_default();
            let number = number - *first.get_or_insert(number);
            shown.push_str(&format!("#{number}{rest}"));
        }
        shown
    }

    pub(super) fn report(&self, wrong: Wrong, what: impl FnOnce() -> String) {
        self.state_reports(&mut lock(&self.state), wrong, what);
    }

    fn state_reports(&self, state: &mut State, wrong: Wrong, what: impl FnOnce() -> String) {
        if state.found.is_none() && self.only.is_none_or(|only| only == wrong) {
            let at = self.begin.elapsed();
            let what = format!("after {:.3} s: {}", at.as_secs_f64(), what());
            state.found = Some(Violation { wrong, what });
        }
    }

    pub(super) fn has_found(&self) -> bool {
        lock(&self.state).found.is_some()
    }

    pub(super) fn end(&self) -> (Option<Violation>, Vec<String>) {
        let mut state = lock(&self.state);
        (state.found.take(), std::mem::take(&mut state.history))
    }

    /// Records a request until the value is dropped.
    pub(super) fn waits(
        self: &Arc<Self>,
        client: usize,
        keys: &[LockKey],
        wait: Duration,
    ) -> Recorded {
        let mut state = lock(&self.state);
        state.ids += 1;
        let id = state.ids;
        state.waiting.push(Waiting {
            id,
            client,
            keys: keys.to_vec(),
            until: Instant::now() + wait,
        });
        Recorded(self.clone(), id)
    }

    /// Records a guard until the value is dropped.
    pub(super) fn holds(
        self: &Arc<Self>,
        client: usize,
        view: HeldLock,
        asked: Asked,
        is_reentered: bool,
    ) -> Recorded {
        let mut state = lock(&self.state);
        state.ids += 1;
        let (id, kind) = (state.ids, asked.mode.kind());
        for (key, fence) in view.fences() {
            let number = fence.number();
            let (writer, any) = state.fences.entry((kind, key.clone())).or_default();
            let is_writer = asked.mode == Mode::Exclusive;
            let largest = if is_writer { *any } else { *writer };
            (*any, *writer) = ((*any).max(number), if is_writer { number } else { *writer });
            // The message of a revocation may be lost, so that a grant is taken after the next one.
            let is_revoked = (state.revoked.get(key)).is_some_and(|until| *until >= asked.since);
            if number <= largest && !is_reentered && !is_revoked {
                let what = || format!("{key}: {number} is granted after {largest}");
                self.state_reports(&mut state, Wrong::Fence, what);
            }
        }
        state.held.push(Held {
            id,
            client,
            view,
            mode: asked.mode,
            since: asked.since,
            lease: asked.lease,
            max_hold: asked.max_hold,
            is_renewed: asked.is_renewed,
            listens: false,
            lost_at: None,
            is_leaving: false,
        });
        self.check_holders(&mut state);
        Recorded(self.clone(), id)
    }

    /// Sets whether the task of a guard waits for its loss.
    pub(super) fn listens(&self, held: &Recorded, listens: bool) {
        let mut state = lock(&self.state);
        let guards = state.held.iter_mut();
        guards
            .filter(|it| it.id == held.1)
            .for_each(|it| it.listens = listens);
    }

    pub(super) fn leaves(&self, held: &Recorded) {
        let mut state = lock(&self.state);
        let guards = state.held.iter_mut();
        guards
            .filter(|it| it.id == held.1)
            .for_each(|it| it.is_leaving = true);
    }

    fn check_holders(&self, state: &mut State) {
        let mut clash = None;
        // A holder may work on after a revocation, until the message or its next renewal.
        let is_revoked = |held: &Held| {
            let revoked = |key| (state.revoked.get(key)).is_some_and(|until| *until >= held.since);
            held.view.fences().any(|(key, _)| revoked(key))
        };
        let valid = |held: &&Held| !held.view.validity().is_zero() && !is_revoked(held);
        let valid: Vec<_> = state.held.iter().filter(valid).collect();
        for (index, one) in valid.iter().enumerate() {
            for (key, fence) in one.view.fences() {
                let others = valid[..index].iter().filter(|other| {
                    let is_same = |(its, token)| its == key && token != fence;
                    other.mode.kind() == one.mode.kind() && other.view.fences().any(is_same)
                });
                let admitted = match one.mode {
                    Mode::Permits(permits) => permits.get() as usize - 1,
                    _ => 0,
                };
                let excluded =
                    others.filter(|it| it.mode != Mode::Shared || one.mode != Mode::Shared);
                let others: Vec<_> = excluded.collect();
                if others.len() > admitted {
                    let (one, other) = (one.client, others[0].client);
                    clash = Some(format!("{key} is held by clients {one} and {other}"));
                }
            }
        }
        if let Some(clash) = clash {
            self.state_reports(state, Wrong::TwoHolders, || clash);
        }
    }

    /// Returns whether a fault of the client explains a failure.
    pub(super) fn excused(&self, client: usize) -> bool {
        Self::is_faulty(&lock(&self.state), client, Instant::now())
    }

    fn is_faulty(state: &State, client: usize, now: Instant) -> bool {
        state.clients[client].1 + AFTERMATH > now
    }

    /// Checks the reason of a loss.
    pub(super) fn lost(&self, held: &Recorded, error: &LockError) {
        let LockErrorKind::Lost(loss) = error.kind() else {
            return;
        };
        let now = Instant::now();
        let mut state = lock(&self.state);
        let Some(guard) = state.held.iter().find(|it| it.id == held.1) else {
            return;
        };
        let was_revoked = |key| (state.revoked.get(key)).is_some_and(|until| *until >= guard.since);
        let is_revoked = guard.view.fences().any(|(key, _)| was_revoked(key));
        let is_faulty = Self::is_faulty(&state, guard.client, now);
        let is_true = match loss {
            Loss::Revoked => is_revoked,
            Loss::MaxHold => guard.max_hold.is_some_and(|most| guard.since + most <= now),
            Loss::Taken => is_revoked || is_faulty || !guard.is_renewed,
            // A renewal that failed before has been repeated.
            Loss::Expired => {
                let at = guard.lost_at.unwrap_or(now);
                let repeated = state.clients[guard.client].1 + guard.lease / 2 + REPEATED;
                is_revoked || repeated > at || !guard.is_renewed
            }
        };
        if !is_true {
            let (client, key, lease) = (guard.client, guard.view.key(), guard.lease);
            let what = format!("client {client} has lost {key} (lease {lease:?}): {loss:?}");
            self.state_reports(&mut state, Wrong::Loss, || what);
        }
    }

    /// Records that the client is shut down. Returns the time at which that began.
    pub(super) fn closes(&self, client: usize) -> Instant {
        lock(&self.state).clients[client].2 = true;
        Instant::now()
    }

    pub(super) fn is_closed(&self, client: usize) -> bool {
        lock(&self.state).clients[client].2
    }

    /// Checks a shutdown that has returned.
    pub(super) fn closed(&self, client: usize, began: Instant) {
        let took = began.elapsed();
        let now = Instant::now();
        let is_calm = !self.excused(client);
        if took > SHUTDOWN || took + Duration::from_millis(20) > SHUTDOWN && is_calm {
            let what = || format!("the shutdown of client {client} took {took:?}");
            self.report(Wrong::Shutdown, what);
        }
        let mut state = lock(&self.state);
        for key in KEYS.map(key) {
            let has_guard = state.held.iter().any(|it| it.client == client)
                || state.waiting.iter().any(|it| it.client == client);
            let used = state.used.get(&(client, key.clone())).copied();
            let is_recent = used.is_some_and(|at| at > began);
            if is_calm && !has_guard && !is_recent && self.keeps(&state, client, &key) {
                let what = || format!("client {client} is shut down, and {key} is held at {now:?}");
                self.state_reports(&mut state, Wrong::Shutdown, what);
            }
        }
    }

    /// Returns whether the store keeps something of the client.
    fn keeps(&self, state: &State, client: usize, key: &LockKey) -> bool {
        let (id, ..) = state.clients[client];
        let is_own = |it: &Identity| matches!(it, Identity::Client { id: its, .. } if *its == id);
        [LockKind::Lock, LockKind::Permits].iter().any(|kind| {
            let inspected = self.store.inspect(key, *kind).now_or_never();
            let Some(Ok(found)) = inspected else {
                return false;
            };
            let mut holders = found.holders.iter().filter(|it| !it.is_reservation);
            holders.any(|it| is_own(&it.client))
                || found.waiters.iter().any(|it| is_own(&it.client))
        })
    }

    /// Checks what holds at every moment.
    pub(super) fn look(&self) {
        let now = Instant::now();
        let mut state = lock(&self.state);
        self.check_holders(&mut state);
        let mut wrong = None;
        for held in &mut state.held {
            if held.view.validity().is_zero() && !held.view.is_lost() && !held.is_leaving {
                let (client, key) = (held.client, held.view.key());
                let what = format!("client {client} has a guard of {key}, neither held nor lost");
                wrong = Some((Wrong::Loss, what));
            }
            if held.view.is_lost() {
                let lost_at = *held.lost_at.get_or_insert(now);
                if held.listens && lost_at + TOLD_WITHIN < now {
                    let what = format!(
                        "client {} was not woken by its loss of {}",
                        held.client,
                        held.view.key()
                    );
                    wrong = Some((Wrong::Untold, what));
                }
            }
        }
        let last_fault = state.clients.iter().map(|(_, at, _)| *at).max();
        let last_fault = last_fault.unwrap_or(now);
        for waiting in &state.waiting {
            let (client, keys) = (waiting.client, &waiting.keys);
            if waiting.until + LATE < now {
                let what = format!("client {client} still waits for {keys:?}");
                wrong = Some((Wrong::Late, what));
            }
            let busy = keys.iter().filter_map(|key| state.busy.get(key)).max();
            let busy = busy.copied().unwrap_or(self.begin).max(last_fault);
            let shares = |it: &Waiting| {
                it.id != waiting.id && it.keys.len() > 1 && it.keys.contains(&keys[0])
            };
            let is_blocked = state.waiting.iter().any(shares) && !state.held.is_empty();
            if busy + FREE_WITHIN < now && !is_blocked {
                let what = format!("client {client} waits for {keys:?}, which are free");
                wrong = Some((Wrong::Stuck, what));
            }
        }
        for client in 0..state.clients.len() {
            for key in KEYS.map(key) {
                let in_use = |it: &Held| it.view.fences().any(|(its, _)| *its == key);
                if state.held.iter().any(in_use) {
                    state.busy.insert(key.clone(), now);
                }
                let holds = state
                    .held
                    .iter()
                    .any(|it| it.client == client && in_use(it));
                let waits =
                    (state.waiting.iter()).any(|it| it.client == client && it.keys.contains(&key));
                if holds || waits {
                    state.used.insert((client, key.clone()), now);
                    continue;
                }
                let used = state.used.get(&(client, key.clone())).copied();
                let is_over = used.is_some_and(|at| at + GIVEN_UP_WITHIN < now);
                if is_over
                    && state.clients[client].1 + QUEUED < now
                    && state.driver_ended.is_none_or(|at| at + QUEUED < now)
                    && self.keeps(&state, client, &key)
                {
                    let what = format!("{key} is left to client {client}");
                    wrong = Some((Wrong::Left, what));
                }
            }
        }
        if let Some((wrong, what)) = wrong {
            self.state_reports(&mut state, wrong, || what);
        }
    }

    /// Checks that the store is empty.
    pub(super) fn is_empty(&self) {
        let mut state = lock(&self.state);
        for key in KEYS.map(key) {
            for client in 0..state.clients.len() {
                if self.keeps(&state, client, &key) {
                    let what = || format!("{key} is left to client {client} at the end");
                    self.state_reports(&mut state, Wrong::Left, what);
                }
            }
        }
    }

    fn forget(&self, id: u64) {
        let now = Instant::now();
        let mut state = lock(&self.state);
        let State {
            held,
            waiting,
            used,
            busy,
            ..
        } = &mut *state;
        let mut dropped = None;
        if let Some(index) = held.iter().position(|it| it.id == id) {
            let guard = held.swap_remove(index);
            for (key, _) in guard.view.fences() {
                used.insert((guard.client, key.clone()), now);
                busy.insert(key.clone(), now);
            }
            dropped = Some(guard);
        }
        if let Some(index) = waiting.iter().position(|it| it.id == id) {
            let request = waiting.swap_remove(index);
            for key in request.keys {
                used.insert((request.client, key.clone()), now);
            }
        }
        drop(state);
        drop(dropped);
    }
}

/// A request or a guard that is recorded until this is dropped.
pub(super) struct Recorded(Arc<World>, u64);

impl Drop for Recorded {
    fn drop(&mut self) {
        self.0.forget(self.1);
    }
}

pub(super) fn key(name: &str) -> LockKey {
    LockKey::new(name).expect("a key")
}

/// The number of schedules, unless the environment sets it.
pub(super) fn schedules(usual: u64) -> u64 {
    explore::from_environment("LOCK_EXPLORER_SCHEDULES").unwrap_or(usual)
}
