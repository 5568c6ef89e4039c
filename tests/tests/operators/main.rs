//! What operators see and do, and the tests of the fixtures.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod blocked;
mod documents;
mod fixture;
mod lockctl;
mod operators;
