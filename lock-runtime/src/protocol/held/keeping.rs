//! The work that the driver of a client is late with. The keeper looks for it, and takes it over.

use std::time::Duration;

use super::super::{Call, Cx, DueRenewal, Effect, Job, Session};
use crate::{
    request::spec::{LockSpec, call_timeout},
    shell::time::Instant,
};

/// The time after which a background call that is due, or that was to be answered, is late.
pub(crate) const LATE: Duration = Duration::from_millis(500);
/// The longest time between two looks.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
/// The largest number of background calls that the keeper takes over at a time.
const JOBS: usize = 256;

/// The result of a look at a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Nothing is held or planned, so the keeper need not look again.
    Idle,
    /// Nothing is late before the next look.
    Calm(Instant),
    /// Work is late. If it is late still, the next look finds it.
    Late(Instant),
}

/// The work that a driver is late with.
#[derive(Debug, Default)]
pub(crate) struct Overdue {
    pub(crate) renewals: Vec<DueRenewal>,
    pub(crate) jobs: Vec<(Job, Call)>,
    /// The driver has not begun a renewal, as distinct from a store that has not replied to it.
    pub(crate) is_driver_late: bool,
}

impl Session {
    /// Lets the keeper look at the client by `at`.
    pub(in crate::protocol) fn watch_by(&mut self, at: Instant, cx: &mut Cx<'_>) {
        if self.look_at.is_none_or(|look_at| at < look_at) {
            self.look_at = Some(at);
            cx.out.push(Effect::Watch);
        }
    }

    /// Returns whether the keeper is to look at the client.
    pub(crate) fn is_looked_at(&self) -> bool {
        self.look_at.is_some()
    }

    /// Finds out whether work is late, unless the next look is not due: it reads all leases.
    pub(crate) fn look(&mut self, now: Instant) -> Look {
        // Also without a lock: a client that is idle for a moment does not wake the keeper with its
        // next one.
        if let Some(at) = self.look_at.filter(|at| *at > now) {
            let next = at.min(now + BETWEEN_LOOKS);
            self.look_at = Some(next);
            return Look::Calm(next);
        }
        if !self.needs_driver() {
            self.look_at = None;
            return Look::Idle;
        }
        let held = self.held.values().filter(|held| held.loss.is_none());
        let leases = held.map(|held| (held.lease.late_at(), held.lease.length()));
        let is_stuck = self.is_stuck(now);
        let jobs = self.jobs.first().filter(|_| self.has_room || is_stuck);
        let jobs = jobs.map(|at| (at + LATE, LATE));
        let stuck = is_stuck.then_some((now, LATE));
        let (mut next, mut pause, mut is_late) = (now + BETWEEN_LOOKS, BETWEEN_LOOKS, false);
        for (late_at, lease) in leases.chain(jobs).chain(stuck) {
            if late_at <= now {
                is_late = true;
                pause = pause.min(call_timeout(lease));
            } else {
                next = next.min(late_at);
            }
        }
        if is_late {
            next = next.min(now + pause.max(call_timeout(LockSpec::MIN_LEASE)));
        }
        self.look_at = Some(next);
        match is_late {
            true => Look::Late(next),
            false => Look::Calm(next),
        }
    }

    /// Returns whether the driver has not even ended a call in time. Otherwise, with as many in
    /// flight as it may have, it has to leave the others.
    fn is_stuck(&self, now: Instant) -> bool {
        self.pending_ends.values().any(|it| it.is_stuck(now))
    }

    /// Forgets that the keeper looks at this client, whose thread is gone.
    pub(crate) fn forget_keeper(&mut self) {
        self.look_at = None;
    }

    /// Takes over the work that is late. If the keeper `calls` no store, it notices losses only.
    pub(crate) fn take_overdue(&mut self, calls: bool, cx: &mut Cx<'_>) -> Overdue {
        let mut overdue = Overdue::default();
        let late = self.held.iter().filter(|(_, held)| held.loss.is_none());
        let late = late.filter(|(_, held)| held.lease.late_at() <= cx.now);
        for id in late.map(|(id, _)| id).collect::<Vec<_>>() {
            self.notice_loss(id, cx);
            let Some(held) = self.held.get_mut(id).filter(|held| held.loss.is_none()) else {
                continue;
            };
            if calls && let Some(is_driver_late) = held.lease.take_over(cx.now) {
                overdue.is_driver_late |= is_driver_late;
                overdue.renewals.push(held.due_renewal(id));
                self.plan_lease(id, cx);
            }
        }
        if !calls {
            return overdue;
        }
        let takes_jobs = self.has_room || self.is_stuck(cx.now);
        let stuck = self.pending_ends.iter();
        let stuck = stuck.filter(|(_, it)| it.is_stuck(cx.now));
        for id in stuck.map(|(id, _)| id).collect::<Vec<_>>() {
            if let Some(id) = self.sent_again(id) {
                let call = self.pending_ends[id].call(cx.now);
                overdue.jobs.push((Job::End(id), call));
            }
        }
        if let Some(until) = cx.now.checked_sub(LATE).filter(|_| takes_jobs) {
            let jobs = std::iter::from_fn(|| self.job_due_by(until, cx));
            overdue.jobs.extend(jobs.take(JOBS));
        }
        overdue.is_driver_late |= !overdue.jobs.is_empty();
        overdue
    }
}
