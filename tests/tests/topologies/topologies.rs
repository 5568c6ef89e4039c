//! Locks on one server, on several, behind Sentinels and on a cluster, while servers fail.

mod modes;
mod single;
pub(crate) mod storm;
