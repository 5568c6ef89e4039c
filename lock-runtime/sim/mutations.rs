//! The rules of the protocol, each switched off in turn: the simulator must find the violation that
//! the rule prevents. It would find the same error in the code.

use super::{
    Broken::{
        Client, KnowsTheTime, Majority, MarkerOnly, NoDrift, NothingDurable, UndoesHandOffs,
        UptimeOnly,
    },
    checker::Wrong,
    explore::found,
};
use crate::protocol::{Mutation, majority::MajorityMutation as Quorum};

found! {
    found_client_that_accepts_an_abandoned_request: Client(Mutation::AcceptsAbandoned) => NotHeld,
    found_client_that_counts_a_lease_from_the_reply: Client(Mutation::CountsFromReply) => TwoHolders,
    found_client_that_ignores_the_counter: Client(Mutation::IgnoresCounter) => NotHeld,
    found_client_that_counts_a_grant_from_its_push: Client(Mutation::CountsFromPush) => TwoHolders,
    found_client_that_confirms_no_grant: Client(Mutation::ConfirmsNothing) => TooShort,
    found_client_that_abandons_a_request_once: Client(Mutation::AbandonsOnce) => Orphan,
    found_store_whose_renewals_shorten_a_lease: Client(Mutation::RenewalShortens) => TwoHolders,
    found_client_that_loses_an_extended_lock_for_one_lease: Client(Mutation::LosesForOneLease) => Left (seen at 2_022),
    found_store_whose_queue_advances_by_a_release_only: Client(Mutation::OnlyReleaseAdvances) => Stuck,
    found_reader_that_takes_an_old_grant: Client(Mutation::ReaderTakesOldGrant) => Fence (seen at 1_246),
    found_client_that_hands_off_without_end: Client(Mutation::HandsOffWithoutBudget) => Budget,
    found_client_that_hands_off_after_a_data_loss: Client(Mutation::HandsOffAfterDataLoss) => Fence (seen at 5_365),
    found_client_that_awaits_a_lost_report: Client(Mutation::AwaitsReport) => Stuck,
    found_client_that_leaves_a_named_token: Client(Mutation::LeavesNamedToken) => Orphan (seen at 771),
    found_client_that_wakes_no_head: Client(Mutation::WakesNoHead) => Asleep,
    found_client_that_takes_silence_for_a_holder: Client(Mutation::TakesSilenceForHolder) => Contended,
    found_client_that_drops_an_extension_which_was_overtaken: Client(Mutation::DropsOvertaken) => Unextended,
    found_client_that_hands_off_a_reserved_lock: Client(Mutation::HandsOffReserved) => TooEarly (seen at 908),
    found_client_that_completes_a_lost_lock: Client(Mutation::CompletesLost) => Recorded (seen at 4_924),
    found_client_that_completes_a_lock_which_was_dropped: Client(Mutation::CompletesDropped) => Recorded,
    found_store_that_takes_the_result_of_an_earlier_holder: Client(Mutation::RecordsUnheld) => Recorded,
    found_client_that_repeats_a_release_without_its_result: Client(Mutation::ForgetsResult) => Forgotten,
    found_store_of_records_that_loses_its_latest_changes: NothingDurable => TwoHolders,
    found_store_of_records_that_loses_a_hand_off: UndoesHandOffs => TwoHolders,
    found_store_of_records_that_takes_a_bound_for_the_time: KnowsTheTime => TwoHolders (seen at 5_782),
    found_client_that_writes_no_number_back: Majority(Quorum::NoWriteBack) => Fence,
    found_reader_that_counts_a_number_which_others_may_have: Majority(Quorum::CountsWhatOthersHave) => Fence,
    found_client_that_proposes_an_old_number: Majority(Quorum::ProposesOld) => Fence (seen at 444),
    found_client_that_is_content_with_half_of_the_servers: Majority(Quorum::MajorityOffByOne) => TwoHolders,
    found_client_content_with_half_of_the_renewals: Majority(Quorum::RenewsByHalf) => TwoHolders,
    found_client_that_adds_up_the_votes_of_several_rounds: Majority(Quorum::AddsUpExchanges) => TwoHolders,
    found_client_that_sums_renewals_of_several_rounds: Majority(Quorum::AddsUpRenewals) => TwoHolders,
    found_client_that_leaves_no_room_for_drift: NoDrift => TwoHolders (seen at 985),
    found_quarantine_by_the_marker_alone: MarkerOnly => TwoHolders (seen at 323),
    found_quarantine_by_the_uptime_alone: UptimeOnly => TwoHolders (seen at 534),
    found_client_that_accepts_an_abandoned_acquire: Majority(Quorum::BelievesTheAbandoned) => NotHeld,
    found_client_that_gives_up_a_name_once: Majority(Quorum::AbandonsOnce) => Orphan,
    found_client_whose_time_outs_are_fixed: Majority(Quorum::FixedTimeOuts) => Stuck,
    found_client_that_abandons_a_reserved_vote: Majority(Quorum::AbandonsReserved) => TooEarly (seen at 2_666),
}
