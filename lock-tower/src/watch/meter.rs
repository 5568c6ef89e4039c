//! The metric of requests that are served without their lock. The others are those of
//! lock-runtime.

use metrics::{Level, Metadata, with_recorder};

use crate::policy::Policy;

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// Counts a request of the policy, if it is served without its lock. The counter exists from the
/// first request on.
pub(super) fn unlocked(policy: &Policy, is_served: bool) {
    if policy.fails_open() {
        with_recorder(|to| {
            let counter = to.register_counter(policy.unlocked(), &METADATA);
            counter.increment(u64::from(is_served));
        });
    }
}
