//! The manual.
//!
//! | page | for |
//! |---|---|
//! | [`functions`] | putting a lock on a function: every argument of `#[distributed_lock]` at work; who is who |
//! | [`modes`] | which lock: exclusive, readers and a writer, permits, several keys, re-entry |
//! | [`waiting`] | who is next, and how soon; passing on; who is gone |
//! | [`holding`] | lease, wait, loss, fencing, the end of the process |
//! | [`limits`] | what a lock cannot promise, and what to do about it |
//! | [`redis`] | a Redis server as the store: URL, access rules, settings, what lies there |
//! | [`majority`] | several independent servers, of which a majority has to agree |

#[cfg(feature = "macros")]
pub mod functions;
pub mod holding;
pub mod limits;
pub mod majority;
pub mod modes;
pub mod redis;
pub mod waiting;
