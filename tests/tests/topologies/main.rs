//! Servers: Cluster, Sentinel, Redlock, their outages and faults, and what clients need of them.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod cluster;
mod environment;
mod faults;
mod outage;
mod redlock;
mod sentinel;
mod topologies;
