//! The answers to the calls of an acquisition.

use std::{sync::Arc, time::Duration};

use super::{Acquisition, Attempt, CONFIRM_WITHIN, Purpose, Refused, Step};
use crate::{
    guard::fence::FencingToken,
    protocol::{
        AcquireId, Cx, Mutation, Note, Session,
        held::lease::Lease,
        held::{Held, Source},
        message::{Answer, Reply, Request},
        queue::handoff::{Budget, Handoff},
        queue::{Refusal, WaitQueue},
    },
    request::{key::LockKey, spec::LockKind},
    shell::time::Instant,
    store::{
        AcquireReply, Done, Grant, PollReply, RenewReply, Renewal, StoreError, StoreErrorKind,
        Token,
    },
};

/// The meaning of the answer to an acquire request.
enum Outcome {
    Granted(Grant, Lease),
    /// The store has a queue entry for the token. With the latest fencing token of the key, and the
    /// TTL of the holder.
    Queued(Option<FencingToken>, Option<Duration>),
    Busy(Option<Duration>),
    /// The same, and the holder may be idle.
    Retained(Option<Duration>),
    /// The same request may succeed a moment later, under a fresh token.
    Failed(StoreError),
    Refused(Refused),
}

impl Session {
    /// Returns the next step after the answer to a call.
    pub(crate) fn replied(&mut self, id: AcquireId, answer: Answer, cx: &mut Cx<'_>) -> Step {
        let Some(acquisition) = self.acquisitions.get_mut(id) else {
            return Step::Done(Err(Refused::ShuttingDown));
        };
        let Some(attempt) = acquisition.in_flight.take() else {
            return self.go_on(id, cx);
        };
        let answer = match attempt.is_revoked {
            true => answer.map(Reply::revoked),
            false => answer,
        };
        match attempt.purpose {
            Purpose::Try => self.tried(id, attempt, answer, cx),
            Purpose::Ask => self.asked(id, attempt, answer, cx),
            Purpose::Poll | Purpose::Confirm(_) => self.polled(id, attempt, answer, cx),
        }
    }

    fn tried(&mut self, id: AcquireId, attempt: Attempt, answer: Answer, cx: &mut Cx<'_>) -> Step {
        let outcome = self.outcome(id, attempt, answer, cx);
        let acquisition = &mut self.acquisitions[id];
        let waits = acquisition.until.is_some();
        match outcome {
            Outcome::Granted(grant, lease) => self.hold_granted(
                id,
                attempt.token,
                (grant, Source::Free),
                lease,
                attempt.sent,
                cx,
            ),
            Outcome::Busy(_) | Outcome::Queued(..) | Outcome::Retained(_) if waits => {
                acquisition.contended = true;
                self.queued_or_refused(id, cx)
            }
            Outcome::Retained(holder_ttl) if !cx.breaks(Mutation::RefusesForRetained) => {
                acquisition.waits_briefly(cx.now);
                let Acquisition { key, terms, .. } = &self.acquisitions[id];
                // A holder of this process is at work.
                if self.excludes(key, terms.mode, cx.now) {
                    return self.refuse(id, Refused::Contended(holder_ttl), cx);
                }
                match self.queued_or_refused(id, cx) {
                    Step::Done(Err(Refused::Full | Refused::FullInAll)) => {
                        Step::Done(Err(Refused::Contended(holder_ttl)))
                    }
                    step => step,
                }
            }
            Outcome::Busy(holder_ttl)
            | Outcome::Retained(holder_ttl)
            | Outcome::Queued(_, holder_ttl) => {
                // The token of the first attempt may be the reason for a refusal of the second.
                let first_error = acquisition.first_error.take();
                let refused = first_error.map_or(Refused::Contended(holder_ttl), Refused::Store);
                self.refuse(id, refused, cx)
            }
            Outcome::Refused(refused) => self.refuse(id, refused, cx),
            Outcome::Failed(error) if waits && !error.ends_waits() => {
                self.queued_or_refused(id, cx)
            }
            Outcome::Failed(error) => {
                // Less time has passed than one call may take: the connection was broken and the
                // store not silent, so a second attempt is made under a fresh token.
                let passed = cx.now.saturating_duration_since(acquisition.since);
                let may_pass = !error.ends_waits() && error.kind() != StoreErrorKind::Blocked;
                let is_early = passed < acquisition.terms.call_timeout() && may_pass;
                if acquisition.first_error.is_none() && is_early {
                    acquisition.first_error = Some(error);
                    return self.try_beside(id, cx);
                }
                self.refuse(id, Refused::Store(error), cx)
            }
        }
    }

    fn asked(&mut self, id: AcquireId, attempt: Attempt, answer: Answer, cx: &mut Cx<'_>) -> Step {
        let Attempt { token, sent, .. } = attempt;
        match self.outcome(id, attempt, answer, cx) {
            Outcome::Granted(grant, lease) => {
                return self.hold_granted(id, token, (grant, Source::Free), lease, sent, cx);
            }
            Outcome::Queued(counter, holder_ttl) => {
                if self.acquisitions[id].is_brief {
                    self.acquisitions[id].queued_briefly(sent, cx.now);
                }
                let (key, queue) = self.key_and_queue(id);
                cx.debug(|| Note::Queued(key.clone(), holder_ttl));
                queue.queued(token, sent, counter, holder_ttl, cx);
            }
            Outcome::Busy(holder_ttl) | Outcome::Retained(holder_ttl) => {
                let (key, queue) = self.key_and_queue(id);
                if !matches!(queue.last, Refusal::Busy(_)) {
                    cx.debug(|| Note::Waiting(key.clone(), holder_ttl));
                }
                queue.refused(token, holder_ttl, cx);
            }
            Outcome::Failed(error) => return self.unanswered(id, attempt, error, cx),
            Outcome::Refused(Refused::Done(done)) => return self.done(id, (token, sent), done, cx),
            Outcome::Refused(refused) => {
                self.key_and_queue(id).1.failed(token, None, cx);
                return self.refuse(id, refused, cx);
            }
        }
        self.go_on(id, cx)
    }

    /// Handles the answer to a poll or to the confirmation of a grant.
    fn polled(&mut self, id: AcquireId, attempt: Attempt, answer: Answer, cx: &mut Cx<'_>) -> Step {
        let Attempt { token, sent, .. } = attempt;
        match (attempt.purpose, answer) {
            (Purpose::Poll, Ok(Reply::Poll(PollReply::Granted(grant)))) => {
                return self.granted(id, token, grant, sent, cx);
            }
            (
                Purpose::Poll,
                Ok(Reply::Poll(PollReply::Queued {
                    counter,
                    holder_ttl,
                })),
            ) => {
                let (_, queue) = self.key_and_queue(id);
                queue.queued(token, sent, counter, holder_ttl, cx);
            }
            (Purpose::Confirm(grant), Ok(Reply::Renew(RenewReply::Renewed { ttl }))) => {
                let terms = &self.acquisitions[id].terms;
                let ttl = ttl.min(terms.lease);
                let lease = Lease::granted(terms.lease, terms.renew, sent, ttl, cx.fraction());
                if lease.validity(cx.now).is_zero() {
                    // A poll after a pause returns the current state.
                    let error = StoreError::timed_out(cx.now - sent);
                    return self.unanswered(id, attempt, error, cx);
                }
                let lease = lease.held_since(sent, terms.max_hold);
                return self.hold_granted(id, token, (grant, Source::Queue), lease, sent, cx);
            }
            (Purpose::Poll, Ok(Reply::Poll(PollReply::Done(done)))) => {
                return self.done(id, (token, sent), done, cx);
            }
            (purpose, Ok(_)) => {
                self.key_and_queue(id).1.gone(token, cx);
                if matches!(purpose, Purpose::Confirm(_)) {
                    // With several servers, some may still hold it (rule 9).
                    let acquisition = &self.acquisitions[id];
                    let (hold, lease) = (acquisition.hold(token), acquisition.terms.lease);
                    self.abandon(hold, lease, None, cx);
                }
            }
            (_, Err(error)) => return self.unanswered(id, attempt, error, cx),
        }
        self.go_on(id, cx)
    }

    /// Refuses the head, and with it the waiters that had come before it called: the lock is done,
    /// and the store has no queue entry for it any more.
    fn done(
        &mut self,
        id: AcquireId,
        (token, sent): (Token, Instant),
        done: Arc<Done>,
        cx: &mut Cx<'_>,
    ) -> Step {
        let acquisition = &self.acquisitions[id];
        if let Some(queue) = acquisition.queue.map(|queue| &mut self.queues[queue]) {
            queue.drop_entry(token);
            queue.done(sent, &done, &self.acquisitions, cx);
        }
        self.refuse(id, Refused::Done(done), cx)
    }

    /// Interprets the answer to an acquire request. A token that may hold the lock is abandoned
    /// unless the lock is granted.
    fn outcome(
        &mut self,
        id: AcquireId,
        attempt: Attempt,
        answer: Answer,
        cx: &mut Cx<'_>,
    ) -> Outcome {
        let (terms, sent) = (&self.acquisitions[id].terms, attempt.sent);
        let error = match answer {
            Ok(Reply::Acquire(AcquireReply::Granted(grant))) => {
                let breaks = cx.breaks(Mutation::CountsFromReply);
                let from = if breaks { cx.now } else { sent };
                let ttl = grant.ttl.min(terms.lease);
                let lease = Lease::granted(terms.lease, terms.renew, from, ttl, cx.fraction());
                if !lease.validity(cx.now).is_zero() {
                    return Outcome::Granted(grant, lease.held_since(sent, terms.max_hold));
                }
                StoreError::timed_out(cx.now.saturating_duration_since(sent))
            }
            Ok(Reply::Acquire(reply)) => {
                return match reply {
                    AcquireReply::Queued {
                        counter,
                        holder_ttl,
                    } => Outcome::Queued(counter, holder_ttl),
                    AcquireReply::Busy { holder_ttl, .. } => Outcome::Busy(holder_ttl),
                    AcquireReply::Retained { holder_ttl } => Outcome::Retained(holder_ttl),
                    AcquireReply::ForeignKey(part) => Outcome::Refused(Refused::ForeignKey(part)),
                    AcquireReply::ModeMismatch => Outcome::Refused(Refused::ModeMismatch),
                    AcquireReply::Done(done) => Outcome::Refused(Refused::Done(done)),
                    // Nothing was done.
                    _ => Outcome::Failed(StoreError::late()),
                };
            }
            Ok(_) => return Outcome::Failed(StoreError::no_reply()),
            // A script may fail after its first writes if the server forbids one of its commands,
            // so the token is abandoned after a refusal as well.
            Err(error) => error,
        };
        if !error.is_unsent() {
            self.abandon_attempt(id, attempt, cx);
        }
        if error.is_transient() {
            Outcome::Failed(error)
        } else {
            Outcome::Refused(Refused::Store(error))
        }
    }

    /// Takes over a grant from the store's wait queue, whose short lease counts from `as_of`
    /// (rule 4). It is confirmed first if too little of it is left, or if renewal is off.
    pub(super) fn granted(
        &mut self,
        id: AcquireId,
        token: Token,
        grant: Grant,
        as_of: Instant,
        cx: &mut Cx<'_>,
    ) -> Step {
        let acquisition = &mut self.acquisitions[id];
        let terms = acquisition.terms;
        let ttl = grant.ttl.min(Grant::HANDOFF_LEASE).min(terms.lease);
        let mut lease = Lease::granted(terms.lease, true, as_of, ttl, cx.fraction());
        lease.hurry(cx.now + CONFIRM_WITHIN);
        // With less validity than a renewal may take, the lock would be lost at once.
        let is_enough = lease.validity(cx.now) > terms.call_timeout();
        if terms.renew && (is_enough || cx.breaks(Mutation::ConfirmsNothing)) {
            let lease = lease.held_since(cx.now, terms.max_hold);
            return self.hold_granted(id, token, (grant, Source::Queue), lease, as_of, cx);
        }
        let request = Request::Renew(Renewal::new(acquisition.hold(token), terms.lease));
        Step::Call(acquisition.call(token, Purpose::Confirm(grant), request, cx.now))
    }

    /// Records a call of the head without a usable reply. After a poll or a confirmation, the
    /// queue entry is unchanged.
    fn unanswered(
        &mut self,
        id: AcquireId,
        attempt: Attempt,
        error: StoreError,
        cx: &mut Cx<'_>,
    ) -> Step {
        let is_over = self.acquisitions[id].is_over(cx.now);
        let (key, queue) = self.key_and_queue(id);
        // A call that the end of the wait has cut short must not replace a more informative last
        // reply.
        let is_informative = match queue.last {
            Refusal::None => true,
            Refusal::Busy(_) => !is_over,
            Refusal::Unavailable(_) => !(is_over && error.is_timed_out()),
        };
        cx.debug(|| Note::Unavailable(key.clone(), error.clone()));
        if attempt.acquires() {
            queue.failed(attempt.token, is_informative.then_some(&error), cx);
        } else if is_informative {
            queue.unanswered(attempt.token, &error, cx);
        }
        if error.ends_waits() {
            // So that the next waiter learns the same at once, and not after a pause.
            queue.asks_at_once(cx.now);
        }
        if error.is_transient() && !error.ends_waits() {
            self.go_on(id, cx)
        } else {
            self.refuse(id, Refused::Store(error), cx)
        }
    }

    /// Takes over the lock from its previous holder in this process. Returns `None` if it must be
    /// released, as too little validity is left.
    pub(in crate::protocol) fn take(
        &mut self,
        id: AcquireId,
        handoff: Handoff,
        source: Source,
        cx: &mut Cx<'_>,
    ) -> Option<Step> {
        let terms = self.acquisitions[id].terms;
        // As for a grant: with less validity than a renewal may take, it would be lost at once.
        if handoff.lease.validity(cx.now) <= terms.call_timeout() {
            self.give_back(handoff.hold, terms.lease, cx);
            return None;
        }
        let lease = handoff.lease.held_since(cx.now, terms.max_hold);
        let (fence, budget) = (handoff.fence, Some(handoff.budget));
        let held = Held::new(handoff.hold, fence, terms, lease, budget);
        Some(self.serve(id, None, source, held, cx))
    }

    /// Starts holding a grant whose fencing tokens were reserved by a request sent at `as_of`.
    fn hold_granted(
        &mut self,
        id: AcquireId,
        token: Token,
        (grant, source): (Grant, Source),
        lease: Lease,
        as_of: Instant,
        cx: &mut Cx<'_>,
    ) -> Step {
        let kind = self.acquisitions[id].terms.mode.kind();
        if kind == LockKind::Lock && !self.retention.is_empty() {
            // The store would not have granted the lock while it was retained here.
            let key = self.acquisitions[id].key.clone();
            self.release_retained(&key, cx);
        }
        let is_contended = source == Source::Queue && !cx.breaks(Mutation::RetainsContended);
        if !token.retains() || is_contended {
            // No store announces a waiter to it, or others may wait behind it.
            self.acquisitions[id].terms.retain = None;
        }
        if token.retains() && is_contended {
            let key = self.acquisitions[id].key.clone();
            self.contended(&key, cx.now);
        }
        let acquisition = &self.acquisitions[id];
        let terms = acquisition.terms;
        let budget = acquisition.claim().hands_off.then(|| {
            let budget = match terms.retain {
                Some(_) => Budget::of_retained,
                None => Budget::new,
            };
            budget(grant.reserved, as_of, cx.now)
        });
        let held = Held::new(acquisition.hold(token), grant.fence, terms, lease, budget);
        self.serve(id, Some(token), source, held, cx)
    }

    /// Ends a request that holds the lock: under the token of its attempt, or by a local
    /// hand-off.
    fn serve(
        &mut self,
        id: AcquireId,
        token: Option<Token>,
        source: Source,
        held: Held,
        cx: &mut Cx<'_>,
    ) -> Step {
        let handoff_until = held.budget.map(|budget| budget.until);
        let mut granted = self.hold(held, cx);
        let acquisition = &self.acquisitions[id];
        let (mode, ticket) = (acquisition.terms.mode, acquisition.ticket);
        (granted.contended, granted.source) = (acquisition.contended, source);
        if let Some(queue) = acquisition.queue {
            let queue = &mut self.queues[queue];
            granted.contended |= queue.contended;
            queue.served((mode, ticket), token, handoff_until);
        }
        self.leave(id, cx);
        Step::Done(Ok(granted))
    }

    fn key_and_queue(&mut self, id: AcquireId) -> (&LockKey, &mut WaitQueue) {
        let acquisition = &self.acquisitions[id];
        #[expect(clippy::expect_used, reason = "only waiters make these calls")]
        let queue = acquisition.queue.expect("a waiter is in a queue");
        (&acquisition.key, &mut self.queues[queue])
    }

    /// Abandons a token that may hold the lock: immediately, and again once a delayed request can
    /// no longer be executed (rule 8).
    pub(super) fn abandon_attempt(&mut self, id: AcquireId, attempt: Attempt, cx: &mut Cx<'_>) {
        let acquisition = &self.acquisitions[id];
        let (hold, lease) = (acquisition.hold(attempt.token), acquisition.terms.lease);
        let deadline = acquisition.deadline(attempt.sent);
        self.abandon(hold, lease, Some(deadline), cx);
    }
}
