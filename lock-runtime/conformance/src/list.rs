//! The macro that makes a test of each promise.

/// Makes a test of each promise of a [`Store`](lock_runtime::store::Store), in the surrounding
/// module.
///
/// The argument is an asynchronous closure without parameters that returns an `Arc<dyn Store>`, or
/// a block that ends with one. Each test evaluates the argument once, and calls the closure for
/// each process that it simulates. See the [crate](crate) for examples.
///
/// With `records:` before it, the argument returns an `Arc<dyn Records>`, and the tests are those
/// of the promises of [`Records`](lock_runtime::store::Records).
///
/// A test runs on a runtime of its own with two threads.
#[macro_export]
macro_rules! conformance {
    (records: $make:expr) => {
        $crate::conformance! { @tests $make,
            swaps_compare_every_version
            conflicts_are_in_the_order_of_their_changes
            swaps_wait_for_their_time
            swaps_of_a_batch_have_their_own_outcomes
            reads_show_many_records_and_large_ones
            swaps_without_effect_send_no_message
            the_clock_goes_on_for_all_clients
        }
    };
    ($make:expr) => {
        $crate::conformance! { @tests $make,
            it_answers_as_memory_does
            fencing_tokens_increase
            holders_exclude_each_other
            contenders_exclude_each_other
            leases_end_by_themselves
            renewals_never_shorten_a_lease
            an_ended_lease_is_gone_for_good
            only_the_holder_releases_its_lock
            repeated_calls_do_nothing_more
            several_keys_are_acquired_together
            min_hold_outlives_lost_releases
            results_are_kept
            abandoned_requests_have_no_effect
            dropped_acquires_leave_nothing
            dropped_releases_free_the_lock
            dropped_calls_leave_the_lock_held
            dropped_calls_can_be_abandoned
            waiters_are_served_in_order
            a_freed_lock_goes_to_the_next_waiter
            grants_from_the_queue_are_short
            grants_from_the_queue_are_pushed
            a_silent_waiter_is_skipped_and_later_removed
            events_that_are_lost_doubled_or_late_do_no_harm
            inspections_show_holders_and_waiters
            lists_contain_every_held_lock
            revocations_take_the_lock_away
        }
    };
    (@tests $make:expr, $($promise:ident)+) => {$(
        #[test]
        fn $promise() {
            let make = $make;
            $crate::__private::block_on($crate::$promise(&make));
        }
    )+};
}
