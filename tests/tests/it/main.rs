//! The promises of the workspace, a module each, held against real servers and processes.

mod attribute;
mod cancellation;
mod events;
mod exclusion;
mod faults;
mod fixture;
mod loss;
mod modes;
mod owners;
mod place;
mod ui;
