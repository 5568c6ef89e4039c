//! Promises about locks and requests that end: by a release, by an abandonment, or unknown to the
//! caller.

pub(crate) mod abandon;
pub(crate) mod cancellation;
pub(crate) mod repeated;
pub(crate) mod reservations;
