//! One client: its state, and its calls to the servers.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    asking::{Ask, Releasing},
    clock::Clock,
    giving_up::GivingUp,
    holder::Holder,
    leading::{Lead, Led},
    link::{Link, Repeat},
    message::{Call, Reply, Request},
    server::MICROS,
    sim::{Event, Sim, Timer, Who},
    user::User,
};
use crate::{
    client::CHECK_WITHIN,
    explorer::sim::say,
    fence::FencingToken,
    gate::ASK_WITHIN,
    store::{
        Grant, Hold, QuorumMember, StoreError, Token,
        quorum::{
            background::LONGEST_CALL,
            campaign::{Campaign, Left},
            contended::Contended,
            node::Node,
            proposals::Proposals,
        },
    },
};

/// The purpose of a call to a server.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// A request of a campaign, with the number of its [`Lead`].
    Lead(u32, Led),
    Ask(u32),
    Release(u32, Left, Duration),
    GiveUp(u32),
}

pub(super) struct Calling {
    pub(super) server: usize,
    pub(super) request: Request,
    pub(super) purpose: Purpose,
    pub(super) conn: Option<usize>,
    pub(super) repeat: Repeat,
    pub(super) sent: Instant,
}

pub(super) struct Client {
    pub(super) who: Who,
    pub(super) clock: Clock,
    /// The difference between its clock and the true time, in microseconds.
    pub(super) ahead: i64,
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) links: Vec<Link>,
    proposals: Proposals,
    pub(super) contended: Contended,
    pub(super) round_trip: Duration,
    /// In the order in which they began.
    pub(super) campaigns: Vec<Campaign>,
    pub(super) leads: BTreeMap<u32, Lead>,
    pub(super) asks: BTreeMap<u32, Ask>,
    pub(super) calls: BTreeMap<Call, Calling>,
    pub(super) giving_up: BTreeMap<u32, GivingUp>,
    pub(super) users: BTreeMap<u32, User>,
    pub(super) holders: BTreeMap<u32, Holder>,
    pub(super) releases: BTreeMap<u32, Releasing>,
    /// The events that wait for the client while it is paused.
    pub(super) stopped: Option<Vec<Event>>,
}

impl Client {
    pub(super) fn new(
        who: Who,
        clock: Clock,
        ahead: i64,
        servers: usize,
        nothing: &Arc<dyn QuorumMember>,
    ) -> Self {
        Self {
            who,
            clock,
            ahead,
            nodes: (0..servers)
                .map(|server| Arc::new(Node::new(format!("s{server}"), nothing.clone())))
                .collect(),
            links: (0..servers).map(|_| Link::default()).collect(),
            proposals: Proposals::default(),
            contended: Contended::default(),
            round_trip: Duration::from_millis(1),
            campaigns: Vec::new(),
            leads: BTreeMap::new(),
            asks: BTreeMap::new(),
            calls: BTreeMap::new(),
            giving_up: BTreeMap::new(),
            users: BTreeMap::new(),
            holders: BTreeMap::new(),
            releases: BTreeMap::new(),
            stopped: None,
        }
    }

    /// The time of its monotonic clock.
    pub(super) fn now(&self, sim: &Sim) -> Instant {
        self.clock.at(sim.now)
    }

    pub(super) fn timer_at(&self, sim: &mut Sim, local: Instant, timer: Timer) {
        sim.at(self.clock.when(local), Event::Timer(self.who, timer));
    }

    pub(super) fn propose(&self, sim: &Sim) -> FencingToken {
        self.proposals.next_at(self.micros(sim))
    }

    /// The time of its wall clock, in microseconds since 1970.
    pub(super) fn micros(&self, sim: &Sim) -> u64 {
        (MICROS + (sim.now - sim.start).as_micros() as u64).saturating_add_signed(self.ahead)
    }

    pub(super) fn seen(&self, fence: FencingToken) {
        self.proposals.seen(fence);
    }

    pub(super) fn campaign(&self, token: Token) -> Option<&Campaign> {
        self.campaigns
            .iter()
            .find(|campaign| campaign.hold().token.stem() == token.stem())
    }

    pub(super) fn campaign_mut(&mut self, token: Token) -> Option<&mut Campaign> {
        self.campaigns
            .iter_mut()
            .find(|campaign| campaign.hold().token.stem() == token.stem())
    }

    pub(super) fn forget(&mut self, token: Token) {
        self.campaigns
            .retain(|campaign| campaign.hold().token.stem() != token.stem());
    }

    /// Handles the end of a call.
    pub(super) fn done(&mut self, sim: &mut Sim, id: Call, result: Result<Reply, StoreError>) {
        let Some(call) = self.calls.remove(&id) else {
            return;
        };
        if let Err(error) = &result {
            say!(sim, "{} #{id} failed: {error}", self.who);
        }
        match call.purpose {
            Purpose::Lead(lead, led) => {
                let raised = match call.request {
                    Request::Raise(number, _) => Some(number),
                    _ => None,
                };
                self.lead_heard(sim, lead, call.server, led, raised, result);
            }
            Purpose::Ask(ask) => self.ask_heard(sim, ask, call.server, result),
            Purpose::Release(ask, left, lease) => {
                self.release_heard(sim, ask, left, lease, call.request, result)
            }
            Purpose::GiveUp(number) => self.said(sim, number, result),
        }
    }

    /// Limits how long the remaining calls of a finished [`Lead`] or [`Ask`] are awaited.
    pub(super) fn finish(&self, sim: &mut Sim, number: u32) {
        self.timer_at(sim, self.now(sim) + LONGEST_CALL, Timer::Forget(number));
    }

    fn forget_calls(&mut self, sim: &mut Sim, number: u32) {
        let of_it = |call: &Calling| match call.purpose {
            Purpose::Lead(lead, _) => lead == number,
            Purpose::Ask(ask) => ask == number,
            Purpose::Release(..) | Purpose::GiveUp(_) => false,
        };
        let calls: Vec<_> = self
            .calls
            .iter()
            .filter(|(_, call)| of_it(call))
            .map(|(id, _)| *id)
            .collect();
        calls.into_iter().for_each(|id| self.drop_call(sim, id));
    }

    pub(super) fn timer(&mut self, sim: &mut Sim, timer: Timer) {
        match timer {
            Timer::Attempt(conn) => self.attempt_over(sim, conn),
            Timer::Redial(server, conn) => self.redial(sim, server, conn),
            Timer::Lead(lead, plan) => self.lead_timer(sim, lead, plan),
            Timer::Forget(number) => self.forget_calls(sim, number),
            Timer::Ask(ask) => self.ask_over(sim, ask),
            Timer::Release(call) => self.release_over(sim, call),
            Timer::GiveUp(number, plan) => self.give_up_timer(sim, number, plan),
            Timer::User(user, wait) => self.wait_over(sim, user, wait),
            Timer::Cancel(user) => self.cancel(sim, user),
            Timer::Lease(holder, plan) => self.lease_due(sim, holder, plan),
            Timer::Done(holder) => self.holder_done(sim, holder),
            Timer::Renewal(holder, renewal) => self.renewal_over(sim, holder, renewal),
            Timer::ReleaseAgain(number) => self.release_again(sim, number),
        }
    }

    /// Handles a grant that a server has pushed: models `Inner::on_event`.
    pub(super) fn pushed(&mut self, sim: &mut Sim, server: usize, hold: &Hold, grant: Grant) {
        say!(
            sim,
            "{} receives a push for {}",
            self.who,
            sim.name(hold.token)
        );
        let Some(campaign) = self.campaign_mut(hold.token) else {
            return;
        };
        if campaign.pushed(server, hold.token, grant) {
            let now = self.now(sim);
            self.call_waiting(sim, &hold.key, |line| line.ask_by(now));
        }
    }

    /// Handles the loss of an established connection, and with it of push messages.
    pub(super) fn disconnected(&mut self, sim: &mut Sim) {
        let now = self.now(sim);
        let holders: Vec<_> = self.holders.keys().copied().collect();
        for id in holders {
            let within = CHECK_WITHIN.mul_f64(sim.dice.fraction());
            if let Some(holder) = self.holders.get_mut(&id) {
                holder.lease.hurry(now + within);
            }
            self.plan(sim, id);
        }
        let at = now + ASK_WITHIN.mul_f64(sim.dice.fraction());
        for key in sim.keys.clone() {
            self.call_waiting(sim, &key, |line| line.ask_soon(at));
        }
    }

    /// Whether this client knows that the server may know the alias, and takes care of it.
    pub(super) fn owns(&self, server: usize, token: Token) -> bool {
        self.campaigns.iter().any(|campaign| campaign.known().any(|known| known == (server, token)))
            || self.giving_up.values().any(|giving_up| giving_up.speaks_of(server, token))
            || self.calls.values().any(|call| {
                matches!(call.purpose, Purpose::Release(_, left, _) if left.node == server && left.token == token)
            })
    }

    /// Describes the state that is left in the client, or returns `None` if there is none.
    pub(super) fn unrest(&self, sim: &Sim) -> Option<String> {
        let campaigns: Vec<_> = self
            .campaigns
            .iter()
            .map(|campaign| sim.name(campaign.hold().token))
            .collect();
        let (users, holders, releases, giving_up) = (
            self.users.len(),
            self.holders.len(),
            self.releases.len(),
            self.giving_up.len(),
        );
        (users + holders + releases + giving_up + campaigns.len() > 0).then(|| {
            format!("{users} users, {holders} holders, {releases} releases, {giving_up} abandoned aliases, campaigns {campaigns:?}")
        })
    }
}
