//! Explores Redlock with random schedules: servers that crash, stall, or come back without their
//! data or with old data, clients that crash and pause, clocks that differ, and a network that
//! loses, delays and duplicates messages and is partitioned.
//!
//! All decisions are made by production code: the client's [`Session`](crate::protocol::Session),
//! the store's [`Session`](crate::protocol::quorum::Session), the quarantine with the estimate of a
//! server's clock, and at each server the table of the in-memory store. Only the tasks of
//! `store/quorum/calls.rs` (in `client.rs`) and a connection (in `link.rs`) are modelled here.
//!
//! `LOCK_EXPLORER_OFFSET=100000` looks for violations of the mutations from that seed on.
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more schedules than by default, and
//! `LOCK_EXPLORER_SEED=17` prints the trace of a single one.

mod checker;
mod client;
mod clock;
mod link;
mod message;
mod mutations;
mod schedule;
mod server;
mod sim;
mod world;

use self::{checker::Wrong, world::World};
use super::from_environment;
use crate::protocol::quorum::Mutation;

/// A rule of docs/PROTOCOL.md that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// A rule of the session.
    Session(Mutation),
    /// A lease is not shortened to allow for clock drift.
    NoDrift,
    /// Rule 30: a restarted server votes at once if its data are old enough.
    MarkerOnly,
    /// Rule 30: a server whose data were deleted continues to vote.
    UptimeOnly,
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
