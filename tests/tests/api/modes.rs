//! Guarantees of each mode of a lock, in memory and on Redis.

mod exclusive;
mod facts;
mod limits;
mod line;
mod overload;
mod permits;
mod read_write;
mod retained;
mod several;
mod shutdown;
