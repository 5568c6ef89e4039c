//! Simulators of the protocol (docs/PROTOCOL.md) in virtual time: processes that crash and pause,
//! requests that are cancelled, and a network that loses, delays, duplicates and reorders messages.
//!
//! All decisions are those of production code: the [`Session`](crate::protocol::Session) of each
//! process, and the table of the in-memory store. The simulators perform effects and check
//! invariants; they decide nothing.
//!
//! `LOCK_EXPLORER_SCHEDULES=5000000` explores more schedules than by default, and
//! `LOCK_EXPLORER_SEED=17` prints the history of a single one. `LOCK_EXPLORER_STARTS=5` counts the
//! schedules after which a rule that is switched off is found, from five starts.
//! `LOCK_EXPLORER_DEPTH=3` makes three more choices of the small scopes in every way.

mod dice;
mod explore;
mod process;
#[cfg(feature = "redis")]
mod quorum;
mod single;

use explore::found;

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
