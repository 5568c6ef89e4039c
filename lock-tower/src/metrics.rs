//! Metrics of the requests under locks, through the [`metrics`] crate. They are exported by any
//! installed recorder, and are labelled by the name of the [`Policy`](crate::Policy), never by
//! key.
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `lock_acquire_seconds` | histogram | `policy`, `outcome` | time that requests waited |
//! | `lock_hold_seconds` | histogram | `policy` | time from the grant to the end of the release |
//! | `lock_waiting` | gauge | `policy` | requests that are waiting for their lock |
//! | `lock_contended_total` | counter | `policy` | requests whose lock was not free |
//! | `lock_lost_total` | counter | `policy`, `loss` | locks that were lost while held |
//! | `lock_renewals_total` | counter | `policy` | lease renewals, counted at the end of each hold |
//! | `lock_unlocked_total` | counter | `policy` | requests served without lock (`fail_open`) |
//!
//! `outcome` is `granted`, `cancelled` (the client disconnected), or the code of the refusal,
//! such as `wait_timeout`. `loss` is `lost_expired`, `lost_taken`, `lost_revoked` or
//! `lost_max_hold`.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

pub(crate) const ACQUIRE: &str = "lock_acquire_seconds";
pub(crate) const HOLD: &str = "lock_hold_seconds";
pub(crate) const WAITING: &str = "lock_waiting";
pub(crate) const CONTENDED: &str = "lock_contended_total";
pub(crate) const LOST: &str = "lock_lost_total";
pub(crate) const RENEWALS: &str = "lock_renewals_total";
pub(crate) const UNLOCKED: &str = "lock_unlocked_total";

/// Registers the units and descriptions of the metrics with the installed recorder. Call it after
/// installing the recorder.
pub fn describe() {
    describe_histogram!(
        ACQUIRE,
        Unit::Seconds,
        "Time that requests waited for their locks"
    );
    describe_histogram!(HOLD, Unit::Seconds, "Time that locks were held");
    describe_gauge!(WAITING, Unit::Count, "Requests waiting for their locks");
    describe_counter!(CONTENDED, Unit::Count, "Requests whose locks were not free");
    describe_counter!(LOST, Unit::Count, "Locks that were lost while held");
    describe_counter!(RENEWALS, Unit::Count, "Lease renewals");
    describe_counter!(UNLOCKED, Unit::Count, "Requests served without their locks");
}
