//! A holder: models `holding.rs` and the driver.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Broken,
    client::{Asker, Client},
    schedule::Arrival,
    sim::{Began, Event, Sim, Timer},
};
use crate::{
    explorer::sim::say,
    holding::CONFIRM_WITHIN,
    lease::{Due, Lease},
    protocol::{
        Abandonment, Ending, Progress,
        quorum::{Reply, RequestId},
    },
    spec::{Mode, call_timeout},
    store::{Grant, HANDOFF_LEASE, Hold, Release, RenewReply, Renewal, StoreError, Token},
};

pub(super) struct Holder {
    pub(super) arrival: Arrival,
    pub(super) hold: Hold,
    pub(super) lease: Lease,
    /// When the grant reached the holder, in true time.
    pub(super) since: Instant,
    /// All aliases that it has had so far, each with its server.
    pub(super) aliases: Vec<(usize, Token)>,
    renewal: Option<RequestId>,
    plan: u32,
}

/// Compensates for the allowance for clock drift where that rule is switched off, so that the lease
/// is valid for the whole `ttl`.
fn undrifted(sim: &Sim, ttl: Duration) -> Duration {
    if sim.is_broken(Broken::NoDrift) {
        (ttl + Duration::from_millis(2)).mul_f64(1.0 / 0.99)
    } else {
        ttl
    }
}

impl Client {
    /// Starts the lease of a grant. `None` if it has no validity left.
    pub(super) fn start(
        &self,
        sim: &mut Sim,
        arrival: Arrival,
        grant: Grant,
        sent: Instant,
    ) -> Option<Lease> {
        let ttl = undrifted(sim, grant.ttl);
        let lease = Lease::granted(arrival.lease, arrival.renew, sent, ttl, sim.dice.fraction());
        (!lease.validity(self.now(sim)).is_zero()).then_some(lease)
    }

    /// Starts the lease of a grant from the wait queue, which is short. `None` if the grant has to
    /// be confirmed first.
    pub(super) fn handed_over(
        &self,
        sim: &mut Sim,
        arrival: Arrival,
        grant: Grant,
        as_of: Instant,
    ) -> Option<Lease> {
        let (now, length) = (self.now(sim), arrival.lease);
        if !arrival.renew {
            return None;
        }
        let ttl = undrifted(sim, grant.ttl.min(HANDOFF_LEASE).min(length));
        let mut lease = Lease::granted(length, true, as_of, ttl, sim.dice.fraction());
        lease.hurry(now + CONFIRM_WITHIN);
        (lease.validity(now) > call_timeout(length)).then_some(lease)
    }

    /// Hands out the guard.
    pub(super) fn begin(
        &mut self,
        sim: &mut Sim,
        arrival: Arrival,
        hold: Hold,
        grant: Grant,
        lease: Lease,
    ) {
        let (id, now) = (sim.number(), self.now(sim));
        let lease = lease.held_since(now, None);
        let (name, validity) = (sim.name(hold.token), lease.validity(now));
        let fence = super::message::short(grant.fence);
        say!(
            sim,
            "{} h{id} HOLDS {:?} as {name}, fence ..{fence}, valid for {validity:?}",
            self.who,
            hold.key
        );
        sim.look = true;
        sim.began.push(Began {
            hold: hold.clone(),
            fence: grant.fence,
        });
        let hold_for = if sim.quiet {
            arrival.hold_for.min(super::HOLD_AT_LAST)
        } else {
            arrival.hold_for
        };
        sim.after(hold_for, Event::Timer(self.who, Timer::Done(id)));
        let since = sim.now;
        self.holders.insert(
            id,
            Holder {
                arrival,
                hold,
                lease,
                since,
                aliases: Vec::new(),
                renewal: None,
                plan: 0,
            },
        );
        self.plan(sim, id);
    }

    /// Schedules the next check of the lease by the driver.
    pub(super) fn plan(&mut self, sim: &mut Sim, id: u32) {
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        holder.plan += 1;
        let (due, plan) = (holder.lease.next_due(), holder.plan);
        self.timer_at(sim, due, Timer::Lease(id, plan));
    }

    pub(super) fn lease_due(&mut self, sim: &mut Sim, id: u32, plan: u32) {
        let now = self.now(sim);
        let Some(holder) = self
            .holders
            .get_mut(&id)
            .filter(|holder| holder.plan == plan)
        else {
            return;
        };
        match holder.lease.due(now) {
            Some(Due::Lost(loss)) => {
                say!(sim, "{} h{id}: {loss:?}", self.who);
                return self.lose(sim, id);
            }
            Some(Due::Renew) => {
                let length = holder.lease.length();
                let renewal = [Renewal::new(holder.hold.clone(), length)];
                let renewal = self.ask(sim, Asker::Holder(id), |session, cx| {
                    session.renew(&renewal, cx)
                });
                if let Some(holder) = self.holders.get_mut(&id) {
                    holder.renewal = Some(renewal);
                }
                self.timer_at(sim, now + call_timeout(length), Timer::Renewal(id, renewal));
            }
            Some(Due::Warn) | None => {}
        }
        self.plan(sim, id);
    }

    pub(super) fn renewal_over(&mut self, sim: &mut Sim, id: u32, renewal: RequestId) {
        let now = self.now(sim);
        let Some(holder) = self
            .holders
            .get_mut(&id)
            .filter(|holder| holder.renewal == Some(renewal))
        else {
            return;
        };
        holder.renewal = None;
        holder.lease.renewal_failed(now);
        self.drop_request(sim, renewal);
        self.plan(sim, id);
    }

    pub(super) fn renewal_answered(
        &mut self,
        sim: &mut Sim,
        id: u32,
        sent: Instant,
        reply: Result<Reply, StoreError>,
    ) {
        let now = self.now(sim);
        let jitter = sim.dice.fraction();
        let Some(holder) = self.holders.get_mut(&id) else {
            return;
        };
        holder.renewal = None;
        match renewed(reply) {
            Some(RenewReply::Renewed { ttl }) => {
                sim.look = true;
                holder.lease.renewed(sent, undrifted(sim, ttl), jitter);
            }
            Some(RenewReply::Gone) => return self.lose(sim, id),
            None => holder.lease.renewal_failed(now),
        }
        self.plan(sim, id);
    }

    /// Abandons the token, as the servers may not know of the loss (PROTOCOL 9).
    fn lose(&mut self, sim: &mut Sim, id: u32) {
        let Some(holder) = self.holders.remove(&id) else {
            return;
        };
        say!(
            sim,
            "{} h{id} has lost {}",
            self.who,
            sim.name(holder.hold.token)
        );
        self.abandon(sim, &holder.hold);
        self.again(sim, holder.arrival);
    }

    /// Ends the hold.
    pub(super) fn holder_done(&mut self, sim: &mut Sim, id: u32) {
        let now = self.now(sim);
        match self.holders.get(&id) {
            None => return,
            // The lease may have expired before the driver has noticed it.
            Some(holder) if holder.lease.loss(now).is_some() => return self.lose(sim, id),
            Some(_) => {}
        }
        let Some(holder) = self.holders.remove(&id) else {
            return;
        };
        say!(
            sim,
            "{} h{id} is done with {}",
            self.who,
            sim.name(holder.hold.token)
        );
        if holder.arrival.downgrades && holder.hold.mode == Mode::Exclusive {
            return self.downgrade(sim, holder.arrival, &holder.hold);
        }
        // The driver repeats a release until it has a reply.
        let lease = holder.lease.length();
        let ending = Ending::Release(Release::new(holder.hold));
        let release = Abandonment::new(ending, lease, None, call_timeout(lease), now);
        let number = sim.number();
        self.releases.insert(number, release);
        self.release_again(sim, number);
        self.again(sim, holder.arrival);
    }

    pub(super) fn release_again(&mut self, sim: &mut Sim, number: u32) {
        let now = self.now(sim);
        if let Some(release) = self.releases.get_mut(&number) {
            release.call(now);
            let release = Release::new(release.hold().clone());
            self.ask(sim, Asker::Release(number), |session, cx| {
                session.release(&release, cx)
            });
        }
    }

    pub(super) fn released(
        &mut self,
        sim: &mut Sim,
        number: u32,
        reply: Result<Reply, StoreError>,
    ) {
        let (now, jitter) = (self.now(sim), sim.dice.fraction());
        let Some(release) = self.releases.get_mut(&number) else {
            return;
        };
        let name = sim.name(release.hold().token);
        say!(sim, "{} has released {name}: {reply:?}", self.who);
        if let Progress::Next { at, .. } = release.replied(reply, jitter, now) {
            self.timer_at(sim, at, Timer::Release(number));
        } else {
            self.releases.remove(&number);
        }
    }
}

/// The reply to the renewal of one lock. `None` if it is not known.
pub(super) fn renewed(reply: Result<Reply, StoreError>) -> Option<RenewReply> {
    match reply {
        Ok(Reply::Renew(mut replies)) => replies.pop().and_then(Result::ok),
        _ => None,
    }
}
