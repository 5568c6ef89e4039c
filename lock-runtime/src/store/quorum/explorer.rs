//! Explores Redlock with random schedules: servers that crash, stall, or come back without their
//! data or with old data, clients that crash and pause, clocks that differ, and a network that
//! loses, delays and duplicates messages and is partitioned.
//!
//! All decisions of the store are made by production code: the client's
//! [`Session`](crate::protocol::quorum::Session), the quarantine with the estimate of a server's
//! clock, and at each server the table of the in-memory store. So are the wait queue in a process
//! and the [`Lease`](crate::lease::Lease). The code around them is modelled here as messages in
//! virtual time: the tasks of `calls.rs` in `client.rs`, a connection in `link.rs`, and the runtime
//! in `user.rs`, `attempt.rs` and `holder.rs`. A change to one of these needs the same change to
//! its model.
//!
//! `LOCK_EXPLORER_OFFSET=100000` looks for violations of the planted mutations from that seed on.
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more schedules than by default, and
//! `LOCK_EXPLORER_SEED=17` prints the trace of a single one.

mod attempt;
mod checker;
mod client;
mod clock;
mod holder;
mod link;
mod message;
mod planted;
mod schedule;
mod server;
mod sim;
mod user;
mod world;

use std::time::Duration;

use self::{checker::Wrong, world::World};
use crate::protocol::quorum::Mutation;

/// The longest time for which a lock is held after the end of the faults.
const HOLD_AT_LAST: Duration = Duration::from_millis(50);

/// A rule of the protocol that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// A rule of the session.
    Session(Mutation),
    /// A lease is not shortened to allow for clock drift.
    NoDrift,
    /// PROTOCOL 30: a restarted server votes at once if its data are old enough.
    MarkerOnly,
    /// PROTOCOL 30: a server whose data were deleted continues to vote.
    UptimeOnly,
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
fn no_schedule_of_redlock_with_an_even_seed_breaks_a_promise() {
    explore_half(0);
}

#[test]
fn no_schedule_of_redlock_with_an_odd_seed_breaks_a_promise() {
    explore_half(1);
}
