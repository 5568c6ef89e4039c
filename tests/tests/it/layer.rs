//! The layer on real axum servers over TCP: who is served when, under which key, and what the others are told.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod keys;
mod policies;
mod refusals;
mod retry_info;
mod server;
mod serving;
mod streaming;
