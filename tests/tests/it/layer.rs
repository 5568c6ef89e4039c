//! The layer on real axum servers over TCP: who is served when, under which key, and what the others are told.

mod keys;
mod refusals;
mod server;
mod serving;
