//! The attribute, requests and guards: what a user of the library writes.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod attribute;
mod cancellation;
mod events;
mod exclusion;
mod loss;
mod modes;
mod once;
mod owners;
mod recipe;
mod runtimes;
mod urls;
