//! The rules of the protocol, each switched off in turn: the explorer must find the violation that
//! the rule prevents. It would find the same error in the code.

use super::{Broken, checker::Wrong, world::World};

const SCHEDULES: u64 = 20_000;

/// Explores without the rule until a violation of this kind occurs.
fn is_found(broken: Broken, wrong: Wrong) {
    let found = (0..SCHEDULES).find(|seed| {
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
fn found_client_that_accepts_an_abandoned_request() {
    is_found(Broken::BelievesTheAbandoned, Wrong::TwoHolders);
}

#[test]
fn a_client_that_counts_a_whole_lease_from_the_reply_is_found() {
    is_found(Broken::CountsFromTheReply, Wrong::TwoHolders);
}

#[test]
fn a_client_that_cannot_tell_an_old_push_is_found() {
    is_found(Broken::HidesTheCounter, Wrong::NotHeld);
}

#[test]
fn a_client_that_counts_a_grant_from_its_push_is_found() {
    is_found(Broken::CountsFromThePush, Wrong::TwoHolders);
}

#[test]
fn a_client_that_abandons_a_question_once_is_found() {
    is_found(Broken::AbandonsOnce, Wrong::Orphan);
}

#[test]
fn a_store_whose_renewals_shorten_a_lease_is_found() {
    is_found(Broken::RenewalShortens, Wrong::TwoHolders);
}

#[test]
fn a_store_whose_line_advances_by_a_release_only_is_found() {
    is_found(Broken::OnlyReleaseAdvances, Wrong::Stuck);
}
