//! The protocol on two pages: two small models, whose states are all visited.
//!
//! [`server`] is a lock at one server, and a resource that compares fencing tokens or does not.
//! [`majority`] is the fencing token of a lock at a majority of three servers. The actions carry
//! the numbers of the rules in `docs/PROTOCOL.md`, and each rule of a [`server::Rules`] or
//! [`majority::Rules`] can be switched off: the search then finds the schedule that breaks without
//! it. [`history`] judges histories of real servers.

pub mod history;
pub mod majority;
pub mod server;
