//! One process: its state, its calls to the store, and its reactions to events.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::{
    clean_up::CleanUp,
    giving_back::GivingBack,
    holder::Holder,
    message::{Call, Reply, Request},
    question::Late,
    sim::{Event, Sim, Timer, Who, say},
    waiter::Waiter,
};
use crate::{
    client::CHECK_WITHIN,
    gate::{Baton, Line},
    store::{Grant, Hold, Release, Token},
};

pub(super) struct Process {
    pub(super) who: Who,
    /// By lock. A wait queue without waiters is `None`, as in [`Gates`](crate::gate::Gates).
    pub(super) lines: Vec<Option<Line>>,
    pub(super) waiters: BTreeMap<u32, Waiter>,
    pub(super) holders: BTreeMap<u32, Holder>,
    /// Releases with a caller that awaits them.
    pub(super) releases: BTreeMap<Call, GivingBack>,
    pub(super) clean_ups: BTreeMap<u32, CleanUp>,
    pub(super) calls: BTreeMap<Call, (Purpose, Instant)>,
    /// Abandoned acquires whose replies a client without PROTOCOL 1 still applies.
    pub(super) late: BTreeMap<Call, Late>,
    /// The events that wait for the process while it is paused.
    pub(super) stopped: Option<Vec<Event>>,
    /// When the connection was last lost.
    pub(super) lost: Option<Instant>,
}

/// The purpose of a call to the store.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Waiter(u32),
    Renewal(u32),
    Extension(u32),
    Release,
    CleanUp(u32),
}

impl Process {
    pub(super) fn new(who: Who, locks: usize) -> Self {
        Self {
            who,
            lines: (0..locks).map(|_| None).collect(),
            waiters: BTreeMap::new(),
            holders: BTreeMap::new(),
            releases: BTreeMap::new(),
            clean_ups: BTreeMap::new(),
            calls: BTreeMap::new(),
            late: BTreeMap::new(),
            stopped: None,
            lost: None,
        }
    }

    pub(super) fn call(
        &mut self,
        sim: &mut Sim,
        purpose: Purpose,
        request: Request,
        patience: Duration,
    ) -> Call {
        let call = sim.number();
        self.calls.insert(call, (purpose, sim.now));
        sim.send(self.who, call, request);
        sim.after(patience, Event::Timer(self.who, Timer::Call(call)));
        call
    }

    /// Handles the reply to a call, or its time-out. Ignores a reply that is no longer awaited.
    pub(super) fn answered(&mut self, sim: &mut Sim, call: Call, reply: Option<Reply>) {
        let Some((purpose, sent)) = self.calls.remove(&call) else {
            self.believe(sim, call, reply);
            return;
        };
        match reply {
            None => say!(sim, "{} has no reply to #{call}", self.who),
            Some(_) => say!(sim, "{} has the reply to #{call}", self.who),
        }
        match purpose {
            Purpose::Waiter(waiter) => self.waiter_answered(sim, waiter, call, sent, reply),
            Purpose::Renewal(holder) => self.renewal_answered(sim, holder, sent, reply),
            Purpose::Extension(holder) => self.extension_answered(sim, holder, sent, reply),
            Purpose::Release => self.release_answered(sim, call, sent, reply),
            Purpose::CleanUp(clean_up) => self.clean_up_answered(sim, clean_up, sent, reply),
        }
    }

    pub(super) fn timer(&mut self, sim: &mut Sim, timer: Timer) {
        match timer {
            Timer::Call(call) if self.calls.contains_key(&call) => self.answered(sim, call, None),
            Timer::Call(_) => {}
            Timer::Waiter(waiter, wait) => self.wait_over(sim, waiter, wait),
            Timer::Cancel(waiter) => self.cancel(sim, waiter),
            Timer::Lease(holder, plan) => self.lease_due(sim, holder, plan),
            Timer::Done(holder) => self.done(sim, holder),
            Timer::Extend(holder) => self.extend(sim, holder),
            Timer::Forsake(call) => self.forsake(sim, call),
            Timer::CleanUp(clean_up) => self.say(sim, clean_up),
        }
    }

    /// Handles a grant that the store has pushed.
    pub(super) fn pushed(&mut self, sim: &mut Sim, hold: &Hold, grant: Grant) {
        let lock = sim.lock_of(hold);
        say!(
            sim,
            "{} receives a push for {}",
            self.who,
            sim.name(hold.token)
        );
        match self.lines[lock]
            .as_mut()
            .and_then(|line| line.pushed(hold.token, grant))
        {
            Some(waker) => waker.into_iter().for_each(std::task::Waker::wake),
            None if self
                .clean_ups
                .values()
                .any(|clean_up| clean_up.hold().token == hold.token) =>
            {
                self.clean_up(
                    sim,
                    CleanUp::abandon(sim.now, hold.clone(), grant.ttl, None),
                );
            }
            None => {}
        }
    }

    /// Handles the loss of the connection, and with it of push messages.
    pub(super) fn disconnected(&mut self, sim: &mut Sim) {
        self.lost = Some(sim.now);
        let batons: Vec<_> = self
            .lines
            .iter_mut()
            .flatten()
            .filter_map(Line::withdraw_baton)
            .collect();
        for Baton { hold, lease, .. } in batons {
            self.clean_up(
                sim,
                CleanUp::release(sim.now, Release::new(hold), lease.length()),
            );
        }
        let holders: Vec<_> = self.holders.keys().copied().collect();
        for id in holders {
            let within = CHECK_WITHIN.mul_f64(sim.dice.fraction());
            if let Some(holder) = self.holders.get_mut(&id) {
                holder.lease.hurry(sim.now + within);
            }
            self.plan(sim, id);
        }
        let wakers: Vec<_> = self
            .lines
            .iter_mut()
            .flatten()
            .filter_map(|line| line.ask_soon(sim.now))
            .collect();
        wakers.into_iter().for_each(std::task::Waker::wake);
    }

    /// Notifies the waiters of this process that a lock was released in it.
    pub(super) fn released(&mut self, sim: &Sim, lock: usize) {
        if let Some(waker) = self.lines[lock]
            .as_mut()
            .and_then(|line| line.released(sim.now))
        {
            waker.wake();
        }
    }

    /// Whether this process knows the token and takes care of it.
    pub(super) fn owns(&self, token: Token) -> bool {
        let known = Some(token);
        self.lines
            .iter()
            .flatten()
            .any(|line| line.place_token() == known || line.baton_token() == known)
            || self
                .holders
                .values()
                .any(|holder| holder.hold.token == token)
            || self.waiters.values().any(|waiter| waiter.asks_as(token))
            || self
                .releases
                .values()
                .any(|giving_back| giving_back.speaks_of(token))
            || self
                .clean_ups
                .values()
                .any(|clean_up| clean_up.speaks_of(token))
    }

    pub(super) fn is_at_rest(&self) -> bool {
        self.waiters.is_empty()
            && self.holders.is_empty()
            && self.releases.is_empty()
            && self.clean_ups.is_empty()
    }
}
