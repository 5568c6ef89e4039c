//! Acquire attempts and polls: runs a campaign to its outcome.

use std::{pin::pin, time::Duration};

use futures_util::{StreamExt as _, future::join_all};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

use super::{
    Inner, Shared,
    background::{UnderWay, Unused},
    calls::{self, Terms},
    campaign::{Calls, Campaign, Left, Next, Outcome, Patience},
    node::line_node,
    node_timeout,
    proposals::{Proposals, micros},
    survey::Calling,
};
use crate::{
    fence::FencingToken,
    spec::call_timeout,
    store::{
        AcquireAllReply, AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, StoreError,
        StoreErrorKind,
    },
    sync::lock,
};

impl Inner {
    pub(super) fn patience(&self) -> Patience {
        Patience::new(*lock(&self.round_trip), rand::random())
    }

    pub(super) fn measured(&self, took: Duration) {
        let mut round_trip = lock(&self.round_trip);
        *round_trip = (*round_trip * 7 + took) / 8;
    }

    /// The time in which one server must reply to an acquire. It is longer if all servers are slow;
    /// otherwise no request would ever get its replies.
    pub(super) fn node_patience(&self, lease: Duration) -> Duration {
        let slow = *lock(&self.round_trip) * 10;
        slow.clamp(node_timeout(lease), call_timeout(lease) * 2 / 3)
    }

    /// Runs a campaign to its outcome.
    pub(super) async fn lead(
        &self,
        campaign: &Shared,
        mut terms: Terms,
        begin: impl FnOnce(&mut Campaign, &Terms, Instant) -> Calls,
    ) -> Outcome {
        let begun = terms.sent;
        let patience = terms
            .patience
            .unwrap_or_else(|| self.node_patience(terms.lease));
        let beyond =
            |fence| Proposals::beyond(fence, micros(), *lock(&self.round_trip), rand::random());
        let mut under_way = Calling {
            background: &self.background,
            calls: UnderWay::new(),
        };
        let mut silent_at = terms.answer_by.min(terms.sent + patience);
        {
            let mut state = lock(campaign);
            let calls = begin(&mut state, &terms, terms.sent);
            self.send(campaign, &state, &terms, calls, &mut under_way.calls);
        }
        self.leave(campaign);
        // One timer for all replies: a timer for each would be registered and removed again.
        let mut alarm = pin!(sleep_until(silent_at));
        loop {
            let now = Instant::now();
            let next = {
                let mut state = lock(campaign);
                let next = state.next(terms.deadline_from(now, patience), now, &beyond);
                if let Next::Send(calls) = &next {
                    terms.sent = now;
                    terms.deadline = terms.deadline_from(now, patience);
                    silent_at = terms.answer_by.min(now + patience);
                    self.send(
                        campaign,
                        &state,
                        &terms,
                        calls.clone(),
                        &mut under_way.calls,
                    );
                }
                next
            };
            // Abandon aliases before this round's requests, which are only sent when they
            // are polled.
            self.leave(campaign);
            let (until, is_awaited) = match next {
                Next::Done(outcome) => {
                    // Measure the last round only, as a pause between rounds is no round trip. A
                    // conversion is not measured: it may have sent nothing.
                    if matches!(outcome, Outcome::Granted { .. }) && terms.patience.is_none() {
                        self.measured(terms.sent.elapsed());
                    }
                    return outcome;
                }
                Next::Wait(grace) => (grace.map_or(silent_at, |grace| grace.min(silent_at)), true),
                Next::Pause(until) => (until, false),
                Next::Send(_) => continue,
            };
            if alarm.deadline() != until {
                alarm.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                Some(()) = under_way.calls.next() => {}
                () = &mut alarm => {
                    if is_awaited && until == silent_at {
                        let error = StoreError::timed_out(begun.elapsed());
                        let silent = lock(campaign).time_is_up(&error);
                        if silent.len() >= self.majority() && terms.sent.elapsed() >= patience {
                            self.measured(patience);
                        }
                        // A circuit breaker does not open if its server had less than the
                        // full time.
                        if terms.sent.elapsed() >= patience {
                            silent.iter().for_each(|node| self.nodes[*node].rest(error.clone(), Instant::now()));
                        }
                    }
                }
            }
        }
    }

    /// Sends the requests of a round to their servers.
    pub(super) fn send(
        &self,
        campaign: &Shared,
        state: &Campaign,
        terms: &Terms,
        calls: Calls,
        under_way: &mut UnderWay,
    ) {
        let now = terms.sent;
        // If a server that has voted is ahead, propose its number, so that the other servers reply
        // with the same one and no write-back is needed. Never propose less than the clock: servers
        // that have lost their data may have given a smaller number to another acquisition.
        let next = self.proposals.next();
        let proposal = state.drawn().map_or(next, |drawn| drawn.max(next));
        // With less than a majority of healthy servers, ask all: ignore the circuit breakers.
        let well = self.nodes.iter().filter(|node| node.is_well(now)).count();
        let spares = well >= self.majority();
        for (index, say) in calls {
            let node = self.nodes[index].clone();
            let admitted = if spares { node.admits(now) } else { Ok(()) };
            under_way.push(calls::call(
                (index, node),
                campaign.clone(),
                state,
                terms,
                proposal,
                say,
                admitted,
            ));
        }
    }

    /// Abandons the aliases that a campaign no longer uses. The campaign must not be locked
    /// meanwhile, as a server may notify it immediately.
    pub(super) fn leave(&self, campaign: &Shared) {
        let (left, hold, lease, was_writer) = {
            let mut state = lock(campaign);
            let left = state.take_left();
            if left.is_empty() {
                return;
            }
            (
                left,
                state.hold().clone(),
                state.longest_lease(),
                state.was_writer(),
            )
        };
        if was_writer {
            self.give_up_writer(&left, &hold, lease);
        }
        left.iter()
            .for_each(|left| drop(self.give_up(left, &hold, lease)));
    }

    pub(super) fn give_up(
        &self,
        left: &Left,
        hold: &Hold,
        lease: Duration,
    ) -> oneshot::Receiver<()> {
        self.background.give_up(Unused::new(
            self.nodes[left.node].clone(),
            left,
            hold,
            lease,
        ))
    }

    /// Abandons the votes that a reader may still hold as a writer, from before its conversion.
    pub(super) fn give_up_writer(&self, left: &[Left], hold: &Hold, lease: Duration) {
        let writer = hold.as_writer();
        left.iter()
            .for_each(|left| drop(self.give_up(left, &writer, lease)));
    }

    /// The error if too few servers have replied.
    pub(super) fn unreachable(&self, campaign: &Shared) -> StoreError {
        let campaign = lock(campaign);
        let said = campaign
            .complaints()
            .map(|(node, said)| format!("{}: {said}", self.nodes[node]));
        let kinds: Vec<_> = campaign.errors().map(StoreError::kind).collect();
        self.too_few(said.collect(), &kinds)
    }

    pub(super) fn too_few(&self, said: Vec<String>, kinds: &[StoreErrorKind]) -> StoreError {
        // If all servers failed for the same reason, the error keeps its kind: a permanent cause
        // must not be reported as `Unavailable`.
        let kind = match kinds {
            [first, rest @ ..] if rest.iter().all(|kind| kind == first) => *first,
            _ => StoreErrorKind::Unavailable,
        };
        let message = format!(
            "{} of {} servers are needed: {}",
            self.majority(),
            self.nodes.len(),
            said.join("; ")
        );
        StoreError::new(kind, message)
    }

    pub(super) async fn acquire(&self, request: &KeyRequest) -> Result<AcquireReply, StoreError> {
        let Hold { ref key, token, .. } = request.hold;
        let now = Instant::now();
        let (campaign, is_new) = self.begin(request, now);
        let reader_group = request
            .reader_group
            .and_then(|reader_group| self.campaign(reader_group));
        let reader_group = reader_group.map(|reader_group| {
            let reader_group = lock(&reader_group);
            (0..self.nodes.len())
                .map(|node| reader_group.held_at(node))
                .collect()
        });
        let terms = Terms::new(request, reader_group, now);
        let outcome = if is_new {
            let line = line_node(&self.nodes, key, now);
            let contended = self.contended.is(key, now);
            let begin = |campaign: &mut Campaign, terms: &Terms, now| {
                campaign.acquire(request.if_busy, line, contended, terms.deadline, now)
            };
            self.lead(&campaign, terms, begin).await
        } else {
            self.lead(&campaign, terms, |campaign, terms, now| {
                campaign.poll(terms.deadline, now)
            })
            .await
        };
        Ok(match outcome {
            Outcome::Granted {
                fence,
                until,
                reserved,
            } => AcquireReply::Granted(self.granted(fence, until, now).reserved(reserved)),
            Outcome::InLine { holder_ttl } => {
                self.contended.note(key, Instant::now());
                AcquireReply::Queued {
                    counter: None,
                    holder_ttl,
                }
            }
            Outcome::Refused(reply) => {
                self.forget(token);
                reply
            }
            Outcome::Gone => {
                self.forget(token);
                AcquireReply::Busy {
                    holder_ttl: None,
                    has_waiters: false,
                }
            }
            // The caller abandons the token.
            Outcome::Unreachable => return Err(self.unreachable(&campaign)),
        })
    }

    pub(super) fn granted(&self, fence: FencingToken, until: Instant, sent: Instant) -> Grant {
        self.proposals.seen(fence);
        Grant::new(fence, until.saturating_duration_since(sent))
    }

    /// Acquires all locks or none: a grant only counts if all locks are granted. The locks are
    /// acquired one after the other in the order of the requests. So of several requests with
    /// locks in common, the first to get the first of these locks proceeds, and no two requests
    /// refuse each other.
    pub(super) async fn acquire_all(
        &self,
        requests: &[KeyRequest],
    ) -> Result<AcquireAllReply, StoreError> {
        let mut grants = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            match self
                .acquire(&KeyRequest {
                    if_busy: IfBusy::Refuse,
                    ..request.clone()
                })
                .await?
            {
                // The TTL counts from this request. The caller counts it from the start of the
                // batch, which is earlier and therefore safe.
                AcquireReply::Granted(grant) => grants.push(grant),
                reply => {
                    join_all(
                        requests[..index]
                            .iter()
                            .map(|request| self.abandon(&request.hold)),
                    )
                    .await;
                    return Ok(AcquireAllReply::Refused { index, reply });
                }
            }
        }
        Ok(AcquireAllReply::Granted(grants))
    }

    pub(super) async fn poll(&self, hold: &Hold) -> Result<PollReply, StoreError> {
        let now = Instant::now();
        let Some(campaign) = self.campaign(hold.token) else {
            return Ok(PollReply::Gone);
        };
        let terms = Terms::again(&lock(&campaign), now);
        let outcome = self
            .lead(&campaign, terms, |campaign, terms, now| {
                campaign.poll(terms.deadline, now)
            })
            .await;
        Ok(match outcome {
            Outcome::Granted {
                fence,
                until,
                reserved,
            } => {
                self.contended.note(&hold.key, Instant::now());
                PollReply::Granted(self.granted(fence, until, now).reserved(reserved))
            }
            Outcome::InLine { holder_ttl } => PollReply::Queued {
                counter: None,
                holder_ttl,
            },
            Outcome::Refused(_) | Outcome::Gone => {
                self.forget(hold.token);
                PollReply::Gone
            }
            Outcome::Unreachable => return Err(self.unreachable(&campaign)),
        })
    }
}
