//! Simulators of the protocol (docs/PROTOCOL.md) in virtual time: processes that crash and pause,
//! requests that are cancelled, and a network that loses, delays, duplicates and reorders messages.
//!
//! All decisions are those of production code: the [`Session`](crate::protocol::Session) of each
//! process, and the table of the in-memory store. The simulators perform effects and check
//! invariants; they decide nothing.
//!
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more schedules than by default, and
//! `LOCK_EXPLORER_SEED=17` prints the history of a single one. `LOCK_EXPLORER_DEPTH=3` makes three
//! more choices of the small scopes in every way.

pub(crate) mod dice;
mod process;
#[cfg(feature = "redis")]
mod quorum;
mod single;

/// Writes a line to the history, if there is one.
#[cfg(feature = "redis")]
macro_rules! say {
    ($sim:expr, $($what:tt)*) => {
        if $sim.trace.is_some() {
            let line = format!($($what)*);
            $sim.write(&line);
        }
    };
}
#[cfg(feature = "redis")]
use say;

pub(crate) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
