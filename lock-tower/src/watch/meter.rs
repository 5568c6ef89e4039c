//! The metric of requests that are served without their lock. The others are those of
//! lock-runtime.

use std::sync::Arc;

use metrics::{Key, Label, Level, Metadata, SharedString, with_recorder};

use crate::{metrics::UNLOCKED, policy::Policy};

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// Returns the metric key of a policy. It is built once, so that a request allocates nothing if no
/// recorder is installed.
pub(crate) fn unlocked_key(policy: &Arc<str>) -> Key {
    let name = SharedString::from_shared(policy.clone());
    Key::from_parts(UNLOCKED, vec![Label::new("name", name)])
}

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
