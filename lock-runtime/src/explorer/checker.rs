//! What must hold at every moment of a run, and at its end.

use std::fmt;

use super::{holder::Holder, process::Process, server::Server, sim::Sim};
use crate::{
    fence::FencingToken,
    spec::{Family, Mode},
    store::Hold,
};

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two who exclude each other hold a lock, each by its own clock.
    TwoHolders,
    /// Somebody believes to hold what the store does not keep for it, or not for so long.
    NotHeld,
    /// A fencing token is not larger than an earlier one.
    Fence,
    /// The store keeps something for a token that nobody in its living process knows.
    Orphan,
    /// A waiter is not served although nothing fails any more.
    Stuck,
    /// Something is left in the store or in a process when all is over.
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
    /// The largest fencing token handed out, by lock: with exclusive grants, and with others.
    fences: Vec<(Option<FencingToken>, Vec<FencingToken>)>,
    /// Holders whose process has crashed. Nobody has released what they held.
    pub(super) dead: Vec<Holder>,
    found: Vec<Violation>,
    /// Only this is looked for.
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

    /// After every event.
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

    /// An exclusive grant comes after everything that was handed out before, and nothing that is handed out later comes before it.
    /// Grants that may be held together are in no order, but no two have the same token.
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
        // A token whose acquire was doubled may have been granted twice, and the word of the first grant may come with the second.
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

    /// After the store has executed something: everything it keeps is somebody's, unless its process is dead.
    pub(super) fn owners(
        &mut self,
        sim: &Sim,
        processes: &[Process],
        server: &Server,
        at_the_end: bool,
    ) {
        for key in &sim.keys {
            let families = [Family::Lock, Family::Permits].into_iter();
            for (token, mode) in
                families.flat_map(|family| server.table.tokens(key, family, sim.now))
            {
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
                    let place = if mode.is_some() { "held" } else { "in line" };
                    self.report(wrong, || {
                        format!("{} is {place} in the store for nobody", sim.name(token))
                    });
                }
            }
        }
    }
}
