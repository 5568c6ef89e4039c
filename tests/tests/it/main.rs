//! The promises of the workspace, a module each, held against real servers and processes.

mod environment;
mod fixture;
mod model;
mod protocol;
