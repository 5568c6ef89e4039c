//! Acquiring: a campaign is led until something came of it.

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
    survey::Calling,
};
use crate::{
    fence::FencingToken,
    spec::{Mode, call_timeout},
    store::{AcquireAllReply, AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, StoreError, StoreErrorKind},
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

    /// How long one server may take to answer an acquire. Where all are slow it is longer, or nobody would ever get an answer.
    pub(super) fn node_patience(&self, lease: Duration) -> Duration {
        let slow = *lock(&self.round_trip) * 10;
        slow.clamp(node_timeout(lease), call_timeout(lease) * 2 / 3)
    }

    /// Leads a campaign until something came of it.
    pub(super) async fn lead(
        &self,
        campaign: &Shared,
        mut terms: Terms,
        begin: impl FnOnce(&mut Campaign, &Terms, Instant) -> Calls,
    ) -> Outcome {
        let (begun, patience) = (terms.sent, self.node_patience(terms.lease));
        let mut under_way = Calling { background: &self.background, calls: UnderWay::new() };
        let mut silent_at = terms.answer_by.min(terms.sent + patience);
        {
            let mut state = lock(campaign);
            let calls = begin(&mut state, &terms, terms.sent);
            self.send(campaign, &state, &terms, calls, &mut under_way.calls);
        }
        self.leave(campaign);
        // One timer for all replies: each new one would be registered and taken back.
        let mut alarm = pin!(sleep_until(silent_at));
        loop {
            let now = Instant::now();
            let next = {
                let mut state = lock(campaign);
                let next = state.next(terms.deadline_from(now, patience), now);
                if let Next::Send(calls) = &next {
                    terms.sent = now;
                    terms.deadline = terms.deadline_from(now, patience);
                    silent_at = terms.answer_by.min(now + patience);
                    self.send(campaign, &state, &terms, calls.clone(), &mut under_way.calls);
                }
                next
            };
            // What is given up is said before anything that is only about to be sent.
            self.leave(campaign);
            let grace = match next {
                Next::Done(outcome) => return outcome,
                Next::Wait(grace) => grace,
                Next::Send(_) => continue,
            };
            let until = grace.map_or(silent_at, |grace| grace.min(silent_at));
            if alarm.deadline() != until {
                alarm.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                Some(()) = under_way.calls.next() => {}
                () = &mut alarm => {
                    if until == silent_at {
                        let error = StoreError::timed_out(begun.elapsed());
                        let silent = lock(campaign).time_is_up(&error);
                        if silent.len() >= self.majority() && terms.sent.elapsed() >= patience {
                            self.measured(patience);
                        }
                        // Whoever had no time to answer is not to blame.
                        if terms.sent.elapsed() >= patience {
                            silent.iter().for_each(|node| self.nodes[*node].rest(error.clone(), Instant::now()));
                        }
                    }
                }
            }
        }
    }

    /// Says what is to be said, each to its server.
    pub(super) fn send(
        &self,
        campaign: &Shared,
        state: &Campaign,
        terms: &Terms,
        calls: Calls,
        under_way: &mut UnderWay,
    ) {
        let now = terms.sent;
        // With too few that are well everybody is asked.
        let well = self.nodes.iter().filter(|node| node.is_well(now)).count();
        let spares = well >= self.majority();
        for (index, say) in calls {
            let node = self.nodes[index].clone();
            let admitted = if spares { node.admits(now) } else { Ok(()) };
            under_way.push(calls::call(node, index, campaign.clone(), state, terms, say, admitted));
        }
    }

    /// Gives up names that are not used any more. Not under the lock of the campaign: a server may tell something on the spot.
    pub(super) fn leave(&self, campaign: &Shared) {
        let (left, hold, lease) = {
            let mut state = lock(campaign);
            let left = state.take_left();
            if left.is_empty() {
                return;
            }
            (left, state.hold().clone(), state.longest_lease())
        };
        left.iter().for_each(|left| drop(self.give_up(left, &hold, lease)));
    }

    pub(super) fn give_up(&self, left: &Left, hold: &Hold, lease: Duration) -> oneshot::Receiver<()> {
        self.background.give_up(Unused::new(self.nodes[left.node].clone(), left, hold, lease))
    }

    /// Gives up what a reader that was a writer may hold as a writer still.
    pub(super) fn give_up_writer(&self, left: &[Left], hold: &Hold, lease: Duration) {
        let writer = Hold { mode: Mode::Exclusive, ..hold.clone() };
        left.iter().for_each(|left| drop(self.give_up(left, &writer, lease)));
    }

    /// Too few servers have answered.
    pub(super) fn unreachable(&self, campaign: &Shared) -> StoreError {
        let campaign = lock(campaign);
        let said = campaign.complaints().map(|(node, said)| format!("{}: {said}", self.nodes[node]));
        let kinds: Vec<_> = campaign.errors().map(StoreError::kind).collect();
        self.too_few(said.collect(), &kinds)
    }

    pub(super) fn too_few(&self, said: Vec<String>, kinds: &[StoreErrorKind]) -> StoreError {
        // What will not pass by itself is worth its own kind, if it is the only obstacle.
        let kind = match kinds {
            [first, rest @ ..] if rest.iter().all(|kind| kind == first) => *first,
            _ => StoreErrorKind::Unavailable,
        };
        let message = format!("{} of {} servers are needed: {}", self.majority(), self.nodes.len(), said.join("; "));
        StoreError::new(kind, message)
    }

    pub(super) async fn acquire(&self, request: &KeyRequest) -> Result<AcquireReply, StoreError> {
        let Hold { ref key, mode, token } = request.hold;
        self.check(mode, request.lease)?;
        let now = Instant::now();
        let (campaign, is_new) = self.begin(request, now);
        let beside = request.beside.and_then(|beside| self.campaign(beside));
        let beside = beside.map(|beside| {
            let beside = lock(&beside);
            (0..self.nodes.len()).map(|node| beside.held_at(node)).collect()
        });
        let terms = Terms::new(request, self.proposals.next(), beside, now);
        let outcome = if is_new {
            let line = line_node(&self.nodes, key, now);
            let contended = self.contended.is(key, now);
            let begin = |campaign: &mut Campaign, terms: &Terms, now| {
                campaign.acquire(request.if_busy, line, contended, terms.deadline, now)
            };
            self.lead(&campaign, terms, begin).await
        } else {
            self.lead(&campaign, terms, |campaign, terms, now| campaign.poll(terms.deadline, now)).await
        };
        Ok(match outcome {
            Outcome::Granted { fence, until, spare } => {
                AcquireReply::Granted(self.granted(fence, until, now).spare(spare))
            }
            Outcome::InLine { holder_ttl } => {
                self.contended.note(key, Instant::now());
                AcquireReply::Queued { counter: None, holder_ttl }
            }
            Outcome::Refused(reply) => {
                self.forget(token);
                reply
            }
            Outcome::Gone => {
                self.forget(token);
                AcquireReply::Busy { holder_ttl: None }
            }
            // Whoever asked gives the token up.
            Outcome::Unreachable => return Err(self.unreachable(&campaign)),
        })
    }

    pub(super) fn granted(&self, fence: FencingToken, until: Instant, sent: Instant) -> Grant {
        self.proposals.seen(fence);
        self.measured(sent.elapsed());
        Grant::new(fence, until.saturating_duration_since(sent))
    }

    /// All or none: one after the other was granted counts only if all were.
    pub(super) async fn acquire_all(&self, requests: &[KeyRequest]) -> Result<AcquireAllReply, StoreError> {
        let now = Instant::now();
        let once: Vec<_> =
            requests.iter().map(|request| KeyRequest { if_busy: IfBusy::Refuse, ..request.clone() }).collect();
        let replies = join_all(once.iter().map(|request| self.acquire(request))).await;
        let mut grants = Vec::with_capacity(replies.len());
        let mut refused = None;
        for (index, reply) in replies.into_iter().enumerate() {
            match reply? {
                AcquireReply::Granted(grant) => grants.push(grant),
                reply => {
                    refused = Some(AcquireAllReply::Refused { index, reply });
                    break;
                }
            }
        }
        if let Some(refused) = refused {
            join_all(requests.iter().map(|request| self.abandon(&request.hold))).await;
            return Ok(refused);
        }
        let late = now.elapsed();
        let left = |grant: Grant| Grant { ttl: grant.ttl.saturating_sub(late), ..grant };
        Ok(AcquireAllReply::Granted(grants.into_iter().map(left).collect()))
    }

    pub(super) async fn poll(&self, hold: &Hold) -> Result<PollReply, StoreError> {
        let now = Instant::now();
        let Some(campaign) = self.campaign(hold.token) else { return Ok(PollReply::Gone) };
        let terms = Terms::again(&lock(&campaign), self.proposals.next(), now);
        let outcome = self.lead(&campaign, terms, |campaign, terms, now| campaign.poll(terms.deadline, now)).await;
        Ok(match outcome {
            Outcome::Granted { fence, until, spare } => {
                self.contended.note(&hold.key, Instant::now());
                PollReply::Granted(self.granted(fence, until, now).spare(spare))
            }
            Outcome::InLine { holder_ttl } => PollReply::Queued { counter: None, holder_ttl },
            Outcome::Refused(_) | Outcome::Gone => {
                self.forget(hold.token);
                PollReply::Gone
            }
            Outcome::Unreachable => return Err(self.unreachable(&campaign)),
        })
    }
}
