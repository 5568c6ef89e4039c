//! Shared code of the examples: start and exit, child processes of the same binary, and the
//! protocol of `inventory`.

mod child;
mod start;

pub use child::{Child, order, parent_hangs_up, say};
pub use start::{run_id, start, stopped};

/// The generated messages, client and server of `proto/inventory.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
#[cfg(feature = "inventory")]
pub mod inventory {
    tonic::include_proto!("inventory.v1");
}
