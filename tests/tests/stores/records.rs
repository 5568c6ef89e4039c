//! Locks in stores of records.

mod files;
mod noticed;
