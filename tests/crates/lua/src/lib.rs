//! A Redis server for the scripts of locks, in memory: the commands that they use, with a clock
//! that its user sets, and the Lua that executes them. `tests/` holds it equal to a real server.

mod keyspace;
mod script;
#[cfg(test)]
mod tests;

pub use self::{keyspace::Keyspace, script::Edit};
