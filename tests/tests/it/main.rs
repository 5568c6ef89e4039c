//! The promises of the workspace, a module each, held against real servers and processes.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod attribute;
mod blocked;
mod cancellation;
mod cluster;
mod conformance;
mod credentials;
mod environment;
mod events;
mod exclusion;
mod faults;
mod fixture;
mod health;
mod inspector;
mod layer;
mod leftovers;
mod lockctl;
mod loss;

mod documents;
mod malice;
mod modes;
mod observed;
mod operators;
mod outage;
mod owners;
mod place;
mod protocol;
mod recipe;
mod records;
mod redlock;
mod replies;
mod runtimes;
mod sentinel;
mod stores;
mod topologies;
mod ui;
mod urls;
mod waiting;
