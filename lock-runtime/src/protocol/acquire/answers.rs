//! The answers to the calls of an acquisition.

use std::time::Duration;

use tokio::time::Instant;

use super::{Attempt, CONFIRM_WITHIN, Refused, State, Step};
use crate::{
    fence::FencingToken,
    key::LockKey,
    protocol::{
        AcquireId, Cx, Mutation, Note, Session,
        handoff::{Budget, Handoff},
        held::{Granted, Held},
        lease::Lease,
        message::{Answer, Call, Reply, Request},
        queue::{Refusal, WaitQueue},
    },
    spec::Terms,
    store::{
        AcquireReply, Grant, HANDOFF_LEASE, PollReply, RenewReply, Renewal, StoreError, Token,
    },
};

/// The meaning of the reply to an acquire request.
pub(super) enum Outcome {
    Granted(Grant, Lease),
    /// The store has a queue entry for the token.
    Queued {
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    },
    Busy(Option<Duration>),
    /// Nothing was done.
    Late(StoreError),
    /// The token may hold the lock, and must be abandoned.
    Unknown(StoreError),
    Refused(Refused),
}

impl Session {
    pub(super) fn asked(
        &mut self,
        id: AcquireId,
        attempt: Attempt,
        answer: Answer,
        cx: &mut Cx<'_>,
    ) -> Step {
        let Attempt { token, sent, .. } = attempt;
        let terms = self.acquisitions[id].terms;
        match outcome(answer, &terms, sent, cx) {
            Outcome::Granted(grant, lease) => {
                let granted = self.hold_from_reply(id, token, grant, lease, sent, cx);
                return self.serve(id, Some(token), granted, cx);
            }
            Outcome::Queued {
                counter,
                holder_ttl,
            } => {
                let (key, queue) = self.key_and_queue(id);
                cx.debug(|| waiting(key, holder_ttl, true));
                queue.queued(token, sent, counter, holder_ttl, cx);
            }
            Outcome::Busy(holder_ttl) => {
                let (key, queue) = self.key_and_queue(id);
                if !matches!(queue.last, Refusal::Busy(_)) {
                    cx.debug(|| waiting(key, holder_ttl, false));
                }
                queue.refused(token, holder_ttl, cx);
            }
            Outcome::Late(error) => self.failed_or_silent(id, token, error, cx),
            Outcome::Unknown(error) => {
                self.abandon_attempt(id, attempt, cx);
                if !error.is_transient() {
                    self.failed(id, token, None, cx);
                    return self.refuse(id, Refused::Store(error), cx);
                }
                self.failed_or_silent(id, token, error, cx);
            }
            Outcome::Refused(refused) => {
                self.failed(id, token, None, cx);
                return self.refuse(id, refused, cx);
            }
        }
        self.go_on(id, cx)
    }

    pub(super) fn polled(
        &mut self,
        id: AcquireId,
        token: Token,
        sent: Instant,
        answer: Answer,
        cx: &mut Cx<'_>,
    ) -> Step {
        let (_, queue) = self.key_and_queue(id);
        match answer {
            Ok(Reply::Poll(PollReply::Granted(grant))) => {
                return self.granted(id, token, grant, sent, cx);
            }
            Ok(Reply::Poll(PollReply::Queued {
                counter,
                holder_ttl,
            })) => drop(queue.queued(token, sent, counter, holder_ttl, cx)),
            Ok(_) => queue.gone(token, cx),
            Err(error) => return self.unanswered(id, token, error, cx),
        }
        self.go_on(id, cx)
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
        let ttl = grant.ttl.min(HANDOFF_LEASE).min(terms.lease);
        let mut lease = Lease::granted(terms.lease, true, as_of, ttl, cx.fraction());
        lease.hurry(cx.now + CONFIRM_WITHIN);
        // With less validity than a renewal may take, the lock would be lost at once.
        let is_enough = lease.validity(cx.now) > terms.call_timeout();
        if terms.renew && (is_enough || cx.breaks(Mutation::ConfirmsNothing)) {
            let lease = lease.held_since(cx.now, terms.max_hold);
            let granted = self.hold_granted(id, token, grant, lease, as_of, cx);
            return self.serve(id, Some(token), granted, cx);
        }
        acquisition.state = State::Confirming {
            token,
            sent: cx.now,
            grant,
        };
        let renewal = Renewal::new(acquisition.hold(token), terms.lease);
        Step::Call(Call::new(
            Request::Renew(renewal),
            acquisition.timeout(cx.now),
        ))
    }

    pub(super) fn confirmed(
        &mut self,
        id: AcquireId,
        token: Token,
        sent: Instant,
        grant: Grant,
        answer: Answer,
        cx: &mut Cx<'_>,
    ) -> Step {
        let acquisition = &self.acquisitions[id];
        let terms = acquisition.terms;
        match answer {
            Ok(Reply::Renew(RenewReply::Renewed { ttl })) => {
                let lease = Lease::granted(terms.lease, terms.renew, sent, ttl, cx.fraction());
                if lease.validity(cx.now).is_zero() {
                    // A poll after a pause returns the current state.
                    let error = StoreError::timed_out(cx.now - sent);
                    return self.unanswered(id, token, error, cx);
                }
                let granted = self.hold_from_reply(id, token, grant, lease, sent, cx);
                self.serve(id, Some(token), granted, cx)
            }
            Ok(_) => {
                // With several servers, some may still hold it (rule 9).
                let hold = acquisition.hold(token);
                self.key_and_queue(id).1.gone(token, cx);
                self.abandon(hold, terms.lease, None, cx);
                self.go_on(id, cx)
            }
            Err(error) => self.unanswered(id, token, error, cx),
        }
    }

    /// Records a poll or a confirmation without a reply. The queue entry is unchanged.
    pub(super) fn unanswered(
        &mut self,
        id: AcquireId,
        token: Token,
        error: StoreError,
        cx: &mut Cx<'_>,
    ) -> Step {
        let is_informative = self.is_informative(id, &error, cx);
        let (key, queue) = self.key_and_queue(id);
        cx.debug(|| Note::Unavailable(key.clone(), error.clone()));
        if is_informative {
            queue.unanswered(token, &error, cx);
        }
        if error.is_transient() {
            self.go_on(id, cx)
        } else {
            self.refuse(id, Refused::Store(error), cx)
        }
    }

    /// Records an acquire request without a usable reply.
    pub(super) fn failed_or_silent(
        &mut self,
        id: AcquireId,
        token: Token,
        error: StoreError,
        cx: &mut Cx<'_>,
    ) {
        let is_informative = self.is_informative(id, &error, cx);
        let key = &self.acquisitions[id].key;
        cx.debug(|| Note::Unavailable(key.clone(), error.clone()));
        self.failed(id, token, is_informative.then_some(&error), cx);
    }

    pub(super) fn failed(
        &mut self,
        id: AcquireId,
        token: Token,
        error: Option<&StoreError>,
        cx: &mut Cx<'_>,
    ) {
        if let Some(queue) = self.acquisitions[id].queue {
            self.queues[queue].failed(token, error, cx);
        }
    }

    /// Returns whether `error` reflects more than the end of the request's wait: a call that the
    /// time limit has cut short must not replace a more informative last reply.
    pub(super) fn is_informative(&self, id: AcquireId, error: &StoreError, cx: &Cx<'_>) -> bool {
        let acquisition = &self.acquisitions[id];
        let last = acquisition.queue.map(|queue| &self.queues[queue].last);
        match last {
            None | Some(Refusal::None) => true,
            Some(Refusal::Busy(_)) => !acquisition.is_over(cx.now),
            Some(Refusal::Unavailable(_)) => !(acquisition.is_over(cx.now) && error.is_timed_out()),
        }
    }

    /// Takes over the lock from its previous holder in this process. Returns `None` if it must be
    /// released, as too little validity is left.
    pub(super) fn take(
        &mut self,
        id: AcquireId,
        handoff: Handoff,
        cx: &mut Cx<'_>,
    ) -> Option<Step> {
        let Handoff {
            hold,
            fence,
            lease,
            budget,
        } = handoff;
        let terms = self.acquisitions[id].terms;
        // As for a grant: with less validity than a renewal may take, it would be lost at once.
        if lease.validity(cx.now) <= terms.call_timeout() {
            self.give_back(hold, terms.lease, cx);
            return None;
        }
        let lease = lease.held_since(cx.now, terms.max_hold);
        let held = Held::new(hold, fence, terms, lease, Some(budget));
        let granted = self.hold(held, cx);
        Some(self.serve(id, None, granted, cx))
    }

    /// Starts holding a grant whose lease was extended by the reply to a request sent at `sent`.
    pub(super) fn hold_from_reply(
        &mut self,
        id: AcquireId,
        token: Token,
        grant: Grant,
        lease: Lease,
        sent: Instant,
        cx: &mut Cx<'_>,
    ) -> Granted {
        let max_hold = self.acquisitions[id].terms.max_hold;
        self.hold_granted(id, token, grant, lease.held_since(sent, max_hold), sent, cx)
    }

    /// Starts holding a grant whose fencing tokens were reserved by a request sent at `as_of`.
    pub(super) fn hold_granted(
        &mut self,
        id: AcquireId,
        token: Token,
        grant: Grant,
        lease: Lease,
        as_of: Instant,
        cx: &mut Cx<'_>,
    ) -> Granted {
        let acquisition = &self.acquisitions[id];
        let hands_off = acquisition.claim().hands_off;
        let budget = hands_off.then(|| Budget::new(grant.reserved, as_of, cx.now));
        let hold = acquisition.hold(token);
        let held = Held::new(hold, grant.fence, acquisition.terms, lease, budget);
        self.hold(held, cx)
    }

    /// Ends a waiter that holds the lock: under the token of its queue entry, or by a local
    /// hand-off.
    pub(super) fn serve(
        &mut self,
        id: AcquireId,
        token: Option<Token>,
        granted: Granted,
        cx: &mut Cx<'_>,
    ) -> Step {
        let handoff_until = self.handoff_until(granted.held);
        let acquisition = &self.acquisitions[id];
        let (mode, ticket) = (acquisition.terms.mode, acquisition.ticket);
        let mut contended = acquisition.was_refused || !acquisition.was_first;
        if let Some(queue) = acquisition.queue {
            let queue = &mut self.queues[queue];
            contended |= queue.contended;
            queue.served((mode, ticket), token, handoff_until);
        }
        self.leave(id, cx);
        Step::Done(Ok(Granted {
            contended,
            ..granted
        }))
    }

    pub(super) fn key_and_queue(&mut self, id: AcquireId) -> (&LockKey, &mut WaitQueue) {
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
        self.abandon(hold, lease, Some(attempt.deadline), cx);
    }
}

fn waiting(key: &LockKey, holder_ttl: Option<Duration>, in_store_queue: bool) -> Note {
    Note::Waiting {
        key: key.clone(),
        holder_ttl,
        in_store_queue,
    }
}

/// Interprets the reply to an acquire request that was sent at `sent`.
pub(super) fn outcome(answer: Answer, terms: &Terms, sent: Instant, cx: &mut Cx<'_>) -> Outcome {
    match answer {
        Ok(Reply::Acquire(AcquireReply::Granted(grant))) => {
            let from = if cx.breaks(Mutation::CountsFromReply) {
                cx.now
            } else {
                sent
            };
            let lease = Lease::granted(terms.lease, terms.renew, from, grant.ttl, cx.fraction());
            if lease.validity(cx.now).is_zero() {
                let took = cx.now.saturating_duration_since(sent);
                return Outcome::Unknown(StoreError::timed_out(took));
            }
            Outcome::Granted(grant, lease)
        }
        Ok(Reply::Acquire(AcquireReply::Queued {
            counter,
            holder_ttl,
        })) => Outcome::Queued {
            counter,
            holder_ttl,
        },
        Ok(Reply::Acquire(AcquireReply::Busy { holder_ttl, .. })) => Outcome::Busy(holder_ttl),
        Ok(Reply::Acquire(AcquireReply::ForeignKey(part))) => {
            Outcome::Refused(Refused::ForeignKey(part))
        }
        Ok(Reply::Acquire(AcquireReply::ModeMismatch)) => Outcome::Refused(Refused::ModeMismatch),
        Ok(_) => Outcome::Late(StoreError::late()),
        // A script may fail after its first writes if the server forbids one of its commands, so
        // the token is abandoned after a refusal as well.
        Err(error) => Outcome::Unknown(error),
    }
}
