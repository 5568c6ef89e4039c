//! The events of a run, apart from those of the network: drawn from a seed.

use std::{num::NonZeroU32, time::Duration};

use crate::{
    protocol::WaiterLimits,
    sim::{
        dice::Dice,
        process::{Arrival, Ending, terms},
    },
    spec::{Mode, Terms, Wait},
};

/// The fault rates of the network. Probabilities are in thousandths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    pub(super) lost: usize,
    pub(super) doubled: usize,
    /// Messages that take more than a millisecond, up to `longest`.
    pub(super) late: usize,
    /// The same for push messages, which have a connection of their own.
    pub(super) pushes_late: usize,
    pub(super) longest: Duration,
}

impl Network {
    pub(super) const PERFECT: Self = Self {
        lost: 0,
        doubled: 0,
        late: 0,
        pushes_late: 0,
        longest: Duration::ZERO,
    };
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    Arrive(Box<Arrival>),
    /// The process loses everything it had in memory, and restarts.
    Crash(usize),
    /// The process does nothing for this time.
    Stop(usize, Duration),
    Continue(usize),
    /// The connection breaks.
    Disconnect(usize),
    /// The runtime of the driver ends.
    DriverDies(usize),
    /// The client of the process is shut down.
    Shutdown(usize),
    /// A process revokes a lock.
    Revoke(usize, usize),
    /// The store executes nothing for this time, and then everything, in any order.
    Stall(Duration),
    /// The store loses its data, and all connections break.
    Flush,
    /// There are no more faults.
    Quiet,
}

#[derive(Clone)]
pub(super) struct Schedule {
    pub(super) processes: usize,
    pub(super) locks: usize,
    pub(super) limits: WaiterLimits,
    pub(super) network: Network,
    pub(super) actions: Vec<(Duration, Action)>,
    /// The time, counted from the end of the faults, within which every waiter must be served.
    pub(super) bound: Duration,
}

/// The way in which a schedule holds its locks.
#[derive(Clone, Copy)]
enum Kind {
    Passing,
    Strict,
    Mixed,
    /// Mostly readers, many of which are cancelled.
    Readers,
    Permits,
}

/// A request for the first lock, which is held for `hold_for`.
pub(super) fn arrival(process: usize, terms: Terms, hold_for: Duration) -> Arrival {
    Arrival {
        process,
        keys: vec![0],
        terms,
        hold_for,
        ending: Ending::Release,
        cancel_after: None,
        extend: None,
        convert: None,
        reenter: None,
        again: 0,
        pause: PAUSE,
    }
}

/// The longest pause before a request is repeated.
const PAUSE: Duration = Duration::from_millis(2);

pub(super) const UNLIMITED: WaiterLimits = WaiterLimits {
    per_key: usize::MAX,
    in_all: usize::MAX,
};

impl Schedule {
    pub(super) fn random(dice: &mut Dice) -> Self {
        let millis = Duration::from_millis;
        // Short leases on a slow network that often duplicates messages: a message about a token
        // arrives late in the life of the token.
        let is_echoing = dice.chance(150);
        let short = if is_echoing {
            100
        } else {
            dice.one_of(&[100, 300, 300, 1000, 2000, 4000, 8000])
        };
        let leases = [
            millis(short),
            millis(dice.one_of(&[short, short, short, 300, 6000])),
        ];
        let longest_lease = leases[0].max(leases[1]);
        // Long enough for leases to expire, and short enough for requests to overlap.
        let times = if is_echoing {
            16
        } else {
            dice.one_of(&[1, 2, 4])
        };
        let horizon = (leases[0] * times).clamp(millis(50), millis(6000));
        let mut network = Network {
            lost: dice.one_of(&[0, 10, 50, 200]),
            doubled: dice.one_of(&[0, 0, 50, 300]),
            late: dice.one_of(&[0, 20, 100, 400]),
            pushes_late: dice.one_of(&[0, 100, 500]),
            longest: dice.one_of(&[millis(20), leases[0], horizon, millis(3500)]),
        };
        if is_echoing {
            network = Network {
                lost: 0,
                doubled: 500,
                late: 150,
                pushes_late: 900,
                longest: millis(900),
            };
        }
        let crowd = Crowd {
            kind: dice.one_of(&[
                Kind::Passing,
                Kind::Passing,
                Kind::Passing,
                Kind::Strict,
                Kind::Mixed,
                Kind::Readers,
                Kind::Permits,
            ]),
            processes: 2 + dice.below(2),
            locks: if dice.chance(150) { 2 } else { 1 },
            leases,
            holds: if is_echoing {
                [millis(150); 2]
            } else {
                let longest = [millis(4), horizon / 4, horizon / 2, longest_lease * 2];
                [millis(4), dice.one_of(&longest)]
            },
            horizon,
            is_echoing,
            are_many: dice.chance(150),
            quick_hold: dice.one_of(&[Duration::from_micros(500), millis(5)]),
        };
        // The push messages to readers are late, so that others are admitted before they arrive.
        let are_readers = matches!(crowd.kind, Kind::Readers) && !is_echoing;
        if are_readers {
            (network.pushes_late, network.longest) = (900, horizon / 2);
        }
        let arrivals: Vec<_> = (0..dice.one_of(&[3, 5, 7, 10]))
            .map(|_| crowd.arrival(dice))
            .collect();
        // Alone, or all at once.
        let rush = dice.up_to(horizon);
        let mut actions: Vec<_> = arrivals
            .iter()
            .map(|arrival| {
                let when = if are_readers || dice.chance(400) {
                    dice.up_to(horizon)
                } else {
                    rush + dice.up_to(millis(5))
                };
                (when.min(horizon), Action::Arrive(Box::new(arrival.clone())))
            })
            .collect();
        for _ in 0..dice.one_of(&[0, 0, 1, 2, 3]) {
            let process = dice.below(crowd.processes);
            let action = match dice.below(if crowd.are_many { 18 } else { 9 }) {
                0 | 1 => Action::Crash(process),
                2 | 3 => Action::Stop(process, dice.up_to(horizon.max(millis(4000)))),
                4 => Action::Disconnect(process),
                5 => Action::Stall(dice.up_to(horizon)),
                6 => Action::DriverDies(process),
                7 if dice.chance(300) => Action::Shutdown(process),
                7 => Action::Revoke(process, dice.below(crowd.locks)),
                _ => Action::Flush,
            };
            actions.push((dice.up_to(horizon), action));
        }
        for _ in 0..if is_echoing { 6 } else { 0 } {
            let pause = millis(100) + dice.up_to(millis(300));
            let stop = Action::Stop(dice.below(crowd.processes), pause);
            actions.push((dice.up_to(horizon), stop));
        }
        actions.push((horizon, Action::Quiet));
        // The sum of: a dead holder's lease, extended by a delayed request; a dead waiter's grant;
        // the longest pause of an abandonment; 2 s; and a turn for each request.
        let extended =
            |arrival: &Arrival| arrival.terms.lease * arrival.extend.map_or(1, |(_, times)| times);
        let longest = arrivals.iter().map(extended).max().unwrap_or_default();
        let bound = longest.max(millis(3000))
            + network.longest
            + millis(3000)
            + millis(5500)
            + millis(2000);
        let requests: usize = arrivals.iter().map(|arrival| arrival.again + 1).sum();
        Self {
            processes: crowd.processes,
            locks: crowd.locks,
            limits: WaiterLimits {
                per_key: if dice.chance(30) { 2 } else { usize::MAX },
                in_all: if dice.chance(30) { 3 } else { usize::MAX },
            },
            network,
            actions,
            bound: bound + millis(100) * requests as u32,
        }
    }
}

/// The requests of a schedule.
struct Crowd {
    kind: Kind,
    processes: usize,
    locks: usize,
    leases: [Duration; 2],
    holds: [Duration; 2],
    horizon: Duration,
    is_echoing: bool,
    /// Requests are repeated often, so that the limits of local hand-offs are reached.
    are_many: bool,
    /// The longest hold of such a request.
    quick_hold: Duration,
}

impl Crowd {
    fn arrival(&self, dice: &mut Dice) -> Arrival {
        let lease = dice.one_of(&self.leases);
        let mode = match self.kind {
            Kind::Passing | Kind::Strict => Mode::Exclusive,
            Kind::Mixed => dice.one_of(&[Mode::Exclusive, Mode::Shared]),
            Kind::Readers => {
                dice.one_of(&[Mode::Exclusive, Mode::Shared, Mode::Shared, Mode::Shared])
            }
            Kind::Permits => NonZeroU32::new(2).map_or(Mode::Exclusive, Mode::Permits),
        };
        let wait = Wait::AtMost(self.horizon / 8 + dice.up_to(self.horizon * 2));
        let mut terms = terms(mode, lease, if dice.chance(80) { Wait::No } else { wait });
        terms.strict_order = matches!(self.kind, Kind::Strict) || dice.chance(50);
        terms.renew = !dice.chance(80);
        terms.min_hold = dice.chance(30).then(|| dice.up_to(lease));
        // A `max_hold` shorter than a round trip can never be met.
        let max_hold =
            terms.min_hold.unwrap_or_default() + Duration::from_millis(10) + dice.up_to(lease * 2);
        terms.max_hold = dice.chance(50).then_some(max_hold);
        let longest_hold = dice.one_of(&self.holds);
        let are_cancelled = matches!(self.kind, Kind::Readers);
        let cancel_after = dice.chance(if are_cancelled { 600 } else { 300 }).then(|| {
            let longest = dice.one_of(&[self.horizon, self.horizon / 4, Duration::from_millis(4)]);
            dice.up_to(longest)
        });
        let mut keys = vec![dice.below(self.locks)];
        if self.locks > 1 && terms.wait == Wait::No && !matches!(self.kind, Kind::Permits) {
            keys = vec![0, 1];
        }
        let extend = dice
            .chance(100)
            .then(|| (dice.up_to(lease), 2 + dice.below(2) as u32));
        let is_writer = mode == Mode::Exclusive && matches!(self.kind, Kind::Mixed | Kind::Readers);
        let repeats = if self.are_many {
            60
        } else if self.is_echoing && terms.wait != Wait::No && cancel_after.is_none() {
            1_000
        } else {
            0
        };
        Arrival {
            // Most requests meet in one process.
            process: dice.below(self.processes).min(dice.below(self.processes)),
            keys,
            terms,
            hold_for: if self.are_many {
                dice.up_to(self.quick_hold)
            } else if extend.is_some() {
                dice.up_to(lease * 3)
            } else {
                dice.up_to(longest_hold)
            },
            ending: match dice.below(4) {
                0 => Ending::Drop,
                1 if dice.chance(100) => Ending::NeglectRelease,
                1 => Ending::DropRelease(dice.up_to(Duration::from_millis(2))),
                _ => Ending::Release,
            },
            cancel_after,
            extend,
            convert: (is_writer && dice.chance(300))
                .then(|| (dice.up_to(longest_hold), dice.chance(300))),
            reenter: dice.chance(50).then(|| dice.up_to(longest_hold)),
            again: repeats,
            pause: PAUSE,
        }
    }
}
