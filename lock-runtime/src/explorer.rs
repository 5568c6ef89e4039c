//! Explores the protocol (docs/PROTOCOL.md) with random schedules: processes that crash and pause,
//! waiters that are cancelled, and a network that loses, delays, duplicates and reorders messages.
//!
//! The decisions are made by production code: the [`Line`](crate::gate::Line) with its queue entry
//! and its local hand-off, the [`Lease`](crate::lease::Lease), and the table of the in-memory
//! store. The asynchronous code around them (`acquire/`, `giving_back.rs`, `holding.rs` and
//! `driver/`) is modelled here as messages in virtual time. A change to one of these needs the same
//! change to its model.
//!
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more schedules than by default, and
//! `LOCK_EXPLORER_SEED=17` prints the trace of a single one.

mod checker;
mod clean_up;
pub(crate) mod dice;
mod giving_back;
mod holder;
mod message;
mod planted;
mod process;
mod question;
mod schedule;
mod server;
pub(crate) mod sim;
mod stories;
mod waiter;
mod world;

use std::time::Duration;

use self::{checker::Wrong, world::World};

/// The longest time for which a lock is held after the end of the faults.
const HOLD_AT_LAST: Duration = Duration::from_millis(50);

/// A rule of the protocol that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// PROTOCOL 1: the reply to an abandoned acquire is applied.
    BelievesTheAbandoned,
    /// PROTOCOL 2: a grant is valid for a whole lease from the arrival of its reply.
    CountsFromTheReply,
    /// PROTOCOL 3: an outdated push message is not recognized.
    HidesTheCounter,
    /// PROTOCOL 4: a pushed grant is valid from the arrival of the push message.
    CountsFromThePush,
    /// PROTOCOL 8: an acquire without a reply is abandoned at once but not after its deadline.
    AbandonsOnce,
    /// PROTOCOL 11: a renewal sets the expiry even if this makes it earlier.
    RenewalShortens,
    /// PROTOCOL 15: only a release advances the wait queue.
    OnlyReleaseAdvances,
    /// PROTOCOL 17: the next waiter of a process goes to the end of the store's wait queue.
    InheritsNoPlace,
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Panics with the trace of the first schedule that violates an invariant.
fn explore(seeds: impl Iterator<Item = u64>) {
    for seed in seeds {
        if World::random(seed, None, false).run(None).is_err() {
            show(seed, None, None);
        }
    }
}

fn show(seed: u64, broken: Option<Broken>, only: Option<Wrong>) {
    let mut world = World::random(seed, broken, true);
    let outcome = world.run(only);
    let trace = world.trace();
    match outcome {
        Ok(()) => println!("seed {seed}\n{trace}"),
        Err(violation) => {
            panic!("seed {seed}\n{trace}{violation}\nLOCK_EXPLORER_SEED={seed} reproduces it")
        }
    }
}

/// Runs one half of the schedules, so that two cores can share the work.
fn explore_half(half: u64) {
    match from_environment("LOCK_EXPLORER_SEED") {
        Some(seed) if seed % 2 == half => show(seed, None, None),
        Some(_) => {}
        None => {
            let schedules = from_environment("LOCK_EXPLORER_SCHEDULES").unwrap_or(20_000);
            explore((0..schedules).filter(|seed| seed % 2 == half));
        }
    }
}

#[test]
fn no_schedule_with_an_even_seed_breaks_a_promise() {
    explore_half(0);
}

#[test]
fn no_schedule_with_an_odd_seed_breaks_a_promise() {
    explore_half(1);
}
