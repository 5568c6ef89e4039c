//! The tasks and timers around the sessions, which perform the decisions of a session. [`core`] has
//! the state of a client, [`driver`] its background task, [`keeper`] the thread that renews locks
//! while tasks block.

pub(crate) mod acquire;
pub(crate) mod call;
pub(crate) mod core;
pub(crate) mod driver;
pub(crate) mod keeper;
pub(crate) mod random;
pub mod rt;
pub(crate) mod runtime;
#[cfg(test)]
#[path = "../../sim/shell/simulated.rs"]
pub(crate) mod simulated;
pub(crate) mod sync;
pub mod time;
