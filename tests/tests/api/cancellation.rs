//! A future may be dropped at any point: no key is left, and no other waiter loses its turn.

mod every_poll;
mod network;
mod release_future;
mod storms;
