//! What an operator asks: the list of locks, the health of the servers and the rights of a user.

pub(super) mod acl;
pub(super) mod health;
pub(super) mod listing;
pub(super) mod rights;
