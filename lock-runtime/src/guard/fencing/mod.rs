//! Fencing tokens in the transactions of a PostgreSQL database.
//!
//! The function `lock_runtime.fenced`, which [`MIGRATION`] creates, compares the token of a lock
//! in the transaction that writes. It works with every store of locks and every client library;
//! the functions here, for `tokio-postgres`, need the feature `postgres`. The page
//! [`guide::fencing`](crate::guide::fencing) shows how to use it.

#[cfg(feature = "postgres")]
mod client;

#[cfg(feature = "postgres")]
pub use client::{FencingError, fenced, guard, guard_named, install};

/// The migration that creates the schema `lock_runtime`, its table `seen` and its function
/// `fenced`.
///
/// It is one statement for the simple query protocol. It may run in a transaction or alone, in
/// several processes at once, and again. Its comment names the rights that other roles need.
pub const MIGRATION: &str = include_str!("fencing.sql");

/// The SQLSTATE with which a stale fencing token is refused: `LK001`.
///
/// A transaction that fails with it never succeeds. It is in no class that frameworks repeat.
pub const STALE: &str = "LK001";
