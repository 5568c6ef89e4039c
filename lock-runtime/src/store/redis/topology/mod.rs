//! The servers of a store: one, a primary that Sentinels name, the nodes of a cluster, or the
//! members of a majority. Decides which of them executes a call, and whether it may vote.

pub(super) mod cluster;
pub(crate) mod quarantine;
pub(crate) mod redlock;
pub(super) mod replicas;
pub(crate) mod runs;
#[cfg(all(test, feature = "records"))]
#[path = "../../../../sim/scripts.rs"]
pub(crate) mod scripts;
pub(super) mod sentinel;
pub(super) mod servers;
pub(super) mod target;
