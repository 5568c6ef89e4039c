//! The events of a run, apart from those of the network: drawn from a seed.

use std::{num::NonZeroU32, time::Duration};

use super::dice::Dice;
use crate::spec::{Mode, Terms, Wait};

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

#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    /// The arrival with this number.
    Arrive(usize),
    /// The process loses everything it had in memory, and restarts.
    Crash(usize),
    /// The process does nothing for this time.
    Stop(usize, Duration),
    Continue(usize),
    Disconnect(usize),
    /// The store executes nothing for this time, and then everything, in any order.
    Stall(Duration),
    /// There are no more faults.
    Quiet,
}

/// How a hold ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Release,
    /// The future of its release is dropped.
    Forsake,
    Drop,
}

/// A request for a lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// Its index among the arrivals.
    pub(super) number: usize,
    pub(super) process: usize,
    pub(super) lock: usize,
    pub(super) terms: Terms,
    pub(super) hold_for: Duration,
    pub(super) ending: Ending,
    pub(super) cancel_after: Option<Duration>,
    /// Extends the hold to this number of leases, this time after the grant.
    pub(super) extend: Option<(Duration, u32)>,
    /// Repeats the request, this time after it has ended.
    pub(super) again: Option<Duration>,
}

pub(super) struct Schedule {
    pub(super) processes: usize,
    pub(super) locks: usize,
    pub(super) network: Network,
    pub(super) arrivals: Vec<Arrival>,
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
    Permits,
}

pub(super) fn terms(mode: Mode, lease: Duration, wait: Wait) -> Terms {
    Terms {
        mode,
        lease,
        wait,
        renew: true,
        strict_order: false,
        reentrant: false,
        min_hold: None,
        max_hold: None,
        max_waiters: usize::MAX,
    }
}

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
        let kind = dice.one_of(&[
            Kind::Passing,
            Kind::Passing,
            Kind::Passing,
            Kind::Strict,
            Kind::Mixed,
            Kind::Permits,
        ]);
        let (processes, locks) = (2 + dice.below(2), if dice.chance(100) { 2 } else { 1 });
        let holds = if is_echoing {
            [millis(150); 2]
        } else {
            [
                millis(4),
                dice.one_of(&[millis(4), horizon / 4, horizon / 2, longest_lease * 2]),
            ]
        };
        let crowd = Crowd {
            kind,
            processes,
            locks,
            leases,
            holds,
            horizon,
            is_echoing,
        };
        let arrivals: Vec<_> = (0..dice.one_of(&[3, 5, 7, 10]))
            .map(|number| crowd.arrival(dice, number))
            .collect();
        // Alone, or all at once.
        let rush = dice.up_to(horizon);
        let mut actions: Vec<_> = arrivals
            .iter()
            .map(|arrival| {
                let when = if dice.chance(400) {
                    dice.up_to(horizon)
                } else {
                    rush + dice.up_to(millis(5))
                };
                (when.min(horizon), Action::Arrive(arrival.number))
            })
            .collect();
        for _ in 0..dice.one_of(&[0, 0, 1, 2, 3]) {
            let process = dice.below(processes);
            let action = match dice.below(6) {
                0 | 1 => Action::Crash(process),
                2 | 3 => Action::Stop(process, dice.up_to(horizon.max(millis(4000)))),
                4 => Action::Disconnect(process),
                _ => Action::Stall(dice.up_to(horizon)),
            };
            actions.push((dice.up_to(horizon), action));
        }
        for _ in 0..if is_echoing { 6 } else { 0 } {
            let pause = millis(100) + dice.up_to(millis(300));
            actions.push((
                dice.up_to(horizon),
                Action::Stop(dice.below(processes), pause),
            ));
        }
        actions.push((horizon, Action::Quiet));
        // The sum of: a dead holder's lease, extended by a delayed request; a dead waiter's grant;
        // the longest pause of a clean-up; 2 s; and a turn for each request.
        let extended =
            |arrival: &Arrival| arrival.terms.lease * arrival.extend.map_or(1, |(_, times)| times);
        let longest = arrivals.iter().map(extended).max().unwrap_or_default();
        let bound = longest.max(millis(3000))
            + network.longest
            + millis(3000)
            + millis(5500)
            + millis(2000);
        let turns = super::HOLD_AT_LAST * 2 * arrivals.len() as u32;
        Self {
            processes,
            locks,
            network,
            arrivals,
            actions,
            bound: bound + turns,
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
}

impl Crowd {
    fn arrival(&self, dice: &mut Dice, number: usize) -> Arrival {
        let lease = dice.one_of(&self.leases);
        let mode = match self.kind {
            Kind::Passing | Kind::Strict => Mode::Exclusive,
            Kind::Mixed => dice.one_of(&[Mode::Exclusive, Mode::Shared]),
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
        let cancel_after = dice.chance(300).then(|| {
            let longest = dice.one_of(&[self.horizon, self.horizon / 4, Duration::from_millis(4)]);
            dice.up_to(longest)
        });
        Arrival {
            number,
            // Most requests meet in one process.
            process: dice.below(self.processes).min(dice.below(self.processes)),
            lock: dice.below(self.locks),
            terms,
            hold_for: dice.up_to(longest_hold),
            ending: dice.one_of(&[
                Ending::Release,
                Ending::Release,
                Ending::Forsake,
                Ending::Drop,
            ]),
            cancel_after,
            extend: dice
                .chance(100)
                .then(|| (dice.up_to(lease), 2 + dice.below(2) as u32)),
            // The lock is nearly always held.
            again: (self.is_echoing && terms.wait != Wait::No && cancel_after.is_none())
                .then_some(Duration::from_millis(1)),
        }
    }
}
