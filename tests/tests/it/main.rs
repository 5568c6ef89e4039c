//! The promises of the workspace, a module each, held against real servers and processes.

#![allow(clippy::unwrap_used, reason = "a test can do nothing better with an error")]

mod attribute;
mod cancellation;
mod events;
mod exclusion;
mod faults;
mod fixture;
mod layer;
mod loss;
mod modes;
mod owners;
mod place;
mod ui;
