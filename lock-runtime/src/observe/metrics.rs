//! Metrics of all locks, through the crate [`metrics`](https://docs.rs/metrics), which any
//! installed recorder exports. They are the same for guards, for the attribute and for the layers
//! of lock-tower.
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `lock_acquisitions_total` | counter | `name`, `mode`, `outcome` | requests that have ended |
//! | `lock_contended_total` | counter | `name`, `mode` | requests that waited or were refused |
//! | `lock_wait_seconds` | histogram | `name`, `mode` | time from the request to its outcome |
//! | `lock_waiting` | gauge | `name`, `mode` | requests without an outcome so far |
//! | `lock_held` | gauge | `name`, `mode` | locks that this process holds |
//! | `lock_hold_seconds` | histogram | `name`, `mode` | time from grant to release or loss |
//! | `lock_lost_total` | counter | `name`, `mode`, `loss` | locks that were lost while held |
//! | `lock_renewals_total` | counter | `name`, `mode` | renewals that the store confirmed |
//! | `lock_renewal_failures_total` | counter | `name`, `mode` | renewals without a usable reply |
//! | `lock_handoffs_total` | counter | `name`, `mode`, `scope` | locks received from a holder |
//! | `lock_once_total` | counter | `name`, `outcome` | requests for work that is done once |
//! | `lock_once_stored_bytes_total` | counter | `name` | results that were recorded, in bytes |
//! | `lock_store_calls_total` | counter | `server`, `operation`, `outcome` | calls of scripts |
//! | `lock_store_call_seconds` | histogram | `server`, `operation` | time of a call |
//! | `lock_store_reconnects_total` | counter | `server` | connections that replaced a broken one |
//! | `lock_store_group_size` | histogram | `server`, `operation` | requests that shared a call |
//!
//! # Labels
//!
//! - `name` is that of the [request](crate::LockRequest::name): the path of the function with the
//!   attribute, the policy with a layer, `unnamed` without one. It is never a key. A process
//!   distinguishes 256 names; the requests of all further ones are counted as `other`.
//! - `mode` is `exclusive`, `shared` or `permits`.
//! - `outcome` of a request is `granted`, `reentered` (an enclosing scope holds the lock),
//!   `cancelled` (the future was dropped), or the [code](crate::LockError::code) of the error.
//!   Thirteen of them, those that operators watch, exist at 0 from the first request with a name
//!   and mode; with the other metrics these are 24 series
//!   and two histograms. That of a call is `ok`, `error`, or `dropped`
//!   if its caller did not wait for the reply: it timed out or was cancelled. That of work that is
//!   done [once](crate::LockClient::once) is `ran` (its result was recorded), `unrecorded` (it
//!   failed, was dropped or lost its lock, or whether its result was recorded is unknown),
//!   `replayed` (it had been done), `running` (refused, as it runs elsewhere and the request does
//!   not wait), or `conflict` (a layer refused another request under the key). Those that waited
//!   for it are in `lock_contended_total` and `lock_wait_seconds`.
//! - `loss` is `expired`, `taken`, `revoked` or `max_hold`, as in [`Loss`](crate::Loss).
//! - `scope` is `local` if the process passed the lock on to the next of its own requests,
//!   `retained` if it had retained the lock for that request, and
//!   `remote` if the store granted it from its wait queue.
//! - `server` is the address of the server, or the addresses and the name of its Sentinels, without
//!   passwords. `operation` is that of the store, such as `acquire` or `renew_group`.
//!
//! A request for several keys has one outcome, and holds a lock for each key. A downgraded lock is
//! a hold of its own, with the name of the writer and the mode `shared`.
//!
//! Requests that began before a recorder was installed are not counted, nor are their holds. With
//! no recorder, a request costs a few nanoseconds. A recorder of size zero is used only if it is
//! the global one.

use ::metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

pub(crate) const ACQUISITIONS: &str = "lock_acquisitions_total";
pub(crate) const CONTENDED: &str = "lock_contended_total";
pub(crate) const WAIT: &str = "lock_wait_seconds";
pub(crate) const WAITING: &str = "lock_waiting";
pub(crate) const HELD: &str = "lock_held";
pub(crate) const HOLD: &str = "lock_hold_seconds";
pub(crate) const LOST: &str = "lock_lost_total";
pub(crate) const RENEWALS: &str = "lock_renewals_total";
pub(crate) const RENEWAL_FAILURES: &str = "lock_renewal_failures_total";
pub(crate) const HANDOFFS: &str = "lock_handoffs_total";
pub(crate) const ONCE: &str = "lock_once_total";
pub(crate) const STORED: &str = "lock_once_stored_bytes_total";
pub(crate) const CALLS: &str = "lock_store_calls_total";
pub(crate) const CALL: &str = "lock_store_call_seconds";
pub(crate) const RECONNECTS: &str = "lock_store_reconnects_total";
pub(crate) const GROUP_SIZE: &str = "lock_store_group_size";

/// Registers the units and descriptions of the metrics with the installed recorder. Call it after
/// installing the recorder.
pub fn describe() {
    for (name, text) in [
        (ACQUISITIONS, "Requests for locks that have ended"),
        (CONTENDED, "Requests whose locks were not free"),
        (LOST, "Locks that were lost while held"),
        (RENEWALS, "Lease renewals"),
        (RENEWAL_FAILURES, "Lease renewals without a usable reply"),
        (HANDOFFS, "Locks received from the holder before"),
        (ONCE, "Requests for work that is done once"),
        (CALLS, "Calls to servers"),
        (RECONNECTS, "Connections that replaced a broken one"),
    ] {
        describe_counter!(name, Unit::Count, text);
    }
    describe_counter!(STORED, Unit::Bytes, "Results that were recorded");
    for (name, text) in [
        (WAIT, "Time from requests for locks to their outcomes"),
        (HOLD, "Time that locks were held"),
        (CALL, "Time of calls to servers"),
    ] {
        describe_histogram!(name, Unit::Seconds, text);
    }
    describe_histogram!(GROUP_SIZE, Unit::Count, "Requests that shared a call");
    describe_gauge!(
        WAITING,
        Unit::Count,
        "Requests for locks without an outcome so far"
    );
    describe_gauge!(HELD, Unit::Count, "Locks that this process holds");
}
