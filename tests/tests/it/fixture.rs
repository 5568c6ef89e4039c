//! The fixtures do what the other tests believe they do.

mod cluster;
mod fenced;
mod processes;
mod proxy;
mod redis_server;
mod sentinel;
mod traces;

/// The worker binary of this package.
const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");
