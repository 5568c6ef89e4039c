//! One step of the table of locks on records: which records it needs, what it makes of them, and
//! when that is true. Decides only; the calls are in [`execution`](super::execution).

pub(super) mod attempt;
pub(super) mod body;
pub(super) mod cache;
pub(super) mod clock;
pub(super) mod evaluation;
pub(super) mod outcome;
#[cfg(test)]
mod tests;
pub(super) mod turns;
