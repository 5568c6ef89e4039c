//! The events of a run, apart from those of the network: drawn from a seed.

use std::time::Duration;

use super::server::Left;
use crate::{
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
    /// Messages after which the connection ends. The client notices its end after a delay.
    pub(super) breaks: usize,
    pub(super) longest: Duration,
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    Arrive(Box<Arrival>),
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
    Flush(usize),
    Save(usize),
    /// The server executes nothing for this time.
    Stall(usize, Duration),
    /// A client and a server cannot reach each other for this time.
    Part(usize, usize, Duration),
    /// There are no more faults.
    Quiet,
}

pub(super) struct Schedule {
    /// For each server, the speed of its clock in millionths and its lead in microseconds.
    pub(super) servers: Vec<(u32, i64)>,
    pub(super) clients: Vec<(u32, i64)>,
    pub(super) locks: usize,
    pub(super) longest_lease: Duration,
    pub(super) network: Network,
    pub(super) actions: Vec<(Duration, Action)>,
    /// The time, counted from the end of the faults, within which every request must be served.
    pub(super) bound: Duration,
}

impl Schedule {
    pub(super) fn random(dice: &mut Dice) -> Self {
        let millis = Duration::from_millis;
        let short = dice.one_of(&[300, 300, 1000, 2000, 4000]);
        let leases = [
            millis(short),
            millis(dice.one_of(&[short, short, short, 1000, 5000])),
        ];
        let longest_lease = leases[0].max(leases[1]);
        let horizon = (leases[0] * dice.one_of(&[1, 2, 2, 4])).clamp(millis(600), millis(6000));
        // Many replies arrive at about the time-out of their requests.
        let is_sluggish = dice.chance(300);
        let mut network = Network {
            lost: dice.one_of(&[0, 0, 10, 50]),
            doubled: dice.one_of(&[0, 0, 50, 300]),
            late: dice.one_of(&[0, 5, 20, 80]),
            breaks: dice.one_of(&[0, 0, 5, 30]),
            longest: dice.one_of(&[millis(20), leases[0] / 10, leases[0] / 2, leases[0] * 2]),
        };
        if is_sluggish {
            network = Network {
                late: 300,
                longest: leases[0] / dice.one_of(&[4, 7, 10]),
                ..network
            };
        }
        let count = dice.one_of(&[3, 3, 3, 5]);
        let clients = 2 + dice.below(3);
        let locks = if dice.chance(80) { 2 } else { 1 };
        let mixed = dice.chance(250);
        let holds = [
            millis(4),
            dice.one_of(&[millis(20), leases[0] / 2, leases[0] * 2]),
        ];
        let arrival = |dice: &mut Dice, number: usize| {
            let mode = if mixed {
                dice.one_of(&[Mode::Exclusive, Mode::Shared])
            } else {
                Mode::Exclusive
            };
            let wait = if dice.chance(150) {
                Wait::No
            } else {
                Wait::AtMost(horizon / 8 + dice.up_to(horizon * 2))
            };
            let terms = Terms {
                renew: !dice.chance(100),
                // A lock that is handed off in a process asks the servers less often.
                strict_order: dice.chance(700),
                ..terms(mode, dice.one_of(&leases), wait)
            };
            let longest_hold = dice.one_of(&holds);
            let mut keys = vec![dice.below(locks)];
            if locks > 1 && wait == Wait::No {
                keys = vec![0, 1];
            }
            let is_repeated = dice.chance(700);
            Arrival {
                process: number % clients,
                keys,
                terms,
                hold_for: dice.up_to(longest_hold),
                ending: match dice.below(4) {
                    0 => Ending::Drop,
                    1 => Ending::DropRelease(dice.up_to(millis(2))),
                    _ => Ending::Release,
                },
                cancel_after: dice.chance(150).then(|| dice.up_to(horizon / 4)),
                extend: None,
                convert: (mixed && mode == Mode::Exclusive && dice.chance(200))
                    .then(|| (dice.up_to(longest_hold), dice.chance(300))),
                reenter: None,
                again: if is_repeated { 2 } else { 0 },
                pause: millis(1) + dice.up_to(horizon / 4),
            }
        };
        let requests = clients * dice.one_of(&[1, 1, 2]);
        let arrivals: Vec<_> = (0..requests).map(|number| arrival(dice, number)).collect();
        // Alone, or all at once.
        let rush = dice.up_to(horizon / 2);
        let mut actions: Vec<_> = arrivals
            .iter()
            .map(|arrival| {
                let when = if dice.chance(400) {
                    dice.up_to(horizon)
                } else {
                    rush + dice.up_to(millis(5))
                };
                (when.min(horizon), Action::Arrive(Box::new(arrival.clone())))
            })
            .collect();
        // A number that servers have forgotten must be smaller than any clock when they vote again.
        let forgets = dice.chance(500);
        let (apart, jumps) = if forgets {
            (longest_lease / 4, false)
        } else {
            (millis(300_000), true)
        };
        for _ in 0..dice.one_of(&[0, 1, 2, 3, 5]) {
            let (when, server, client) =
                (dice.up_to(horizon), dice.below(count), dice.below(clients));
            let pause = dice.up_to(horizon);
            let left = |dice: &mut Dice| dice.one_of(&[Left::All, Left::Saved, Left::Nothing]);
            actions.push((
                when,
                match dice.below(if forgets { 12 } else { 9 }) {
                    0 => Action::Crash(client),
                    1 | 2 => Action::Stop(client, pause),
                    3 | 4 => Action::Stall(server, pause),
                    5 | 6 => Action::Part(client, server, pause),
                    7 if jumps => Action::Jump(client, ahead(dice, apart)),
                    7 | 8 => Action::Restart(server, pause / 4, Left::All),
                    9 => Action::Flush(server),
                    _ => Action::Restart(server, pause / 8, left(dice)),
                },
            ));
        }
        for _ in 0..if forgets { 2 } else { 0 } {
            actions.push((dice.up_to(horizon), Action::Save(dice.below(count))));
        }
        // All servers are restarted, one after the other.
        if forgets && dice.chance(400) {
            let (when, pause) = (
                dice.up_to(horizon),
                leases[0] / dice.one_of(&[4, 16, 64]) as u32,
            );
            let left = dice.one_of(&[Left::All, Left::Saved, Left::Saved, Left::Nothing]);
            for server in 0..count {
                actions.push((
                    when + pause * server as u32,
                    Action::Restart(server, pause / 4, left),
                ));
            }
        }
        // A client reaches only a minority of the servers for longer than a lease.
        if dice.chance(200) {
            let (when, client) = (dice.up_to(horizon), dice.below(clients));
            let first = dice.below(count);
            for server in (first..=first + count / 2).map(|server| server % count) {
                actions.push((when, Action::Part(client, server, leases[0] * 2)));
            }
        }
        let fast = |dice: &mut Dice| dice.one_of(&[0, 0, 1_000, 5_000, 10_000]);
        let of_servers = if forgets {
            longest_lease / 4
        } else {
            millis(5000)
        };
        let servers = (0..count)
            .map(|_| (fast(dice), ahead(dice, of_servers)))
            .collect();
        let of_clients = if dice.chance(500) { millis(2) } else { apart };
        let clients = (0..clients)
            .map(|_| (fast(dice), ahead(dice, of_clients)))
            .collect();
        actions.push((horizon, Action::Quiet));
        // The sum of: the quarantine and a dead holder's lease; a dead waiter's grant; the longest
        // delay of the network; the longest pause of a retry; and a turn.
        let bound = longest_lease * 2
            + millis(1000)
            + millis(3000)
            + network.longest
            + millis(5500)
            + millis(5000);
        Self {
            servers,
            clients,
            locks,
            longest_lease,
            network,
            actions,
            bound,
        }
    }
}

fn ahead(dice: &mut Dice, most: Duration) -> i64 {
    let ahead = dice.up_to(most).as_micros() as i64;
    if dice.chance(500) { -ahead } else { ahead }
}
