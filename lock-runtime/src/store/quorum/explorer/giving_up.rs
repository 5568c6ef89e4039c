//! The abandonment of an alias at a server: models `background.rs`.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Broken,
    client::{Client, Purpose},
    message::{Call, Reply, Request},
    sim::{Sim, Timer},
};
use crate::{
    explorer::sim::say,
    store::{
        Hold, StoreError, Token,
        quorum::{
            background::{FIRST_PAUSE, LONGEST_PAUSE},
            campaign::Left,
            node_timeout,
        },
    },
};

pub(super) struct GivingUp {
    server: usize,
    hold: Hold,
    straggler_until: Option<Instant>,
    ends: Instant,
    patience: Duration,
    pause: Duration,
    call: Option<Call>,
    plan: u32,
}

impl GivingUp {
    pub(super) fn speaks_of(&self, server: usize, token: Token) -> bool {
        self.server == server && self.hold.token == token
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
        let giving_up = GivingUp {
            server: left.node,
            hold: Hold::new(hold.key.clone(), hold.mode, left.token),
            straggler_until,
            ends: left.straggler_until.unwrap_or(now) + lease,
            patience: patience(lease),
            pause: FIRST_PAUSE,
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
        let (server, hold, until, plan) = (
            giving_up.server,
            giving_up.hold.clone(),
            now + giving_up.patience,
            giving_up.plan,
        );
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
                let (sent, patience) = (
                    self.calls.get(&call).map(|call| call.sent),
                    giving_up.patience,
                );
                self.drop_call(sim, call);
                let sent = sent.unwrap_or_else(|| self.now(sim));
                self.said(sim, id, sent, Err(StoreError::timed_out(patience)));
            }
            None => self.say(sim, id),
        }
    }

    pub(super) fn said(
        &mut self,
        sim: &mut Sim,
        id: u32,
        sent: Instant,
        said: Result<Reply, StoreError>,
    ) {
        let now = self.now(sim);
        let Some(giving_up) = self.giving_up.get_mut(&id) else {
            return;
        };
        giving_up.call = None;
        giving_up.plan += 1;
        let plan = giving_up.plan;
        match (said, giving_up.straggler_until) {
            (Ok(_), Some(deadline)) if sent <= deadline => {
                self.timer_at(
                    sim,
                    deadline + Duration::from_millis(1),
                    Timer::GiveUp(id, plan),
                );
            }
            (Err(_), _) if now < giving_up.ends => {
                let pause = giving_up.pause.mul_f64(0.5 + 0.5 * sim.dice.fraction());
                giving_up.pause = (giving_up.pause * 2).min(LONGEST_PAUSE);
                self.timer_at(sim, now + pause, Timer::GiveUp(id, plan));
            }
            (said, _) => {
                if said.is_err() {
                    say!(
                        sim,
                        "{} leaves {} to its lease",
                        self.who,
                        sim.name(giving_up.hold.token)
                    );
                    sim.excuse(giving_up.hold.token);
                }
                self.giving_up.remove(&id);
            }
        }
    }
}
