//! The rules of the protocol, each switched off in turn: the simulator must find the violation that
//! the rule prevents.

use super::{checker::Wrong, world::World};
use crate::{protocol::Mutation, sim::found};

found! {
    found_client_that_accepts_an_abandoned_request: Mutation::AcceptsAbandoned => NotHeld,
    found_client_that_counts_a_lease_from_the_reply: Mutation::CountsFromReply => TwoHolders,
    found_client_that_ignores_the_counter: Mutation::IgnoresCounter => NotHeld,
    found_client_that_counts_a_grant_from_its_push: Mutation::CountsFromPush => TwoHolders,
    found_client_that_confirms_no_grant: Mutation::ConfirmsNothing => TooShort,
    found_client_that_abandons_a_request_once: Mutation::AbandonsOnce => Orphan,
    found_store_whose_renewals_shorten_a_lease: Mutation::RenewalShortens => TwoHolders,
    found_store_whose_queue_advances_by_a_release_only: Mutation::OnlyReleaseAdvances => Stuck,
    found_reader_that_takes_an_old_grant: Mutation::ReaderTakesOldGrant => Fence,
    found_client_that_hands_off_without_end: Mutation::HandsOffWithoutBudget => Budget,
    found_client_that_hands_off_after_a_data_loss: Mutation::HandsOffAfterDataLoss => Fence,
    found_client_that_awaits_a_lost_report: Mutation::AwaitsReport => Stuck,
    found_client_that_wakes_no_head: Mutation::WakesNoHead => Asleep,
}
