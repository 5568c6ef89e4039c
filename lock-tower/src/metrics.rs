//! What is counted of the requests under locks, by the name of their [`Policy`](crate::Policy) and never by key, through the
//! [`metrics`] crate: install an exporter of your choice, and these are among its figures.
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `lock_acquire_seconds` | histogram | `policy`, `outcome` | how long requests have waited: `granted`, `cancelled` (the caller hung up), or the code of the refusal, such as `wait_timeout` |
//! | `lock_hold_seconds` | histogram | `policy` | how long locks were held, from the grant to the end of the release |
//! | `lock_waiting` | gauge | `policy` | requests that wait for their lock now |
//! | `lock_contended_total` | counter | `policy` | requests that did not find their lock free |
//! | `lock_lost_total` | counter | `policy`, `loss` | locks that were lost while they were held: `lost_expired`, `lost_taken`, `lost_revoked`, `lost_max_hold` |
//! | `lock_renewals_total` | counter | `policy` | renewals of leases, counted at the end of each hold |
//! | `lock_unlocked_total` | counter | `policy` | requests that were served without their lock, as `fail_open` says |

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

pub(crate) const ACQUIRE: &str = "lock_acquire_seconds";
pub(crate) const HOLD: &str = "lock_hold_seconds";
pub(crate) const WAITING: &str = "lock_waiting";
pub(crate) const CONTENDED: &str = "lock_contended_total";
pub(crate) const LOST: &str = "lock_lost_total";
pub(crate) const RENEWALS: &str = "lock_renewals_total";
pub(crate) const UNLOCKED: &str = "lock_unlocked_total";

/// Tells the exporter what the figures mean, if it wants to know. Call it when the exporter is installed.
pub fn describe() {
    describe_histogram!(
        ACQUIRE,
        Unit::Seconds,
        "How long requests have waited for their locks"
    );
    describe_histogram!(HOLD, Unit::Seconds, "How long locks were held");
    describe_gauge!(WAITING, Unit::Count, "Requests that wait for their locks");
    describe_counter!(
        CONTENDED,
        Unit::Count,
        "Requests that did not find their locks free"
    );
    describe_counter!(
        LOST,
        Unit::Count,
        "Locks that were lost while they were held"
    );
    describe_counter!(RENEWALS, Unit::Count, "Renewals of leases");
    describe_counter!(
        UNLOCKED,
        Unit::Count,
        "Requests that were served without their locks"
    );
}
