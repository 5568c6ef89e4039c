//! The decisions of the protocol, without I/O.

mod abandon;
mod message;
pub(crate) mod quorum;

pub(crate) use self::{
    abandon::{Abandonment, Ending, Progress},
    message::{Answer, Call, Reply, Request},
};
