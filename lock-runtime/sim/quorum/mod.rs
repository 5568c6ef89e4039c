//! Explores Redlock with random schedules: servers that crash, stall, or come back without their
//! data or with old data, clients that crash and pause, clocks that differ, and a network that
//! loses, delays and duplicates messages and is partitioned.
//!
//! All decisions are made by production code: the client's [`Session`](crate::protocol::Session),
//! the store's [`Session`](crate::protocol::quorum::Session), the quarantine with the estimate of a
//! server's clock, and at each server the table of the in-memory store. Only the tasks of
//! `store/quorum/calls.rs` (in `client.rs`) and a connection (in `link.rs`) are modelled here.
//!
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

use self::world::World;
use super::explore::explore_half;
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

#[test]
fn no_schedule_of_redlock_with_an_even_seed_breaks_a_promise() {
    explore_half::<World>(0);
}

#[test]
fn no_schedule_of_redlock_with_an_odd_seed_breaks_a_promise() {
    explore_half::<World>(1);
}
