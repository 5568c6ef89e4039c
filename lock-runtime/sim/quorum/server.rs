//! One of the servers: its data, its clock, and its replies.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    clock::Clock,
    message::{Call, Conditions, Greeted, Reply, Request, alias},
    sim::{Conn, Event, Sim, Who},
};
use crate::{
    protocol::quorum::{ServerReply, ServerRequest},
    sim::say,
    store::{
        AcquireReply, KeyRequest, StoreEvent,
        memory::table::{Fences, Step, Table},
    },
};

/// The start of the run in true time, in microseconds since 1970.
pub(super) const MICROS: u64 = 1_800_000_000_000_000;

/// The data that a server has after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    All,
    /// The data that were saved last.
    Saved,
    Nothing,
}

struct Data {
    table: Table,
    fences: Fences,
    /// Its name, and when it was written.
    marker: Option<(u64, u64)>,
}

impl Data {
    fn none(start: Instant, epoch: u64) -> Self {
        Self {
            table: Table::default(),
            fences: Fences::since(start, epoch),
            marker: None,
        }
    }

    fn save(&self) -> Self {
        Self {
            table: self.table.clone(),
            fences: self.fences.saved(),
            marker: self.marker,
        }
    }
}

pub(super) struct Server {
    number: usize,
    pub(super) clock: Clock,
    /// The time of its clock at the start of the run.
    epoch: u64,
    data: Data,
    saved: Data,
    pub(super) up: bool,
    pub(super) life: u32,
    started: u64,
    pub(super) stalls_until: Instant,
    /// Everything that the server kept before is lost.
    pub(super) lost_data_at: Option<Instant>,
    /// The clients that receive push messages, each with its connection.
    ears: Vec<(Who, Conn)>,
}

impl Server {
    pub(super) fn new(number: usize, start: Instant, fast: u32, ahead: i64) -> Self {
        let epoch = MICROS.saturating_add_signed(ahead);
        // The server has been up for long, with its marker.
        let long_ago = epoch - 1_000_000_000;
        let mut data = Data::none(start, epoch);
        data.marker = Some((0, long_ago));
        Self {
            number,
            clock: Clock::new(start, fast),
            epoch,
            saved: data.save(),
            data,
            up: true,
            life: 0,
            started: long_ago,
            stalls_until: start,
            lost_data_at: None,
            ears: Vec::new(),
        }
    }

    pub(super) fn table(&self) -> &Table {
        &self.data.table
    }

    fn micros(&self, now: Instant) -> u64 {
        self.epoch + self.clock.micros(now)
    }

    pub(super) fn save(&mut self) {
        self.saved = self.data.save();
    }

    pub(super) fn crash(&mut self, sim: &mut Sim) {
        say!(sim, "s{} crashes", self.number);
        self.up = false;
        self.life += 1;
        for conn in 0..sim.connections.len() {
            if sim.connections[conn].server == self.number
                && sim.connections[conn].life == Some(self.life - 1)
            {
                let soon = sim.dice.up_to(Duration::from_millis(2));
                sim.after(soon, Event::Broken(conn));
            }
        }
        self.ears.clear();
    }

    pub(super) fn start(&mut self, sim: &mut Sim, left: Left) {
        say!(sim, "s{} starts, with {left:?} of its data", self.number);
        match left {
            Left::All => {}
            Left::Saved => self.data = self.saved.save(),
            Left::Nothing => self.data = Data::none(sim.start, self.epoch),
        }
        if left != Left::All {
            self.lost_data_at = Some(sim.now);
        }
        let now = self.clock.at(sim.now);
        for key in sim.keys.clone() {
            for (token, _) in self
                .data
                .table
                .tokens(&key, crate::spec::LockKind::Lock, now)
                .collect::<Vec<_>>()
            {
                sim.excuse(token);
            }
        }
        self.up = true;
        self.started = self.micros(sim.now);
    }

    pub(super) fn flush(&mut self, sim: &mut Sim) {
        say!(sim, "s{} loses its data", self.number);
        self.data = Data::none(sim.start, self.epoch);
        self.lost_data_at = Some(sim.now);
    }

    pub(super) fn execute(&mut self, sim: &mut Sim, conn: Conn, call: Call, request: &Request) {
        let (now, micros) = (self.clock.at(sim.now), self.micros(sim.now));
        let caller = match request {
            Request::Call(request, _) if call != 0 => alias(request).map(|hold| hold.token),
            _ => None,
        };
        let Data {
            table,
            fences,
            marker,
        } = &mut self.data;
        let mut step = Step::new(now, fences, caller);
        let reply = match request {
            Request::Greet => {
                let (name, since) = *marker.get_or_insert((u64::from(sim.number()), micros));
                let seconds = micros / 1_000_000 - self.started / 1_000_000;
                let with_data = Duration::from_micros(micros - since);
                let who = sim.connections[conn].who;
                self.ears.retain(|(ear, _)| ear.client != who.client);
                self.ears.push((who, conn));
                sim.connections[conn].life = Some(self.life);
                Reply::Greeted(Greeted {
                    micros,
                    uptime: Duration::from_secs(seconds),
                    marker: name,
                    with_data,
                })
            }
            Request::Call(_, Conditions { deadline, .. })
                if deadline.is_some_and(|deadline| micros > deadline) =>
            {
                Reply::Call(ServerReply::Acquire(AcquireReply::Late), micros)
            }
            Request::Call(_, conditions)
                if conditions.marker.is_some()
                    && conditions.marker != marker.map(|(name, _)| name) =>
            {
                Reply::Strange(micros)
            }
            Request::Call(request, conditions) => {
                let reply = match request {
                    ServerRequest::Acquire(request, proposal) => {
                        // Without recent replies, the client's estimate of the server's clock is
                        // outdated.
                        if conditions
                            .deadline_there
                            .is_some_and(|there| sim.now > there)
                        {
                            sim.excuse(request.hold.token);
                        }
                        step.proposal = Some(*proposal);
                        // The deadline was checked above.
                        let request = KeyRequest {
                            deadline: now,
                            ..request.clone()
                        };
                        ServerReply::Acquire(table.acquire(&request, &mut step))
                    }
                    ServerRequest::Poll(hold) => ServerReply::Poll(table.poll(hold, &mut step)),
                    ServerRequest::Renew(renewals) => {
                        let renewed = renewals.iter().map(|renewal| Ok(table.renew(renewal, now)));
                        ServerReply::Renew(renewed.collect())
                    }
                    ServerRequest::Release(release) => {
                        ServerReply::Release(table.release(release, &mut step))
                    }
                    ServerRequest::Convert(hold) => {
                        ServerReply::Convert(table.convert(hold, &mut step))
                    }
                    ServerRequest::Abandon(hold) => {
                        sim.look = true;
                        table.abandon(hold, &mut step);
                        ServerReply::Abandoned
                    }
                    ServerRequest::Raise(_, _, fence) => {
                        ServerReply::Raise(*fence, fences.raise(*fence))
                    }
                    ServerRequest::Inspect(key, kind) => {
                        ServerReply::Inspect(table.inspect(key, *kind, now))
                    }
                    ServerRequest::Revoke(..) => unreachable!("no lock is revoked"),
                };
                Reply::Call(reply, micros)
            }
        };
        let events = std::mem::take(&mut step.events);
        sim.reply(conn, call, reply);
        for event in events {
            let StoreEvent::Granted { hold, grant } = event else {
                continue;
            };
            let whose = sim.whose(hold.token);
            if let Some((_, conn)) = self
                .ears
                .iter()
                .find(|(ear, _)| Some(*ear) == whose)
                .copied()
            {
                sim.push(conn, hold, grant);
            }
        }
    }
}
