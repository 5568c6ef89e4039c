//! An acquisition: one request for one lock, from its arrival to the grant.

mod answers;

use std::{sync::Arc, time::Duration};

use super::{
    AcquireId, Cx, Mutation, Note, QueueId, Session,
    held::{Granted, Source},
    message::{Call, Request},
    queue::entry::{Claim, QueueEntry},
    queue::handoff::MAX_HANDOFFS,
    queue::{Refusal, Ticket},
};
use crate::{
    request::key::LockKey,
    request::spec::{LockSpec, Mode, Terms, Wait},
    shell::time::Instant,
    store::{Done, Grant, Hold, IfBusy, KeyPart, KeyRequest, RETAINED, StoreError, Token},
};

/// The time after its call time-out for which a delayed request may still be executed. The store
/// rejects it after that (rule 7).
pub(crate) const STRAGGLE: Duration = Duration::from_secs(1);

/// Lower bound of a call's time-out: a request with a shorter wait still makes one acquire
/// attempt.
pub(crate) const SHORTEST_CALL: Duration = Duration::from_millis(50);

/// The time within which a grant from the wait queue is renewed. It is not zero, because most
/// critical sections end earlier and then need no renewal.
pub(crate) const CONFIRM_WITHIN: Duration = Duration::from_millis(100);

/// The time that a client has to release an idle lock for a request that does not wait, unless the
/// store is far away.
const BRIEFLY: Duration = Duration::from_millis(50);

/// The largest number of given up requests that are yet to be ended: each that is given up while
/// its call is in flight leaves a token, which takes 400 bytes and two calls.
pub(crate) const UNENDED: usize = 100_000;

/// The next step of a task that waits for a lock.
#[derive(Debug)]
pub(crate) enum Step<G = Granted> {
    /// Make this call, and pass its answer to [`Session::replied`].
    Call(Call),
    /// The same, but call [`Session::resume`] whenever the task is woken, and drop the call for
    /// any other step than `Wait`.
    CallOrWake(Call),
    /// Call [`Session::resume`] at this instant and whenever the task is woken. A call in flight
    /// goes on.
    Wait(Instant),
    /// The request is over.
    Done(Result<G, Refused>),
}

/// The reason why a request was not granted.
#[derive(Clone, Debug)]
pub(crate) enum Refused {
    ShuttingDown,
    /// The queue is as long as the request or the client allows.
    Full,
    /// All queues together are as long as the client allows.
    FullInAll,
    /// Too many tokens are to be ended.
    Unended,
    /// The request does not wait, and the lock is held, for the given time if that is known.
    Contended(Option<Duration>),
    /// The wait has ended after this last refusal.
    TimedOut(Refusal),
    Store(StoreError),
    ForeignKey(KeyPart),
    ModeMismatch,
    /// The store keeps this result of the work under the lock.
    Done(Arc<Done>),
}

#[cfg_attr(test, derive(Clone))]
pub(crate) struct Acquisition {
    pub(super) key: LockKey,
    pub(super) terms: Terms,
    /// The time at which the request was made.
    since: Instant,
    /// The end of its wait, or `None` if it does not wait.
    until: Option<Instant>,
    /// It does not wait for a holder that uses the lock.
    is_brief: bool,
    /// The time-out of its calls, unless its wait ends before.
    patience: Duration,
    /// The call in flight. `None` behind others, or at the head while no call is made.
    in_flight: Option<Attempt>,
    /// The error of the first attempt of a request that does not wait.
    first_error: Option<StoreError>,
    /// The store refused the attempt outside of the queue, or others waited when it entered the
    /// queue.
    pub(super) contended: bool,
    /// The time at which it entered its queue.
    entered: Instant,
    /// The wait queue, once the request has entered it.
    pub(super) queue: Option<QueueId>,
    pub(super) ticket: Ticket,
    pub(super) previous: Option<AcquireId>,
    pub(super) next: Option<AcquireId>,
}

/// A call in flight.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    token: Token,
    sent: Instant,
    purpose: Purpose,
    /// The token has been revoked: a grant in the answer is over.
    is_revoked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// An acquire request outside of the queue: of a request that does not wait, or of one that
    /// other holders may admit.
    Try,
    /// An acquire request of the head.
    Ask,
    /// The head polls the queue entry.
    Poll,
    /// The head extends a grant to its full lease before the lock is used.
    Confirm(Grant),
}

impl Attempt {
    /// Returns whether this is an acquire request.
    fn acquires(&self) -> bool {
        matches!(self.purpose, Purpose::Try | Purpose::Ask)
    }
}

impl Acquisition {
    pub(super) fn claim(&self) -> Claim {
        Claim::of(&self.terms)
    }

    /// Returns the number of fencing tokens to reserve for a lock that is retained. They follow a
    /// clock of microseconds, so the tokens of locks that are retained for less do not run ahead.
    fn retained_tokens(&self) -> u32 {
        let micros = self.terms.retain.map_or(0, |retain| retain.as_micros());
        u32::try_from(micros).map_or(RETAINED, |micros| micros.min(RETAINED))
    }

    fn timeout(&self, now: Instant) -> Duration {
        self.until.map_or(self.patience, |until| {
            let left = until.saturating_duration_since(now);
            self.patience.min(left.max(SHORTEST_CALL))
        })
    }

    /// Lets a request that does not wait be queued until an idle lock is released. The call may
    /// take as long as any.
    fn waits_briefly(&mut self, now: Instant) {
        (self.until, self.is_brief) = (Some(now + self.patience), true);
    }

    /// Records that such a request is in the queue since the reply to a call sent at `sent`. The
    /// message to the holder and the release take about as long again.
    fn queued_briefly(&mut self, sent: Instant, now: Instant) {
        let round_trip = now.saturating_duration_since(sent);
        let by = now + BRIEFLY.max(round_trip * 2);
        self.until = self.until.map(|until| until.min(by));
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// Returns whether a grant from the wait queue may be older than grants that other holders got
    /// before this waiter came, as the entry may be that of an earlier waiter. A poll draws a
    /// larger fencing token then.
    fn is_newer(&self, as_of: Instant, cx: &Cx<'_>) -> bool {
        let is_newer = self.terms.mode != Mode::Exclusive && as_of < self.entered;
        is_newer && !cx.breaks(Mutation::ReaderTakesOldGrant)
    }

    /// Returns the instant by which a waiting task calls again: the end of its wait, which is at
    /// most [`LockSpec::MAX_LEASE`] away, or before.
    fn wakes(&self, at: Instant) -> Step {
        Step::Wait(self.until.map_or(at, |until| until.min(at)))
    }

    fn hold(&self, token: Token) -> Hold {
        Hold::new(self.key.clone(), self.terms.mode, token)
    }

    /// Returns the deadline of an acquire request that is sent at `now`.
    fn deadline(&self, now: Instant) -> Instant {
        now + self.timeout(now) + STRAGGLE
    }

    /// An acquire request that is sent at `now`.
    fn request(&self, token: Token, now: Instant) -> KeyRequest {
        KeyRequest::new(self.hold(token), self.terms.lease, self.deadline(now))
    }

    /// Returns the call of a request that is sent at `now`, and awaits its answer.
    fn call(&mut self, token: Token, purpose: Purpose, request: Request, now: Instant) -> Call {
        self.in_flight = Some(Attempt {
            token,
            sent: now,
            purpose,
            is_revoked: false,
        });
        Call::new(request, self.timeout(now))
    }

    #[cfg(test)]
    pub(super) fn wait_longer(&mut self, longer: Duration) {
        self.until = self.until.map(|until| until + longer);
    }

    #[cfg(test)]
    pub(super) fn knows(&self, token: Token) -> bool {
        self.in_flight.is_some_and(|it| it.token == token)
    }
}

impl Session {
    /// Begins a request that was made at `since`, and returns its first step.
    pub(crate) fn begin(
        &mut self,
        key: &LockKey,
        terms: &Terms,
        since: Instant,
        cx: &mut Cx<'_>,
    ) -> Result<(AcquireId, Step), Refused> {
        let retaining;
        let terms = match terms.retain {
            Some(_) => {
                retaining = self.retaining(key, terms, cx);
                &retaining
            }
            None => terms,
        };
        let id = self.admit(key, terms, (since, terms.call_timeout()), cx)?;
        let step = match self.take_retained(id, cx) {
            Some(step) => step,
            None => self.first_step(id, cx)?,
        };
        Ok((id, step))
    }

    /// Begins a request whose calls may take as long as `patience`, together with others.
    pub(super) fn begin_with(
        &mut self,
        key: &LockKey,
        terms: &Terms,
        times: (Instant, Duration),
        cx: &mut Cx<'_>,
    ) -> Result<(AcquireId, Step), Refused> {
        let terms = Terms {
            retain: None,
            ..*terms
        };
        let id = self.admit(key, &terms, times, cx)?;
        Ok((id, self.first_step(id, cx)?))
    }

    /// Adds a request, unless it is refused at once.
    fn admit(
        &mut self,
        key: &LockKey,
        terms: &Terms,
        (since, patience): (Instant, Duration),
        cx: &mut Cx<'_>,
    ) -> Result<AcquireId, Refused> {
        if self.closed {
            return Err(Refused::ShuttingDown);
        }
        if self.jobs.rest.len() >= UNENDED {
            return Err(Refused::Unended);
        }
        let until = match terms.wait {
            Wait::No => None,
            Wait::AtMost(wait) => Some(since + wait),
        };
        if until.is_none()
            && let Some(queue) = self.queue_of(terms.mode.kind(), key)
            && queue.stuck
        {
            return Err(self.refused_beside(key, terms.mode, cx));
        }
        Ok(self.acquisitions.insert(Acquisition {
            key: key.clone(),
            terms: *terms,
            since,
            until,
            is_brief: false,
            patience,
            in_flight: None,
            first_error: None,
            contended: false,
            entered: cx.now,
            queue: None,
            ticket: 0,
            previous: None,
            next: None,
        }))
    }

    /// Returns the first step of a request that needs the store.
    fn first_step(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Result<Step, Refused> {
        let Acquisition {
            ref key,
            terms,
            until,
            ..
        } = self.acquisitions[id];
        let others_wait = || {
            let queue = self.by_key[terms.mode.kind() as usize].get(key);
            queue.is_some_and(|queue| self.queues[*queue].stuck)
        };
        // Requests that several holders may admit are not admitted one by one, unless one of them
        // was refused.
        if until.is_none() || (terms.mode != Mode::Exclusive && !others_wait()) {
            return Ok(self.try_beside(id, cx));
        }
        self.wait_in_queue(id, cx)
    }

    /// Returns the next step of a task that was woken, or whose wait has ended. It is safe to call
    /// this at any time.
    pub(crate) fn resume(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Step {
        let Some(acquisition) = self.acquisitions.get_mut(id) else {
            return Step::Done(Err(Refused::ShuttingDown));
        };
        match acquisition.in_flight.map(|attempt| attempt.purpose) {
            Some(Purpose::Try | Purpose::Ask | Purpose::Confirm(_)) => {
                acquisition.wakes(cx.now + STRAGGLE)
            }
            Some(Purpose::Poll) if !self.closed => {
                // A poll goes on unless the head can be served without its reply: a broken poll
                // would otherwise be repeated at once, without its pause.
                let is_served = acquisition.queue.is_some_and(|queue| {
                    let queue = &self.queues[queue];
                    let proven = queue.entry.as_ref().and_then(QueueEntry::proven);
                    let takes = |(_, as_of)| !acquisition.is_newer(as_of, cx);
                    queue.handoff.is_some() || proven.is_some_and(takes)
                });
                if is_served {
                    acquisition.in_flight = None;
                    return self.go_on(id, cx);
                }
                acquisition.wakes(cx.now + STRAGGLE)
            }
            Some(Purpose::Poll) | None => self.go_on(id, cx),
        }
    }

    /// Ends a request whose task has dropped it. A token that may hold the lock is abandoned. A
    /// queue entry stays for the next waiter.
    pub(crate) fn cancel(&mut self, id: AcquireId, cx: &mut Cx<'_>) {
        let Some(acquisition) = self.acquisitions.get_mut(id) else {
            return;
        };
        let (in_flight, queue) = (acquisition.in_flight.take(), acquisition.queue);
        if let Some(attempt) = in_flight.filter(Attempt::acquires) {
            self.abandon_attempt(id, attempt, cx);
            if let Some(queue) = queue {
                self.queues[queue].failed(attempt.token, None, cx);
            }
        }
        self.leave(id, cx);
    }

    /// Records that a token of a request was revoked whose grant no task has taken yet: a reply
    /// with it may be on its way. The request goes on under a fresh token.
    pub(super) fn revoke_untaken(&mut self, token: Token, cx: &mut Cx<'_>) {
        let in_flight = self.acquisitions.iter_mut().find_map(|(id, it)| {
            // Other programs may send the message any number of times.
            let attempt = it.in_flight.as_mut();
            let attempt = attempt.filter(|it| it.token == token && !it.is_revoked)?;
            attempt.is_revoked = true;
            let attempt = *attempt;
            // The task need not await the reply to a poll.
            it.in_flight
                .take_if(|it| matches!(it.purpose, Purpose::Poll));
            Some((id, attempt))
        });
        let of_entry = self.queues.values_mut().find_map(|queue| {
            let head = queue.head?;
            queue.entry_of(token)?;
            queue.gone(token, cx);
            queue.wake_head(cx);
            Some(head)
        });
        // With several servers, some may still hold it (rule 9).
        if let Some((id, attempt)) = in_flight {
            self.abandon_attempt(id, attempt, cx);
        } else if let Some(head) = of_entry {
            let acquisition = &self.acquisitions[head];
            let (hold, lease) = (acquisition.hold(token), acquisition.terms.lease);
            self.abandon(hold, lease, None, cx);
        }
    }

    fn refuse(&mut self, id: AcquireId, refused: Refused, cx: &mut Cx<'_>) -> Step {
        self.leave(id, cx);
        Step::Done(Err(refused))
    }

    /// Makes one acquire attempt outside of the wait queues.
    fn try_beside(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Step {
        let acquisition = &mut self.acquisitions[id];
        let reserved = acquisition.retained_tokens();
        let token = cx.token(reserved > 0);
        let mut request = acquisition.request(token, cx.now);
        request.reserved = reserved;
        request.then_queues = acquisition.until.is_some();
        let request = Request::Acquire(request);
        Step::Call(acquisition.call(token, Purpose::Try, request, cx.now))
    }

    fn queued_or_refused(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Step {
        // This client may have retained the lock since the call: no message would announce that.
        if let Some(step) = self.take_retained(id, cx) {
            return step;
        }
        self.wait_in_queue(id, cx)
            .unwrap_or_else(|refused| Step::Done(Err(refused)))
    }

    /// Enters the wait queue. A request that is refused is removed.
    fn wait_in_queue(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Result<Step, Refused> {
        self.acquisitions[id].entered = cx.now;
        match self.enter(id) {
            Ok(is_first) => {
                if !is_first {
                    cx.debug(|| Note::Behind(self.acquisitions[id].key.clone()));
                }
                // The lock may be done for a waiter behind others, too: its thread may have read
                // the time before that of the head did, and be late.
                Ok(self.decide(id, cx))
            }
            Err(refused) => {
                self.acquisitions.remove(id);
                Err(refused)
            }
        }
    }

    /// The error of a request that does not wait while others of this process do. It follows from
    /// the latest reply of the store to those requests.
    fn refused_beside(&mut self, key: &LockKey, mode: Mode, cx: &Cx<'_>) -> Refused {
        let queue = self.queue_of(mode.kind(), key);
        let last = queue.map(|queue| queue.last.clone());
        if let Some(Refusal::Unavailable(error)) = last
            && !self.excludes(key, mode, cx.now)
            && !cx.breaks(Mutation::TakesSilenceForHolder)
        {
            // It is unknown whether the lock is held.
            return Refused::Store(error);
        }
        Refused::Contended(None)
    }

    fn go_on(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Step {
        if self.closed {
            return self.refuse(id, Refused::ShuttingDown, cx);
        }
        let acquisition = &self.acquisitions[id];
        if acquisition.is_over(cx.now) {
            let queue = acquisition.queue.map(|queue| &self.queues[queue]);
            let last = queue.map(|queue| queue.last.clone()).unwrap_or_default();
            // The token of the first attempt may be the reason for a refusal of the second.
            let first_error = acquisition.first_error.clone();
            let refused = match last {
                Refusal::Busy(holder_ttl) if acquisition.is_brief => {
                    first_error.map_or(Refused::Contended(holder_ttl), Refused::Store)
                }
                Refusal::None if acquisition.is_brief => Refused::Contended(None),
                last => Refused::TimedOut(last),
            };
            return self.refuse(id, refused, cx);
        }
        self.decide(id, cx)
    }

    /// Decides the next step of a waiter.
    fn decide(&mut self, id: AcquireId, cx: &mut Cx<'_>) -> Step {
        loop {
            let acquisition = &mut self.acquisitions[id];
            let Some(queue_id) = acquisition.queue else {
                return acquisition.wakes(cx.now);
            };
            let queue = &mut self.queues[queue_id];
            if let Some(done) = queue.done_for(acquisition.entered) {
                return self.refuse(id, Refused::Done(done), cx);
            }
            if queue.head != Some(id) {
                return acquisition.wakes(cx.now + LockSpec::MAX_LEASE);
            }
            if let Some(handoff) = queue.handoff.take() {
                match self.take(id, handoff, Source::Local, cx) {
                    Some(step) => return step,
                    None => continue,
                }
            }
            let claim = acquisition.claim();
            if queue.entry.is_none()
                && let Some(until) = queue.handoff_until.filter(|until| *until > cx.now)
                && claim.hands_off
            {
                return acquisition.wakes(until);
            }
            let entry = queue
                .entry
                .get_or_insert_with(|| QueueEntry::new(claim, cx));
            let token = entry.token;
            let proven = entry.proven();
            let is_outdated = proven.is_some_and(|(_, as_of)| acquisition.is_newer(as_of, cx));
            if let (Some((grant, as_of)), false) = (proven, is_outdated) {
                return self.granted(id, token, grant, as_of, cx);
            }
            if !is_outdated {
                if entry.ask_at > cx.now {
                    return acquisition.wakes(entry.ask_at);
                }
                if entry.is_asked() && cx.breaks(Mutation::AwaitsReport) {
                    return acquisition.wakes(cx.now + STRAGGLE);
                }
                if entry.is_asked() {
                    // The task that releases the lock made this request. Its outcome is overdue;
                    // the task may be gone.
                    entry.rename(cx);
                    if !cx.breaks(Mutation::LeavesNamedToken) {
                        let (hold, lease) = (acquisition.hold(token), acquisition.terms.lease);
                        self.abandon(hold, lease, Some(cx.now + STRAGGLE), cx);
                        self.named_in_vain(token, cx);
                    }
                    continue;
                }
            }
            let is_poll = entry.asked(cx.now);
            queue.asks();
            if is_poll {
                let request = Request::Poll(acquisition.hold(token));
                let call = acquisition.call(token, Purpose::Poll, request, cx.now);
                return Step::CallOrWake(call);
            }
            let mut request = acquisition.request(token, cx.now);
            request.if_busy = IfBusy::Queue;
            // The entry may be that of a request that retains nothing.
            if claim.retains && token.retains() {
                request.reserved = acquisition.retained_tokens();
            } else if claim.hands_off && queue.behind > 0 {
                request.reserved = MAX_HANDOFFS;
            }
            if claim.mode == Mode::Shared {
                request.reader_group = queue.reader_group(acquisition.ticket);
            }
            let request = Request::Acquire(request);
            return Step::Call(acquisition.call(token, Purpose::Ask, request, cx.now));
        }
    }
}
