//! An exchange with the servers: which of them are asked, for how long, and what their replies
//! amount to.

pub(super) mod broadcast;
pub(super) mod contended;
pub(super) mod count;
pub(super) mod proposals;
pub(super) mod server;
pub(super) mod tally;
pub(super) mod time_out;
