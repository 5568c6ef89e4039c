//! The stores and their protocol.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod conformance;
mod credentials;
mod elections;
mod etcd;
mod leftovers;
mod malice;
mod protocol;
mod records;
mod stores;
mod waiting;
mod zookeeper;
