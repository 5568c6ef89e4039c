//! What the examples share: how they start and end, and child processes of the same binary.

mod child;
mod start;

pub use child::{Child, order, parent_hangs_up, say};
pub use start::{run_id, start};
