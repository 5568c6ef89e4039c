//! Explores Redlock by schedules drawn from seeds: servers that crash, come back without their data or with old ones, or do
//! nothing for a while; clients that crash and stop; clocks that do not agree; a network that loses, delays, doubles, parts.
//!
//! What decides is the real thing: [`Campaign`](super::campaign::Campaign), the tallies, [`Node`](super::node::Node) with its rests,
//! the proposals, the line in a process, the [`Lease`](crate::lease::Lease), the quarantine with the estimate of a server's clock, and at
//! each server the table of the in-memory store. What acts is imitated here by messages in virtual time: `quorum.rs` in `leading.rs`
//! and `asking.rs`, `background.rs` in `giving_up.rs`, a connection in `link.rs`, the runtime in `user.rs` and `holder.rs`. Whoever
//! changes one of those changes its imitation, too.
//!
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more than usual, `LOCK_EXPLORER_SEED=17` shows the trace of one.

mod asking;
mod checker;
mod client;
mod clock;
mod giving_up;
mod holder;
mod leading;
mod link;
mod message;
mod planted;
mod schedule;
mod server;
mod sim;
mod stories;
mod user;
mod world;

use std::time::Duration;

use self::{checker::Wrong, world::World};
use super::campaign;

/// When nothing fails any more, a lock is held for so long at most.
const HOLD_AT_LAST: Duration = Duration::from_millis(50);

/// A rule of the protocol that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// One of those of a campaign.
    Campaign(campaign::Broken),
    /// Nothing is taken off a lease for clocks that do not run alike.
    NoDrift,
    /// Half of the servers is enough for a renewal.
    RenewsByHalf,
    /// 29: what was renewed in earlier rounds counts as well.
    AddsUpRenewals,
    /// 30: a server that was restarted votes at once if its data are old enough.
    MarkerOnly,
    /// 30: a server whose data were deleted votes on.
    UptimeOnly,
    /// 8: a name is given up once, whatever may still be under way for it.
    AbandonsOnce,
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
fn no_schedule_of_redlock_with_an_even_seed_breaks_a_promise() {
    explore_half(0);
}

#[test]
fn no_schedule_of_redlock_with_an_odd_seed_breaks_a_promise() {
    explore_half(1);
}
