//! One lock that this process holds: shared by its guards, their views, the frames that cover it, and the driver.

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
    store::{ConvertReply, Grant, HANDED_OVER, Hold, Next, Release, RenewReply, Renewal},
    sync::lock,
};

/// A grant out of the line is renewed so soon. Not at once: most critical sections are over before, and cost the store nothing.
pub(crate) const CONFIRM_WITHIN: Duration = Duration::from_millis(100);

/// A lock that this process holds, or held.
pub(crate) struct Holding {
    core: Arc<Core>,
    id: u64,
    hold: Hold,
    fence: FencingToken,
    terms: Terms,
    /// When it was asked for, or handed over: `min_hold` and `max_hold` count from here.
    since: Instant,
    /// How far it may be passed on in this process.
    budget: Option<Budget>,
    /// Where it was taken: if the driver's runtime ends, this one may still live.
    runtime: Handle,
    state: Mutex<State>,
}

/// One state machine owns renewal and release, so that no renewal is sent after the release (PROTOCOL 13).
#[derive(Debug)]
struct State {
    lease: Lease,
    /// So many the store has confirmed.
    renewals: u64,
    phase: Phase,
    /// Guards that stand on this lease: the first and those that re-entered.
    guards: usize,
    /// Where the driver's schedule has it.
    planned: Option<Instant>,
    /// Who wants to hear of the loss, by the number of the listener.
    listeners: Vec<(u64, Waker)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    Released,
    Lost(Loss),
}

/// A move in the driver's schedule.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) before: Option<Instant>,
    pub(crate) after: Option<Instant>,
}

/// What is left to do for a guard that leaves.
#[derive(Debug)]
pub(crate) enum Left {
    /// Another guard still stands on the lease.
    Shared,
    /// It was the last one: give the lock back.
    Last(Release),
    /// There is nothing to give back any more.
    Lost(Loss),
}

impl Holding {
    /// Starts to look after a grant that the reply to a request sent at `sent` brought. `None` if it has no validity left.
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
            .then(|| Budget::new(grant.spare, sent, now));
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

    /// Starts to look after a grant out of the line, which is short and counts from `as_of` (PROTOCOL 4). `None` if it is to be
    /// confirmed first: too little is left of it, or nobody will renew it.
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
        let ttl = grant.ttl.min(HANDED_OVER).min(terms.lease);
        let mut lease = Lease::granted(terms.lease, true, as_of, ttl, rand::random());
        lease.hurry(now + CONFIRM_WITHIN);
        // With less than a renewal may take it would be lost at once.
        if lease.validity(now) <= call_timeout(terms.lease) {
            return None;
        }
        let budget = terms
            .wish()
            .passing
            .then(|| Budget::new(grant.spare, as_of, now));
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

    /// Goes on with the lock of somebody else in this process. If nothing is left of it, it is to be given back.
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
        // Where the request was made there was one.
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

    /// Until when it may be passed on in this process, or handed back for those who wait here.
    pub(crate) fn passing_until(&self) -> Option<Instant> {
        self.budget.map(|budget| budget.until)
    }

    /// After [`Left::Last`]: passes the lock on in this process, if somebody waits for it and may have it. Otherwise the release
    /// to be sent is returned, which may take the lock up again for those who wait here.
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
                tracing::debug!(key = %self.hold.key, fence = %self.fence, "passed on in this process");
                None
            }
            Parting::HandBack(token) => {
                Some(release.next(Next::new(token, self.terms.lease, PASSES)))
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

    /// What is surely left; zero when it was lost or released.
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

    /// How it was lost, if it was. By our own clock, so without waiting for the driver to notice.
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

    /// Is ready with the loss once there is one; until then `listener` is woken when it comes.
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

    /// `listener` is gone.
    pub(crate) fn unlisten(&self, listener: u64) {
        lock(&self.state)
            .listeners
            .retain(|(number, _)| *number != listener);
    }

    /// Has the last guard left?
    pub(crate) fn is_released(&self) -> bool {
        lock(&self.state).phase == Phase::Released
    }

    /// Lets one more guard stand on this lease; `false` if the last one has left.
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

    /// As [`leave`](Self::leave), but only for the last guard; `None`, and nothing is done, if others stand on the lease.
    pub(crate) fn leave_alone(self: &Arc<Self>) -> Option<Left> {
        self.notice_loss();
        let state = lock(&self.state);
        (state.guards <= 1).then(|| self.leave_locked(state))
    }

    /// One guard less. With the last one renewal ends, before anything is sent.
    pub(crate) fn leave(self: &Arc<Self>) -> Left {
        self.notice_loss();
        self.leave_locked(lock(&self.state))
    }

    /// The clock may know of a loss before the driver does.
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

    /// What the driver is to do with this lease now. A loss is dealt with here.
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
                tracing::warn!(key = %self.hold.key, lease = ?self.terms.lease, "held for ten leases; is its holder alive? `max_hold` would end it");
            }
            Some(Due::Renew) | None => {}
        }
        due
    }

    /// Where the schedule has this lease and where it is to have it.
    pub(crate) fn plan(&self) -> Plan {
        let mut state = lock(&self.state);
        let after = (state.phase == Phase::Held).then(|| state.lease.next_due());
        Plan {
            before: std::mem::replace(&mut state.planned, after),
            after,
        }
    }

    /// The renewal to send; `None` when the lease is over.
    pub(crate) fn renewal(&self) -> Option<Renewal> {
        let state = lock(&self.state);
        (state.phase == Phase::Held).then(|| Renewal::new(self.hold.clone(), state.lease.length()))
    }

    /// The store said, in reply to a renewal sent at `sent`, that `ttl` is left.
    pub(crate) fn renewed(self: &Arc<Self>, sent: Instant, ttl: Duration) {
        let mut state = lock(&self.state);
        state.lease.renewed(sent, ttl, rand::random());
        state.renewals += 1;
        drop(state);
        tracing::trace!(key = %self.hold.key, fence = %self.fence, ?ttl, "renewed");
        self.core.driver.plan(&self.core, self);
    }

    /// The renewal that was sent has failed.
    pub(crate) fn renewal_failed(self: &Arc<Self>) {
        lock(&self.state).lease.renewal_failed(Instant::now());
        self.core.driver.plan(&self.core, self);
    }

    /// Renews by `within` from now instead of later.
    pub(crate) fn hurry(self: &Arc<Self>, within: Duration) {
        lock(&self.state).lease.hurry(Instant::now() + within);
        self.core.driver.plan(&self.core, self);
    }

    /// The lock is lost: everybody is told, once, and the token is given up, as the store may not know yet (PROTOCOL 9).
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
            .released(&self.hold.key, self.hold.mode.family());
    }

    /// Asks the store to keep the lock for at least `lease` from now; zero only asks whether it is held.
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
                lock(&self.state).lease.told(sent, ttl);
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

    /// Makes the writer a reader at the store; the lease of the writer must have ended here ([`leave`](Self::leave)).
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
        // The reader goes on where the writer was: its limits do not start anew.
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
