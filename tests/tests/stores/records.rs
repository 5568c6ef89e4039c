//! Locks in stores of records.

mod ended;
mod files;
mod noticed;
