//! The invariants of a run: those that hold at every moment, and those that hold at its end.

use tokio::time::Instant;

use super::{
    client::Client,
    server::Server,
    sim::{Began, Sim, Who},
};
use crate::{
    fence::FencingToken,
    protocol::quorum::majority,
    spec::{LockKind, Mode},
    store::Hold,
};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two holders that exclude each other hold a lock at the same time, each by its own clock.
    TwoHolders,
    /// A holder is valid, but no majority holds the lock for it, or not for as long.
    NotHeld,
    /// A fencing token was handed out before, or is not larger than an earlier one.
    Fence,
    /// A server keeps something for an alias that no part of its living client knows.
    Orphan,
    /// A request is not served although there are no more faults.
    Stuck,
    /// A request was refused in a way that its schedule excludes.
    Refusal,
    /// Something is left at a server or in a client at the end.
    Leak,
}

pub(super) type Violation = crate::sim::explore::Violation<Wrong>;

/// A holder whose client has crashed without a release.
pub(super) struct Dead {
    pub(super) hold: Hold,
    /// In true time.
    pub(super) until: Instant,
}

/// The fencing tokens of one lock that were handed out.
#[derive(Default)]
struct Fences {
    /// All tokens, each with the true time at which it was handed out.
    all: Vec<(FencingToken, Instant)>,
    /// The largest token of a writer.
    exclusive: Option<FencingToken>,
}

#[derive(Default)]
pub(super) struct Checker {
    /// By lock.
    fences: Vec<Fences>,
    pub(super) dead: Vec<Dead>,
    found: Option<Violation>,
    /// If set, all other violations are ignored.
    pub(super) only: Option<Wrong>,
}

impl Checker {
    pub(super) fn report(&mut self, wrong: Wrong, what: impl FnOnce() -> String) {
        if self.only.is_none_or(|only| only == wrong) && self.found.is_none() {
            self.found = Some(Violation {
                wrong,
                what: what(),
            });
        }
    }

    pub(super) fn found(&mut self) -> Option<Violation> {
        self.found.take()
    }

    /// Checks the state after an event at a client.
    pub(super) fn look(&mut self, sim: &mut Sim, clients: &mut [Client], servers: &[Server]) {
        for began in std::mem::take(&mut sim.began) {
            self.began(sim, &began);
        }
        self.holders(sim, clients);
        self.votes(sim, clients, servers);
    }

    /// Checks that each grant has a token of its own, and that it is larger than all tokens handed
    /// out before the grant was requested. The token of a writer is larger than all tokens handed
    /// out before it, and that of a reader is larger than all earlier tokens of writers.
    fn began(&mut self, sim: &Sim, began: &Began) {
        let Began {
            ref hold,
            fence,
            asked_at,
        } = *began;
        let lock = sim
            .keys
            .iter()
            .position(|key| *key == hold.key)
            .unwrap_or_default();
        self.fences
            .resize_with(self.fences.len().max(lock + 1), Fences::default);
        let Fences { all, exclusive } = &mut self.fences[lock];
        let is_writer = hold.mode == Mode::Exclusive;
        let comes_after = |(_, at): &&(FencingToken, Instant)| is_writer || *at < asked_at;
        let wrong = if all.iter().any(|(other, _)| *other == fence) {
            Some("the fencing token of another grant")
        } else if all
            .iter()
            .filter(comes_after)
            .any(|(other, _)| *other > fence)
            || *exclusive > Some(fence)
        {
            Some("a fencing token out of order")
        } else {
            None
        };
        all.push((fence, sim.now));
        if is_writer {
            *exclusive = (*exclusive).max(Some(fence));
        }
        if let Some(wrong) = wrong {
            self.report(Wrong::Fence, || {
                format!("{} has {wrong}", sim.name(hold.token))
            });
        }
    }

    fn holders(&mut self, sim: &Sim, clients: &[Client]) {
        let now = sim.now;
        self.dead.retain(|dead| dead.until > now);
        let living = clients.iter().flat_map(|client| {
            let valid = client.process.session.valid(client.clock.at(now));
            valid.map(|(_, hold, _)| hold)
        });
        let all: Vec<&Hold> = living
            .chain(self.dead.iter().map(|dead| &dead.hold))
            .filter(|hold| !sim.revoked.contains(&hold.token))
            .collect();
        let mut two = None;
        for (index, hold) in all.iter().enumerate() {
            let excludes = |other: &&&Hold| {
                other.key == hold.key
                    && (other.mode == Mode::Exclusive || hold.mode == Mode::Exclusive)
            };
            two = two.or_else(|| {
                all[..index]
                    .iter()
                    .find(excludes)
                    .map(|other| (hold.token, other.token))
            });
        }
        drop(all);
        if let Some((one, other)) = two {
            self.report(Wrong::TwoHolders, || {
                format!(
                    "{} and {} are held at the same time",
                    sim.name(one),
                    sim.name(other)
                )
            });
        }
    }

    /// Checks that a majority holds each lock for as long as its holder is valid. A server that has
    /// lost the lock with its data counts too, as it does not vote in the meantime.
    fn votes(&mut self, sim: &Sim, clients: &mut [Client], servers: &[Server]) {
        for client in clients {
            let local = client.now(sim);
            let Client {
                process,
                votes,
                session,
                clock: of_client,
                ..
            } = client;
            for (_, hold, until) in process.session.valid(local) {
                let (Some(round), Some(held)) =
                    (session.round(hold.token), votes.get_mut(&hold.token))
                else {
                    continue;
                };
                if sim.revoked.contains(&hold.token) {
                    continue;
                }
                let until = of_client.when(until);
                // An alias is replaced when its server no longer knows it.
                let fresh = round.known().filter(|known| !held.aliases.contains(known));
                let fresh: Vec<_> = fresh.collect();
                held.aliases.extend(fresh);
                let keeps = |server: &usize| {
                    let Server {
                        clock,
                        lost_data_at,
                        ..
                    } = &servers[*server];
                    let forgot =
                        lost_data_at.is_some_and(|at| at >= held.since - sim.longest_lease);
                    let mut aliases = held.aliases.iter().filter(|(at, _)| at == server);
                    aliases.any(|(_, token)| {
                        let name = Hold::new(hold.key.clone(), hold.mode, *token);
                        let kept = servers[*server]
                            .table()
                            .held_until(&name, clock.at(sim.now));
                        forgot || kept.is_some_and(|kept| clock.when(kept) >= until)
                    })
                };
                if (0..servers.len()).filter(keeps).count() < majority(servers.len()) {
                    let name = sim.name(hold.token);
                    self.report(Wrong::NotHeld, || {
                        format!("{name} is not held by a majority until {until:?}")
                    });
                }
            }
        }
    }

    /// Checks, after each request that a server executes, that everything it keeps has an owner,
    /// unless its client is dead.
    pub(super) fn owners(
        &mut self,
        sim: &Sim,
        clients: &[Client],
        number: usize,
        server: &Server,
        at_the_end: bool,
    ) {
        let now = server.clock.at(sim.now);
        for key in &sim.keys {
            for (token, mode) in server.table().tokens(key, LockKind::Lock, now) {
                let Some(who) = sim.whose(token) else {
                    continue;
                };
                let Who { client, life } = who;
                let client = &clients[client];
                if client.who.life == life && !client.owns(number, token) && !sim.is_excused(token)
                {
                    let wrong = if at_the_end {
                        Wrong::Leak
                    } else {
                        Wrong::Orphan
                    };
                    let place = if mode.is_some() { "held" } else { "queued" };
                    self.report(wrong, || {
                        format!("{} is {place} unowned at s{number}", sim.name(token))
                    });
                }
            }
        }
    }
}
