//! A holder: models `holding.rs` and the driver as messages.

use tokio::time::Instant;

use super::{
    Broken,
    clean_up::CleanUp,
    message::{Reply, Request},
    process::{Process, Purpose},
    schedule::Arrival,
    sim::{Began, Event, Sim, Timer, say},
};
use crate::{
    fence::FencingToken,
    gate::{Baton, Budget},
    holding::CONFIRM_WITHIN,
    lease::{Due, Lease},
    spec::call_timeout,
    store::{Grant, HANDOFF_LEASE, Hold, RenewReply, Renewal},
};

pub(super) struct Holder {
    pub(super) arrival: Arrival,
    pub(super) hold: Hold,
    pub(super) fence: FencingToken,
    pub(super) since: Instant,
    pub(super) budget: Option<Budget>,
    pub(super) lease: Lease,
    plan: u32,
}

impl Holder {
    pub(super) fn start(
        sim: &mut Sim,
        arrival: Arrival,
        hold: Hold,
        grant: Grant,
        sent: Instant,
    ) -> Option<Self> {
        let terms = arrival.terms;
        let jitter = sim.dice.fraction();
        let lease = if sim.is_broken(Broken::CountsFromTheReply) {
            Lease::granted(terms.lease, terms.renew, sim.now, terms.lease, jitter)
        } else {
            Lease::granted(terms.lease, terms.renew, sent, grant.ttl, jitter)
        };
        let budget = terms
            .wish()
            .passing
            .then(|| Budget::new(grant.reserved, sent, sim.now));
        Self::new(sim, arrival, hold, grant.fence, lease, budget, sent)
    }

    pub(super) fn handed_over(
        sim: &mut Sim,
        arrival: Arrival,
        hold: Hold,
        grant: Grant,
        as_of: Instant,
    ) -> Option<Self> {
        let terms = arrival.terms;
        if !terms.renew {
            return None;
        }
        let now = sim.now;
        let as_of = if sim.is_broken(Broken::CountsFromThePush) {
            now
        } else {
            as_of
        };
        let ttl = grant.ttl.min(HANDOFF_LEASE).min(terms.lease);
        let mut lease = Lease::granted(terms.lease, true, as_of, ttl, sim.dice.fraction());
        lease.hurry(now + CONFIRM_WITHIN);
        let budget = terms
            .wish()
            .passing
            .then(|| Budget::new(grant.reserved, as_of, now));
        Self::new(sim, arrival, hold, grant.fence, lease, budget, now)
    }

    pub(super) fn passed(sim: &Sim, arrival: Arrival, baton: Baton) -> Result<Self, Hold> {
        let Baton {
            hold,
            fence,
            lease,
            budget,
        } = baton;
        Self::new(
            sim,
            arrival,
            hold.clone(),
            fence,
            lease,
            Some(budget),
            sim.now,
        )
        .ok_or(hold)
    }

    fn new(
        sim: &Sim,
        arrival: Arrival,
        hold: Hold,
        fence: FencingToken,
        lease: Lease,
        budget: Option<Budget>,
        since: Instant,
    ) -> Option<Self> {
        let lease = lease.held_since(since, arrival.terms.max_hold);
        let is_valid = !lease.validity(sim.now).is_zero();
        is_valid.then_some(Self {
            arrival,
            hold,
            fence,
            since,
            budget,
            lease,
            plan: 0,
        })
    }

    pub(super) fn passing_until(&self) -> Option<Instant> {
        self.budget.map(|budget| budget.until)
    }
}

impl Process {
    /// Hands out the guard.
    pub(super) fn begin(&mut self, sim: &mut Sim, holder: Holder) {
        let id = sim.number();
        let (hold, fence, arrival) = (holder.hold.clone(), holder.fence, holder.arrival);
        let (name, validity) = (sim.name(hold.token), holder.lease.validity(sim.now));
        say!(
            sim,
            "{} h{id} HOLDS {:?} as {name}, fence ..{}, valid for {validity:?}",
            self.who,
            hold.key,
            fence.number() % 1_000_000_000
        );
        sim.began.push(Began { hold, fence });
        sim.served[self.who.process] += u32::from(!sim.quiet);
        let hold_for = if sim.quiet {
            arrival.hold_for.min(super::HOLD_AT_LAST)
        } else {
            arrival.hold_for
        };
        sim.after(hold_for, Event::Timer(self.who, Timer::Done(id)));
        if let Some((pause, _)) = arrival.extend {
            sim.after(pause, Event::Timer(self.who, Timer::Extend(id)));
        }
        self.holders.insert(id, holder);
        self.plan(sim, id);
    }

    /// Schedules the next check of the lease by the driver.
    pub(super) fn plan(&mut self, sim: &mut Sim, id: u32) {
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        holder.plan += 1;
        let due = holder.lease.next_due();
        sim.at(due, Event::Timer(self.who, Timer::Lease(id, holder.plan)));
    }

    pub(super) fn lease_due(&mut self, sim: &mut Sim, id: u32, plan: u32) {
        let Some(holder) = self
            .holders
            .get_mut(&id)
            .filter(|holder| holder.plan == plan)
        else {
            return;
        };
        match holder.lease.due(sim.now) {
            Some(Due::Lost(loss)) => {
                say!(sim, "{} h{id}: {loss:?}", self.who);
                self.lose(sim, id);
            }
            Some(Due::Renew) => {
                let lease = holder.lease.length();
                let renewal = Renewal::new(holder.hold.clone(), lease);
                self.call(
                    sim,
                    Purpose::Renewal(id),
                    Request::Renew(renewal),
                    call_timeout(lease),
                );
            }
            Some(Due::Warn) | None => {}
        }
        self.plan(sim, id);
    }

    pub(super) fn renewal_answered(
        &mut self,
        sim: &mut Sim,
        id: u32,
        sent: Instant,
        reply: Option<Reply>,
    ) {
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        match reply {
            Some(Reply::Renew(RenewReply::Renewed { ttl })) => {
                holder.lease.renewed(sent, ttl, sim.dice.fraction())
            }
            Some(Reply::Renew(RenewReply::Gone)) => return self.lose(sim, id),
            _ => holder.lease.renewal_failed(sim.now),
        }
        self.plan(sim, id);
    }

    /// Extends the lease beyond its usual length.
    pub(super) fn extend(&mut self, sim: &mut Sim, id: u32) {
        let Some(holder) = self
            .holders
            .get(&id)
            .filter(|holder| holder.lease.loss(sim.now).is_none())
        else {
            return;
        };
        let lease = holder.arrival.terms.lease;
        let times = holder.arrival.extend.map_or(1, |(_, times)| times);
        let renewal = Renewal::new(holder.hold.clone(), lease * times);
        self.call(
            sim,
            Purpose::Extension(id),
            Request::Renew(renewal),
            call_timeout(lease),
        );
    }

    pub(super) fn extension_answered(
        &mut self,
        sim: &mut Sim,
        id: u32,
        sent: Instant,
        reply: Option<Reply>,
    ) {
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        match reply {
            Some(Reply::Renew(RenewReply::Renewed { ttl })) => holder.lease.reported(sent, ttl),
            Some(Reply::Renew(RenewReply::Gone)) => return self.lose(sim, id),
            _ => {}
        }
        self.plan(sim, id);
    }

    /// Abandons the token, as the store may not know of the loss (PROTOCOL 9).
    pub(super) fn lose(&mut self, sim: &mut Sim, id: u32) {
        let Some(holder) = self.holders.remove(&id) else {
            return;
        };
        say!(
            sim,
            "{} h{id} has lost {}",
            self.who,
            sim.name(holder.hold.token)
        );
        let lock = holder.arrival.lock;
        self.clean_up(
            sim,
            CleanUp::abandon(sim.now, holder.hold, holder.arrival.terms.lease, None),
        );
        self.released(sim, lock);
        self.again(sim, holder.arrival);
    }
}
