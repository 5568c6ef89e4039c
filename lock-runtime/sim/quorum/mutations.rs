//! The rules of the protocol, each switched off in turn: the simulator must find the violation that
//! the rule prevents. It would find the same error in the code.

use super::{Broken, checker::Wrong, world::World};
use crate::protocol::quorum::Mutation;

const SCHEDULES: u64 = 20_000;

/// Explores without the rule until a violation of this kind occurs.
fn is_found(broken: Broken, wrong: Wrong) {
    let first = crate::sim::from_environment("LOCK_EXPLORER_OFFSET").unwrap_or(0);
    let found = (first..first + SCHEDULES).find(|seed| {
        World::random(*seed, Some(broken), false)
            .run(Some(wrong))
            .is_err()
    });
    let Some(seed) = found else {
        panic!("{broken:?}: nothing found in {SCHEDULES} schedules")
    };
    // Shown with `--nocapture`.
    let mut world = World::random(seed, Some(broken), true);
    let violation = world
        .run(Some(wrong))
        .err()
        .map_or_else(String::new, |violation| violation.to_string());
    println!(
        "{broken:?} with seed {seed}: {violation}\n{}",
        world.trace()
    );
}

#[test]
fn a_client_that_writes_no_number_back_is_found() {
    is_found(Broken::Session(Mutation::NoWriteBack), Wrong::Fence);
}

#[test]
fn a_reader_that_counts_a_number_which_others_may_have_is_found() {
    is_found(
        Broken::Session(Mutation::CountsWhatOthersHave),
        Wrong::Fence,
    );
}

#[test]
fn a_client_that_is_content_with_half_of_the_servers_is_found() {
    is_found(
        Broken::Session(Mutation::MajorityOffByOne),
        Wrong::TwoHolders,
    );
}

#[test]
fn found_client_content_with_half_of_the_renewals() {
    is_found(Broken::Session(Mutation::RenewsByHalf), Wrong::TwoHolders);
}

#[test]
fn a_client_that_adds_up_the_votes_of_several_rounds_is_found() {
    is_found(
        Broken::Session(Mutation::AddsUpExchanges),
        Wrong::TwoHolders,
    );
}

#[test]
fn found_client_that_sums_renewals_of_several_rounds() {
    is_found(Broken::Session(Mutation::AddsUpRenewals), Wrong::TwoHolders);
}

#[test]
fn a_client_that_leaves_no_room_for_drift_is_found() {
    is_found(Broken::NoDrift, Wrong::TwoHolders);
}

#[test]
fn a_quarantine_by_the_marker_alone_is_found() {
    is_found(Broken::MarkerOnly, Wrong::TwoHolders);
}

#[test]
fn a_quarantine_by_the_uptime_alone_is_found() {
    is_found(Broken::UptimeOnly, Wrong::TwoHolders);
}

#[test]
fn found_client_that_accepts_an_abandoned_acquire() {
    is_found(
        Broken::Session(Mutation::BelievesTheAbandoned),
        Wrong::TwoHolders,
    );
}

#[test]
fn a_client_that_gives_up_a_name_once_is_found() {
    is_found(Broken::Session(Mutation::AbandonsOnce), Wrong::Orphan);
}
