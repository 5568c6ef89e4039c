//! The rules of the protocol, each switched off in turn: the simulator must find the violation that
//! the rule prevents. It would find the same error in the code.

use super::{Broken, checker::Wrong, world::World};
use crate::{protocol::quorum::Mutation, sim::found};

found! {
    found_client_that_writes_no_number_back: Broken::Session(Mutation::NoWriteBack) => Fence,
    found_reader_that_counts_a_number_which_others_may_have: Broken::Session(Mutation::CountsWhatOthersHave) => Fence,
    found_client_that_is_content_with_half_of_the_servers: Broken::Session(Mutation::MajorityOffByOne) => TwoHolders,
    found_client_content_with_half_of_the_renewals: Broken::Session(Mutation::RenewsByHalf) => TwoHolders,
    found_client_that_adds_up_the_votes_of_several_rounds: Broken::Session(Mutation::AddsUpExchanges) => TwoHolders,
    found_client_that_sums_renewals_of_several_rounds: Broken::Session(Mutation::AddsUpRenewals) => TwoHolders,
    found_client_that_leaves_no_room_for_drift: Broken::NoDrift => TwoHolders,
    found_quarantine_by_the_marker_alone: Broken::MarkerOnly => TwoHolders,
    found_quarantine_by_the_uptime_alone: Broken::UptimeOnly => TwoHolders,
    found_client_that_accepts_an_abandoned_acquire: Broken::Session(Mutation::BelievesTheAbandoned) => TwoHolders,
    found_client_that_gives_up_a_name_once: Broken::Session(Mutation::AbandonsOnce) => Orphan,
}
