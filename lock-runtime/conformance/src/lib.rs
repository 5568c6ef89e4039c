//! Tests of locks in a database of your own: `conformance!(records: ..)` has those of the public
//! trait `Records`, and `conformance!(..)` those of a whole store, which is the hidden contract.
//!
//! The tests of a whole store are the promises of the trait [`Store`], which may change in any
//! minor release. The stores of lock-runtime pass them, and so does a `RecordStore` over records
//! that keep their promises: run both.
//!
//! # Tests of your own store
//!
//! ```toml
//! [dev-dependencies]
//! lock-conformance = "0.1"
//! ```
//!
//! The macro [`conformance!`](crate::conformance!) makes a test of each promise, so that a failure
//! has a name. Its argument is an asynchronous closure that connects to the store:
//!
//! ```
//! # mod my_crate {
//! #     pub struct MyStore;
//! #     impl MyStore {
//! #         pub async fn connect(_: &str) -> Result<lock_runtime::store::MemoryStore, ()> {
//! #             Ok(lock_runtime::store::MemoryStore::new())
//! #         }
//! #     }
//! # }
//! # const URL: &str = "";
//! #[cfg(test)]
//! mod my_store {
//!     use std::sync::Arc;
//!
//!     use lock_runtime::store::Store;
//! #   use super::{URL, my_crate};
//!     use my_crate::MyStore;
//!
//!     lock_conformance::conformance!(async || {
//!         Arc::new(MyStore::connect(URL).await.unwrap()) as Arc<dyn Store>
//!     });
//! }
//! # fn main() {}
//! ```
//!
//! A test calls the closure once for each process that it simulates, up to twenty times, so each
//! call should open connections of its own. A store within the process has nothing to connect to:
//! its argument is a block that makes a store and ends with a closure that returns it.
//!
//! ```
//! # #[cfg(test)]
//! mod my_store {
//!     use std::sync::Arc;
//!
//!     use lock_runtime::store::{MemoryStore, Store};
//!
//!     lock_conformance::conformance!({
//!         let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
//!         async move || store.clone()
//!     });
//! }
//! # fn main() {}
//! ```
//!
//! For another test harness, each promise is a function with a reference to such a closure. It
//! needs a runtime of tokio with the timer enabled, and several threads find more races:
//!
//! ```
//! use std::sync::Arc;
//!
//! use lock_conformance::Model;
//! use lock_runtime::store::{MemoryStore, Store};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
//! let make = async || store.clone();
//! lock_conformance::fencing_tokens_increase(&make).await;
//! // A longer model test than that of the macro.
//! Model::new().sequences(20).run(&make).await;
//! # }
//! ```
//!
//! # The promises
//!
//! | Promise | About |
//! |---|---|
//! | [`it_answers_as_memory_does`] | every operation, in random sequences |
//! | [`contenders_exclude_each_other`] | calls from many tasks at once |
//! | [`holders_exclude_each_other`] | clients with all options of a lock |
//! | [`fencing_tokens_increase`] | each way to get a lock |
//! | [`leases_end_by_themselves`] | leases |
//! | [`renewals_never_shorten_a_lease`] | leases |
//! | [`an_ended_lease_is_gone_for_good`] | leases |
//! | [`repeated_calls_do_nothing_more`] | tokens |
//! | [`only_the_holder_releases_its_lock`] | tokens |
//! | [`several_keys_are_acquired_together`] | `acquire_all` |
//! | [`min_hold_outlives_lost_releases`] | `min_hold` |
//! | [`results_are_kept`] | `done` |
//! | [`abandoned_requests_have_no_effect`] | `abandon` and deadlines |
//! | [`waiters_are_served_in_order`] | the wait queue |
//! | [`a_freed_lock_goes_to_the_next_waiter`] | the wait queue |
//! | [`grants_from_the_queue_are_short`] | hand-offs |
//! | [`grants_from_the_queue_are_pushed`] | hand-offs |
//! | [`a_silent_waiter_is_skipped_and_later_removed`] | dead waiters |
//! | [`events_that_are_lost_doubled_or_late_do_no_harm`] | polls |
//! | [`dropped_acquires_leave_nothing`] | dropped futures |
//! | [`dropped_releases_free_the_lock`] | dropped futures |
//! | [`dropped_calls_leave_the_lock_held`] | dropped futures |
//! | [`dropped_calls_can_be_abandoned`] | dropped futures |
//! | [`inspections_show_holders_and_waiters`] | `inspect`, `list`, `revoke` |
//! | [`lists_contain_every_held_lock`] | `inspect`, `list`, `revoke` |
//! | [`revocations_take_the_lock_away`] | `inspect`, `list`, `revoke` |
//!
//! # A store of records
//!
//! A database that implements [`Records`](lock_runtime::store::Records) has promises of its own,
//! which locks rely on at rare moments only. With the feature `records`,
//! `conformance!(records: async || ..)` makes a test of each; the closure returns an
//! `Arc<dyn Records>`. The locks in it are tested as those of any store.
//!
//! | Promise | Otherwise |
//! |---|---|
//! | `swaps_compare_every_version` | a request for several keys is granted one that is held |
//! | `conflicts_are_in_the_order_of_their_changes` | the record of another lock decides |
//! | `swaps_wait_for_their_time` | a lease ends early after a clock was set back or a failover |
//! | `swaps_of_a_batch_have_their_own_outcomes` | a lock that was not renewed counts as renewed |
//! | `reads_show_many_records_and_large_ones` | a lock with many waiters cannot be used |
//! | `swaps_without_effect_send_no_message` | a waiter enters without a grant |
//! | `the_clock_goes_on_for_all_clients` | a lock is granted while its lease lasts for the holder |
//!
//! # Limits of a store
//!
//! The tests make only requests that [`Store::limits`] allows. They use longer leases if the store
//! has no short ones, and leave out permits that it does not support. They also leave out parts
//! that the contract leaves to the store: wait queues, lists, deadlines of a store without a clock.
//! Each part that is left out is printed with the reason (`cargo test -- --nocapture`).
//!
//! # Names, time and failures
//!
//! All names are random and begin with `conformance:`, so that the tests can share a server with
//! other tests and with earlier runs. After a failure some locks may be left until their leases
//! end. On a store in memory the tests take about 15 s with two threads, most of them asleep.
//!
//! A message names the promise that is broken, and the calls with their replies. Where calls are
//! random, it also contains a seed: the environment variable `LOCK_CONFORMANCE_SEED` repeats them.
//!
//! # Limits of these tests
//!
//! They test a store that works. Servers that fail, connections that break, clocks that differ and
//! loss of data are for the tests of your own store.

#[macro_use]
mod list;

mod ending;
mod exclusion;
mod fences;
mod intercepted;
mod leases;
mod model;
mod operators;
#[cfg(feature = "records")]
mod records;
mod results;
#[doc(hidden)]
#[allow(missing_docs, reason = "not public")]
pub mod storm;
mod subject;
mod waiting;

use std::sync::Arc;

use lock_runtime::store::Store;

#[cfg(feature = "records")]
pub use self::records::{
    conflicts_are_in_the_order_of_their_changes, reads_show_many_records_and_large_ones,
    swaps_compare_every_version, swaps_of_a_batch_have_their_own_outcomes,
    swaps_wait_for_their_time, swaps_without_effect_send_no_message,
    the_clock_goes_on_for_all_clients,
};
#[doc(hidden)]
pub use self::{ending::cancellation::cancelled, waiting::lateness::Lateness};
pub use self::{
    ending::{
        abandon::{abandoned_requests_have_no_effect, dropped_calls_can_be_abandoned},
        cancellation::{
            dropped_acquires_leave_nothing, dropped_calls_leave_the_lock_held,
            dropped_releases_free_the_lock,
        },
        repeated::{
            only_the_holder_releases_its_lock, repeated_calls_do_nothing_more,
            several_keys_are_acquired_together,
        },
        reservations::min_hold_outlives_lost_releases,
    },
    exclusion::holders_exclude_each_other,
    fences::fencing_tokens_increase,
    leases::{
        an_ended_lease_is_gone_for_good, leases_end_by_themselves, renewals_never_shorten_a_lease,
    },
    model::Model,
    operators::{
        inspections_show_holders_and_waiters, lists_contain_every_held_lock,
        revocations_take_the_lock_away,
    },
    results::results_are_kept,
    waiting::{
        contention::contenders_exclude_each_other,
        events::events_that_are_lost_doubled_or_late_do_no_harm,
        hand_off::{
            a_silent_waiter_is_skipped_and_later_removed, grants_from_the_queue_are_pushed,
            grants_from_the_queue_are_short,
        },
        queue::{a_freed_lock_goes_to_the_next_waiter, waiters_are_served_in_order},
    },
};

/// The variable with the seed of random choices.
const SEED: &str = "LOCK_CONFORMANCE_SEED";

/// Checks that random sequences of operations get the same replies as from the in-memory store.
///
/// [`Model`] sets the number of sequences.
///
/// # Panics
/// If the store breaks this promise.
pub async fn it_answers_as_memory_does(make: &impl AsyncFn() -> Arc<dyn Store>) {
    Model::new().run(make).await;
}

#[doc(hidden)]
pub mod __private {
    use std::future::Future;

    use tokio::runtime::Builder;

    /// Runs a test on two threads.
    pub fn block_on<T>(test: impl Future<Output = T>) -> T {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        runtime.expect("a runtime for a test").block_on(test)
    }
}
