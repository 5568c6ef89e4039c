//! Layers, policies, health, metrics and the inspector.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod health;
mod inspector;
mod layer;
mod observed;
