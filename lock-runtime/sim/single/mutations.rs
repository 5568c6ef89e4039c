//! The rules of the protocol, each switched off in turn: the simulator must find the violation that
//! the rule prevents.

use super::{checker::Wrong, world::World};
use crate::{protocol::Mutation, sim::from_environment};

const SCHEDULES: u64 = 20_000;

/// Explores without the rule until a violation of this kind occurs. Returns its seed.
fn first(mutation: Mutation, wrong: Wrong, offset: u64) -> Option<u64> {
    (offset..offset + SCHEDULES).find(|seed| {
        World::random(*seed, Some(mutation), false)
            .run(Some(wrong))
            .is_err()
    })
}

fn is_found(mutation: Mutation, wrong: Wrong) {
    let Some(seed) = first(mutation, wrong, 0) else {
        panic!("{mutation:?}: nothing found in {SCHEDULES} schedules")
    };
    // Shown with `--nocapture`.
    let mut world = World::random(seed, Some(mutation), true);
    let violation = world.run(Some(wrong)).err();
    let violation = violation.map_or_else(String::new, |violation| violation.to_string());
    println!(
        "{mutation:?} with seed {seed}: {violation}\n{}",
        world.history()
    );
    // The number of schedules that it takes, from several starts.
    if let Some(starts) = from_environment("LOCK_EXPLORER_STARTS") {
        let mut counts: Vec<_> = (0..starts)
            .filter_map(|start| {
                let offset = start * 1_000_000;
                first(mutation, wrong, offset).map(|seed| seed - offset + 1)
            })
            .collect();
        counts.sort_unstable();
        println!(
            "{mutation:?}: found from {} of {starts} starts, median after {:?} schedules",
            counts.len(),
            counts.get(counts.len() / 2)
        );
    }
}

macro_rules! found {
    ($($name:ident: $mutation:ident => $wrong:ident,)*) => {
        $(
            #[test]
            fn $name() {
                is_found(Mutation::$mutation, Wrong::$wrong);
            }
        )*
    };
}

found! {
    found_client_that_accepts_an_abandoned_request: AcceptsAbandoned => NotHeld,
    found_client_that_counts_a_lease_from_the_reply: CountsFromReply => TwoHolders,
    found_client_that_ignores_the_counter: IgnoresCounter => NotHeld,
    found_client_that_counts_a_grant_from_its_push: CountsFromPush => TwoHolders,
    found_client_that_confirms_no_grant: ConfirmsNothing => TooShort,
    found_client_that_abandons_a_request_once: AbandonsOnce => Orphan,
    found_store_whose_renewals_shorten_a_lease: RenewalShortens => TwoHolders,
    found_store_whose_queue_advances_by_a_release_only: OnlyReleaseAdvances => Stuck,
    found_reader_that_takes_an_old_grant: ReaderTakesOldGrant => Fence,
    found_client_that_hands_off_without_end: HandsOffWithoutBudget => Budget,
    found_client_that_hands_off_after_a_data_loss: HandsOffAfterDataLoss => Fence,
    found_client_that_awaits_a_lost_report: AwaitsReport => Stuck,
    found_client_that_wakes_no_head: WakesNoHead => Asleep,
}
