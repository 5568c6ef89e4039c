//! Retained locks: a lock that was released stays with this client for a while, idle, for its next
//! use here. Towards the store it is a release that is yet to be sent, so it ends like any other:
//! when its time is over, when another client waits for the lock, or when the client ends.

use std::{collections::HashMap, time::Duration};

use foldhash::fast::RandomState;

use super::{
    AcquireId, Cx, EndId, Job, Mutation, Session,
    abandon::{Ending, PendingEnd},
    acquire::Step,
    held::Source,
    queue::entry::Claim,
    queue::handoff::Handoff,
};
use crate::{
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::{LockKind, Terms},
    shell::time::Instant,
    store::Token,
};

/// The time for which a lock is not retained after another client has waited for it. It doubles if
/// that happens again soon.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The largest number of contended locks that are remembered.
const MOST: usize = 1_024;

/// The locks that are retained, and those that are not for a while.
#[cfg_attr(test, derive(Clone))]
#[derive(Default)]
pub(super) struct Retention {
    idle: HashMap<LockKey, Idle, RandomState>,
    contended: HashMap<LockKey, Contended, RandomState>,
    /// The client has ended, so it retains nothing more.
    is_over: bool,
}

/// A lock that no task uses.
#[cfg_attr(test, derive(Clone))]
struct Idle {
    /// Its release.
    end: EndId,
    /// The lock for its next holder.
    handoff: Handoff,
}

/// A lock for which other clients have waited.
#[cfg_attr(test, derive(Clone))]
struct Contended {
    until: Instant,
    pause: Duration,
}

impl Contended {
    /// Returns whether it no longer counts.
    fn is_over(&self, now: Instant) -> bool {
        self.until + self.pause <= now
    }
}

impl Retention {
    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty()
    }

    pub(super) fn holds(&self) -> impl Iterator<Item = &Handoff> {
        self.idle.values().map(|idle| &idle.handoff)
    }
}

impl Session {
    /// Returns the terms of a request for this lock: they retain it only if other clients have not
    /// waited for it lately, and if messages about waiters arrive.
    pub(super) fn retaining(&self, key: &LockKey, terms: &Terms, cx: &Cx<'_>) -> Terms {
        let may_retain = terms.min_hold.is_none() && Claim::of(terms).hands_off && !cx.polls;
        let is_calm = || {
            let contended = self.retention.contended.get(key);
            contended.is_none_or(|it| it.until <= cx.now)
        };
        let retain = terms.retain.filter(|_| may_retain && is_calm());
        Terms { retain, ..*terms }
    }

    /// Records that other clients wait for a lock: it is not retained for a while.
    pub(super) fn contended(&mut self, key: &LockKey, now: Instant) {
        let known = &mut self.retention.contended;
        let mut pause = FIRST_PAUSE;
        if let Some(earlier) = known.get(key) {
            if now < earlier.until {
                return;
            }
            if !earlier.is_over(now) {
                pause = (earlier.pause * 2).min(LONGEST_PAUSE);
            }
        } else if known.len() >= MOST {
            known.retain(|_, it| !it.is_over(now));
            if known.len() >= MOST {
                return;
            }
        }
        let until = now + pause;
        known.insert(key.clone(), Contended { until, pause });
    }

    /// Handles the message that another client waits for the lock that this token holds. A late
    /// message, of an earlier hold, has no effect.
    pub(super) fn wanted(&mut self, key: &LockKey, token: Token, cx: &mut Cx<'_>) {
        if cx.breaks(Mutation::IgnoresWanted) {
            return;
        }
        let idle = self.retention.idle.get(key);
        if idle.is_some_and(|idle| idle.handoff.hold.token == token) {
            self.contended(key, cx.now);
            self.release_retained(key, cx);
            return;
        }
        let mut held = self.held.values_mut();
        let held = held.find(|held| held.hold.token == token);
        let is_held = held.map(|held| held.is_wanted = true).is_some();
        let queue = self.queue_of(LockKind::Lock, key);
        let handoff = queue.and_then(|queue| queue.handoff.as_mut());
        let handoff = handoff.filter(|handoff| handoff.hold.token == token);
        let is_handed_off = handoff.map(|it| it.budget.left = 0).is_some();
        if is_held || is_handed_off {
            self.contended(key, cx.now);
        }
    }

    /// Retains a lock that its last holder has released; `handoff` is the lock for the next one.
    /// Returns `false` if it is to be released: too little of its lease is left, of which the next
    /// holder gets at least a third.
    pub(super) fn retain(
        &mut self,
        handoff: Handoff,
        retain: Duration,
        longest_lease: Duration,
        cx: &mut Cx<'_>,
    ) -> bool {
        let Handoff { hold, lease, .. } = &handoff;
        let left = lease.validity(cx.now).saturating_sub(lease.length() / 3);
        if left.is_zero() || self.closed || self.retention.is_over || cx.polls {
            return false;
        }
        let until = cx.now + retain.min(left);
        let ending = Ending::Release(hold.clone(), None, None);
        let pending = PendingEnd::new(ending, longest_lease, None, until).of_holder();
        let end = self.pending_ends.insert(pending);
        let key = hold.key.clone();
        self.retention.idle.insert(key, Idle { end, handoff });
        self.plan_job(until, Job::End(end), cx);
        true
    }

    /// Serves a request with the lock that this client retains. Releases it if the request cannot
    /// take it.
    pub(super) fn take_retained(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Option<Step> {
        let acquisition = &self.acquisitions[id];
        if self.retention.idle.is_empty() || acquisition.terms.mode.kind() != LockKind::Lock {
            return None;
        }
        let (key, claim) = (acquisition.key.clone(), acquisition.claim());
        let idle = self.retention.idle.get(&key)?;
        if !claim.takes(idle.handoff.lease.length()) {
            self.contended(&key, cx.now);
            self.release_retained(&key, cx);
            return None;
        }
        let Idle { end, mut handoff } = self.retention.idle.remove(&key)?;
        self.pending_ends.remove(end)?;
        if cx.breaks(Mutation::RetainsOldTokens) {
            let earlier = FencingToken::new(handoff.fence.number() - 1);
            handoff.fence = earlier.unwrap_or(handoff.fence);
        }
        self.take(id, handoff, Source::Retained, cx)
    }

    /// Releases the lock of this name if it is retained. Returns whether it was.
    pub(super) fn release_retained(&mut self, key: &LockKey, cx: &mut Cx<'_>) -> bool {
        let Some(Idle { end, .. }) = self.retention.idle.remove(key) else {
            return false;
        };
        if let Some(pending) = self.pending_ends.get_mut(end)
            && pending.hurry(cx.now)
        {
            self.plan_job(cx.now, Job::End(end), cx);
        }
        true
    }

    /// Records that the last clone of the client is gone: guards that are left retain nothing.
    pub(crate) fn orphan(&mut self, cx: &mut Cx<'_>) {
        self.retention.is_over = true;
        self.release_all_retained(cx);
    }

    /// Releases every lock that is retained.
    pub(super) fn release_all_retained(&mut self, cx: &mut Cx<'_>) {
        for key in self.retention.idle.keys().cloned().collect::<Vec<_>>() {
            self.release_retained(&key, cx);
        }
    }

    /// Releases the retained lock of this token. Returns whether it is one.
    pub(super) fn revoke_retained(&mut self, token: Token, cx: &mut Cx<'_>) -> bool {
        let mut idle = self.retention.idle.iter();
        let revoked = idle.find(|(_, idle)| idle.handoff.hold.token == token);
        let Some(key) = revoked.map(|(key, _)| key.clone()) else {
            return false;
        };
        self.release_retained(&key, cx)
    }

    /// Records that the release of a lock is being sent: it is no longer retained.
    pub(super) fn retained_until_now(&mut self, id: EndId) {
        if self.retention.idle.is_empty() {
            return;
        }
        let Some(pending) = self.pending_ends.get(id) else {
            return;
        };
        let key = &pending.hold().key;
        if self.retention.idle.get(key).is_some_and(|it| it.end == id) {
            let key = key.clone();
            self.retention.idle.remove(&key);
        }
    }
}
