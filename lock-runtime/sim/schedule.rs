//! The events of a run, apart from those of the network: drawn from a seed.

use std::{num::NonZeroU32, time::Duration};

use super::{
    dice::Dice,
    network::Rates,
    process::{Act, Arrival, Ending, Event},
    server::Left,
};
use crate::{
    protocol::WaiterLimits,
    request::spec::{Mode, Terms, Wait},
    store::StoreEvent,
};

/// The stores of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    /// A single one.
    One,
    /// A single one on Redis, with its scripts.
    Scripts,
    /// A single store of records.
    Records,
    /// Servers that decide by majority.
    Majority,
    /// The same on Redis, with its scripts.
    ScriptsOfMajority,
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    /// An event in the process of a client.
    Process(usize, Event),
    /// The client loses everything it had in memory, and restarts.
    Crash(usize),
    /// The client does nothing for this time.
    Stop(usize, Duration),
    Continue(usize),
    /// The clock of a client jumps by this number of microseconds.
    Jump(usize, i64),
    /// A server is down for this time, and comes back with some of its data.
    Restart(usize, Duration, Left),
    Start(usize, Left),
    /// The server loses its data.
    Flush(usize),
    /// A crash of a store of records undoes the last changes that need not survive it.
    Undo,
    Save(usize),
    /// The server executes nothing for this time, and then everything.
    Stall(usize, Duration),
    /// A client and a server cannot reach each other for this time.
    Part(usize, usize, Duration),
    /// There are no more faults.
    Quiet,
}

#[derive(Clone)]
pub(super) struct Schedule {
    /// Whether the single store is one of records.
    pub(super) of_records: bool,
    /// How far from the time of its clock the two times of each reply are at most.
    pub(super) doubt: Duration,
    /// Whether the servers are those of Redis.
    pub(super) of_scripts: bool,
    /// For each server, the speed of its clock in millionths and its lead in microseconds. One
    /// server is a store by itself, several are those of a majority.
    pub(super) servers: Vec<(u32, i64)>,
    pub(super) clients: Vec<(u32, i64)>,
    /// The server lists of two successive clients are shifted by this number.
    pub(super) shift: usize,
    pub(super) locks: usize,
    pub(super) limits: WaiterLimits,
    pub(super) longest_lease: Duration,
    pub(super) rates: Rates,
    pub(super) actions: Vec<(Duration, Action)>,
    /// The time, counted from the end of the faults, within which every waiter must be served.
    pub(super) bound: Duration,
}

/// The longest pause before a request is repeated.
const PAUSE: Duration = Duration::from_millis(2);

/// A request for the first lock, which is held for `hold_for`.
pub(super) fn arrival(process: usize, terms: Terms, hold_for: Duration) -> Arrival {
    Arrival {
        process,
        keys: vec![0],
        terms,
        hold_for,
        ending: Ending::Release,
        cancel_after: None,
        acts: Vec::new(),
        again: 0,
        pause: PAUSE,
        completes: None,
    }
}

impl Schedule {
    /// Requests to a single store on a network without faults.
    pub(super) fn perfect(
        arrivals: impl IntoIterator<Item = (Duration, Arrival)>,
        bound: Duration,
    ) -> Self {
        let arrivals: Vec<_> = arrivals.into_iter().collect();
        let processes = arrivals.iter().map(|(_, arrival)| arrival.process).max();
        let keys = arrivals.iter().flat_map(|(_, arrival)| &arrival.keys).max();
        let arrives = |(when, arrival): (Duration, Arrival)| {
            let process = arrival.process;
            (
                when,
                Action::Process(process, Event::Arrive(Box::new(arrival))),
            )
        };
        Self {
            of_records: false,
            doubt: Duration::ZERO,
            of_scripts: false,
            servers: vec![(0, 0)],
            clients: vec![(0, 0); processes.map_or(0, |last| last + 1)],
            shift: 0,
            locks: keys.map_or(0, |last| last + 1),
            limits: WaiterLimits {
                per_key: usize::MAX,
                in_all: usize::MAX,
            },
            longest_lease: Duration::ZERO,
            rates: Rates::default(),
            actions: arrivals.into_iter().map(arrives).collect(),
            bound,
        }
    }

    pub(super) fn of_one(dice: &mut Dice) -> Self {
        let millis = Duration::from_millis;
        // Short leases on a slow network that often duplicates messages: a message about a token
        // arrives late in the life of the token.
        let is_echoing = dice.chance(150);
        let mut short = dice.one_of(&[100, 300, 300, 1000, 2000, 4000, 8000]);
        let mut times = dice.one_of(&[1, 2, 4]);
        if is_echoing {
            (short, times) = (100, 16);
        }
        let leases = [short, dice.one_of(&[short, short, short, 300, 6000])].map(millis);
        let longest_lease = leases[0].max(leases[1]);
        // Long enough for leases to expire, and short enough for requests to overlap.
        let horizon = (leases[0] * times).clamp(millis(50), millis(6000));
        let mut rates = Rates {
            lost: dice.one_of(&[0, 10, 50, 200]),
            doubled: dice.one_of(&[0, 0, 50, 300]),
            late: dice.one_of(&[0, 20, 100, 400]),
            // Push messages have a connection of their own.
            pushes_late: dice.one_of(&[0, 100, 500]),
            longest: dice.one_of(&[millis(20), leases[0], horizon, millis(3500)]),
            ..Rates::default()
        };
        if is_echoing {
            rates = Rates {
                doubled: 500,
                late: 150,
                pushes_late: 900,
                longest: millis(900),
                ..Rates::default()
            };
        }
        let kind = dice.one_of(&[
            Kind::Passing,
            Kind::Passing,
            Kind::Passing,
            Kind::Strict,
            Kind::Mixed,
            Kind::Readers,
            Kind::Readers,
            Kind::Permits,
        ]);
        let clients = 2 + dice.below(2);
        let are_readers = matches!(kind, Kind::Readers);
        let are_many = dice.chance(150);
        let longest_holds = [millis(4), horizon / 4, horizon / 2, longest_lease * 2];
        let crowd = Crowd {
            kind,
            clients,
            locks: if dice.chance(150) { 2 } else { 1 },
            leases,
            holds: if is_echoing {
                [millis(150); 2]
            } else {
                [millis(4), dice.one_of(&longest_holds)]
            },
            horizon,
            quick_hold: are_many.then(|| dice.one_of(&[Duration::from_micros(500), millis(5)])),
            strict: 50,
            cancelled: if are_readers { 600 } else { 300 },
            extended: 100,
            again: match (are_many, is_echoing) {
                (true, _) => 60,
                (false, true) => 1_000,
                (false, false) => 0,
            },
            repeated: 1000,
            longest_pause: PAUSE / 2,
            are_spread: false,
            are_at_once: false,
        };
        // The push messages to readers are late, so that others are admitted before they arrive.
        if are_readers && !is_echoing {
            (rates.pushes_late, rates.longest) = (900, horizon / 2);
        }
        // A reader inherits an old grant only behind a writer that came after other readers.
        let requests = match kind {
            Kind::Readers => dice.one_of(&[12, 5]),
            _ => dice.one_of(&[3, 5, 7, 10]),
        };
        let mut schedule = crowd.schedule(dice, requests, rates);
        for _ in 0..dice.one_of(&[0, 0, 1, 2, 3]) {
            let process = dice.below(clients);
            let action = match dice.below(if are_many { 18 } else { 9 }) {
                0 | 1 => Action::Crash(process),
                2 | 3 => Action::Stop(process, dice.up_to(horizon.max(millis(4000)))),
                4 => Action::Process(process, Event::FromStore(StoreEvent::Disconnected)),
                5 if dice.chance(500) => {
                    let pause = dice.up_to(longest_lease * 2);
                    schedule.bound += pause;
                    Action::Part(process, 0, pause)
                }
                5 => Action::Stall(0, dice.up_to(horizon)),
                6 => Action::Process(process, Event::DriverDies),
                7 if dice.chance(300) => Action::Process(process, Event::Shutdown),
                7 => Action::Process(process, Event::Revoke(dice.below(crowd.locks))),
                _ => Action::Flush(0),
            };
            schedule.actions.push((dice.up_to(horizon), action));
        }
        for _ in 0..if is_echoing { 6 } else { 0 } {
            let pause = millis(100) + dice.up_to(millis(300));
            let stop = Action::Stop(dice.below(clients), pause);
            schedule.actions.push((dice.up_to(horizon), stop));
        }
        schedule.limits = WaiterLimits {
            per_key: if dice.chance(30) { 2 } else { usize::MAX },
            in_all: if dice.chance(30) { 3 } else { usize::MAX },
        };
        schedule
    }

    /// The same with the scripts of Redis.
    pub(super) fn on_redis(mut self) -> Self {
        self.of_scripts = true;
        self
    }

    /// The same with requests that are repeated more often, and that retain the lock.
    pub(super) fn retaining(mut self, seed: u64) -> Self {
        const AGAIN: usize = 12;
        let millis = [2, 50, 300, 2000][seed as usize % 4];
        for (_, action) in &mut self.actions {
            if let Action::Process(_, Event::Arrive(arrival)) = action {
                arrival.terms.retain = Some(Duration::from_millis(millis));
                if arrival.again < AGAIN {
                    arrival.again = AGAIN;
                    self.bound += Duration::from_millis(100) * AGAIN as u32;
                }
            }
        }
        self.bound += Duration::from_millis(millis);
        self
    }

    pub(super) fn of_records(dice: &mut Dice) -> Self {
        let mut schedule = Self::of_one(dice);
        schedule.of_records = true;
        // A store refuses leases that are short against what it knows of its clock.
        let leases = schedule
            .actions
            .iter()
            .filter_map(|(_, action)| match action {
                Action::Process(_, Event::Arrive(arrival)) => Some(arrival.terms.lease),
                _ => None,
            });
        let shortest = leases.min().unwrap_or_default();
        schedule.doubt = Duration::from_millis(dice.one_of(&[0, 0, 20, 150])).min(shortest / 4);
        for (_, action) in &mut schedule.actions {
            if matches!(action, Action::Flush(_)) {
                *action = Action::Undo;
            }
        }
        let last = schedule.actions.iter().map(|(when, _)| *when).max();
        for _ in 0..dice.one_of(&[0, 1, 3, 10]) {
            let when = dice.up_to(last.unwrap_or_default());
            schedule.actions.push((when, Action::Undo));
        }
        schedule
    }

    pub(super) fn of_majority(dice: &mut Dice) -> Self {
        let millis = Duration::from_millis;
        let short = dice.one_of(&[300, 300, 1000, 2000, 4000]);
        let leases = [short, dice.one_of(&[short, short, short, 1000, 5000])].map(millis);
        let horizon = (leases[0] * dice.one_of(&[1, 2, 2, 4])).clamp(millis(600), millis(6000));
        // Many replies arrive at about the time-out of their requests.
        let is_sluggish = dice.chance(300);
        let late = dice.one_of(&[0, 5, 20, 80]);
        let mut rates = Rates {
            lost: dice.one_of(&[0, 0, 10, 50]),
            doubled: dice.one_of(&[0, 0, 50, 300]),
            late,
            pushes_late: late,
            breaks: dice.one_of(&[0, 0, 5, 30]),
            longest: dice.one_of(&[millis(20), leases[0] / 10, leases[0] / 2, leases[0] * 2]),
            ..Rates::default()
        };
        if is_sluggish {
            (rates.late, rates.pushes_late) = (300, 300);
            rates.longest = leases[0] / dice.one_of(&[4, 7, 10]);
        }
        // Some servers take longer to reply than the shortest time-out of their requests.
        if (late, rates.lost, is_sluggish) == (0, 0, false) && rates.longest == millis(20) {
            rates.shortest = leases[0].min(leases[1]) / 36;
        }
        let count = dice.one_of(&[3, 3, 3, 5]);
        let is_mixed = dice.chance(200);
        // The lock is handed off from one client to the next, most of the time.
        let is_hot = dice.chance(400);
        // The servers grant the lock to several clients in turn, none of which reaches them all.
        let is_torn = is_hot && dice.chance(200);
        let count = if is_torn { 5 } else { count };
        let clients = if is_hot {
            3 + dice.below(3)
        } else {
            2 + dice.below(3)
        };
        // Push messages, or releases, arrive long after the hand-off.
        if is_hot && dice.chance(300) {
            (rates.pushes_late, rates.longest) = (200, leases[0] * 2);
        } else if is_hot && dice.chance(300) {
            (rates.late, rates.longest) = (50, leases[0]);
        }
        let longest_holds = [millis(20), leases[0] / 2, leases[0] * 2];
        let crowd = Crowd {
            kind: if is_mixed { Kind::Mixed } else { Kind::Passing },
            clients,
            locks: if !is_hot && dice.chance(80) { 2 } else { 1 },
            leases,
            holds: [millis(4), dice.one_of(&longest_holds)],
            horizon,
            quick_hold: is_hot.then(|| leases[0] / dice.one_of(&[8, 30, 100])),
            // A lock that is handed off in a process asks the servers less often.
            strict: 700,
            cancelled: if is_hot { 40 } else { 150 },
            extended: 20,
            again: if is_hot { 1_000 } else { 2 },
            repeated: if is_hot { 1000 } else { 700 },
            longest_pause: if is_hot { millis(1) } else { horizon / 4 },
            are_spread: true,
            are_at_once: is_hot,
        };
        let requests = clients * if is_hot { 1 } else { dice.one_of(&[1, 1, 2]) };
        // A number that the servers limit takes a round trip more, for which there is no time then.
        let farthest = millis(if rates.shortest.is_zero() {
            300_000
        } else {
            30_000
        });
        let mut schedule = crowd.schedule(dice, requests, rates);
        let longest_lease = schedule.longest_lease;
        // A number that servers have forgotten must be smaller than any clock when they vote again.
        let forgets = dice.chance(500);
        let (of_servers, apart) = if forgets {
            (longest_lease / 4, longest_lease / 4)
        } else {
            (millis(5000), farthest)
        };
        for _ in 0..dice.one_of(&[0, 1, 2, 3, 5]) {
            let (server, client) = (dice.below(count), dice.below(clients));
            let pause = dice.up_to(horizon);
            let action = match dice.below(if forgets { 12 } else { 9 }) {
                0 => Action::Crash(client),
                1 | 2 => Action::Stop(client, pause),
                3 | 4 => Action::Stall(server, pause),
                5 | 6 => Action::Part(client, server, pause),
                7 if !forgets => Action::Jump(client, ahead(dice, apart)),
                7 | 8 => Action::Restart(server, pause / 4, Left::All),
                9 => Action::Flush(server),
                _ => {
                    let left = dice.one_of(&[Left::All, Left::Saved, Left::Nothing]);
                    Action::Restart(server, pause / 8, left)
                }
            };
            schedule.actions.push((dice.up_to(horizon), action));
        }
        for _ in 0..if is_hot && forgets { 3 } else { 0 } {
            let flush = Action::Flush(dice.below(count));
            schedule.actions.push((dice.up_to(horizon), flush));
        }
        for _ in 0..if is_hot { 3 } else { 0 } {
            let stop = Action::Stop(dice.below(clients), dice.up_to(leases[0] * 2));
            schedule.actions.push((dice.up_to(horizon), stop));
        }
        for _ in 0..if forgets { 2 } else { 0 } {
            let save = Action::Save(dice.below(count));
            schedule.actions.push((dice.up_to(horizon), save));
        }
        for _ in 0..if is_torn { 12 } else { 0 } {
            let (client, server) = (dice.below(clients), dice.below(count));
            let part = Action::Part(client, server, dice.up_to(leases[0] * 3));
            schedule.actions.push((dice.up_to(horizon), part));
        }
        // All servers are restarted, one after the other.
        if forgets && dice.chance(400) {
            let when = dice.up_to(horizon);
            let pause = leases[0] / dice.one_of(&[4, 16, 64]);
            let left = dice.one_of(&[Left::All, Left::Saved, Left::Saved, Left::Nothing]);
            for server in 0..count {
                let at = when + pause * server as u32;
                let restart = Action::Restart(server, pause / 4, left);
                schedule.actions.push((at, restart));
            }
        }
        // A client reaches only a minority of the servers for longer than a lease.
        if dice.chance(200) {
            let (when, client) = (dice.up_to(horizon), dice.below(clients));
            let first = dice.below(count);
            for server in (first..=first + count / 2).map(|server| server % count) {
                let part = Action::Part(client, server, leases[0] * 2);
                schedule.actions.push((when, part));
            }
        }
        let of_clients = if dice.chance(500) { millis(2) } else { apart };
        let mut clocks = |count: usize, apart| -> Vec<_> {
            let fast = [0, 0, 1_000, 5_000, 10_000];
            let clock = |_| (dice.one_of(&fast), ahead(dice, apart));
            (0..count).map(clock).collect()
        };
        schedule.servers = clocks(count, of_servers);
        schedule.clients = clocks(clients, of_clients);
        if of_clients > millis(60_000) {
            // No server takes a number from a clock that is a minute ahead of its own, so that a
            // request needs a third round trip within its time-out.
            schedule.rates.shortest = schedule.rates.shortest * 2 / 3;
        }
        schedule.shift = usize::from(dice.chance(80));
        // The quarantine, and the duration of calls to several servers.
        schedule.bound += longest_lease + millis(4000);
        schedule
    }
}

fn ahead(dice: &mut Dice, most: Duration) -> i64 {
    let ahead = dice.up_to(most).as_micros() as i64;
    if dice.chance(500) { -ahead } else { ahead }
}

/// The way in which a schedule holds its locks.
#[derive(Clone, Copy)]
enum Kind {
    Passing,
    Strict,
    Mixed,
    /// Mostly readers, most of which are cancelled.
    Readers,
    Permits,
}

/// The requests of a schedule. Probabilities are in thousandths.
struct Crowd {
    kind: Kind,
    clients: usize,
    locks: usize,
    leases: [Duration; 2],
    holds: [Duration; 2],
    horizon: Duration,
    /// The longest hold of requests that are repeated so often that the limits of local hand-offs
    /// are reached.
    quick_hold: Option<Duration>,
    strict: usize,
    cancelled: usize,
    extended: usize,
    /// The number of repetitions, and the requests that are repeated.
    again: usize,
    repeated: usize,
    longest_pause: Duration,
    /// The requests are distributed over all clients. Otherwise, most of them meet in one.
    are_spread: bool,
    /// The requests arrive at about the same time.
    are_at_once: bool,
}

impl Crowd {
    /// Draws this number of requests, alone or all at once, to a single store without faults.
    fn schedule(&self, dice: &mut Dice, requests: usize, rates: Rates) -> Schedule {
        let millis = Duration::from_millis;
        let arrival = |number| self.arrival(dice, number);
        let arrivals: Vec<_> = (0..requests).map(arrival).collect();
        let extended = |arrival: &Arrival| {
            let times = arrival.acts.iter().map(|(_, act)| match act {
                Act::Extend(times) => *times,
                _ => 1,
            });
            arrival.terms.lease * times.max().unwrap_or(1)
        };
        let longest_lease = arrivals.iter().map(extended).max().unwrap_or_default();
        let turns: usize = match self.are_at_once {
            // They are not repeated any more then.
            true => arrivals.len(),
            false => arrivals.iter().map(|arrival| arrival.again + 1).sum(),
        };
        let rush = dice.up_to(self.horizon / if self.are_at_once { 8 } else { 1 });
        let are_apart = matches!(self.kind, Kind::Readers);
        let arrivals = arrivals.into_iter().map(|arrival| {
            let when = if are_apart || !self.are_at_once && dice.chance(400) {
                dice.up_to(self.horizon)
            } else {
                rush + dice.up_to(millis(5))
            };
            (when.min(self.horizon), arrival)
        });
        // The sum of: a dead holder's lease, extended by a delayed request; a dead waiter's grant;
        // the longest pause of an abandonment; 2 s; and a turn for each request.
        let bound = longest_lease.max(millis(3000))
            + rates.longest
            + millis(3000)
            + millis(5500)
            + millis(2000)
            + (millis(100) + rates.shortest * 8) * turns as u32;
        let mut schedule = Schedule {
            clients: vec![(0, 0); self.clients],
            locks: self.locks,
            longest_lease: longest_lease.max(self.leases[0]).max(self.leases[1]),
            rates,
            ..Schedule::perfect(arrivals, bound)
        };
        schedule.actions.push((self.horizon, Action::Quiet));
        schedule
    }

    fn arrival(&self, dice: &mut Dice, number: usize) -> Arrival {
        let millis = Duration::from_millis;
        let lease = dice.one_of(&self.leases);
        let (writer, reader) = (Mode::Exclusive, Mode::Shared);
        let mode = match self.kind {
            Kind::Passing | Kind::Strict => writer,
            Kind::Mixed => dice.one_of(&[writer, reader]),
            Kind::Readers => dice.one_of(&[writer, reader, reader, reader]),
            // Two versions of a program, with different numbers.
            Kind::Permits => {
                let number = NonZeroU32::new(dice.one_of(&[2, 3]));
                number.map_or(writer, Mode::Permits)
            }
        };
        let wait = if self.are_at_once {
            Wait::AtMost(self.horizon * 2)
        } else if dice.chance(100) {
            Wait::No
        } else {
            Wait::AtMost(self.horizon / 8 + dice.up_to(self.horizon * 2))
        };
        let mut terms = Terms::plain(mode, lease, wait);
        terms.strict_order = matches!(self.kind, Kind::Strict) || dice.chance(self.strict);
        terms.renew = !dice.chance(90);
        terms.min_hold = dice.chance(30).then(|| dice.up_to(lease));
        // A `max_hold` shorter than a round trip can never be met.
        let max_hold = terms.min_hold.unwrap_or_default() + millis(10) + dice.up_to(lease * 2);
        terms.max_hold = dice.chance(50).then_some(max_hold);
        let longest_hold = dice.one_of(&self.holds);
        let cancel_after = dice.chance(self.cancelled).then(|| {
            let longest = dice.one_of(&[self.horizon, self.horizon / 4, millis(4)]);
            dice.up_to(longest)
        });
        let mut keys = vec![dice.below(self.locks)];
        if self.locks > 1 && wait == Wait::No && !matches!(self.kind, Kind::Permits) {
            keys = vec![0, 1];
        }
        let extend = dice
            .chance(self.extended)
            .then(|| (dice.up_to(lease), Act::Extend(2 + dice.below(2) as u32)));
        let is_writer = mode == Mode::Exclusive && matches!(self.kind, Kind::Mixed | Kind::Readers);
        // The longest sequences are those of waiters that stay.
        let may_repeat = self.again <= 60 || (wait != Wait::No && cancel_after.is_none());
        let process = if self.are_spread {
            number % self.clients
        } else {
            dice.below(self.clients).min(dice.below(self.clients))
        };
        let hold_for = match (self.quick_hold, extend) {
            (Some(longest), _) => dice.up_to(longest),
            (None, Some(_)) => dice.up_to(lease * 3),
            (None, None) => dice.up_to(longest_hold),
        };
        Arrival {
            process,
            keys,
            terms,
            hold_for,
            ending: match dice.below(4) {
                0 => Ending::Drop,
                1 if dice.chance(100) => Ending::NeglectRelease,
                1 => Ending::DropRelease(dice.up_to(millis(2))),
                _ => Ending::Release,
            },
            cancel_after,
            acts: {
                let convert = (is_writer && dice.chance(300)).then(|| {
                    let (when, is_dropped) = (dice.up_to(longest_hold), dice.chance(300));
                    (when, Act::Convert { is_dropped })
                });
                let reenters = dice.chance(50);
                let reenter = reenters.then(|| (dice.up_to(longest_hold), Act::Reenter));
                [extend, convert, reenter].into_iter().flatten().collect()
            },
            again: self.again * usize::from(may_repeat && dice.chance(self.repeated)),
            pause: Duration::from_millis(1) + dice.up_to(self.longest_pause),
            // Without a throw, so that the schedules stay what they are.
            completes: (hold_for.as_micros() % 8 == 0 && terms.min_hold.is_none())
                .then_some(lease / 2),
        }
    }
}
