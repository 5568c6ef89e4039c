//! Simulates the clients of a single store.

mod checker;
mod mutations;
mod schedule;
mod search;
mod server;
mod small;
mod stories;
mod world;

use self::world::World;
use super::explore::explore_half;

#[test]
fn no_schedule_with_an_even_seed_breaks_a_promise() {
    explore_half::<World>(0);
}

#[test]
fn no_schedule_with_an_odd_seed_breaks_a_promise() {
    explore_half::<World>(1);
}
