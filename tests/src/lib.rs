//! Fixtures of the workspace's tests: real servers, faults on the wire and in a store, resources
//! that notice a broken lock, other processes, and captured traces. Except for the faulty store and
//! the tasks of a storm, they know Redis, TCP and processes, and nothing of the locks under test.
//!
//! A fixture panics when it cannot do its work, with what went wrong: a test can do nothing better with the error.
//!
//! | module | what it gives |
//! |---|---|
//! | [`redis_server`] | a real `redis-server` of the test's own, or one shared by all tests of the process |
//! | [`sentinel`] | a primary with two replicas, watched by three Sentinels |
//! | [`cluster`] | a Redis Cluster of three primaries with a replica each |
//! | [`proxy`] | a TCP proxy that loses replies and messages, delays, cuts, refuses and swallows |
//! | [`faulty_store`] | a `Store` whose operations a test fails, delays, holds back or replaces |
//! | [`fenced`] | a resource that checks fencing tokens and counts overlaps, stale writes and lost updates |
//! | [`processes`] | worker processes that run this package's code (`lock-worker`) |
//! | [`storm`] | tasks that ask for locks in every mode and option, and record what they saw |
//! | [`traces`] | the `tracing` events of a test |
//! | [`errors`] | errors as an error reporter prints them |

pub mod cluster;
pub mod errors;
pub mod faulty_store;
pub mod fenced;
pub mod processes;
pub mod proxy;
pub mod redis_server;
pub mod sentinel;
pub mod storm;
pub mod traces;

mod nodes;
mod ports;
mod resp;
mod supervised;

pub use cluster::{RedisCluster, shared_cluster};
pub use errors::chain;
pub use faulty_store::FaultyStore;
pub use fenced::{FencedResource, RedisFencedResource};
pub use processes::Worker;
pub use proxy::Proxy;
pub use redis_server::{RedisServer, shared_five, shared_server, unique};
pub use sentinel::{SentinelSet, shared_sentinels};
pub use traces::Captured;

/// The snippets of the README, of the crates' and of docs/stores.md compile.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[doc = include_str!("../../lock-macros/README.md")]
#[doc = include_str!("../../lock-runtime/README.md")]
#[doc = include_str!("../../lock-tower/README.md")]
#[doc = include_str!("../../docs/stores.md")]
pub struct Readme;
