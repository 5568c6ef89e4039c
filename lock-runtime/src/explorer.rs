//! Explores the protocol (PROTOCOL.md) by schedules drawn from seeds: processes that crash and stop, waiters that are cancelled, a
//! network that loses, delays, doubles and reorders.
//!
//! What decides is the real thing: the [`Line`](crate::gate::Line) with its place and its baton, the
//! [`Lease`](crate::lease::Lease), and the table of the in-memory store. What acts, the async shell around them, is imitated here by messages
//! in virtual time: `acquire/`, `giving_back.rs`, `holding.rs` and `driver/`. Whoever changes one of those changes its
//! imitation, too.
//!
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more than usual, `LOCK_EXPLORER_SEED=17` shows the trace of one.

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

/// When nothing fails any more, a lock is held for so long at most.
const HOLD_AT_LAST: Duration = Duration::from_millis(50);

/// A rule of the protocol that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// 1: the reply to an abandoned question is believed.
    BelievesTheAbandoned,
    /// 2: a grant counts for a whole lease from when its reply came.
    CountsFromTheReply,
    /// 3: nobody knows how old a push is.
    HidesTheCounter,
    /// 4: a pushed grant counts from when the push came.
    CountsFromThePush,
    /// 8: a question without an answer is abandoned at once, and not again after its deadline.
    AbandonsOnce,
    /// 11: a renewal sets the expiry, also to an earlier instant.
    RenewalShortens,
    /// 15: the line advances by a release only.
    OnlyReleaseAdvances,
    /// 17: who comes forward in a process stands at the end of the store's line.
    InheritsNoPlace,
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Panics with the trace of the first schedule in which something goes wrong.
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
            panic!("seed {seed}\n{trace}{violation}\nLOCK_EXPLORER_SEED={seed} shows it again")
        }
    }
}

/// Two halves, for two cores.
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
