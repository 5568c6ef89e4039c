//! A store of another crate, which has limits and does no more than the contract demands: no wait
//! queues, no events, no lists, no clock, and no reserved fencing tokens.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod store;

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use lock_conformance::Model;
use lock_runtime::store::{Limits, Store};

use self::store::OwnStore;

const LIMITS: Limits = Limits::new()
    .shortest_lease(Duration::from_millis(700))
    .longest_lease(Duration::from_secs(3600))
    .keys_at_once(NonZeroUsize::MIN)
    .permits(false)
    .push(false);

mod with_wait_queues {
    use super::*;

    lock_conformance::conformance!({
        let store: Arc<dyn Store> = OwnStore::new(LIMITS, true);
        async move || store.clone()
    });
}

mod without_wait_queues {
    use super::*;

    lock_conformance::conformance!({
        let store: Arc<dyn Store> = OwnStore::new(LIMITS.keys_at_once(NonZeroUsize::MAX), false);
        async move || store.clone()
    });
}

/// The functions, without the macro.
#[tokio::test]
async fn a_store_is_tested_without_the_macro() {
    let store: Arc<dyn Store> = OwnStore::new(LIMITS, true);
    let make = || std::future::ready(store.clone());
    lock_conformance::fencing_tokens_increase(&make).await;
    Model::new().sequences(5).run(&make).await;
}

/// Leases of a day are enough for the tests, and no shorter ones are requested.
#[tokio::test]
async fn a_store_with_long_leases_is_compared_with_memory() {
    let store: Arc<dyn Store> = OwnStore::new(LIMITS.longest_lease(Duration::from_secs(900)), true);
    Model::new()
        .sequences(50)
        .run(&async || store.clone())
        .await;
}
