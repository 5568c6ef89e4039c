//! What the examples share: how they start and end, child processes of the same binary, and what `inventory` speaks.

mod child;
mod start;

pub use child::{Child, order, parent_hangs_up, say};
pub use start::{run_id, start};

/// The messages, the client and the server of `proto/inventory.proto`, as they are generated.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "written by a machine"
)]
#[cfg(feature = "inventory")]
pub mod inventory {
    tonic::include_proto!("inventory.v1");
}
