//! The rounds of a campaign: models `Inner::lead`, `acquire`, `poll` and `abandon`, and `calls.rs`.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    client::{Client, Purpose},
    message::{Acquire, Reply, Request},
    sim::{Sim, Timer},
};
use crate::{
    acquire::STRAGGLE,
    explorer::sim::say,
    fence::FencingToken,
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, StoreError, Token,
        quorum::{
            campaign::{Calls, Campaign, Heard, Next, Outcome, Patience, Say},
            majority::majority,
            node::line_node,
            node_timeout,
            proposals::Proposals,
        },
    },
};

/// The rounds of a request that a user awaits.
pub(super) struct Lead {
    user: u32,
    token: Token,
    began: Instant,
    sent: Instant,
    deadline: Instant,
    silent_at: Instant,
    polls: bool,
    plan: u32,
    /// Replies are awaited.
    is_awaited: bool,
}

/// The request of a round for which a call was made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Led {
    token: Token,
    round: u32,
    sent: Instant,
    pub(super) deadline: Instant,
    pub(super) asked_again: bool,
}

/// The outcome of a [`Lead`].
pub(super) enum Answer {
    Acquire(AcquireReply),
    Poll(PollReply),
    Unreachable(StoreError),
}

impl Client {
    pub(super) fn lead_acquire(&mut self, sim: &mut Sim, user: u32, request: KeyRequest) -> u32 {
        let now = self.now(sim);
        let Hold { ref key, token, .. } = request.hold;
        sim.introduce(token, self.who);
        let patience = Patience::new(self.round_trip, sim.dice.fraction());
        let mut campaign = Campaign::new(&request, self.nodes.len(), patience, now);
        if let Some(super::Broken::Campaign(broken)) = sim.broken {
            campaign.broken = Some(broken);
        }
        let line = line_node(&self.nodes, key, now);
        let contended = self.contended.is(key, now);
        let calls = campaign.acquire(request.if_busy, line, contended, request.deadline, now);
        self.campaigns.push(campaign);
        self.lead(sim, user, token, request.deadline, calls, false)
    }

    pub(super) fn lead_poll(&mut self, sim: &mut Sim, user: u32, token: Token) -> Option<u32> {
        let now = self.now(sim);
        let campaign = self.campaign_mut(token)?;
        let deadline = now + node_timeout(campaign.lease()) + STRAGGLE;
        let calls = campaign.poll(deadline, now);
        Some(self.lead(sim, user, token, deadline, calls, true))
    }

    fn lead(
        &mut self,
        sim: &mut Sim,
        user: u32,
        token: Token,
        deadline: Instant,
        calls: Calls,
        polls: bool,
    ) -> u32 {
        let (now, id) = (self.now(sim), sim.number());
        let lead = Lead {
            user,
            token,
            began: now,
            sent: now,
            deadline,
            silent_at: now,
            polls,
            plan: 0,
            is_awaited: true,
        };
        self.leads.insert(id, lead);
        self.leave(sim, token);
        self.lead_send(sim, id, calls);
        // Servers that were not asked have failed already, which may decide the round.
        self.timer_at(sim, now, Timer::Lead(id, 0));
        id
    }

    fn lead_send(&mut self, sim: &mut Sim, id: u32, calls: Calls) {
        let now = self.now(sim);
        let Some(lead) = self.leads.get_mut(&id) else {
            return;
        };
        let (token, deadline) = (lead.token, lead.deadline);
        lead.sent = now;
        let Some(campaign) = self
            .campaigns
            .iter()
            .find(|campaign| campaign.hold().token == token)
        else {
            return;
        };
        lead.silent_at = now + node_timeout(campaign.lease());
        let (hold, lease, round) = (campaign.hold().clone(), campaign.lease(), campaign.round());
        let drawn = campaign.drawn();
        let proposal = self.propose(sim);
        let proposal = drawn.map_or(proposal, |drawn| drawn.max(proposal));
        let well = self.nodes.iter().filter(|node| node.is_well(now)).count();
        let spares = well >= majority(self.nodes.len());
        for (server, say) in calls {
            let admitted = if spares {
                self.nodes[server].admits(now)
            } else {
                Ok(())
            };
            let held_at = self
                .campaign(token)
                .and_then(|campaign| campaign.held_at(server));
            let named = |token| Hold::new(hold.key.clone(), hold.mode, token);
            let (name, request) = match say {
                Say::Acquire(name, if_busy) => {
                    let (hold, deadline_there, marker) =
                        (named(name), self.clock.when(deadline), None);
                    let acquire = Acquire {
                        hold,
                        lease,
                        if_busy,
                        proposal,
                        deadline: 0,
                        deadline_there,
                        marker,
                    };
                    (name, Request::Acquire(acquire))
                }
                Say::Poll(name) => (name, Request::Poll(named(name))),
                Say::Renew(name) => (name, Request::Renew(named(name), lease)),
                Say::Raise(fence) => {
                    let marker = self.links[server].marker(sim);
                    (held_at.unwrap_or(token), Request::Raise(fence, marker))
                }
            };
            let led = Led {
                token: name,
                round,
                sent: now,
                deadline,
                asked_again: false,
            };
            if let Err(error) = admitted {
                if let Some(campaign) = self.campaign_mut(token) {
                    campaign.heard(server, name, round, Heard::Failed(error), now);
                }
            } else if let Request::Acquire(_) = request {
                self.acquire(sim, server, request, Purpose::Lead(id, led));
            } else {
                self.call(sim, server, request, Purpose::Lead(id, led));
            }
        }
    }

    pub(super) fn lead_heard(
        &mut self,
        sim: &mut Sim,
        id: u32,
        server: usize,
        led: Led,
        raised: Option<FencingToken>,
        result: Result<Reply, StoreError>,
    ) {
        let now = self.now(sim);
        self.nodes[server].note(&result, now);
        let heard = match result {
            Ok(Reply::Acquire(reply, _)) => Heard::Acquire(reply),
            Ok(Reply::Poll(reply)) => Heard::Poll(reply),
            Ok(Reply::Renew(reply)) => Heard::Renew(reply),
            Ok(Reply::Raise(reply)) => match raised {
                Some(number) => Heard::Raise(number, reply),
                None => unreachable!("no number was to be raised"),
            },
            Ok(other) => unreachable!("{other:?} is no reply to a campaign"),
            Err(error) => Heard::Failed(error),
        };
        if let Some(campaign) = self.campaign_mut(led.token) {
            campaign.heard(server, led.token, led.round, heard, led.sent);
        }
        self.lead_go(sim, id);
    }

    fn lead_go(&mut self, sim: &mut Sim, id: u32) {
        let (now, micros, jitter) = (self.now(sim), self.micros(sim), sim.dice.fraction());
        let round_trip = self.round_trip;
        let beyond = |fence| Proposals::beyond(fence, micros, round_trip, jitter);
        loop {
            let Some(lead) = self.leads.get_mut(&id) else {
                return;
            };
            let (token, silent_at) = (lead.token, lead.silent_at);
            let Some(campaign) = self
                .campaigns
                .iter_mut()
                .find(|campaign| campaign.hold().token == token)
            else {
                return;
            };
            let patience = node_timeout(campaign.lease());
            let deadline = lead.deadline.max(now + patience + STRAGGLE);
            let next = campaign.next(deadline, now, &beyond);
            if let Next::Send(_) = next {
                lead.deadline = deadline;
            }
            self.leave(sim, token);
            match next {
                Next::Send(calls) => self.lead_send(sim, id, calls),
                Next::Wait(grace) => {
                    let until = grace.map_or(silent_at, |grace| grace.min(silent_at));
                    return self.lead_plan(sim, id, until, true);
                }
                Next::Pause(until) => return self.lead_plan(sim, id, until, false),
                Next::Done(outcome) => return self.led(sim, id, outcome),
            }
        }
    }

    fn lead_plan(&mut self, sim: &mut Sim, id: u32, until: Instant, is_awaited: bool) {
        let Some(lead) = self.leads.get_mut(&id) else {
            return;
        };
        (lead.plan, lead.is_awaited) = (lead.plan + 1, is_awaited);
        let plan = lead.plan;
        self.timer_at(sim, until, Timer::Lead(id, plan));
    }

    pub(super) fn lead_timer(&mut self, sim: &mut Sim, id: u32, plan: u32) {
        let now = self.now(sim);
        let Some(lead) = self.leads.get(&id).filter(|lead| lead.plan == plan) else {
            return;
        };
        let (token, silent_at, is_awaited) = (lead.token, lead.silent_at, lead.is_awaited);
        if is_awaited
            && silent_at <= now
            && let Some(campaign) = self.campaign_mut(token)
        {
            let error = StoreError::timed_out(node_timeout(campaign.lease()));
            for server in campaign.time_is_up(&error) {
                self.nodes[server].rest(error.clone(), now);
            }
        }
        self.lead_go(sim, id);
    }

    fn led(&mut self, sim: &mut Sim, id: u32, outcome: Outcome) {
        let now = self.now(sim);
        let Some(lead) = self.leads.remove(&id) else {
            return;
        };
        self.finish(sim, id);
        say!(sim, "{} u{} has {outcome:?}", self.who, lead.user);
        let Some(key) = self
            .campaign(lead.token)
            .map(|campaign| campaign.hold().key.clone())
        else {
            return;
        };
        let mut granted = |fence, until: Instant| {
            self.proposals_seen(fence);
            self.round_trip = (self.round_trip * 7 + (now - lead.began)) / 8;
            Grant::new(fence, until.saturating_duration_since(lead.began))
        };
        let answer = match (outcome, lead.polls) {
            (Outcome::Granted { fence, until, .. }, false) => {
                Answer::Acquire(AcquireReply::Granted(granted(fence, until)))
            }
            (Outcome::Granted { fence, until, .. }, true) => {
                let grant = granted(fence, until);
                self.contended.note(&key, now);
                Answer::Poll(PollReply::Granted(grant))
            }
            (Outcome::InLine { holder_ttl }, false) => {
                self.contended.note(&key, now);
                Answer::Acquire(AcquireReply::Queued {
                    counter: None,
                    holder_ttl,
                })
            }
            (Outcome::InLine { holder_ttl }, true) => Answer::Poll(PollReply::Queued {
                counter: None,
                holder_ttl,
            }),
            (Outcome::Refused(reply), false) => {
                self.forget(lead.token);
                Answer::Acquire(reply)
            }
            (Outcome::Gone, false) => {
                self.forget(lead.token);
                Answer::Acquire(AcquireReply::Busy {
                    holder_ttl: None,
                    has_waiters: false,
                })
            }
            (Outcome::Refused(_) | Outcome::Gone, true) => {
                self.forget(lead.token);
                Answer::Poll(PollReply::Gone)
            }
            (Outcome::Unreachable, _) => Answer::Unreachable(StoreError::timed_out(Duration::ZERO)),
        };
        self.user_answered(sim, lead.user, id, lead.began, answer);
    }

    fn proposals_seen(&self, fence: FencingToken) {
        self.seen(fence);
    }

    /// Drops the future of a [`Lead`]. Its calls complete in the background.
    pub(super) fn drop_lead(&mut self, sim: &mut Sim, id: u32) {
        if self.leads.remove(&id).is_some() {
            self.finish(sim, id);
        }
    }

    /// Abandons the aliases that a campaign no longer uses.
    fn leave(&mut self, sim: &mut Sim, token: Token) {
        let Some(campaign) = self.campaign_mut(token) else {
            return;
        };
        let left = campaign.take_left();
        if left.is_empty() {
            return;
        }
        let (hold, lease) = (campaign.hold().clone(), campaign.lease());
        for left in left {
            self.give_up(sim, &left, &hold, lease);
        }
    }

    /// Abandons all aliases of an acquisition.
    pub(super) fn abandon(&mut self, sim: &mut Sim, token: Token) {
        let who = self.who;
        let Some(campaign) = self.campaign_mut(token) else {
            return;
        };
        say!(sim, "{who} abandons {}", sim.name(token));
        campaign.leave_all();
        self.leave(sim, token);
        self.forget(token);
    }
}

/// The acquire of a user.
pub(super) fn request(
    hold: Hold,
    lease: Duration,
    if_busy: IfBusy,
    deadline: Instant,
) -> KeyRequest {
    KeyRequest {
        if_busy,
        ..KeyRequest::new(hold, lease, deadline)
    }
}
