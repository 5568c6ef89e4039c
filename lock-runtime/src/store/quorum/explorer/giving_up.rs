//! The abandonment of an alias at a server: models `background.rs`.

use std::time::Duration;

use super::{
    Broken,
    client::{Client, Purpose},
    message::{Call, Reply, Request},
    sim::{Sim, Timer},
};
use crate::{
    explorer::sim::say,
    protocol::{Abandonment, Ending, Progress},
    store::{
        Hold, StoreError, Token,
        quorum::{campaign::Left, node_timeout},
    },
};

pub(super) struct GivingUp {
    server: usize,
    abandonment: Abandonment,
    call: Option<Call>,
    plan: u32,
}

impl GivingUp {
    pub(super) fn speaks_of(&self, server: usize, token: Token) -> bool {
        self.server == server && self.abandonment.hold().token == token
    }
}

/// The time-out of one abandon.
pub(super) fn patience(lease: Duration) -> Duration {
    node_timeout(lease).max(Duration::from_millis(50))
}

impl Client {
    pub(super) fn give_up(&mut self, sim: &mut Sim, left: &Left, hold: &Hold, lease: Duration) {
        let now = self.now(sim);
        let id = sim.number();
        let straggler_until = left
            .straggler_until
            .filter(|_| !sim.is_broken(Broken::AbandonsOnce));
        let hold = Hold::new(hold.key.clone(), hold.mode, left.token);
        let (ending, timeout) = (Ending::Abandon(hold), patience(lease));
        let giving_up = GivingUp {
            server: left.node,
            abandonment: Abandonment::new(ending, lease, straggler_until, timeout, now),
            call: None,
            plan: 0,
        };
        self.giving_up.insert(id, giving_up);
        self.say(sim, id);
    }

    fn say(&mut self, sim: &mut Sim, id: u32) {
        let now = self.now(sim);
        let Some(giving_up) = self.giving_up.get_mut(&id) else {
            return;
        };
        giving_up.plan += 1;
        let until = now + giving_up.abandonment.call(now).timeout;
        let (server, plan) = (giving_up.server, giving_up.plan);
        let hold = giving_up.abandonment.hold().clone();
        let call = self.call(sim, server, Request::Abandon(hold), Purpose::GiveUp(id));
        if let Some(giving_up) = self.giving_up.get_mut(&id) {
            giving_up.call = Some(call);
            self.timer_at(sim, until, Timer::GiveUp(id, plan));
        }
    }

    pub(super) fn give_up_timer(&mut self, sim: &mut Sim, id: u32, plan: u32) {
        let Some(giving_up) = self
            .giving_up
            .get_mut(&id)
            .filter(|giving_up| giving_up.plan == plan)
        else {
            return;
        };
        match giving_up.call.take() {
            Some(call) => {
                self.drop_call(sim, call);
                self.said(sim, id, Err(StoreError::timed_out(Duration::ZERO)));
            }
            None => self.say(sim, id),
        }
    }

    pub(super) fn said(&mut self, sim: &mut Sim, id: u32, said: Result<Reply, StoreError>) {
        let now = self.now(sim);
        let jitter = said.as_ref().err().map_or(0.0, |_| sim.dice.fraction());
        let Some(giving_up) = self.giving_up.get_mut(&id) else {
            return;
        };
        giving_up.call = None;
        giving_up.plan += 1;
        let plan = giving_up.plan;
        match giving_up.abandonment.replied(said, jitter, now) {
            Progress::Next { at, .. } => self.timer_at(sim, at, Timer::GiveUp(id, plan)),
            Progress::Done => drop(self.giving_up.remove(&id)),
            Progress::GaveUp(_) => {
                let token = giving_up.abandonment.hold().token;
                say!(sim, "{} leaves {} to its lease", self.who, sim.name(token));
                sim.excuse(token);
                self.giving_up.remove(&id);
            }
        }
    }
}
