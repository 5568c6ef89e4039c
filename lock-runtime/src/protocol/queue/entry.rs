//! An entry of this process in the store's wait queue.

use std::time::Duration;

use super::super::{Cx, Mutation};
use crate::{
    guard::fence::FencingToken,
    request::spec::{Mode, Terms},
    shell::time::Instant,
    store::{Grant, Token, Waiter},
};

/// The first pause between two acquire attempts on a store that keeps no wait queue.
pub(in crate::protocol) const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// The longest pause between two such attempts.
pub(in crate::protocol) const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// The first pause between two polls of a waiter that gets no events. It doubles with each poll.
const FIRST_POLL: Duration = Duration::from_millis(20);

/// The time after which an entry is abandoned if the outcome of its request was not reported.
/// Longer than any call to the store takes.
pub(in crate::protocol) const UNREPORTED: Duration = Duration::from_secs(1);

/// The terms of a waiter. Waiters with the same claim may continue with each other's queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::protocol) struct Claim {
    pub(in crate::protocol) mode: Mode,
    pub(in crate::protocol) lease: Duration,
    /// Whether the lock may be handed off locally to this waiter and from it. Only a writer that
    /// renews accepts a local hand-off (rule 20).
    pub(in crate::protocol) hands_off: bool,
    /// Whether the lock may be retained after its release.
    pub(in crate::protocol) retains: bool,
}

impl Claim {
    pub(in crate::protocol) fn of(terms: &Terms) -> Self {
        Self {
            mode: terms.mode,
            lease: terms.lease,
            hands_off: terms.mode == Mode::Exclusive && terms.renew && !terms.strict_order,
            retains: terms.retain.is_some(),
        }
    }

    /// Returns whether a lock with a lease of `lease` may be handed off to this waiter.
    pub(in crate::protocol) fn takes(self, lease: Duration) -> bool {
        self.hands_off && self.lease == lease
    }
}

/// An entry in the store's wait queue on behalf of this process. The head of a local queue makes
/// its requests under the entry's token, and leaves the entry to the next waiter with the same
/// claim (rule 17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::protocol) struct QueueEntry {
    /// The token under which the requests are made.
    pub(in crate::protocol) token: Token,
    pub(in crate::protocol) mode: Mode,
    pub(in crate::protocol) lease: Duration,
    standing: Standing,
    /// A pushed grant that no reply has confirmed as current yet.
    pushed: Option<Grant>,
    /// When the next request is due.
    pub(in crate::protocol) ask_at: Instant,
    pause: Duration,
    /// The longest pause before the next poll, where the store sends no events.
    poll_pause: Duration,
    /// The store did not reply. Nothing that this process does makes the next request succeed, so
    /// it is not sent before the pause is over.
    backs_off: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The store does not know the token.
    Outside,
    /// A request is in flight that may open the queue entry.
    Asked,
    /// The store has a queue entry for the token.
    Queued {
        /// When the latest request that was answered `Queued` was sent. The token surely did not
        /// hold the lock before that (rule 4).
        as_of: Instant,
        /// The key's fencing token in that reply. A grant with an older one is not for this
        /// entry (rule 3).
        counter: Option<FencingToken>,
    },
}

impl QueueEntry {
    pub(in crate::protocol) fn new(claim: Claim, cx: &mut Cx<'_>) -> Self {
        Self {
            token: cx.token(claim.retains),
            mode: claim.mode,
            lease: claim.lease,
            standing: Standing::Outside,
            pushed: None,
            ask_at: cx.now,
            pause: FIRST_PAUSE,
            poll_pause: FIRST_POLL,
            backs_off: false,
        }
    }

    pub(in crate::protocol) fn fits(&self, claim: Claim) -> bool {
        (self.mode, self.lease) == (claim.mode, claim.lease)
    }

    /// Records a request that is about to be sent and whose outcome will be reported. Returns
    /// whether it is to be a poll.
    pub(in crate::protocol) fn asked(&mut self, now: Instant) -> bool {
        let in_line = self.is_queued();
        if !in_line {
            self.standing = Standing::Asked;
            self.ask_at = now + UNREPORTED;
        }
        in_line
    }

    pub(in crate::protocol) fn is_queued(&self) -> bool {
        matches!(self.standing, Standing::Queued { .. })
    }

    pub(in crate::protocol) fn is_asked(&self) -> bool {
        self.standing == Standing::Asked
    }

    /// Returns whether the store may know the token.
    pub(in crate::protocol) fn is_known(&self) -> bool {
        self.standing != Standing::Outside
    }

    /// Records the reply `Queued` to a request sent at `sent`.
    pub(in crate::protocol) fn queued(
        &mut self,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
        cx: &mut Cx<'_>,
    ) {
        let mut counter = counter.filter(|_| !cx.breaks(Mutation::IgnoresCounter));
        let mut as_of = sent;
        if let Standing::Queued {
            as_of: latest,
            counter: largest,
        } = self.standing
        {
            // Each of them proves that no earlier grant counts, in whatever order they were
            // executed (rule 41).
            counter = counter.max(largest);
            as_of = sent.max(latest);
        }
        self.standing = Standing::Queued { as_of, counter };
        self.pause = FIRST_PAUSE;
        // At most half a lease, so that a pushed grant has validity left, and no later than the
        // holder's expiry, since the other processes may miss it.
        // Spread, so that waiters do not poll in step.
        let mut longest = Waiter::POLL_INTERVAL.min(self.lease / 2);
        if cx.polls {
            longest = longest.min(self.poll_pause);
            self.poll_pause = self.poll_pause.saturating_mul(2).min(Waiter::POLL_INTERVAL);
        }
        let poll = longest.mul_f64(0.75 + 0.25 * cx.fraction());
        self.ask_at = cx.now + holder_ttl.map_or(poll, |ttl| poll.min(past_expiry(ttl)));
    }

    /// Records a pushed grant.
    pub(in crate::protocol) fn pushed(&mut self, grant: Grant, cx: &Cx<'_>) {
        if let Standing::Queued { as_of, .. } = &mut self.standing
            && cx.breaks(Mutation::CountsFromPush)
        {
            *as_of = cx.now;
        }
        if self.pushed.is_none_or(|pushed| pushed.fence < grant.fence) {
            self.pushed = Some(grant);
        }
    }

    /// Records that the queue entry or the pushed grant may be out of date. The next
    /// request is due by `at`.
    pub(in crate::protocol) fn doubt(&mut self, at: Instant) {
        if !self.is_asked() {
            self.pushed = None;
            self.ask_at = self.ask_at.min(at);
        }
    }

    /// Returns the pushed grant once a reply has shown that it is current, and the instant from
    /// which its lease is counted (rule 4).
    pub(in crate::protocol) fn proven(&self) -> Option<(Grant, Instant)> {
        let Standing::Queued { as_of, counter } = self.standing else {
            return None;
        };
        let is_current = |grant: &Grant| counter.is_none_or(|counter| grant.fence > counter);
        Some((self.pushed.filter(is_current)?, as_of))
    }

    /// Records the refusal of a store that keeps no wait queue. The next attempt is due after a
    /// growing pause, at the latest when the holder's lease ends.
    pub(in crate::protocol) fn refused(&mut self, holder_ttl: Option<Duration>, cx: &mut Cx<'_>) {
        // With several servers, some may have granted the request; its token is being abandoned
        // there (rule 1).
        self.rename(cx);
        self.try_later(holder_ttl, cx);
        self.backs_off = false;
    }

    /// Schedules the next request after a missing or unusable reply.
    pub(in crate::protocol) fn try_later(&mut self, holder_ttl: Option<Duration>, cx: &mut Cx<'_>) {
        self.pushed = None;
        self.backs_off = true;
        let pause = self.pause.mul_f64(0.5 + 0.5 * cx.fraction());
        self.pause = self.pause.mul_f64(1.6).min(LONGEST_PAUSE);
        let expiry = holder_ttl.map_or(LONGEST_PAUSE, past_expiry);
        self.ask_at = cx.now + pause.min(expiry);
    }

    /// Sends the next request at once, as the lock may be free, unless the store did not reply to
    /// the latest one.
    pub(in crate::protocol) fn hurry(&mut self, now: Instant) {
        if !self.is_known() && !self.backs_off {
            self.ask_at = now;
        }
    }

    /// Replaces a token whose replies and grants must no longer be accepted (rule 1).
    pub(in crate::protocol) fn rename(&mut self, cx: &mut Cx<'_>) {
        if !cx.breaks(Mutation::AcceptsAbandoned) {
            self.token = cx.token(self.token.retains());
        }
        self.standing = Standing::Outside;
        self.pushed = None;
    }
}

/// One millisecond past the expiry, so that a request does not arrive just before it.
fn past_expiry(ttl: Duration) -> Duration {
    ttl.saturating_add(Duration::from_millis(1))
}
