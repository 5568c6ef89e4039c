//! Promises about requests that wait, and about those that are granted their lock in turn.

pub(crate) mod contention;
pub(crate) mod events;
pub(crate) mod hand_off;
pub(crate) mod lateness;
pub(crate) mod queue;
