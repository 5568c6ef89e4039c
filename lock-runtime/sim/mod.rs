//! Simulators of the protocol (docs/PROTOCOL.md) in virtual time: clients that crash and pause,
//! requests that are cancelled, and a network that loses, delays, duplicates and reorders messages.
//! The clients are those of a single store, of a store of records whose crashes undo the changes
//! that need not survive them, or of a majority of servers, which crash, stall, or come
//! back without their data or with old data, with clocks that differ, and behind a network that is
//! partitioned.
//!
//! All decisions are those of production code: the [`Session`](crate::protocol::Session) of each
//! process, the [`MajoritySession`](crate::protocol::majority::MajoritySession), the quarantine
//! with the estimate of a server's clock, and at each server the table of the in-memory store, or
//! the scripts of Redis (`scripts.rs`). The simulators perform effects and check invariants; they
//! decide nothing. Only the tasks of `store/quorum/calls.rs` (in `client.rs`) and a connection (in
//! `link.rs`) are modelled here.
//!
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more schedules than by default, with
//! `LOCK_EXPLORER_FIRST=5000000` those after them, and `LOCK_EXPLORER_SEED=17` prints the history
//! of a single one. `LOCK_EXPLORER_STARTS=5` counts the schedules after which a rule that is
//! switched off is found, from five starts. `LOCK_EXPLORER_DEPTH=3` makes three more choices of
//! the small scopes in every way.

mod checker;
mod client;
mod clock;
mod dice;
mod edits;
mod explore;
mod link;
mod message;
mod mutations;
mod network;
mod process;
mod records;
mod schedule;
mod search;
mod server;
mod shared_clock;
mod shell;
mod small;
mod stories;
mod world;

pub(crate) use self::process::Message;
use self::{explore::explore_half, schedule::Stores};
use crate::protocol::{self, majority};

/// A rule of docs/PROTOCOL.md that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// A rule of the clients of a single store, or of the store.
    Client(protocol::Mutation),
    /// A store of records makes no change durable.
    NothingDurable,
    /// A store of records makes no hand-off durable.
    UndoesHandOffs,
    /// The lower bound of the time of a store of records is taken for its time.
    KnowsTheTime,
    /// A rule of the scripts of Redis: this text is replaced by the other one.
    Script(&'static str, &'static str),
    /// The same on the servers of a majority.
    ScriptOfMajority(&'static str, &'static str),
    /// A rule of the session of a majority.
    Majority(majority::MajorityMutation),
    /// A lease is not shortened to allow for clock drift.
    NoDrift,
    /// Rule 30: a restarted server votes at once if its data are old enough.
    MarkerOnly,
    /// Rule 30: a server whose data were deleted continues to vote.
    UptimeOnly,
}

impl Broken {
    /// The stores to which the rule applies.
    fn stores(self) -> Stores {
        match self {
            Self::Client(_) => Stores::One,
            Self::Script(..) => Stores::Scripts,
            Self::ScriptOfMajority(..) => Stores::ScriptsOfMajority,
            Self::NothingDurable | Self::UndoesHandOffs | Self::KnowsTheTime => Stores::Records,
            _ => Stores::Majority,
        }
    }
}

#[test]
fn no_schedule_of_a_single_store_with_an_even_seed_breaks_a_promise() {
    explore_half(Stores::One, 0);
}

#[test]
fn no_schedule_of_a_single_store_with_an_odd_seed_breaks_a_promise() {
    explore_half(Stores::One, 1);
}

#[test]
fn no_schedule_of_scripts_with_an_even_seed_breaks_a_promise() {
    explore_half(Stores::Scripts, 0);
}

#[test]
fn no_schedule_of_scripts_with_an_odd_seed_breaks_a_promise() {
    explore_half(Stores::Scripts, 1);
}

#[test]
fn no_schedule_of_records_with_an_even_seed_breaks_a_promise() {
    explore_half(Stores::Records, 0);
}

#[test]
fn no_schedule_of_records_with_an_odd_seed_breaks_a_promise() {
    explore_half(Stores::Records, 1);
}

#[test]
fn no_schedule_of_scripts_of_a_majority_with_an_even_seed_breaks_a_promise() {
    explore_half(Stores::ScriptsOfMajority, 0);
}

#[test]
fn no_schedule_of_scripts_of_a_majority_with_an_odd_seed_breaks_a_promise() {
    explore_half(Stores::ScriptsOfMajority, 1);
}

#[test]
fn no_schedule_of_a_majority_with_an_even_seed_breaks_a_promise() {
    explore_half(Stores::Majority, 0);
}

#[test]
fn no_schedule_of_a_majority_with_an_odd_seed_breaks_a_promise() {
    explore_half(Stores::Majority, 1);
}
