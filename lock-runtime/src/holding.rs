//! One lock that this process holds, shared by its guards, their views, the enclosing
//! frames and the driver.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{runtime::Handle, time::Instant};

use crate::{
    call::{renew_one, within},
    client::Core,
    driver::CleanUp,
    error::{LockError, LockErrorKind, Loss},
    fence::FencingToken,
    gate::{Baton, Budget, PASSES, Parting},
    lease::{Due, Lease},
    runtime,
    spec::{Mode, Terms, call_timeout},
    store::{ConvertReply, Grant, HANDOFF_LEASE, Hold, NextHolder, Release, RenewReply, Renewal},
    sync::lock,
};

/// How soon a grant from the wait queue is renewed. Not at once: most critical sections end
/// earlier and then need no renewal.
pub(crate) const CONFIRM_WITHIN: Duration = Duration::from_millis(100);

/// A lock that this process holds or has held.
pub(crate) struct Holding {
    core: Arc<Core>,
    id: u64,
    hold: Hold,
    fence: FencingToken,
    terms: Terms,
    /// When the lock was requested or taken over; `min_hold` and `max_hold` count from here.
    since: Instant,
    /// The limits of local hand-offs.
    budget: Option<Budget>,
    /// The runtime on which the lock was acquired. It may outlive the driver's runtime.
    runtime: Handle,
    state: Mutex<State>,
}

/// The state of renewal and release. One state machine owns both, so that no renewal is sent
/// after the release (PROTOCOL 13).
#[derive(Debug)]
struct State {
    lease: Lease,
    /// The number of renewals that the store has confirmed.
    renewals: u64,
    phase: Phase,
    /// The number of guards on this lease: the first one and those that re-entered.
    guards: usize,
    /// The position of the lease in the driver's schedule.
    planned: Option<Instant>,
    /// The wakers to be woken by a loss, by listener number.
    listeners: Vec<(u64, Waker)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    Released,
    Lost(Loss),
}

/// A change of position in the driver's schedule.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) before: Option<Instant>,
    pub(crate) after: Option<Instant>,
}

/// The work that remains after a guard has left.
#[derive(Debug)]
pub(crate) enum Left {
    /// Another guard still uses the lease.
    Shared,
    /// It was the last guard: the lock must be released.
    Last(Release),
    /// The lock was lost; there is nothing to release.
    Lost(Loss),
}

impl Holding {
    /// Starts holding a grant from the reply to a request sent at `sent`. Returns `None` if the
    /// grant has no validity left.
    pub(crate) fn start(
        core: &Arc<Core>,
        hold: Hold,
        grant: Grant,
        sent: Instant,
        terms: Terms,
    ) -> Option<Arc<Self>> {
        let lease = Lease::granted(terms.lease, terms.renew, sent, grant.ttl, rand::random());
        let now = Instant::now();
        let budget = terms
            .wish()
            .passing
            .then(|| Budget::new(grant.reserved, sent, now));
        Self::begin(
            core,
            hold,
            grant.fence,
            lease.held_since(sent, terms.max_hold),
            budget,
            terms,
            now,
        )
    }

    /// Starts holding a grant from the wait queue, whose short lease counts from `as_of`
    /// (PROTOCOL 4). Returns `None` if the grant must be confirmed first: too little of it is
    /// left, or renewal is off.
    pub(crate) fn handed_over(
        core: &Arc<Core>,
        hold: Hold,
        grant: Grant,
        as_of: Instant,
        terms: Terms,
    ) -> Option<Arc<Self>> {
        if !terms.renew {
            return None;
        }
        let now = Instant::now();
        let ttl = grant.ttl.min(HANDOFF_LEASE).min(terms.lease);
        let mut lease = Lease::granted(terms.lease, true, as_of, ttl, rand::random());
        lease.hurry(now + CONFIRM_WITHIN);
        // With less validity than a renewal may take, the lock would be lost at once.
        if lease.validity(now) <= call_timeout(terms.lease) {
            return None;
        }
        let budget = terms
            .wish()
            .passing
            .then(|| Budget::new(grant.reserved, as_of, now));
        Self::begin(
            core,
            hold,
            grant.fence,
            lease.held_since(now, terms.max_hold),
            budget,
            terms,
            now,
        )
    }

    /// Takes over the lock of the previous holder in this process. Returns the hold to release if
    /// no validity is left.
    pub(crate) fn passed(core: &Arc<Core>, baton: Baton, terms: Terms) -> Result<Arc<Self>, Hold> {
        let Baton {
            hold,
            fence,
            lease,
            budget,
        } = baton;
        let now = Instant::now();
        let lease = lease.held_since(now, terms.max_hold);
        Self::begin(core, hold.clone(), fence, lease, Some(budget), terms, now).ok_or(hold)
    }

    fn begin(
        core: &Arc<Core>,
        hold: Hold,
        fence: FencingToken,
        lease: Lease,
        budget: Option<Budget>,
        terms: Terms,
        now: Instant,
    ) -> Option<Arc<Self>> {
        if lease.validity(now).is_zero() {
            return None;
        }
        // The request was made within a runtime.
        let runtime = Handle::try_current().ok()?;
        let since = lease.since();
        let state = State {
            lease,
            renewals: 0,
            phase: Phase::Held,
            guards: 1,
            planned: None,
            listeners: Vec::new(),
        };
        let holding = Arc::new(Self {
            core: core.clone(),
            id: core.next_id(),
            hold,
            fence,
            terms,
            since,
            budget,
            runtime,
            state: Mutex::new(state),
        });
        core.driver.plan(core, &holding);
        Some(holding)
    }

    /// Returns until when the lock may be handed off locally, or taken up again for the
    /// waiters of this process.
    pub(crate) fn passing_until(&self) -> Option<Instant> {
        self.budget.map(|budget| budget.until)
    }

    /// After [`Left::Last`]: hands off the lock if a waiter of this process may take it.
    /// Otherwise returns the release to send, which may take the lock up again for the
    /// waiters of this process.
    pub(crate) fn part(&self, release: Release) -> Option<Release> {
        let Some(budget) = self.budget.filter(|_| release.keep_for.is_none()) else {
            return Some(release);
        };
        let baton = |now| {
            let lease = lock(&self.state).lease.passed_on(now);
            Baton::new(self.hold.clone(), self.fence, lease, budget, now)
        };
        match self
            .core
            .gates
            .part(&self.hold.key, self.terms.lease, baton)
        {
            Parting::Passed => {
                tracing::debug!(key = %self.hold.key, fence = %self.fence, "handed off in this process");
                None
            }
            Parting::HandBack(token) => {
                Some(release.next(NextHolder::new(token, self.terms.lease, PASSES)))
            }
            Parting::GiveBack => Some(release),
        }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn hold(&self) -> &Hold {
        &self.hold
    }

    pub(crate) fn fence(&self) -> FencingToken {
        self.fence
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Returns how long the lock is surely still held; zero after a loss or a release.
    pub(crate) fn validity(&self) -> Duration {
        let state = lock(&self.state);
        match state.phase {
            Phase::Held => state.lease.validity(Instant::now()),
            Phase::Released | Phase::Lost(_) => Duration::ZERO,
        }
    }

    pub(crate) fn renewals(&self) -> u64 {
        lock(&self.state).renewals
    }

    /// Returns how the lock was lost, if it was. The local clock decides, so the driver
    /// need not have noticed.
    pub(crate) fn loss(&self) -> Option<Loss> {
        let state = lock(&self.state);
        match state.phase {
            Phase::Lost(loss) => Some(loss),
            Phase::Held => state.lease.loss(Instant::now()),
            Phase::Released => None,
        }
    }

    pub(crate) fn lost_error(&self, loss: Loss) -> LockError {
        let message = match loss {
            Loss::Expired => "lost: renewal did not succeed before the lease ran out",
            Loss::Taken => "lost: the store no longer knows this grant",
            Loss::Revoked => "lost: it was revoked",
            Loss::MaxHold => "lost: max_hold has passed",
        };
        LockError::new(LockErrorKind::Lost(loss), message).with_key(&self.hold.key)
    }

    /// Resolves with the loss once there is one. Until then `listener` is registered to be woken.
    pub(crate) fn poll_loss(&self, listener: u64, cx: &Context<'_>) -> Poll<Loss> {
        if let Some(loss) = self.loss() {
            return Poll::Ready(loss);
        }
        let mut state = lock(&self.state);
        if let Phase::Lost(loss) = state.phase {
            return Poll::Ready(loss);
        }
        match state
            .listeners
            .iter_mut()
            .find(|(number, _)| *number == listener)
        {
            Some((_, waker)) => waker.clone_from(cx.waker()),
            None => state.listeners.push((listener, cx.waker().clone())),
        }
        Poll::Pending
    }

    /// Removes a listener.
    pub(crate) fn unlisten(&self, listener: u64) {
        lock(&self.state)
            .listeners
            .retain(|(number, _)| *number != listener);
    }

    /// Returns whether the last guard has left.
    pub(crate) fn is_released(&self) -> bool {
        lock(&self.state).phase == Phase::Released
    }

    /// Adds a guard to this lease. Returns `false` if the last guard has already left.
    pub(crate) fn enter(&self) -> Result<bool, LockError> {
        if let Some(loss) = self.loss() {
            return Err(self.lost_error(loss));
        }
        let mut state = lock(&self.state);
        let held = state.phase == Phase::Held;
        if held {
            state.guards += 1;
        }
        Ok(held)
    }

    /// As [`leave`](Self::leave), but only for the last guard. Returns `None` and does nothing if
    /// other guards use the lease.
    pub(crate) fn leave_alone(self: &Arc<Self>) -> Option<Left> {
        self.notice_loss();
        let state = lock(&self.state);
        (state.guards <= 1).then(|| self.leave_locked(state))
    }

    /// Removes a guard. With the last one renewal ends, before anything is sent.
    pub(crate) fn leave(self: &Arc<Self>) -> Left {
        self.notice_loss();
        self.leave_locked(lock(&self.state))
    }

    /// Records a loss that the clock shows and the driver has not noticed yet.
    fn notice_loss(self: &Arc<Self>) {
        if let Some(loss) = self.loss() {
            self.lose(loss);
        }
    }

    fn leave_locked(self: &Arc<Self>, mut state: MutexGuard<'_, State>) -> Left {
        state.guards = state.guards.saturating_sub(1);
        match state.phase {
            Phase::Lost(loss) => Left::Lost(loss),
            _ if state.guards > 0 => Left::Shared,
            _ => {
                state.phase = Phase::Released;
                drop(state);
                self.core.driver.plan(&self.core, self);
                let keep_for = self
                    .terms
                    .min_hold
                    .and_then(|min_hold| min_hold.checked_sub(self.since.elapsed()));
                Left::Last(Release::new(self.hold.clone()).keep_for(keep_for))
            }
        }
    }

    /// Returns the action that is due for this lease now. A loss is handled here.
    pub(crate) fn turn(self: &Arc<Self>, now: Instant) -> Option<Due> {
        let mut state = lock(&self.state);
        // The driver has just taken it off the schedule.
        state.planned = None;
        if state.phase != Phase::Held {
            return None;
        }
        let due = state.lease.due(now);
        drop(state);
        match due {
            Some(Due::Lost(loss)) => self.lose(loss),
            Some(Due::Warn) => {
                tracing::warn!(key = %self.hold.key, lease = ?self.terms.lease, "held for ten leases; if its holder may hang, set `max_hold`");
            }
            Some(Due::Renew) | None => {}
        }
        due
    }

    /// Moves the lease in the schedule; returns its old and its new position.
    pub(crate) fn plan(&self) -> Plan {
        let mut state = lock(&self.state);
        let after = (state.phase == Phase::Held).then(|| state.lease.next_due());
        Plan {
            before: std::mem::replace(&mut state.planned, after),
            after,
        }
    }

    /// Returns the renewal to send, or `None` when the lease is over.
    pub(crate) fn renewal(&self) -> Option<Renewal> {
        let state = lock(&self.state);
        (state.phase == Phase::Held).then(|| Renewal::new(self.hold.clone(), state.lease.length()))
    }

    /// Records the TTL from the reply to a renewal sent at `sent`.
    pub(crate) fn renewed(self: &Arc<Self>, sent: Instant, ttl: Duration) {
        let mut state = lock(&self.state);
        state.lease.renewed(sent, ttl, rand::random());
        state.renewals += 1;
        drop(state);
        tracing::trace!(key = %self.hold.key, fence = %self.fence, ?ttl, "renewed");
        self.core.driver.plan(&self.core, self);
    }

    /// Records that the renewal in flight has failed.
    pub(crate) fn renewal_failed(self: &Arc<Self>) {
        lock(&self.state).lease.renewal_failed(Instant::now());
        self.core.driver.plan(&self.core, self);
    }

    /// Schedules a renewal by `within` from now, if none is due earlier.
    pub(crate) fn hurry(self: &Arc<Self>, within: Duration) {
        lock(&self.state).lease.hurry(Instant::now() + within);
        self.core.driver.plan(&self.core, self);
    }

    /// Records the loss of the lock. Wakes every listener once and abandons the token, as the
    /// store may not know of the loss yet (PROTOCOL 9).
    pub(crate) fn lose(self: &Arc<Self>, loss: Loss) {
        let mut state = lock(&self.state);
        if state.phase != Phase::Held {
            return;
        }
        state.phase = Phase::Lost(loss);
        let listeners = std::mem::take(&mut state.listeners);
        drop(state);
        tracing::warn!(key = %self.hold.key, fence = %self.fence, loss = ?loss, "lost");
        listeners.into_iter().for_each(|(_, waker)| waker.wake());
        self.core.driver.plan(&self.core, self);
        self.core.driver.clean_up(
            &self.core,
            CleanUp::abandon(self.hold.clone(), self.terms.lease, None),
        );
        self.core
            .gates
            .released(&self.hold.key, self.hold.mode.kind());
    }

    /// Extends the lease to at least `lease` from now. Zero only queries whether the
    /// lock is held.
    pub(crate) async fn extend(self: &Arc<Self>, lease: Duration) -> Result<(), LockError> {
        if let Some(loss) = self.loss() {
            return Err(self.lost_error(loss));
        }
        if self.is_released() {
            let message = "no longer held: it was released";
            return Err(
                LockError::new(LockErrorKind::Lost(Loss::Taken), message).with_key(&self.hold.key)
            );
        }
        runtime::check().map_err(|error| error.with_key(&self.hold.key))?;
        let patience = call_timeout(self.terms.lease);
        let sent = Instant::now();
        let renewal = Renewal::new(self.hold.clone(), lease);
        match renew_one(&self.core, patience, &renewal).await {
            Ok(RenewReply::Renewed { ttl }) => {
                lock(&self.state).lease.reported(sent, ttl);
                self.core.driver.plan(&self.core, self);
                Ok(())
            }
            Ok(RenewReply::Gone) => {
                self.lose(Loss::Taken);
                Err(self.lost_error(Loss::Taken))
            }
            Err(error) => Err(LockError::from_store(error).with_key(&self.hold.key)),
        }
    }

    /// Converts the writer to a reader at the store. The writer's lease must have ended here
    /// before ([`leave`](Self::leave)).
    pub(crate) async fn convert(self: &Arc<Self>) -> Result<Arc<Self>, LockError> {
        let patience = call_timeout(self.terms.lease);
        let sent = Instant::now();
        let reply = within(patience, self.core.store.convert(&self.hold))
            .await
            .map_err(|error| LockError::from_store(error).with_key(&self.hold.key))?;
        let grant = match reply {
            ConvertReply::Converted(grant) => grant,
            ConvertReply::NotHeld => return Err(self.lost_error(Loss::Taken)),
        };
        let hold = Hold::new(self.hold.key.clone(), Mode::Shared, self.hold.token);
        // The limits of the writer continue for the reader; they do not start again.
        let left = |limit: Duration| limit.saturating_sub(self.since.elapsed());
        let (min_hold, max_hold) = (self.terms.min_hold.map(left), self.terms.max_hold.map(left));
        let terms = Terms {
            mode: Mode::Shared,
            min_hold,
            max_hold,
            ..self.terms
        };
        Self::start(&self.core, hold, grant, sent, terms)
            .ok_or_else(|| self.lost_error(Loss::Expired))
    }
}
