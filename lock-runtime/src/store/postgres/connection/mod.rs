//! The connections to a database: how they are made and checked, the pool, and the one that
//! receives messages.

mod check;
pub(super) mod connector;
pub(super) mod direct;
pub(super) mod listener;
pub(super) mod pool;
pub(super) mod tls;
