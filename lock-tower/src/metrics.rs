//! Metrics of the requests under locks: those of [`lock_runtime::metrics`], with the name of the
//! [`Policy`](crate::Policy) as label `name`. A layer adds one:
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `lock_unlocked_total` | counter | `name` | requests served without lock (`fail_open`) |
//!
//! A lock is held from its grant to the release after the response, or after its last frame.

use lock_runtime::RequestName;
use metrics::{Key, Label, SharedString, Unit, describe_counter};

const UNLOCKED: &str = "lock_unlocked_total";

/// Registers the units and descriptions of the metrics, those of [`lock_runtime::metrics`]
/// included, with the installed recorder. Call it after installing the recorder.
pub fn describe() {
    lock_runtime::metrics::describe();
    describe_counter!(UNLOCKED, Unit::Count, "Requests served without their locks");
}

/// Returns the metric key of a policy. It is built once, so that a request allocates nothing if no
/// recorder is installed.
pub(crate) fn unlocked_key(policy: &RequestName) -> Key {
    let name = SharedString::from_owned(policy.to_string());
    Key::from_parts(UNLOCKED, vec![Label::new("name", name)])
}
