//! The layer on real axum and tonic servers over TCP: order of requests, keys and refusals.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod client;
mod cost;
mod frames;
mod grpc;
mod hang_ups;
mod keys;
mod lost;
mod observed;
mod once;
mod order;
mod policies;
mod readiness;
mod refusals;
mod retry_info;
mod server;
mod serving;
mod slow;
mod spellings;
mod storms;
mod streaming;
mod templates;
mod unrouted;
mod versions;
