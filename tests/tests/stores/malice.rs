//! Programs that mean harm: what they can do to a lock with the rights that SECURITY.md names, and
//! what they cannot.

mod forged;
mod garbled;
mod given_up;
