//! Locks that a majority holds: renewal, release, conversion and abandonment.

use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::time::{Instant, timeout};

use super::{
    Inner, Shared, answer_timeout,
    background::{UnderWay, Unused},
    calls::Terms,
    campaign::{Calls, Campaign, Heard, Left, Outcome, PerNode},
    tally::{Held, Renewed, Vote},
};
use crate::{
    acquire::SHORTEST_CALL,
    spec::{MAX_LEASE, call_timeout},
    store::{ConvertReply, Grant, Hold, Release, ReleaseReply, RenewReply, Renewal, StoreError},
    sync::lock,
};

impl Inner {
    /// Renews all locks of a batch with one call to each server.
    pub(super) async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<RenewReply, StoreError>> {
        let now = Instant::now();
        let nodes = self.nodes.len();
        let mut tallies: Vec<_> = renewals.iter().map(|_| Renewed::new(nodes)).collect();
        let mut batches: Vec<(Vec<usize>, Vec<Renewal>)> = vec![Default::default(); nodes];
        let mut healing = UnderWay::new();
        for (number, renewal) in renewals.iter().enumerate() {
            let names = self
                .campaign(renewal.hold.token)
                .map(|campaign| lock(&campaign).known().collect::<PerNode<_>>());
            let mut knows = PerNode::from_elem(false, nodes);
            for (node, token) in names.into_iter().flatten() {
                knows[node] = true;
                let hold = Hold::new(renewal.hold.key.clone(), renewal.hold.mode, token);
                batches[node].0.push(number);
                batches[node].1.push(Renewal::new(hold, renewal.lease));
            }
            knows
                .iter()
                .filter(|knows| !**knows)
                .for_each(|_| tallies[number].gone());
            if !renewal.lease.is_zero() {
                self.extends(renewal);
                self.heal(&renewal.hold, now, &mut healing);
            }
        }
        let shortest = renewals
            .iter()
            .filter_map(|renewal| self.lease_of(renewal))
            .min();
        let patience = answer_timeout(shortest.unwrap_or(MAX_LEASE));
        let mut numbers = Vec::with_capacity(nodes);
        let mut questions: Vec<(usize, BoxFuture<'static, _>)> = Vec::with_capacity(nodes);
        for (index, (of, batch)) in batches.into_iter().enumerate() {
            numbers.push(of);
            if !batch.is_empty() {
                let (node, background) = (self.nodes[index].clone(), self.background.clone());
                let campaigns = self.campaigns_of(&batch);
                questions.push((
                    index,
                    Box::pin(async move {
                        let replies = node.store.renew(&batch).await;
                        let mut unused = Vec::new();
                        for ((campaign, renewal), reply) in
                            campaigns.into_iter().zip(&batch).zip(&replies)
                        {
                            let (Some(campaign), Ok(reply)) = (campaign, reply) else {
                                continue;
                            };
                            let mut campaign = lock(&campaign);
                            let round = campaign.round();
                            campaign.heard(
                                index,
                                renewal.hold.token,
                                round,
                                Heard::Renew(*reply),
                                now,
                            );
                            let left = campaign.take_left();
                            let (hold, lease) = (campaign.hold(), campaign.longest_lease());
                            let mut unused_by = |hold: &Hold| {
                                unused.extend(
                                    left.iter()
                                        .map(|left| Unused::new(node.clone(), left, hold, lease)),
                                );
                            };
                            unused_by(hold);
                            if campaign.was_writer() {
                                // Servers that missed the conversion still hold a writer's vote.
                                unused_by(&hold.as_writer());
                            }
                        }
                        unused
                            .into_iter()
                            .for_each(|unused| drop(background.give_up(unused)));
                        Ok(replies)
                    }),
                ));
            }
        }
        self.background.finish(healing);
        let mut errors: Vec<Vec<(usize, StoreError)>> = vec![Vec::new(); renewals.len()];
        let failed = self
            .ask(
                patience,
                None,
                questions,
                |index, replies: Vec<Result<RenewReply, StoreError>>| {
                    for (number, reply) in numbers[index].iter().zip(replies) {
                        match reply {
                            Ok(RenewReply::Renewed { ttl }) => tallies[*number].renewed(now, ttl),
                            Ok(RenewReply::Gone) => tallies[*number].gone(),
                            Err(error) => errors[*number].push((index, error)),
                        }
                    }
                    tallies.iter().all(|tally| tally.held() != Held::Open)
                },
            )
            .await;
        let reply = |(tally, mut errors): (Renewed, Vec<_>)| match tally.held() {
            Held::Until(until) => Ok(RenewReply::Renewed {
                ttl: until.saturating_duration_since(now),
            }),
            Held::Gone => Ok(RenewReply::Gone),
            Held::Open => {
                errors.extend(failed.iter().cloned());
                Err(self.unanswered(&errors))
            }
        };
        tallies.into_iter().zip(errors).map(reply).collect()
    }

    /// Requests the missing votes of a held lock. They count from the next renewal on.
    pub(super) fn heal(&self, hold: &Hold, now: Instant, under_way: &mut UnderWay) {
        let Some(campaign) = self.campaign(hold.token) else {
            return;
        };
        {
            let mut state = lock(&campaign);
            let terms = Terms::again(&state, now);
            let calls = state.heal(terms.deadline);
            self.send(&campaign, &state, &terms, calls, under_way);
        }
        // Sent before these calls, which are only sent when they are polled.
        self.leave(&campaign);
    }

    pub(super) fn campaigns_of(&self, renewals: &[Renewal]) -> Vec<Option<Shared>> {
        let campaigns = lock(&self.campaigns);
        renewals
            .iter()
            .map(|renewal| campaigns.get(&renewal.hold.token.stem()).cloned())
            .collect()
    }

    fn extends(&self, renewal: &Renewal) {
        if let Some(campaign) = self.campaign(renewal.hold.token) {
            lock(&campaign).extends(renewal.lease);
        }
    }

    pub(super) fn lease_of(&self, renewal: &Renewal) -> Option<Duration> {
        self.campaign(renewal.hold.token)
            .map(|campaign| lock(&campaign).lease())
    }

    pub(super) async fn release(&self, release: &Release) -> Result<ReleaseReply, StoreError> {
        let hold = &release.hold;
        let Some(campaign) = self.campaign(hold.token) else {
            return Ok(ReleaseReply::NotHeld);
        };
        let (left, lease, longest_lease, line, was_writer) = {
            let mut state = lock(&campaign);
            state.close();
            (
                state.all_known(),
                state.lease(),
                state.longest_lease(),
                state.line(),
                state.was_writer(),
            )
        };
        if was_writer {
            self.give_up_writer(&left, hold, longest_lease);
        }
        let mut vote = Vote::new(self.nodes.len());
        (left.len()..self.nodes.len()).for_each(|_| vote.count(false));
        let questions = left
            .iter()
            .map(|left| (left.node, self.release_at(release, *left, longest_lease)));
        let questions: Vec<_> = questions.collect();
        let mut decided = vote.decided();
        let failed = self
            .ask(answer_timeout(lease), line, questions, |_, released| {
                vote.count(released);
                decided = vote.decided();
                decided.is_some()
            })
            .await;
        // The release is repeated in the background for servers that have not received it. The
        // aliases are no longer needed here.
        self.forget(hold.token);
        match decided {
            Some(true) => Ok(ReleaseReply::Released),
            Some(false) => Ok(ReleaseReply::NotHeld),
            None => Err(self.unanswered(&failed)),
        }
    }

    /// Releases one vote. If the server may still know the alias after that, abandons it in
    /// the background.
    pub(super) fn release_at(
        &self,
        release: &Release,
        left: Left,
        lease: Duration,
    ) -> BoxFuture<'static, Result<bool, StoreError>> {
        let node = self.nodes[left.node].clone();
        let background = self.background.clone();
        let hold = Hold::new(release.hold.key.clone(), release.hold.mode, left.token);
        let release = Release::new(hold.clone()).keep_for(release.keep_for);
        let patience = call_timeout(lease).max(SHORTEST_CALL);
        Box::pin(async move {
            let said = timeout(patience, node.store.release(&release)).await;
            let said = said.unwrap_or_else(|_| Err(StoreError::timed_out(patience)));
            // The alias is in the queue, or a delayed acquire may still make it a holder.
            let lingers =
                !matches!(said, Ok(ReleaseReply::Released)) && (left.lingers || said.is_err());
            if lingers {
                drop(background.give_up(Unused::new(node, &left, &hold, lease)));
            }
            said.map(|reply| reply == ReleaseReply::Released)
        })
    }

    pub(super) async fn convert(&self, hold: &Hold) -> Result<ConvertReply, StoreError> {
        let now = Instant::now();
        let Some(campaign) = self.campaign(hold.token) else {
            return Ok(ConvertReply::NotHeld);
        };
        let (names, lease) = {
            let mut state = lock(&campaign);
            state.converts();
            (state.known().collect::<PerNode<_>>(), state.lease())
        };
        let nodes = self.nodes.len();
        let mut vote = Vote::new(nodes);
        (names.len()..nodes).for_each(|_| vote.count(false));
        let questions = names.iter().map(|(index, token)| {
            let node = self.nodes[*index].clone();
            let hold = Hold::new(hold.key.clone(), hold.mode, *token);
            let question = async move { node.store.convert(&hold).await };
            (*index, Box::pin(question) as BoxFuture<'static, _>)
        });
        let questions: Vec<_> = questions.collect();
        let mut grants: PerNode<(usize, Grant)> = PerNode::new();
        let failed = self
            .ask(answer_timeout(lease), None, questions, |index, reply| {
                vote.count(match reply {
                    ConvertReply::Converted(grant) => {
                        grants.push((index, grant));
                        true
                    }
                    ConvertReply::NotHeld => false,
                });
                vote.decided().is_some()
            })
            .await;
        match vote.decided() {
            Some(true) => {}
            Some(false) => return Ok(ConvertReply::NotHeld),
            None => return Err(self.unanswered(&failed)),
        }
        let mut terms = Terms::again(&lock(&campaign), Instant::now());
        terms.patience = Some(answer_timeout(lease));
        let begin = |campaign: &mut Campaign, _: &Terms, begun| {
            campaign.converted(&grants, now, begun);
            Calls::new()
        };
        match self.lead(&campaign, terms, begin).await {
            Outcome::Granted { fence, until, .. } => {
                self.proposals.seen(fence);
                Ok(ConvertReply::Converted(Grant::new(
                    fence,
                    until.saturating_duration_since(Instant::now()),
                )))
            }
            _ => Err(self.unreachable(&campaign)),
        }
    }

    /// Abandons all aliases of an acquisition. Waits for the first attempt at each server, but no
    /// longer than [`Inner::node_patience`].
    pub(super) async fn abandon(&self, hold: &Hold) {
        let Some(campaign) = self.campaign(hold.token) else {
            return;
        };
        self.forget(hold.token);
        let (left, lease, held, was_writer) = {
            let mut state = lock(&campaign);
            state.close();
            state.leave_all();
            (
                state.take_left(),
                state.longest_lease(),
                state.hold().clone(),
                state.was_writer(),
            )
        };
        if was_writer {
            self.give_up_writer(&left, &held, lease);
        }
        let said: Vec<_> = left
            .iter()
            .map(|left| self.give_up(left, &held, lease))
            .collect();
        let _ = timeout(self.node_patience(lease), join_all(said)).await;
    }
}
