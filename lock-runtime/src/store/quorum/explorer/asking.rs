//! Requests decided by a majority: models `Inner::ask`, `renew`, `release` and `release_at`.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Broken,
    client::{Client, Purpose},
    giving_up::patience,
    message::{Call, Reply, Request},
    sim::{Sim, Timer},
};
use crate::{
    driver,
    explorer::sim::say,
    store::{
        Hold, ReleaseReply, RenewReply, StoreError, Token,
        quorum::{
            campaign::{Left, PerNode},
            node_timeout,
            tally::{Held, Renewed, Vote},
        },
    },
};

/// A request to all servers at once.
pub(super) struct Ask {
    awaited: PerNode<usize>,
    patience: Duration,
    sent: Instant,
    what: What,
}

enum What {
    Renewal(Asker, Renewed),
    Release(u32, Vote),
}

/// The origin of a renewal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asker {
    Holder(u32),
    /// Confirms a grant before it is used.
    User(u32),
}

/// A release in progress: models the clean-up of the driver.
pub(super) struct Releasing {
    token: Token,
    lease: Duration,
    give_up_at: Instant,
    pause: Duration,
}

impl Client {
    /// Renews one lock. A tally of earlier rounds is continued only if a rule is switched off.
    pub(super) fn renew(
        &mut self,
        sim: &mut Sim,
        asker: Asker,
        token: Token,
        earlier: Option<Renewed>,
    ) -> Option<u32> {
        let (now, id, servers) = (self.now(sim), sim.number(), self.nodes.len());
        let mut tally = earlier.unwrap_or_else(|| Renewed::new(servers));
        tally.by_half = sim.is_broken(Broken::RenewsByHalf);
        let campaign = self.campaign(token)?;
        let (hold, lease) = (campaign.hold().clone(), campaign.lease());
        let known: PerNode<_> = campaign.known().collect();
        (known.len()..servers).for_each(|_| tally.gone());
        let patience = node_timeout(lease);
        let awaited = known.iter().map(|(server, _)| *server).collect();
        self.asks.insert(
            id,
            Ask {
                awaited,
                patience,
                sent: now,
                what: What::Renewal(asker, tally),
            },
        );
        self.timer_at(sim, now + patience, Timer::Ask(id));
        for (server, token) in known {
            let request = Request::Renew(Hold::new(hold.key.clone(), hold.mode, token), lease);
            self.call(sim, server, request, Purpose::Ask(id));
        }
        Some(id)
    }

    pub(super) fn drop_ask(&mut self, sim: &mut Sim, id: u32) -> Option<Renewed> {
        let ask = self.asks.remove(&id)?;
        self.finish(sim, id);
        match ask.what {
            What::Renewal(_, tally) => Some(tally),
            What::Release(..) => None,
        }
    }

    pub(super) fn release(&mut self, sim: &mut Sim, token: Token, lease: Duration) {
        let (now, id) = (self.now(sim), sim.number());
        let releasing = Releasing {
            token,
            lease,
            give_up_at: now + lease,
            pause: driver::FIRST_PAUSE,
        };
        self.releases.insert(id, releasing);
        self.release_again(sim, id);
    }

    pub(super) fn release_again(&mut self, sim: &mut Sim, number: u32) {
        let (now, id, servers) = (self.now(sim), sim.number(), self.nodes.len());
        let Some(Releasing { token, lease, .. }) = self.releases.get(&number) else {
            return;
        };
        let (token, lease) = (*token, *lease);
        let Some(campaign) = self.campaign(token) else {
            self.releases.remove(&number);
            return;
        };
        let (hold, left) = (campaign.hold().clone(), campaign.all_known());
        let mut vote = Vote::new(servers);
        (left.len()..servers).for_each(|_| vote.count(false));
        let (awaited, patient) = (
            left.iter().map(|left| left.node).collect(),
            node_timeout(lease),
        );
        self.asks.insert(
            id,
            Ask {
                awaited,
                patience: patient,
                sent: now,
                what: What::Release(number, vote),
            },
        );
        self.timer_at(sim, now + patient, Timer::Ask(id));
        for left in left {
            let request = Request::Release(Hold::new(hold.key.clone(), hold.mode, left.token));
            let call = self.call(sim, left.node, request, Purpose::Release(id, left, lease));
            self.timer_at(sim, now + patience(lease), Timer::Release(call));
        }
    }

    pub(super) fn release_over(&mut self, sim: &mut Sim, id: Call) {
        let Some(call) = self.calls.get(&id) else {
            return;
        };
        let (purpose, request) = (call.purpose, call.request.clone());
        self.drop_call(sim, id);
        if let Purpose::Release(ask, left, lease) = purpose {
            self.release_heard(
                sim,
                ask,
                left,
                lease,
                request,
                Err(StoreError::timed_out(patience(lease))),
            );
        }
    }

    /// Counts the release of one vote. If the server may still know the alias, abandons it.
    pub(super) fn release_heard(
        &mut self,
        sim: &mut Sim,
        ask: u32,
        left: Left,
        lease: Duration,
        request: Request,
        result: Result<Reply, StoreError>,
    ) {
        let released = matches!(result, Ok(Reply::Release(ReleaseReply::Released)));
        if !released
            && (left.lingers || result.is_err())
            && let Some(hold) = request.hold()
        {
            self.give_up(sim, &left, hold, lease);
        }
        self.ask_heard(sim, ask, left.node, result);
    }

    pub(super) fn ask_heard(
        &mut self,
        sim: &mut Sim,
        id: u32,
        server: usize,
        result: Result<Reply, StoreError>,
    ) {
        let now = self.now(sim);
        self.nodes[server].note(&result, now);
        let Some(ask) = self.asks.get_mut(&id) else {
            return;
        };
        ask.awaited.retain(|awaited| *awaited != server);
        match (&mut ask.what, result) {
            (What::Renewal(_, tally), Ok(Reply::Renew(RenewReply::Renewed { ttl }))) => {
                tally.renewed(ask.sent, ttl)
            }
            (What::Renewal(_, tally), Ok(_)) => tally.gone(),
            (What::Release(_, vote), Ok(Reply::Release(reply))) => {
                vote.count(reply == ReleaseReply::Released)
            }
            _ => {}
        }
        self.ask_decided(sim, id, false);
    }

    pub(super) fn ask_over(&mut self, sim: &mut Sim, id: u32) {
        let now = self.now(sim);
        let Some(ask) = self.asks.get(&id) else {
            return;
        };
        let error = StoreError::timed_out(ask.patience);
        ask.awaited
            .iter()
            .for_each(|server| self.nodes[*server].rest(error.clone(), now));
        self.ask_decided(sim, id, true);
    }

    fn ask_decided(&mut self, sim: &mut Sim, id: u32, is_over: bool) {
        let Some(ask) = self.asks.get(&id) else {
            return;
        };
        let is_over = is_over || ask.awaited.is_empty();
        let is_open = match &ask.what {
            What::Renewal(_, tally) => tally.held() == Held::Open,
            What::Release(_, vote) => vote.decided().is_none(),
        };
        if is_open && !is_over {
            return;
        }
        let Some(Ask { sent, what, .. }) = self.asks.remove(&id) else {
            return;
        };
        self.finish(sim, id);
        match what {
            What::Renewal(asker, tally) => {
                let reply = match tally.held() {
                    Held::Until(until) => Some(RenewReply::Renewed {
                        ttl: until.saturating_duration_since(sent),
                    }),
                    Held::Gone => Some(RenewReply::Gone),
                    Held::Open => None,
                };
                let earlier = Some(tally).filter(|_| sim.is_broken(Broken::AddsUpRenewals));
                match asker {
                    Asker::Holder(holder) => {
                        self.renewal_answered(sim, holder, sent, reply, earlier)
                    }
                    Asker::User(user) => self.confirmed(sim, user, sent, reply),
                }
            }
            What::Release(number, vote) => self.released(sim, number, vote.decided()),
        }
    }

    fn released(&mut self, sim: &mut Sim, number: u32, decided: Option<bool>) {
        let now = self.now(sim);
        let Some(releasing) = self.releases.get_mut(&number) else {
            return;
        };
        say!(
            sim,
            "{} has released {}: {decided:?}",
            self.who,
            sim.name(releasing.token)
        );
        let token = releasing.token;
        if decided.is_none() && now < releasing.give_up_at {
            let pause = releasing.pause.mul_f64(0.5 + 0.5 * sim.dice.fraction());
            releasing.pause = (releasing.pause * 2).min(driver::LONGEST_PAUSE);
            self.timer_at(sim, now + pause, Timer::ReleaseAgain(number));
        } else {
            self.releases.remove(&number);
        }
        self.forget(token);
    }
}
