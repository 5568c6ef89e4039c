//! Simulates the clients of a single store.

mod checker;
mod mutations;
mod schedule;
mod search;
mod server;
mod small;
mod stories;
mod world;

use self::{checker::Wrong, world::World};
use super::from_environment;
use crate::protocol::Mutation;

/// Panics with the history of the first schedule that violates an invariant.
fn explore(seeds: impl Iterator<Item = u64>) {
    for seed in seeds {
        if World::random(seed, None, false).run(None).is_err() {
            show(seed, None, None);
        }
    }
}

/// Prints the history of a schedule.
fn show(seed: u64, mutation: Option<Mutation>, only: Option<Wrong>) {
    let mut world = World::random(seed, mutation, true);
    let outcome = world.run(only);
    let history = world.history();
    match outcome {
        Ok(()) => println!("seed {seed}\n{history}"),
        Err(violation) => {
            panic!("seed {seed}\n{history}{violation}\nLOCK_EXPLORER_SEED={seed} reproduces it")
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
