//! A future may be dropped wherever it stands: no key is left, nobody else's turn is lost (FAILURES 1, 2).

mod every_poll;
mod network;
mod release_in_place;
mod storms;
