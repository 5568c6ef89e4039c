//! The locks that this process holds: their guards, their renewal and their loss.

pub(super) mod convert;
pub(super) mod ended;
pub(super) mod keeping;
pub(super) mod lease;
pub(super) mod reenter;

use std::{sync::Arc, time::Duration};

use self::lease::{Correction, Due, LONGEST_SLACK, Lease};
use super::{
    Cx, Effect, HeldId, Mutation, Note, Session,
    abandon::Ending,
    message::{Answer, Call, Reply, Request},
    queue::handoff::{Budget, Handoff},
};
use crate::{
    error::Loss,
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::{LockKind, Mode, Terms},
    shell::time::Instant,
    store::{Hold, HolderId, RenewReply, Renewal, StoreError, StoreErrorKind, Token},
};

/// After a broken connection, every lease is renewed within this time.
pub(crate) const CHECK_WITHIN: Duration = Duration::from_millis(200);

/// A lock that has just been granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) held: HeldId,
    pub(crate) fence: FencingToken,
    pub(crate) valid_until: Instant,
    /// When `max_hold` has passed.
    pub(crate) ends_at: Option<Instant>,
    /// The request had competitors.
    pub(crate) contended: bool,
    pub(crate) source: Source,
}

/// The state that a lock was in before it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Free, or held in a mode that admits the request.
    Free,
    /// Held in this process, and handed off.
    Local,
    /// Retained by this process.
    Retained,
    /// Held by another holder, and granted from the store's wait queue.
    Queue,
}

/// A held lock. Its entry is removed when its last guard leaves.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Held {
    pub(super) hold: Hold,
    pub(super) fence: FencingToken,
    pub(super) terms: Terms,
    pub(super) lease: Lease,
    /// The longest lease that was requested: the store keeps the lock no longer without a renewal.
    pub(super) longest_lease: Duration,
    pub(super) correction: Correction,
    /// The end of `min_hold`, or of the time for which the result is kept.
    pub(super) keep_until: Option<Instant>,
    /// The result of the work, once it has ended.
    pub(super) result: Option<Arc<[u8]>>,
    /// The limits of local hand-offs.
    pub(super) budget: Option<Budget>,
    /// The number of guards on this lease: the first one and those that re-entered.
    pub(super) guards: usize,
    pub(super) loss: Option<Loss>,
    /// Another client waits for a lock that was to be retained.
    pub(super) is_wanted: bool,
    /// The position of the lease in the schedule.
    due: Option<Instant>,
}

/// A renewal to send, together with others of the same server and time-out.
#[derive(Debug)]
pub(crate) struct DueRenewal {
    pub(crate) held: HeldId,
    pub(crate) renewal: Renewal,
    pub(crate) timeout: Duration,
}

/// The reason why a lease was not extended.
#[derive(Clone, Debug)]
pub(crate) enum ExtendError {
    Lost(Loss),
    Released,
    Store(StoreError),
}

impl Held {
    /// A lock with one guard.
    #[inline]
    pub(super) fn new(
        hold: Hold,
        fence: FencingToken,
        terms: Terms,
        lease: Lease,
        budget: Option<Budget>,
    ) -> Self {
        Self {
            hold,
            fence,
            terms,
            lease,
            longest_lease: terms.lease,
            correction: Correction::default(),
            keep_until: None,
            result: None,
            budget,
            guards: 1,
            loss: None,
            is_wanted: false,
            due: None,
        }
    }

    /// Returns the renewal of the lease.
    pub(super) fn due_renewal(&mut self, id: HeldId) -> DueRenewal {
        DueRenewal {
            held: id,
            renewal: self.renewal(self.lease.length()),
            timeout: self.terms.call_timeout(),
        }
    }

    /// Returns a renewal that keeps the lock for at least `lease`.
    fn renewal(&mut self, lease: Duration) -> Renewal {
        let at_most = self.correction.at_most(self.longest_lease);
        Renewal::new(self.hold.clone(), lease).at_most(at_most)
    }

    /// Returns how long the lock is surely still held.
    pub(super) fn validity(&self, now: Instant) -> Duration {
        match self.loss {
            Some(_) => Duration::ZERO,
            None => self.lease.validity(now),
        }
    }
}

impl Session {
    /// Starts holding a lock. Its `min_hold` counts from now: the store may have granted it only
    /// just before the reply.
    pub(super) fn hold(&mut self, mut held: Held, cx: &mut Cx<'_>) -> Granted {
        let keep_until = || held.terms.min_hold.map(|min_hold| cx.now + min_hold);
        held.keep_until = held.keep_until.or_else(keep_until);
        let (fence, lease) = (held.fence, &held.lease);
        let (valid_until, ends_at) = (lease.valid_until(), lease.ends_at());
        let late_at = lease.late_at();
        let held = self.held.insert(held);
        self.plan_lease(held, cx);
        self.watch_by(late_at, cx);
        Granted {
            held,
            fence,
            valid_until,
            ends_at,
            contended: false,
            source: Source::Free,
        }
    }

    /// Returns the hold of a lock that is held.
    pub(crate) fn hold_of(&self, id: HeldId) -> Option<&Hold> {
        let held = self.held.get(id).filter(|held| held.loss.is_none());
        held.map(|held| &held.hold)
    }

    /// Reserves a held lock for at least `min_hold` from now.
    pub(crate) fn reserve(&mut self, id: HeldId, min_hold: Duration, cx: &Cx<'_>) {
        if let Some(held) = self.held.get_mut(id) {
            held.keep_until = Some(cx.now + min_hold);
        }
    }

    /// Moves a lease to its position in the schedule.
    pub(super) fn plan_lease(&mut self, id: HeldId, cx: &mut Cx<'_>) {
        let held = &mut self.held[id];
        let due = held.loss.is_none().then(|| held.lease.next_due());
        if due == held.due {
            return;
        }
        held.due = due;
        let Some(at) = due else { return };
        let held = &self.held;
        let counts = |at, id| held.get(id).is_some_and(|held| held.due == Some(at));
        if self.leases.add(at, id, held.len(), counts) {
            cx.rouse();
        }
    }

    /// Adds a guard to a lease. Returns `false` if the last guard has already left.
    pub(crate) fn reenter(&mut self, id: HeldId, cx: &mut Cx<'_>) -> Result<bool, Loss> {
        self.notice_loss(id, cx);
        let Some(held) = self.held.get_mut(id) else {
            return Ok(false);
        };
        if let Some(loss) = held.loss {
            return Err(loss);
        }
        held.guards += 1;
        Ok(true)
    }

    /// Handles the leases that are due, and adds the renewals to send to `renewals`. A renewal
    /// that is not sent at once does not delay the detection of a loss.
    pub(crate) fn due_renewals(&mut self, renewals: &mut Vec<DueRenewal>, cx: &mut Cx<'_>) {
        let mut due = Vec::new();
        // None is renewed early unless an entry is due, as only then they share a round trip.
        if !self.leases.is_due(cx.now) {
            return;
        }
        while let Some((at, id)) = self.leases.pop(cx.now + LONGEST_SLACK) {
            if self.held.get(id).is_some_and(|held| held.due == Some(at)) {
                due.push(id);
            }
        }
        for id in due {
            // An earlier one may have been the reason for its loss.
            let Some(held) = self.held.get_mut(id) else {
                continue;
            };
            held.due = None;
            if held.loss.is_some() {
                continue;
            }
            match held.lease.due(cx.now) {
                Some(Due::Lost(loss)) => {
                    self.lose(id, loss, cx);
                    continue;
                }
                Some(Due::Renew) => renewals.push(held.due_renewal(id)),
                Some(Due::Warn) => {
                    cx.note(|| Note::HeldLong(held.hold.key.clone(), held.terms.lease));
                }
                None => {}
            }
            self.plan_lease(id, cx);
        }
    }

    /// Returns whether the lock is still held, so that its renewal is still to be sent.
    pub(crate) fn is_held(&self, id: HeldId) -> bool {
        self.held.get(id).is_some_and(|held| held.loss.is_none())
    }

    /// Returns the readers and permits that have been held for the longest, at most `most`, each
    /// with the time since its grant.
    pub(crate) fn oldest_shares(&self, most: usize, now: Instant) -> Vec<(HolderId, Duration)> {
        let held = self.held.values().filter(|held| held.loss.is_none());
        let shares = held.filter(|held| held.hold.mode != Mode::Exclusive);
        let mut shares: Vec<_> = shares
            .map(|held| (held.lease.since(), &held.hold))
            .collect();
        shares.sort_unstable_by_key(|(since, _)| *since);
        let oldest = shares.into_iter().take(most);
        let entry = |(since, hold): (Instant, &Hold)| {
            let id = HolderId::of(&hold.key, hold.token, false);
            (id, now.saturating_duration_since(since))
        };
        oldest.map(entry).collect()
    }

    /// Records the answer to a renewal sent at `sent`.
    pub(crate) fn renewal_replied(
        &mut self,
        id: HeldId,
        answer: Result<RenewReply, StoreError>,
        sent: Instant,
        cx: &mut Cx<'_>,
    ) {
        // A guard may have reported the loss already, so it stands.
        self.notice_loss(id, cx);
        let Some(held) = self.held.get_mut(id).filter(|held| held.loss.is_none()) else {
            return;
        };
        match answer {
            Ok(RenewReply::Renewed { ttl }) => {
                let counted = held.correction.counted(ttl, held.longest_lease);
                held.lease.renewed(sent, counted, cx.fraction(), cx.now);
                cx.debug(|| Note::Renewed(held.hold.key.clone(), held.fence, ttl));
                cx.out.push(Effect::Extended {
                    held: id,
                    valid_until: held.lease.valid_until(),
                    is_renewal: true,
                });
            }
            Ok(RenewReply::Gone) => return self.lose(id, Loss::Taken, cx),
            Err(_) => held.lease.renewal_failed(cx.now),
        }
        self.plan_lease(id, cx);
    }

    /// Begins to extend a lease to at least `lease` from now. Zero only queries whether the
    /// lock is held. The answer goes to [`extend_replied`](Self::extend_replied).
    pub(crate) fn extend(
        &mut self,
        id: HeldId,
        lease: Duration,
        cx: &mut Cx<'_>,
    ) -> Result<Call, ExtendError> {
        self.notice_loss(id, cx);
        let Some(held) = self.held.get_mut(id) else {
            return Err(ExtendError::Released);
        };
        if let Some(loss) = held.loss {
            return Err(ExtendError::Lost(loss));
        }
        held.longest_lease = held.longest_lease.max(lease);
        let renewal = held.renewal(lease);
        let timeout = held.terms.call_timeout();
        Ok(Call::new(Request::Renew(renewal), timeout))
    }

    /// Records the answer to an extension sent at `sent`. The lease is valid from then on for as
    /// long as the store has stated.
    pub(crate) fn extend_replied(
        &mut self,
        id: HeldId,
        answer: Answer,
        sent: Instant,
        cx: &mut Cx<'_>,
    ) -> Result<(), ExtendError> {
        // A guard may have reported the loss already, so it stands.
        self.notice_loss(id, cx);
        let ttl = match answer {
            Ok(Reply::Renew(RenewReply::Renewed { ttl })) => ttl,
            Ok(_) => {
                self.lose(id, Loss::Taken, cx);
                return Err(ExtendError::Lost(Loss::Taken));
            }
            Err(error) => return Err(ExtendError::Store(error)),
        };
        let Some(held) = self.held.get_mut(id) else {
            return Err(ExtendError::Released);
        };
        if let Some(loss) = held.loss {
            return Err(ExtendError::Lost(loss));
        }
        let ttl = held.correction.counted(ttl, held.longest_lease);
        let is_dropped = cx.breaks(Mutation::DropsOvertaken) && held.lease.is_overtaken(sent);
        let is_extended = is_dropped || held.lease.reported(sent, ttl, cx.now);
        cx.out.push(Effect::Extended {
            held: id,
            valid_until: held.lease.valid_until(),
            is_renewal: false,
        });
        self.plan_lease(id, cx);
        if is_extended {
            Ok(())
        } else {
            Err(ExtendError::Store(shortened()))
        }
    }

    /// Records the loss of a lock. Its listeners are notified once, and the token is given up, as
    /// the store may not know of the loss yet (rule 9).
    pub(super) fn lose(&mut self, id: HeldId, loss: Loss, cx: &mut Cx<'_>) {
        let Some(held) = self.held.get_mut(id).filter(|held| held.loss.is_none()) else {
            return;
        };
        held.loss = Some(loss);
        held.due = None;
        let lease = match cx.breaks(Mutation::LosesForOneLease) {
            false => held.longest_lease,
            true => held.terms.lease,
        };
        let hold = held.hold.clone();
        // A lock that was taken away is not reserved.
        let is_taken = matches!(loss, Loss::Taken | Loss::Revoked);
        let keep_until = held.keep_until.filter(|_| !is_taken);
        cx.note(|| Note::Lost(hold.key.clone(), held.fence, loss));
        cx.out.push(Effect::Lost(id, loss));
        let ending = Ending::of(hold.clone(), keep_until, cx.now);
        self.end(ending, lease, None, None, cx);
        self.freed(hold.mode.kind(), &hold.key, cx);
    }

    /// Records a loss that the clock shows and the driver has not noticed yet.
    pub(super) fn notice_loss(&mut self, id: HeldId, cx: &mut Cx<'_>) {
        let held = self.held.get(id);
        if let Some(loss) = held.and_then(|held| held.lease.loss(cx.now)) {
            self.lose(id, loss, cx);
        }
    }

    /// Returns the tokens of this process that a revocation of `key` takes away.
    pub(crate) fn holders_of(&self, kind: LockKind, key: &LockKey) -> Vec<Token> {
        let held = self.held.values().map(|held| &held.hold);
        let handed_off = self.queues.values().flat_map(|queue| &queue.handoff);
        let handed_off = handed_off.chain(self.retention.holds());
        let holds = held.chain(handed_off.map(|handoff| &handoff.hold));
        let revoked = holds.filter(|hold| hold.key == *key && hold.mode.kind() == kind);
        revoked.map(|hold| hold.token).collect()
    }

    /// Records that the store has taken the lock away from a token. Its grant may be on its way to
    /// this process, or from one holder to the next.
    pub(super) fn revoke(&mut self, token: Token, cx: &mut Cx<'_>) {
        let mut held = self.held.iter();
        if let Some((id, _)) = held.find(|(_, held)| held.hold.token == token) {
            return self.lose(id, Loss::Revoked, cx);
        }
        if self.release_revoked(token) || self.revoke_retained(token, cx) {
            return;
        }
        let mut converted = self.conversions.values_mut();
        if let Some(it) = converted.find(|it| it.writer.hold.token == token) {
            (it.writer.loss, it.writer.keep_until) = (Some(Loss::Revoked), None);
            return;
        }
        let revoked = self.queues.values_mut().find_map(|queue| {
            let handoff = queue.handoff.take_if(|it| it.hold.token == token)?;
            queue.freed(cx);
            Some(handoff)
        });
        match revoked {
            Some(Handoff { hold, lease, .. }) => self.abandon(hold, lease.length(), None, cx),
            None => self.revoke_untaken(token, cx),
        }
    }

    /// Records that `holders` have been revoked.
    pub(crate) fn revoked(
        &mut self,
        kind: LockKind,
        key: &LockKey,
        holders: &[Token],
        cx: &mut Cx<'_>,
    ) {
        for token in holders {
            self.revoke(*token, cx);
        }
        self.freed(kind, key, cx);
    }

    /// Returns whether a lease of this process surely excludes a request for `key` in `mode`.
    pub(super) fn excludes(&self, key: &LockKey, mode: Mode, now: Instant) -> bool {
        self.held.values().any(|held| {
            let excludes = held.hold.mode == Mode::Exclusive || mode == Mode::Exclusive;
            excludes
                && held.hold.key == *key
                && held.hold.mode.kind() == mode.kind()
                && !held.validity(now).is_zero()
        })
    }

    /// Removes a lock whose last guard leaves.
    pub(super) fn remove_held(&mut self, id: HeldId, cx: &mut Cx<'_>) -> Option<Held> {
        cx.out.push(Effect::Released(id));
        self.held.remove(id)
    }

    /// Renews every lease soon, as the store may have lost data.
    pub(super) fn renew_all_soon(&mut self, cx: &mut Cx<'_>) {
        for id in self.held.keys().collect::<Vec<_>>() {
            let held = &mut self.held[id];
            let within = CHECK_WITHIN.mul_f64(cx.fraction());
            held.lease.hurry(cx.now + within);
            self.plan_lease(id, cx);
        }
    }

    /// Plans again every renewal whose answer will not arrive.
    pub(super) fn renewals_interrupted(&mut self, cx: &mut Cx<'_>) {
        self.leases.unchecked();
        for id in self.held.keys().collect::<Vec<_>>() {
            let held = &mut self.held[id];
            held.lease.renewal_failed(cx.now);
            self.plan_lease(id, cx);
        }
        if !self.leases.is_empty() {
            cx.rouse();
        }
    }
}

fn shortened() -> StoreError {
    let message = "another program has shortened the lease; extend it again";
    StoreError::new(StoreErrorKind::Unavailable, message)
}
