//! Requests that are made once: several locks at once, and the conversion of a writer to a reader.

use tokio::time::Instant;

use super::{
    client::{Asker, Client},
    schedule::Arrival,
    sim::{Sim, Timer},
};
use crate::{
    acquire::STRAGGLE,
    explorer::sim::say,
    protocol::quorum::{Cx, Reply, RequestId, Session},
    spec::{Mode, call_timeout},
    store::{AcquireAllReply, ConvertReply, Hold, KeyRequest, StoreError, Token},
};

pub(super) struct Attempt {
    arrival: Arrival,
    holds: Vec<Hold>,
    request: RequestId,
}

impl Client {
    pub(super) fn acquire_all(&mut self, sim: &mut Sim, arrival: Arrival) {
        let deadline = self.now(sim) + call_timeout(arrival.lease) + STRAGGLE;
        let holds = sim.keys.clone().into_iter();
        let holds: Vec<_> = holds
            .map(|key| Hold::new(key, arrival.mode, Token::random()))
            .collect();
        holds
            .iter()
            .for_each(|hold| sim.introduce(hold.token, self.who));
        let request = |hold: &Hold| KeyRequest::new(hold.clone(), arrival.lease, deadline);
        let requests: Vec<_> = holds.iter().map(request).collect();
        self.attempt(sim, arrival, holds, |session, cx| {
            session.acquire_all(&requests, cx)
        });
    }

    pub(super) fn downgrade(&mut self, sim: &mut Sim, arrival: Arrival, writer: &Hold) {
        let name = sim.name(writer.token);
        say!(sim, "{} makes {name} a reader", self.who);
        let arrival = Arrival {
            mode: Mode::Shared,
            ..arrival
        };
        let reader = Hold::new(writer.key.clone(), Mode::Shared, writer.token);
        self.attempt(sim, arrival, vec![reader], |session, cx| {
            session.convert(writer, cx)
        });
    }

    fn attempt(
        &mut self,
        sim: &mut Sim,
        arrival: Arrival,
        holds: Vec<Hold>,
        begin: impl FnOnce(&mut Session, &mut Cx<'_>) -> RequestId,
    ) {
        let number = sim.number();
        let request = self.ask(sim, Asker::Attempt(number), begin);
        let timeout = self.now(sim) + call_timeout(arrival.lease);
        self.timer_at(sim, timeout, Timer::Attempted(number));
        let attempt = Attempt {
            arrival,
            holds,
            request,
        };
        self.attempts.insert(number, attempt);
    }

    /// Drops an attempt whose time is up.
    pub(super) fn attempt_late(&mut self, sim: &mut Sim, number: u32) {
        if let Some(attempt) = self.attempts.get(&number) {
            self.drop_request(sim, attempt.request);
            let now = self.now(sim);
            self.attempted(sim, number, now, Err(StoreError::late()));
        }
    }

    pub(super) fn attempted(
        &mut self,
        sim: &mut Sim,
        number: u32,
        sent: Instant,
        reply: Result<Reply, StoreError>,
    ) {
        let Some(Attempt { arrival, holds, .. }) = self.attempts.remove(&number) else {
            return;
        };
        let grants = match reply {
            Ok(Reply::AcquireAll(AcquireAllReply::Granted(grants))) => grants,
            Ok(Reply::Convert(ConvertReply::Converted(grant))) => vec![grant],
            _ => Vec::new(),
        };
        let leases = grants
            .iter()
            .filter_map(|grant| self.start(sim, arrival, *grant, sent));
        let leases: Vec<_> = leases.collect();
        if leases.len() < holds.len() {
            holds.iter().for_each(|hold| self.abandon(sim, hold));
            return self.again(sim, arrival);
        }
        let mut arrival = arrival;
        for ((hold, grant), lease) in holds.into_iter().zip(grants).zip(leases) {
            self.begin(sim, arrival, hold, grant, lease);
            // The request is repeated once, not for each lock.
            arrival.again = None;
        }
    }
}
