//! The release of a lock with its last guard: by a local hand-off, by a call in the caller's task,
//! or in the background.

use std::{sync::Arc, time::Duration};

use slotmap::SlotMap;

use super::{
    Cx, EndId, HeldId, Job, Mutation, Note, ReleaseId, Session,
    abandon::{Afterwards, Ending, PendingEnd},
    held::keeping::LATE,
    held::lease::Lease,
    message::{Answer, Call, Reply, Request},
    queue::entry::UNREPORTED,
    queue::handoff::{Budget, Handoff, MAX_HANDOFFS},
};
use crate::{
    error::Loss,
    request::spec::{LockKind, LockSpec, Mode, call_timeout},
    shell::time::Instant,
    store::{Hold, NextHolder, Release, ReleaseReply, StoreError, Token},
};

/// A release whose reply has not arrived.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Releasing {
    release: Release,
    /// The end of the reservation.
    keep_until: Option<Instant>,
    /// The longest time for which the store keeps the lock.
    lease: Duration,
    /// The time at which the call was sent, or `None` if the driver is to send it.
    sent: Option<Instant>,
    /// The driver sends the release, and not the caller's task. If its performer ends, the call
    /// ends with it.
    is_background: bool,
    /// An event has announced that the hold was revoked.
    is_revoked: bool,
}

/// The next step of a task that releases a lock.
#[derive(Debug)]
pub(crate) enum ReleaseStep {
    /// Make this call within this time, and pass its answer to [`Session::release_replied`], or
    /// call [`Session::release_dropped`].
    Call(ReleaseId, Release, Duration),
    Done(Result<Released, ReleaseError>),
}

/// The way in which a guard was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// Another guard uses the lease, or it was handed off in this process.
    Locally,
    AtStore,
}

/// The reason why a release was not confirmed.
#[derive(Clone, Debug)]
pub(crate) enum ReleaseError {
    /// The lock was lost before.
    Lost(Loss),
    /// The store no longer held the lock: it was revoked, or taken.
    NotHeld(Loss),
    /// The release continues in the background.
    Unknown(StoreError),
}

/// The work that remains after the removal of a guard.
enum Left {
    Over(Result<Released, ReleaseError>),
    /// A release, and the time-out of its call.
    Last(Releasing, Duration),
}

impl Releasing {
    /// The hold that takes up the lock again after the release, and its lease.
    fn next_holder(&self) -> Option<(Hold, Duration)> {
        let next = self.release.next?;
        let key = self.release.hold.key.clone();
        Some((Hold::new(key, Mode::Exclusive, next.token), next.lease))
    }

    /// An unanswered release no longer takes care of the token that it has named once its outcome
    /// is overdue: its task may be gone.
    #[cfg(test)]
    pub(super) fn knows(&self, token: Token, now: Instant) -> bool {
        // The head notices it a little later.
        let late = Duration::from_millis(50);
        let is_overdue = self.overdue_at().is_some_and(|at| now > at + late);
        self.release.hold.token == token || !is_overdue && self.names(token)
    }

    /// Returns when the outcome is overdue of a release that a task has sent.
    fn overdue_at(&self) -> Option<Instant> {
        let sent = self.sent.filter(|_| !self.is_background);
        sent.map(|sent| sent + UNREPORTED)
    }

    /// Returns whether the token takes up the lock again after the release.
    fn names(&self, token: Token) -> bool {
        self.release.next.is_some_and(|next| next.token == token)
    }

    /// Returns the request, which is sent at `now`.
    fn send(&mut self, now: Instant) -> Release {
        self.sent = Some(now);
        self.release.clone()
    }
}

impl Session {
    /// Returns the holds that the driver releases.
    pub(super) fn background_releases(&self) -> impl Iterator<Item = &Hold> {
        let releases = self.releases.values().filter(|it| it.is_background);
        releases.map(|it| &it.release.hold)
    }

    /// Removes a guard. With the last one, renewal ends before anything is sent (rule 13). A
    /// waiter of this process may take the lock over; otherwise it is released, and may be taken
    /// up again for the waiters of this process in the same step.
    fn part(&mut self, id: HeldId, cx: &mut Cx<'_>) -> Left {
        self.notice_loss(id, cx);
        let Some(held) = self.held.get_mut(id) else {
            return Left::Over(Ok(Released::Locally));
        };
        if held.result.is_some() && cx.breaks(Mutation::CompletesLost) {
            held.loss = None;
        }
        held.guards = held.guards.saturating_sub(1);
        let (is_last, loss) = (held.guards == 0, held.loss);
        let held = is_last.then(|| self.remove_held(id, cx)).flatten();
        if let Some(loss) = loss {
            return Left::Over(Err(ReleaseError::Lost(loss)));
        }
        let Some(held) = held else {
            return Left::Over(Ok(Released::Locally));
        };
        let keep_until = held.keep_until.filter(|until| *until > cx.now);
        let (terms, fence, longest_lease) = (held.terms, held.fence, held.longest_lease);
        let is_wanted = held.is_wanted;
        let mut release = Release::new(held.hold).keep_until(keep_until, cx.now);
        let result = held.result.filter(|_| keep_until.is_some());
        release.result = result.map(|result| (held.fence, result));
        let key = &release.hold.key;
        let data_lost_at = self.data_lost_at;
        let is_reserved = keep_until.is_some() && !cx.breaks(Mutation::HandsOffReserved);
        if let Some(mut budget) = held.budget.filter(|_| !is_reserved) {
            if cx.breaks(Mutation::HandsOffWithoutBudget) {
                budget.left = budget.left.max(1);
                budget.until = cx.now + terms.lease;
            }
            let is_sound = budget.is_after(data_lost_at)
                || cx.breaks(Mutation::HandsOffAfterDataLoss)
                || cx.breaks(Mutation::RetainsAfterDataLoss);
            // The store may keep a lock that was extended for longer than the next holder has asked
            // for, also if it has not replied to the extension yet. A renewal that corrects a lease
            // (rule 39) would shorten an extension of the next holder.
            let was_changed = longest_lease > terms.lease || held.correction.was_sent();
            let may_pass = is_sound && !was_changed && !is_wanted;
            if was_changed && terms.retain.is_some() {
                // Its fencing tokens were reserved in vain, and those of the next one would be.
                self.contended(key, cx.now);
            }
            let passed = || {
                let lease = held.lease.passed_on(cx.now);
                Handoff::new(release.hold.clone(), fence, lease, budget, cx.now)
            };
            if let Some((queue, claim)) = self.successor(key, terms.lease) {
                if let Some(handoff) = may_pass.then(passed).flatten() {
                    queue.hand_off(handoff, cx);
                    cx.debug(|| Note::HandedOff(key.clone(), fence));
                    return Left::Over(Ok(Released::Locally));
                }
                // A head with a queue entry is notified by the store.
                if queue.entry.is_none() {
                    let token = queue.open_entry(claim, cx);
                    release = release.next(NextHolder::new(token, terms.lease, MAX_HANDOFFS));
                }
            } else if may_pass
                && let Some(retain) = terms.retain.filter(|_| release.hold.token.retains())
                && self.queue_of(LockKind::Lock, key).is_none()
                && let Some(handoff) = passed()
                && self.retain(handoff, retain, longest_lease, cx)
            {
                return Left::Over(Ok(Released::Locally));
            }
        }
        let releasing = Releasing {
            release,
            keep_until,
            lease: longest_lease,
            sent: None,
            is_background: true,
            is_revoked: false,
        };
        Left::Last(releasing, terms.call_timeout())
    }

    /// Releases a guard on behalf of a task that waits for the outcome.
    pub(crate) fn release(&mut self, id: HeldId, cx: &mut Cx<'_>) -> ReleaseStep {
        match self.part(id, cx) {
            Left::Last(mut releasing, timeout) => {
                releasing.is_background = false;
                let release = releasing.send(cx.now);
                ReleaseStep::Call(self.releases.insert(releasing), release, timeout)
            }
            Left::Over(outcome) => ReleaseStep::Done(outcome),
        }
    }

    /// Releases a lock with the result of its work, which the store keeps for `keep`. Returns
    /// `None` if the lock is not exclusive, or has been re-entered.
    pub(crate) fn complete(
        &mut self,
        id: HeldId,
        (result, keep): (Arc<[u8]>, Duration),
        cx: &mut Cx<'_>,
    ) -> Option<ReleaseStep> {
        // A lock that was lost is not reserved.
        self.notice_loss(id, cx);
        let breaks = cx.breaks(Mutation::CompletesLost);
        let held = self.held.get_mut(id);
        if let Some(held) = held.filter(|held| held.loss.is_none() || breaks) {
            if held.guards > 1 || held.hold.mode != Mode::Exclusive {
                return None;
            }
            (held.keep_until, held.result) = (Some(cx.now + keep), Some(result));
        }
        Some(self.release(id, cx))
    }

    /// Releases a guard in the background.
    pub(crate) fn guard_dropped(&mut self, id: HeldId, cx: &mut Cx<'_>) {
        if cx.breaks(Mutation::CompletesDropped)
            && let Some(held) = self.held.get_mut(id)
        {
            held.result = Some(Arc::default());
            held.keep_until = Some(cx.now + held.terms.lease);
        }
        if let Left::Last(releasing, _) = self.part(id, cx) {
            if releasing.release.next.is_some() {
                let id = self.releases.insert(releasing);
                self.plan_job(cx.now, Job::Release(id), cx);
            } else {
                self.release_until_confirmed(releasing, cx);
            }
        }
    }

    /// Continues a release in the background whose future was dropped.
    pub(crate) fn release_dropped(&mut self, id: ReleaseId, cx: &mut Cx<'_>) {
        if let Some(releasing) = self.releases.remove(id) {
            self.release_until_confirmed(releasing, cx);
        }
    }

    /// Plans the end of the release that has named this token, which is being abandoned: executed
    /// late, it would make the token that of a holder. If its outcome is overdue, its task may be
    /// gone.
    pub(super) fn named_in_vain(&mut self, token: Token, cx: &mut Cx<'_>) {
        let mut releases = self.releases.iter();
        let naming = releases.find(|(_, it)| it.names(token));
        if let Some((id, at)) = naming.and_then(|(id, it)| Some((id, it.overdue_at()?))) {
            self.plan_job(at, Job::Release(id), cx);
        }
    }

    /// Repeats a release until it is confirmed. The next holder that an unanswered release has
    /// named is abandoned afterwards.
    fn release_until_confirmed(&mut self, releasing: Releasing, cx: &mut Cx<'_>) {
        let next_holder = releasing.next_holder();
        if let Some((hold, _)) = &next_holder {
            self.drop_entry(hold, cx);
        }
        let abandoned = |(hold, lease)| Afterwards::new(Ending::Abandon(hold), lease);
        let afterwards = next_holder.map(abandoned);
        let Release { hold, result, .. } = releasing.release;
        let result = result.filter(|_| !cx.breaks(Mutation::ForgetsResult));
        let ending = Ending::Release(hold, releasing.keep_until, result);
        self.end(ending, releasing.lease, None, afterwards, cx);
    }

    /// Removes the queue entry that a release should have opened and did not.
    fn drop_entry(&mut self, hold: &Hold, cx: &mut Cx<'_>) {
        if let Some(queue) = self.queue_of(LockKind::Lock, &hold.key) {
            queue.drop_entry(hold.token);
            queue.freed(cx);
        }
    }

    /// Records that a hold was revoked that is being released. Returns whether there is one.
    pub(super) fn release_revoked(&mut self, token: Token) -> bool {
        let mut releases = self.releases.values_mut();
        let revoked = releases.find(|it| it.release.hold.token == token);
        revoked.map(|it| it.is_revoked = true).is_some()
    }

    /// Records the answer to a release.
    pub(crate) fn release_replied(
        &mut self,
        id: ReleaseId,
        answer: Answer,
        cx: &mut Cx<'_>,
    ) -> Result<Released, ReleaseError> {
        let Some(releasing) = self.releases.remove(id) else {
            // The driver has ended it, perhaps before this call was executed.
            return match answer {
                Ok(Reply::Release(reply)) if reply != ReleaseReply::NotHeld => {
                    Ok(Released::AtStore)
                }
                other => Err(ReleaseError::Unknown(
                    other.err().unwrap_or_else(StoreError::no_reply),
                )),
            };
        };
        let reply = match answer {
            Ok(Reply::Release(reply)) => reply,
            other => {
                let error = other.err().unwrap_or_else(StoreError::no_reply);
                let mut releasing = releasing;
                if releasing.release.result.is_some() && !error.is_transient() {
                    // The store refuses the result, and would refuse it again.
                    (releasing.release.result, releasing.keep_until) = (None, None);
                }
                self.release_until_confirmed(releasing, cx);
                return Err(ReleaseError::Unknown(error));
            }
        };
        if reply == ReleaseReply::NotHeld {
            self.abandon_unheld(releasing.release.hold.clone(), releasing.lease, cx);
        }
        let outcome = match reply {
            ReleaseReply::NotHeld => Err(ReleaseError::NotHeld(match releasing.is_revoked {
                true => Loss::Revoked,
                false => Loss::Taken,
            })),
            _ => Ok(Released::AtStore),
        };
        let sent = releasing.sent.unwrap_or(cx.now);
        let next_holder = releasing.next_holder();
        let Release { hold, result, .. } = releasing.release;
        if next_holder.is_none() {
            self.freed(hold.mode.kind(), &hold.key, cx);
        }
        let ending = match reply {
            // A lock that was lost leaves nothing behind.
            ReleaseReply::NotHeld => Ending::Abandon(hold),
            _ => Ending::Release(hold, releasing.keep_until, result),
        };
        self.ended.push(ending, sent, cx.now + releasing.lease);
        let Some((next, lease)) = next_holder else {
            return outcome;
        };
        match reply {
            ReleaseReply::Passed(grant) => {
                let handoff = Handoff {
                    hold: next,
                    fence: grant.fence,
                    lease: Lease::granted(lease, true, sent, grant.ttl, cx.fraction()),
                    budget: Budget::new(grant.reserved, sent, cx.now),
                };
                self.handed_back(handoff, cx);
            }
            ReleaseReply::Queued {
                counter,
                holder_ttl,
            } => {
                if let Some(queue) = self.queue_of(LockKind::Lock, &next.key)
                    && queue.queued(next.token, sent, counter, holder_ttl, cx)
                {
                    queue.wake_head(cx);
                } else {
                    self.abandon(next, lease, None, cx);
                }
            }
            ReleaseReply::Released | ReleaseReply::NotHeld => self.drop_entry(&next, cx),
        }
        outcome
    }

    /// Records that a lock is held again after it was released for the waiters of this process.
    /// It is released if no waiter takes it.
    fn handed_back(&mut self, handoff: Handoff, cx: &mut Cx<'_>) {
        let (key, lease) = (handoff.hold.key.clone(), handoff.lease.length());
        let is_sound = handoff.budget.is_after(self.data_lost_at);
        // Without the entry, the waiters for which the lock was taken up again have left, and the
        // token is being abandoned. Later waiters must not get it (rule 1).
        let queue = self.queue_of(LockKind::Lock, &key);
        let had_entry = queue.is_some_and(|queue| queue.drop_entry(handoff.hold.token).is_some());
        let is_takeable = is_sound && (had_entry || cx.breaks(Mutation::AcceptsAbandoned));
        if is_takeable && let Some((queue, _)) = self.successor(&key, lease) {
            return queue.hand_off(handoff, cx);
        }
        if had_entry && !cx.breaks(Mutation::WakesNoOtherHead) {
            // The head stood behind the entry, whatever its claim.
            self.freed(LockKind::Lock, &key, cx);
        }
        self.give_back(handoff.hold, lease, cx);
    }

    pub(super) fn plan_job(&mut self, at: Instant, job: Job, cx: &mut Cx<'_>) {
        let owners = self.releases.len() + self.pending_ends.len();
        let counts = |at, job| is_due(&self.releases, &self.pending_ends, at, job);
        let ends_request = match job {
            Job::End(id) => self.pending_ends[id].ends_request(),
            Job::Release(_) => false,
        };
        let schedule = match ends_request {
            true => &mut self.jobs.rest,
            false => &mut self.jobs.holds,
        };
        if schedule.add(at, job, owners, counts) {
            cx.rouse();
        }
        self.watch_by(at + LATE, cx);
    }

    /// Returns the next background call that is due.
    pub(crate) fn due_job(&mut self, cx: &mut Cx<'_>) -> Option<(Job, Call)> {
        self.job_due_by(cx.now, cx)
    }

    /// Returns the next background call that was due by `until`.
    pub(super) fn job_due_by(&mut self, until: Instant, cx: &mut Cx<'_>) -> Option<(Job, Call)> {
        while let Some((at, job)) = self.jobs.pop(until) {
            if !is_due(&self.releases, &self.pending_ends, at, job) {
                continue;
            }
            if let Job::Release(id) = job
                && self.releases[id].sent.is_some()
            {
                self.release_dropped(id, cx);
                continue;
            }
            let call = match job {
                Job::End(id) => {
                    self.retained_until_now(id);
                    self.pending_ends[id].call(cx.now)
                }
                Job::Release(id) => {
                    let request = Request::Release(Box::new(self.releases[id].send(cx.now)));
                    Call::new(request, call_timeout(LockSpec::DEFAULT_LEASE))
                }
            };
            return Some((job, call));
        }
        None
    }

    /// Records the answer to a background call.
    pub(crate) fn job_replied(&mut self, job: Job, answer: Answer, cx: &mut Cx<'_>) {
        match job {
            Job::Release(id) => {
                let key = self.releases.get(id).map(|it| it.release.hold.key.clone());
                if self.release_replied(id, answer, cx).is_ok()
                    && let Some(key) = key
                {
                    cx.debug(|| Note::Released(key));
                }
            }
            Job::End(id) => self.end_replied(id, answer, cx),
        }
    }

    /// Plans again every background call whose answer will not arrive.
    pub(super) fn jobs_interrupted(&mut self, cx: &mut Cx<'_>) {
        for schedule in self.jobs.each() {
            schedule.unchecked();
        }
        let sent = self.pending_ends.iter();
        let sent = sent.filter(|(_, it)| it.due().is_none());
        for id in sent.map(|(id, _)| id).collect::<Vec<_>>() {
            if let Some(id) = self.sent_again(id) {
                self.pending_ends[id].interrupted(cx.now);
                self.plan_job(cx.now, Job::End(id), cx);
            }
        }
        for id in self.releases.keys().collect::<Vec<_>>() {
            let releasing = &self.releases[id];
            if releasing.is_background && releasing.sent.is_some() {
                self.release_dropped(id, cx);
            }
        }
        if !self.jobs.is_empty() {
            cx.rouse();
        }
    }
}

fn is_due(
    releases: &SlotMap<ReleaseId, Releasing>,
    pending_ends: &SlotMap<EndId, PendingEnd>,
    at: Instant,
    job: Job,
) -> bool {
    match job {
        Job::End(id) => pending_ends.get(id).is_some_and(|it| it.due() == Some(at)),
        // Planned for one instant: when it is to be sent, or when its outcome is overdue.
        Job::Release(id) => releases.contains_key(id),
    }
}
