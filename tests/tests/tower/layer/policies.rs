//! Lock policies from a file, under adverse conditions: invalid text, ambiguous paths, and requests
//! during a reload.

mod any_router;
mod corpus;
mod file;
mod inheritance;
mod keys;
mod reload;
mod routes;
mod serving;
mod text;
