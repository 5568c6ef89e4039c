//! The invariants of a run: those that hold at every moment, and those that hold at its end.

use std::fmt;

use super::{holder::Holder, process::Process, server::Server, sim::Sim};
use crate::{
    fence::FencingToken,
    spec::{LockKind, Mode},
    store::Hold,
};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two holders that exclude each other hold a lock at the same time, each by its own clock.
    TwoHolders,
    /// A holder is valid, but the store does not hold the lock for it, or not for as long.
    NotHeld,
    /// A fencing token is not larger than an earlier one.
    Fence,
    /// The store keeps something for a token that no part of its living process knows.
    Orphan,
    /// A waiter is not served although there are no more faults.
    Stuck,
    /// Something is left in the store or in a process at the end.
    Leak,
}

pub(super) struct Violation {
    pub(super) wrong: Wrong,
    pub(super) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.wrong, self.what)
    }
}

#[derive(Default)]
pub(super) struct Checker {
    /// By lock: the largest token of an exclusive grant, and the tokens of all other grants.
    fences: Vec<(Option<FencingToken>, Vec<FencingToken>)>,
    /// Holders whose process has crashed without a release.
    pub(super) dead: Vec<Holder>,
    found: Vec<Violation>,
    /// If set, all other violations are ignored.
    pub(super) only: Option<Wrong>,
}

impl Checker {
    pub(super) fn report(&mut self, wrong: Wrong, what: impl FnOnce() -> String) {
        if self.only.is_none_or(|only| only == wrong) {
            self.found.push(Violation {
                wrong,
                what: what(),
            });
        }
    }

    pub(super) fn found(&mut self) -> Option<Violation> {
        self.found.pop()
    }

    /// Checks the state after every event.
    pub(super) fn look(&mut self, sim: &mut Sim, processes: &[Process], server: &Server) {
        for began in std::mem::take(&mut sim.began) {
            let lock = sim.lock_of(&began.hold);
            self.fences
                .resize_with(self.fences.len().max(lock + 1), Default::default);
            self.began(sim, &began.hold, began.fence, lock);
        }
        let dead = std::mem::take(&mut self.dead);
        self.holders(
            sim,
            processes
                .iter()
                .flat_map(|process| process.holders.values())
                .chain(&dead),
            server,
        );
        self.dead = dead;
        self.dead
            .retain(|holder| !holder.lease.validity(sim.now).is_zero());
    }

    /// Checks the order of fencing tokens. The token of an exclusive grant is larger than all
    /// earlier tokens, and no later token is smaller. Grants that may be held together are in no
    /// particular order, but no two have the same token.
    fn began(&mut self, sim: &Sim, hold: &Hold, fence: FencingToken, lock: usize) {
        let (exclusive, others) = &mut self.fences[lock];
        let mut in_order = exclusive.is_none_or(|exclusive| exclusive < fence);
        if hold.mode == Mode::Exclusive {
            in_order &= others.iter().all(|other| *other < fence);
            *exclusive = (*exclusive).max(Some(fence));
        } else {
            in_order &= !others.contains(&fence);
            others.push(fence);
        }
        // If an acquire was duplicated, its token may have been granted twice, and the reply with
        // the first grant may arrive with the second.
        if !in_order && !sim.is_excused(hold.token) {
            self.report(Wrong::Fence, || {
                format!("{} has a fencing token out of order", sim.name(hold.token))
            });
        }
    }

    fn holders<'a>(
        &mut self,
        sim: &Sim,
        holders: impl Iterator<Item = &'a Holder> + Clone,
        server: &Server,
    ) {
        let now = sim.now;
        let valid = holders.filter(|holder| !holder.lease.validity(now).is_zero());
        for (index, holder) in valid.clone().enumerate() {
            let until = now + holder.lease.validity(now);
            if server
                .table
                .held_until(&holder.hold, now)
                .is_none_or(|kept_until| kept_until < until)
            {
                self.report(Wrong::NotHeld, || {
                    format!("{} is not held in the store", sim.name(holder.hold.token))
                });
            }
            let beside = valid
                .clone()
                .take(index)
                .filter(|other| other.arrival.lock == holder.arrival.lock);
            let beside = beside.filter(|other| {
                other.hold.token != holder.hold.token || other.hold.mode == Mode::Exclusive
            });
            let (mut count, mut excluded) = (1, None);
            for other in beside {
                count += 1;
                if holder.hold.mode == Mode::Exclusive || other.hold.mode == Mode::Exclusive {
                    excluded = Some(other);
                }
            }
            let too_many =
                matches!(holder.hold.mode, Mode::Permits(permits) if count > permits.get());
            if excluded.is_some() || too_many {
                let other = excluded.unwrap_or(holder);
                let (one, other) = (sim.name(holder.hold.token), sim.name(other.hold.token));
                self.report(Wrong::TwoHolders, || {
                    format!("{one} and {other} are held at the same time")
                });
            }
        }
    }

    /// Checks, after each request that the store executes, that everything it keeps has an owner,
    /// unless its process is dead.
    pub(super) fn owners(
        &mut self,
        sim: &Sim,
        processes: &[Process],
        server: &Server,
        at_the_end: bool,
    ) {
        for key in &sim.keys {
            let kinds = [LockKind::Lock, LockKind::Permits].into_iter();
            for (token, mode) in kinds.flat_map(|kind| server.table.tokens(key, kind, sim.now)) {
                let Some(who) = sim.whose(token).filter(|_| !sim.is_excused(token)) else {
                    continue;
                };
                let process = &processes[who.process];
                if process.who == who && !process.owns(token) {
                    let wrong = if at_the_end {
                        Wrong::Leak
                    } else {
                        Wrong::Orphan
                    };
                    let place = if mode.is_some() { "held" } else { "queued" };
                    self.report(wrong, || {
                        format!("{} is {place} unowned in the store", sim.name(token))
                    });
                }
            }
        }
    }
}
